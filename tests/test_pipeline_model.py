"""The Transformer in a pipeline: the layout never changes loss or gradients, and no layer is lost."""

import dataclasses
import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.build import build, model_maker
from jaxpar.config import Config, LossConfig, ModelConfig, MoeConfig, ParallelConfig, PipelineConfig
from jaxpar.errors import UserError
from jaxpar.layout_check import put
from jaxpar.mesh import make_mesh
from jaxpar.models.sharder import UNSHARDED
from jaxpar.pipeline import divergent_permutes
from jaxpar.pipeline.assign import layer_costs
from jaxpar.pipeline.model import make_pipeline, pick_schedule
from jaxpar.precision import precision
from jaxpar.sharding import Placement, make_layout
from jaxpar.step import row_keys_of, value_and_grad
from jaxpar.tree import named_leaves

FAST_COMPILE = {"xla_backend_optimization_level": 0}
TRAINED = (3, 16, 1, 9, 12, 16, 7, 0)  # tokens that count, per row
MODEL = {
    "num_layers": 4, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 24, "vocab_size": 21,
    "vocab_multiple": 32,
}  # fmt: skip


def config_of(*, model=None, parallel=None, schedule="fused", microbatches=4, chunks=1, **settings):
    return Config(
        model=ModelConfig(**(MODEL | (model or {}))),
        parallel=ParallelConfig(**({"data": 1} | (parallel or {}))),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches, chunks=chunks),
        **({"precision": "float32", "seq_len": 16, "global_batch": 8} | settings),
    )


