"""A small model with every feature that a pipeline must carry, and its one-device reference.

Tied vocabulary table split over the stages, a position table and a norm scale that every stage holds, a side input per
row, an auxiliary loss and a count per chunk, token weights that differ between rows.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import pipeline

DIM, VOCAB, LENGTH, ROWS, LAYERS_PER_CHUNK = 8, 24, 6, 2, 2
AUX = 0.01
FAST_COMPILE = {"xla_backend_optimization_level": 0}
ENDS_SPECS = {"table": P("stage"), "positions": P(), "scale": P()}


def norm(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x, weights, gain):
    return x + jnp.tanh(norm(x) @ weights["up"]) @ weights["down"] * gain[:, None, None]


def stage_fn(remat, scan):
    one = jax.checkpoint(layer) if remat else layer

    def run(params, x, side):
        gain = side.batch["gain"]
        if scan:
            x = lax.scan(lambda x, w: (one(x, w, gain), None), x, params)[0]
        else:
            for i in range(LAYERS_PER_CHUNK):
                x = one(x, jax.tree.map(lambda a, i=i: a[i], params), gain)
        return pipeline.StageOut(x, AUX * (x * x).sum(), {"chunks": side.constants["one"]})

    return run


def embed_fn(ends, batch):
    table = ends["table"]
    row = batch["tokens"] - lax.axis_index("stage") * table.shape[0]
    here = (row >= 0) & (row < table.shape[0])
    return lax.psum(jnp.where(here[..., None], table[jnp.where(here, row, 0)], 0), "stage") + ends["positions"]


def head_fn(ends, y, batch):
    logits = norm(y) * ends["scale"] @ ends["table"].T
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 2) + lax.axis_index("stage") * logits.shape[-1]
    largest = lax.pmax(lax.stop_gradient(logits.max(-1)), "stage")
    normalizer = jnp.log(lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "stage")) + largest
    picked = lax.psum(jnp.where(column == batch["targets"][..., None], logits, 0).sum(-1), "stage")
    return ((normalizer - picked) * batch["weights"]).sum(), {"tokens": batch["weights"].sum()}


def make_params(num_layers):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ends = {"table": draw(VOCAB, DIM), "positions": draw(LENGTH, DIM), "scale": draw(DIM)}
    return ends, {"up": 0.3 * draw(num_layers, DIM, DIM), "down": 0.3 * draw(num_layers, DIM, DIM)}


def make_batch(microbatches):
    rng = np.random.default_rng(1)
    shape = (microbatches, ROWS, LENGTH)
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "targets": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "weights": jnp.asarray(rng.random(shape) < rng.random(shape[:2])[..., None], jnp.float32),
        "gain": jnp.asarray(rng.random(shape[:2]), jnp.float32),
    }


def reference(ends, layers, batch):
    """(loss, auxiliary loss), and the gradients of their sum, on one device."""
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)

    def objective(ends, layers):
        x, aux = ends["table"][flat["tokens"]] + ends["positions"], 0.0
        for i in range(layers["up"].shape[0]):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], layers), flat["gain"])
            aux += AUX * (x * x).sum() * ((i + 1) % LAYERS_PER_CHUNK == 0)
        log_p = jax.nn.log_softmax(norm(x) * ends["scale"] @ ends["table"].T)
        loss = -(jnp.take_along_axis(log_p, flat["targets"][..., None], -1)[..., 0] * flat["weights"]).sum()
        return loss + aux, (loss, aux)

    run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True), compiler_options=FAST_COMPILE)
    (_, losses), grads = run(ends, layers)
    return losses, grads


def mesh_of(stages, data=1):
    return jax.make_mesh((stages, data), ("stage", "data"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[: stages * data])  # fmt: skip


def to_stages(a, stages, chunks):
    return a.reshape(chunks, stages, LAYERS_PER_CHUNK, *a.shape[1:]).swapaxes(0, 1)


def arguments(stages, chunks, microbatches, data=1):
    """Mesh, placed parameters and batch, and the natural ones."""
    mesh = mesh_of(stages, data)
    ends, layers = make_params(stages * chunks * LAYERS_PER_CHUNK)
    batch = make_batch(microbatches)
    params = pipeline.Params(ends, jax.tree.map(lambda a: to_stages(a, stages, chunks), layers))

    def place(tree, specs):
        return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))

    placed = pipeline.Params(place(ends, ENDS_SPECS), place(params.stages, {"up": P("stage"), "down": P("stage")}))
    batch = place(batch, dict.fromkeys(batch, P(None, "data")))
    return mesh, placed, batch, (ends, layers)


def options(mesh, stages, chunks, batch_axes=()):
    automatic = mesh.shape["data"] > 1 and not batch_axes
    constrain = (lambda x: lax.with_sharding_constraint(x, P("data"))) if automatic else (lambda x: x)
    constants = {"one": jnp.ones((stages, chunks))}
    return {"ends_specs": ENDS_SPECS, "constrain": constrain, "batch_axes": batch_axes, "constants": constants}


def compiled(name, stages, microbatches, chunks=1, *, remat=True, scan=True, data=1, batch_axes=()):
    """The compiled gradient function and its arguments."""
    schedule = pipeline.named(name, stages=stages, microbatches=microbatches, chunks=chunks)
    mesh, params, batch, natural = arguments(stages, chunks, microbatches, data)
    function = pipeline.value_and_grad(
        stage_fn(remat, scan), embed_fn, head_fn, schedule, mesh, **options(mesh, stages, chunks, batch_axes)
    )
    program = jax.jit(function, compiler_options=FAST_COMPILE).lower(params, batch).compile()
    return program, params, batch, natural


def relative_errors(found, wanted):
    return {
        jax.tree_util.keystr(path): float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(wanted), strict=True)
    }


def check(name, stages, microbatches, chunks=1, **variant):
    """Loss within 1e-5 and every gradient within 1e-4 of one device; no permute that some stages skip."""
    program, params, batch, (ends, layers) = compiled(name, stages, microbatches, chunks, **variant)
    assert not pipeline.divergent_permutes(program.as_text())
    totals, grads = program(params, batch)
    (loss, aux), wanted = reference(ends, layers, batch)
    natural = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[3:]), grads.stages)
    np.testing.assert_allclose(totals.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(totals.stage_loss, aux, rtol=1e-5)
    assert totals.head["tokens"] == batch["weights"].sum()
    shards = variant["data"] if variant.get("batch_axes") else 1  # each runs the chunk once
    assert totals.stages["chunks"] == stages * chunks * microbatches * shards
    errors = relative_errors((grads.ends, natural), wanted)
    assert max(errors.values()) < 1e-4, errors


def sweep():
    """Every schedule on 2, 4 and 8 stages with few and many microbatches, and some ragged counts."""
    names = ("gpipe", "1f1b", "fused", "interleaved", "zb_h1")
    for stages, many, name in itertools.product((2, 4, 8), (1, 2, 8), names):
        for chunks in (1, 2) if name in ("fused", "interleaved") else (1,):
            yield name, stages, many * stages, chunks
    ragged = [("fused", 1, 2, 2), ("fused", 4, 6, 2), ("interleaved", 4, 7, 2)]
    ragged += [("1f1b", 4, 1, 1), ("fused", 4, 3, 1), ("zb_h1", 8, 3, 1)]
    yield from ragged
