"""The law of the project: a layout never changes the maths."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from layouts import References, assert_same, cases, choices, meshes, pairs, tiny

from jaxpar.build import build
from jaxpar.config import LossConfig, PipelineConfig
from jaxpar.layout_check import compare, put, random_batch, shrunk
from jaxpar.tree import named_leaves

CASES = cases()
QUICK = CASES[2::9]  # a part in which every setting occurs, and tying with either family and sequence parallelism


@pytest.fixture(scope="module")
def references():
    return References()


def label(case):
    family, mesh, accumulation, tied = case
    sizes = "-".join(f"{axis}{size}" for axis, size in mesh.items() if size not in (1, False))
    return f"{family}-{sizes}-acc{accumulation}{'-tied' if tied else ''}"


def run_case(case, references):
    family, mesh, accumulation, tied = case
    assert_same(tiny(family, parallel=mesh, accumulation=accumulation, model={"tied": tied}), references)


@pytest.mark.parametrize("case", QUICK, ids=label)
def test_layout(case, references):
    run_case(case, references)


@pytest.mark.sweep
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=label)
def test_every_layout(case, references):
    run_case(case, references)


def test_sweep_is_wide():
    assert len(meshes()) >= 40
    assert len(CASES) <= 90
    met = {pair for case in CASES for pair in pairs(case)}
    assert met == {pair for options in choices() for option in options for pair in pairs(option)}
    triples = {(family, mesh["sequence_parallel"], tied) for family, mesh, _, tied in CASES}
    assert len(triples) == 8
    quick = [mesh for _, mesh, _, _ in QUICK]
    assert {mesh["zero"] for mesh in quick} == {0, 1, 2, 3}
    assert {mesh["tensor"] for mesh in quick} == {1, 2, 4, 8}
    assert {mesh["sequence_parallel"] for mesh in quick} == {True, False}
    assert {accumulation for _, _, accumulation, _ in QUICK} == {1, 2, 4}
    assert len({(tied, mesh["sequence_parallel"]) for _, mesh, _, tied in QUICK}) == 4
    assert len({(tied, family) for family, _, _, tied in QUICK}) == 4


VARIANTS = {
    "kv heads fewer than tensor": ({"tensor": 8}, {"num_kv_heads": 2}, {}),
    "one kv head": ({"tensor": 4, "data": 2, "zero": 3}, {"num_kv_heads": 1}, {}),
    "qk norm over all heads": ({"tensor": 4, "data": 2, "sequence_parallel": True}, {"qk_norm": "full"}, {}),
    "post norms, window, soft caps": (
        {"tensor": 2, "data": 4, "zero": 2},
        {"norm_placement": "both", "window": 16, "window_pattern": (True, False), "attention_soft_cap": 5.0,
         "logit_soft_cap": 3.0, "norm_plus_one": True, "embed_scale": 8.0},
        {},
    ),
    "dropout": ({"tensor": 2, "data": 4, "sequence_parallel": True}, {"dropout": 0.5}, {"accumulation": 2}),
    "full remat": ({"tensor": 2, "data": 2, "replica": 2, "zero": 3}, {"dropout": 0.1}, {"remat": "full"}),
    "dots remat": ({"data": 8, "zero": 3}, {}, {"remat": "dots"}),
    "attention remat": ({"data": 8, "zero": 1}, {}, {"remat": "attention"}),
    "chunked loss, z-loss, label smoothing": (
        {"tensor": 4, "data": 2, "sequence_parallel": True}, {},
        {"loss": LossConfig(chunk_tokens=16, z_loss=1e-3, label_smoothing=0.1)},
    ),
    "unrolled": ({"tensor": 4, "data": 2}, {"scan_layers": False}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, references):
    parallel, model, settings = VARIANTS[name]
    assert_same(tiny(parallel=parallel, model=model, **settings), references)


def test_init_is_bit_equal_on_every_mesh():
    wanted = None
    for parallel in (
        {"data": 1},
        {"data": 8, "zero": 3},
        {"data": 2, "tensor": 4},
        {"replica": 2, "data": 4, "zero": 1},
    ):
        config = tiny(parallel=parallel, model={"num_kv_heads": 2})
        devices = jax.devices()[: 1 if parallel == {"data": 1} else 8]
        state = build(config, devices).init(jax.random.key(0))
        found = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
        wanted = wanted or found
        for name, value in found.items():
            assert np.array_equal(value, wanted[name]), name


def test_steps_keep_replicas_equal_and_match_one_device():
    finals = []
    for parallel, count in (({"data": 1}, 1), ({"data": 2, "tensor": 4, "sequence_parallel": True}, 8)):
        built = build(tiny(parallel=parallel), jax.devices()[:count])
        state = built.init(jax.random.key(0))
        for seed in range(10):
            state, _ = built.step(state, put(built, random_batch(built.config, seed)))
        leaves = named_leaves(state.params)
        for name, leaf in leaves.items():
            first = {}
            for shard in leaf.addressable_shards:
                copy = np.asarray(shard.data)
                assert np.array_equal(first.setdefault(str(shard.index), copy), copy), name
        finals.append({name: np.asarray(leaf) for name, leaf in leaves.items()})
    for name, value in finals[0].items():
        np.testing.assert_allclose(finals[1][name], value, rtol=0, atol=1e-4 * max(np.abs(value).max(), 1e-30))


def test_a_schedule_from_a_file_keeps_its_microbatches():
    for schedule, asked, wanted in (("mine.csv", 8, 8), ("mine.csv", None, 4), ("fused", 8, 4)):
        pipeline = PipelineConfig(schedule=schedule, microbatches=asked)
        small = shrunk(tiny(parallel={"stage": 2}, pipeline=pipeline, global_batch=16))
        assert small.pipeline.microbatches == small.global_batch == wanted


def test_check_layout_finds_a_wrong_gradient(monkeypatch):
    config = tiny(parallel={"data": 2}, model={"num_layers": 1})
    devices = jax.devices()[:2]
    assert compare(config, build(config, devices)).passed

    import jaxpar.build as build_module

    honest = build_module.value_and_grad

    def doubled(params, batch, row_keys, scale, sharder):
        sums, grads = honest(params, batch, row_keys, scale, sharder)
        if sharder.mesh.size > 1:
            grads.blocks.mlp.down = grads.blocks.mlp.down.replace(grads.blocks.mlp.down[...] * 2)
        return sums, grads

    monkeypatch.setattr(build_module, "value_and_grad", doubled)
    result = compare(config, build(config, devices))
    assert not result.passed
    assert result.worst_gradient == pytest.approx(1.0, rel=1e-3)