def batch_of(config):
    """Two documents a row; rows with very different numbers of trained tokens."""
    B, T = config.global_batch, config.seq_len
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.model.true_vocab, (B, T + 1)).astype(np.int32)
    column, cut = np.arange(T)[None], rng.integers(1, T, (B, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (column < np.resize(TRAINED, B)[:, None]).astype(np.float32),
        "positions": np.where(column < cut, column, column - cut).astype(np.int32),
        "segment_ids": (1 + (column >= cut)).astype(np.int32),
    }


class Run:
    """One config: natural parameters, its pipeline, and the one-device reference."""

    def __init__(self, config):
        self.config = config
        policy = precision(config.precision)
        make = model_maker(config, policy)
        self.params = jax.jit(make, compiler_options=FAST_COMPILE)(jax.random.key(0))
        self.batch = batch_of(config)
        dropout = config.model.dropout > 0
        self.row_keys = row_keys_of(config.seed, jnp.int32(2), config.global_batch) if dropout else None
        self.scale = jnp.float32(4.0)
        sizes = [getattr(config.parallel, axis) for axis in ("stage", "replica", "data", "expert", "context", "tensor")]
        self.mesh = make_mesh(config.parallel, jax.devices()[: int(np.prod(sizes))])
        layout = make_layout(config, self.mesh, policy.compute)
        self.pipeline = make_pipeline(config, layout, jax.eval_shape(make, jax.random.key(0)))

    def placed(self):
        """Arranged parameters where the layout wants them, and the batch."""
        layout = self.pipeline.layout
        arranged = self.pipeline.to_stages(self.params)
        shardings = jax.tree.map(
            lambda p: layout.sharding(p.parameter),
            layout.placements(arranged),
            is_leaf=lambda node: isinstance(node, Placement),
        )
        return jax.device_put(arranged, shardings), jax.device_put(self.batch, layout.batch)

    def reference(self):
        function = functools.partial(value_and_grad, sharder=UNSHARDED)
        arguments = (self.params, self.batch, self.row_keys, self.scale)
        return jax.jit(function, compiler_options=FAST_COMPILE)(*arguments)

    def compiled(self):
        arguments = (*self.placed(), self.row_keys, self.scale)
        return jax.jit(self.pipeline.grads, compiler_options=FAST_COMPILE).lower(*arguments).compile(), arguments

    def check(self):
        program, arguments = self.compiled()
        assert divergent_permutes(program.as_text()) == []
        sums, grads = program(*arguments)
        wanted_sums, wanted = self.reference()
        np.testing.assert_allclose(sums.loss, wanted_sums.loss, rtol=1e-5)
        np.testing.assert_allclose(sums.aux["loss"], wanted_sums.aux["loss"], rtol=1e-5, atol=1e-6)
        assert sums.tokens == wanted_sums.tokens
        found, exact = named_leaves(self.pipeline.from_stages(grads)), named_leaves(wanted)
        assert list(found) == list(exact)
        errors = {name: np.abs(found[name] - exact[name]).max() / np.abs(exact[name]).max() for name in exact}
        assert max(errors.values()) < 1e-4, errors


MIXED = MoeConfig(num_experts=4, expert_dim=8, balance_loss=0.1, router_z_loss=0.01, first_dense=2)
EVERYTHING = {"tied": True, "dropout": 0.3, "embed_scale": 4.0, "logit_soft_cap": 5.0}
QUICK = {
    "tied, dropout, z-loss, smoothing, chunked loss, tensor": {
        "model": EVERYTHING, "parallel": {"stage": 2, "tensor": 2}, "remat": "full",
        "loss": LossConfig(z_loss=0.01, label_smoothing=0.1, chunk_tokens=5),
    },
    "uneven stages of two chunks, learned positions, data": {
        "model": {"num_layers": 5, "positions": "learned", "max_position": 16, "dropout": 0.2},
        "parallel": {"stage": 2, "data": 2}, "chunks": 2, "microbatches": 2,
    },
    "ZeRO-3 and sequence parallelism": {
        "parallel": {"stage": 2, "data": 2, "tensor": 2, "zero": 3, "sequence_parallel": True}, "schedule": "1f1b",
        "microbatches": 2, "remat": "dots",
    },
    "dense layers before those with experts": {
        "model": {"num_layers": 5, "dropout": 0.2, "moe": MIXED}, "parallel": {"stage": 2, "expert": 2, "zero": 1},
        "remat": "full",
    },
    "zero bubble on unrolled layers": {"parallel": {"stage": 4, "zero": 1}, "schedule": "zb_h1"},
    "ring of four": {
        "model": {"num_layers": 2, "window": 6}, "parallel": {"stage": 2, "context": 4, "context_mode": "ring"},
        "microbatches": 2, "remat": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_same_loss_and_gradients_as_one_device(name):
    Run(config_of(**QUICK[name])).check()


def sweep():
    """Stages with every other axis, every schedule, and the layers that do not divide."""
    others = [{}, {"data": 2}, {"replica": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}]
    others += [{"data": 2, "zero": zero} for zero in (1, 2, 3)]
    others += [{"data": 2, "tensor": 2, "zero": zero, "sequence_parallel": True} for zero in (0, 1, 2, 3)]
    others += [{"replica": 2, "data": 2, "zero": 2}, {"context": 2}, {"context": 2, "tensor": 2}]
    schedules = [("gpipe", 1), ("1f1b", 1), ("fused", 1), ("fused", 2), ("interleaved", 2), ("zb_h1", 1)]
    for number, other in enumerate(others):
        for stages in (2, 4):
            if stages * np.prod([v for k, v in other.items() if k in ("replica", "data", "tensor", "context")]) <= 8:
                schedule, chunks = schedules[(number + stages) % len(schedules)]
                remat = ("none", "dots", "attention", "full")[number % 4]
                yield {
                    "parallel": {"stage": stages, **other}, "schedule": schedule, "chunks": chunks, "remat": remat,
                    "model": {"num_layers": 8, "tied": bool(number % 2)}, "microbatches": (2, 4)[stages == 4],
                }  # fmt: skip
    moe = {"moe": MoeConfig(num_experts=4, balance_loss=0.1, router_z_loss=0.01)}
    yield {"model": moe, "parallel": {"stage": 2, "expert": 2, "data": 2}, "microbatches": 2}
    yield {"model": moe, "parallel": {"stage": 4, "expert": 2}, "schedule": "1f1b", "microbatches": 4}
    for layers, parallel, settings in (
        (4, {"stage": 4, "zero": 1, "data": 2}, {"schedule": "gpipe"}),  # two stages of dense layers only
        (7, {"stage": 2, "tensor": 2, "sequence_parallel": True}, {"schedule": "interleaved", "chunks": 2}),
        (6, {"stage": 2, "data": 2, "tensor": 2, "zero": 3}, {"schedule": "1f1b"}),
        (5, {"stage": 2, "context": 2, "expert": 2}, {"chunks": 2}),
    ):
        mixed = {"num_layers": layers, "moe": MIXED, "dropout": 0.1}
        yield {"model": mixed, "parallel": parallel, "remat": "full", "microbatches": 4, **settings}
    for (schedule, chunks), size in itertools.product(schedules, (2, 4)):
        both = size == 4 and schedule in ("fused", "zb_h1")
        yield {
            "parallel": {"stage": 2, "context": size, "context_mode": "ring_all_to_all" if both else "ring"},
            "model": {"num_heads": 2} if both else {}, "schedule": schedule, "chunks": chunks, "microbatches": 2,
        }  # fmt: skip
    yield {"parallel": {"stage": 2, "context": 4, "context_mode": "ring"}, "schedule": "zb_h1", "microbatches": 2}
    yield {"parallel": {"stage": 4, "context": 2, "context_mode": "ring"}, "microbatches": 4}
    for layers, stages, chunks in ((10, 3, 1), (30, 4, 1), (30, 4, 2), (9, 8, 1)):
        yield {"model": {"num_layers": layers}, "parallel": {"stage": stages}, "chunks": chunks}


@pytest.mark.sweep
@pytest.mark.parametrize("settings", list(sweep()))
def test_every_mesh(settings):
    if settings["parallel"]["stage"] == 3:
        settings["model"]["vocab_multiple"] = 33
    Run(config_of(**settings)).check()


def test_evaluation_gives_the_same_loss():
    run = Run(config_of(model={"num_layers": 3}, parallel={"stage": 2}, microbatches=2))
    params, batch = run.placed()
    sums = jax.jit(run.pipeline.evaluate, compiler_options=FAST_COMPILE)(params, batch)
    wanted = jax.jit(lambda params, batch: params(batch), compiler_options=FAST_COMPILE)(run.params, run.batch)
    np.testing.assert_allclose(sums.loss, wanted.loss, rtol=1e-5)
    assert sums.tokens == wanted.tokens


def test_arrangement_round_trip_keeps_every_layer(caplog):
    config = config_of(model={"num_layers": 30}, parallel={"stage": 4}, chunks=2)
    with caplog.at_level(logging.INFO):
        run = Run(config)
    arranged = run.pipeline.to_stages(run.params)
    again = run.pipeline.from_stages(arranged)
    assert jax.tree.structure(again) == jax.tree.structure(run.params)
    for (name, found), wanted in zip(named_leaves(again).items(), named_leaves(run.params).values(), strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    up = arranged.blocks.mlp.up
    assert up.axes == ("stage", "chunk", "layer", "embed", "mlp")
    assert up.shape[:3] == (4, 2, 4)
    assert (np.abs(np.asarray(up)).sum((3, 4)) > 0).sum() == 30  # padding slots hold zeros
    assert caplog.text.count("stage ") == 4
    assert "layers 0-2, 14-17" in caplog.text


def test_memory_of_weights_is_divided_over_the_stages():
    run = Run(config_of(parallel={"stage": 4}))
    params, _ = run.placed()
    for name, leaf in named_leaves(params).items():
        shard = leaf.addressable_shards[0].data.size
        assert shard == leaf.size // (1 if "final_norm" in name else 4), name


def test_automatic_schedule_and_layer_costs():
    auto = lambda **settings: pick_schedule(config_of(schedule="auto", microbatches=8, **settings), 4)  # noqa: E731
    assert auto().name == "fused"
    assert (auto(chunks=2).name, auto(chunks=2).chunks) == ("fused", 2)
    window = config_of(model={"num_layers": 4, "window": 4, "window_pattern": (True, False)}, seq_len=64)
    costs = layer_costs(window.model, window.seq_len)
    assert costs[1] == costs[3] == 1.0
    assert costs[0] == costs[2] < 1.0
    with pytest.raises(UserError, match=r"pipeline\.microbatches=3"):
        pick_schedule(dataclasses.replace(window, pipeline=PipelineConfig(microbatches=3)), 4)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_narrow_dtypes_follow_one_device(name):
    """Also a test that they compile: sums over stages of 16-bit floats are the compiler's weak spot."""
    settings = {"precision": name, "model": {"tied": True}, "seq_len": 16, "global_batch": 8}
    parallel = {"stage": 2, "tensor": 2, "sequence_parallel": True}
    found, wanted = (
        trained(config_of(parallel=layout, **settings), devices) for layout, devices in ((parallel, 4), ({}, 1))
    )
    # Rounding in another order, and in fp8 by the scale of a microbatch, not of the batch.
    np.testing.assert_allclose(found, wanted, rtol=3e-3)


def trained(config, num_devices):
    """Loss of three steps."""
    built = build(config, jax.devices()[:num_devices])
    state, batch, losses = built.init(jax.random.key(0)), put(built, batch_of(config)), []
    for _ in range(3):
        state, metrics = built.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses
