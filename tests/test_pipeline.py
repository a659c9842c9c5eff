"""The pipeline executor: every schedule gives the loss and the gradients of one device, and holds little memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pipeline_toy as toy
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import pipeline
from jaxpar.errors import UserError
from jaxpar.pipeline.split import Pieces

QUICK = [
    # name, stages, microbatches, chunks, variant
    ("1f1b", 4, 5, 1, {}),
    ("fused", 4, 8, 1, {"data": 2}),
    ("fused", 2, 3, 2, {"data": 2, "batch_axes": ("data",), "remat": False}),
    ("interleaved", 2, 4, 2, {}),
    ("zb_h1", 4, 4, 1, {"remat": False, "scan": False}),
    ("zb_h1", 2, 4, 1, {"scan": False, "data": 2}),
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks", "variant"), QUICK)
def test_same_loss_and_gradients_as_one_device(name, stages, microbatches, chunks, variant):
    toy.check(name, stages, microbatches, chunks, **variant)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), list(toy.sweep()))
def test_every_schedule_and_size(name, stages, microbatches, chunks):
    toy.check(name, stages, microbatches, chunks, scan=name != "zb_h1")


def test_evaluation_gives_the_loss_of_training():
    stages, microbatches, chunks = 2, 3, 2
    mesh, params, batch, (ends, layers) = toy.arguments(stages, chunks, microbatches)
    function = pipeline.evaluate(
        toy.stage_fn(False, True), toy.embed_fn, toy.head_fn, mesh,
        microbatches=microbatches, chunks=chunks, **toy.options(mesh, stages, chunks),
    )  # fmt: skip
    totals = jax.jit(function, compiler_options=toy.FAST_COMPILE)(params, batch)
    (loss, aux), _ = toy.reference(ends, layers, batch)
    np.testing.assert_allclose((totals.loss, totals.stage_loss), (loss, aux), rtol=1e-5)
    assert totals.head["tokens"] == batch["weights"].sum()


def test_a_table_of_the_users_own_runs(tmp_path):
    """An order no generator makes: GPipe whose backwards come last microbatch first."""
    plain = pipeline.gpipe(2, 3)
    rows = [f"{t},{s},F,{plain.f[t, s]},0" for t, s in zip(*np.nonzero(plain.f >= 0))]
    rows += [f"{t},{s},B,{2 - plain.b[t, s]},0" for t, s in zip(*np.nonzero(plain.b >= 0))]
    (tmp_path / "own.csv").write_text("# by hand\n" + "\n".join(rows))
    toy.check(str(tmp_path / "own.csv"), 2, 3)


def test_memory_does_not_grow_with_microbatches():
    few, many = (toy.compiled("fused", 2, m)[0].memory_analysis().temp_size_in_bytes for m in (8, 32))
    assert many < 1.02 * few


def pieces_of(remat, *, split_weights):
    batch = jax.tree.map(lambda a: a[0], toy.make_batch(1))
    layers = toy.make_params(toy.LAYERS_PER_CHUNK)[1]
    side = pipeline.Side(batch, {"one": jnp.ones(())})
    x = jnp.asarray(np.random.default_rng(2).standard_normal((toy.ROWS, toy.LENGTH, toy.DIM)), jnp.float32)
    function = toy.stage_fn(remat, scan=not split_weights)
    return Pieces(function, layers, x, side, split_weights=split_weights), function, layers, x, side


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("split_weights", [False, True])
def test_pieces_are_the_gradient_of_the_stage(remat, split_weights):
    pieces, function, layers, x, side = pieces_of(remat, split_weights=split_weights)
    out, fb, fw = pieces.forward(layers, x, side)
    dy = jnp.cos(x)
    dx, rest = pieces.backward(layers, side, fb, fw, dy)
    dlayers = pieces.weight(layers, side, fw, rest) if split_weights else rest
    wanted, pullback = jax.vjp(lambda p, x: function(p, x, side)[:2], layers, x)
    wanted_dlayers, wanted_dx = pullback((dy, jnp.ones(())))
    np.testing.assert_allclose(out.y, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=1e-6)
    for found, exact in zip(dlayers, jax.tree.leaves(wanted_dlayers), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_remat_policy_decides_what_is_stored():
    size = toy.ROWS * toy.LENGTH * toy.DIM

    def stored(pieces):
        return sum(np.prod(t.shape) for t in (*pieces.saved_fb, *pieces.saved_fw))

    full = pieces_of(True, split_weights=False)[0]
    most = (toy.LAYERS_PER_CHUNK + 2) * size  # the input of every layer, and both factors of the auxiliary loss
    assert stored(full) <= most
    none = pieces_of(False, split_weights=False)[0]
    assert stored(none) > 2 * stored(full)
    split = pieces_of(True, split_weights=True)[0]
    assert stored(split) <= most  # recomputed by B, not stored by F
    assert all(t.shape[0] == toy.ROWS for p in (full, none, split) for t in p.saved_fb if len(t.shape) == 3)


def test_lint_finds_a_permute_that_some_stages_skip():
    mesh = toy.mesh_of(2)

    def send(x):
        return lax.ppermute(x, "stage", [(0, 1), (1, 0)])

    def body(x, gate):
        return send(x), lax.cond(gate[0] > 0, send, lambda x: x, x)

    def safe(x, gate):
        return send(lax.cond(gate[0] > 0, jnp.sin, lambda x: x, x))

    found = []
    for function in (body, safe):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"})
        text = jax.jit(mapped).lower(jnp.ones((2, 4)), jnp.ones((2, 4))[:, 0]).compile().as_text()
        found.append(len(pipeline.divergent_permutes(text)))
    assert found == [1, 0]


def test_sizes_that_do_not_fit_are_refused():
    mesh, params, batch, _ = toy.arguments(2, 1, 4)

    def make(schedule, stage_fn=None, **more):
        stage_fn = stage_fn or toy.stage_fn(True, True)
        return pipeline.value_and_grad(stage_fn, toy.embed_fn, toy.head_fn, schedule, mesh, **more)

    with pytest.raises(UserError, match=r"has 4 stages, but the mesh has stage=2"):
        make(pipeline.fused(4, 4))
    with pytest.raises(UserError, match="no backward"):
        make(pipeline.forward_only(2, 4))
    with pytest.raises(UserError, match=r"batch\['gain'\] has shape \[4, 2\].* wants \[8\] first"):
        make(pipeline.fused(2, 8))(params, batch)
    with pytest.raises(UserError, match=r"params\.stages\['down'\].* wants \[2, 2\] first"):
        make(pipeline.fused(2, 4, 2))(params, batch)
    whole = params._replace(ends=params.ends | {"count": jnp.zeros(3, jnp.int32)})
    with pytest.raises(UserError, match=r"\['count'\] is int32"):
        make(pipeline.fused(2, 4))(whole, batch)
    halved = make(pipeline.fused(2, 4), lambda params, x, side: x[..., :4], ends_specs=toy.ENDS_SPECS)
    with pytest.raises(UserError, match="activation of its input's type"):
        jax.jit(halved).lower(params, batch)
