"""Weight decay by logical axes, schedules, what every optimizer holds on every ZeRO level, the update on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import small, tiny

import jaxpar.state as state_module
from jaxpar import sharding
from jaxpar.build import build
from jaxpar.config import OptimizerConfig
from jaxpar.contract import ContractError, check_gradients, check_step, compile_step
from jaxpar.layout_check import put, random_batch, relative_error
from jaxpar.models import families
from jaxpar.names import is_matrix
from jaxpar.optim import decay_counts, make_optimizer, make_schedule
from jaxpar.tree import from_named, named_leaves

MATRICES = {"embedding", "head", "positions", "q", "k", "v", "out", "gate", "up", "down", "router", "q_down",
            "kv_down", "kv_up"}  # fmt: skip


@pytest.mark.parametrize("family", families.PRESETS)
def test_decay_moves_exactly_the_matrices(family: str):
    config = dataclasses.replace(tiny(seq_len=32), model=small(family))
    params = build(config, jax.devices()[:1]).abstract_state.params
    params = jax.tree.map(lambda p: np.ones(p.shape, p.dtype), params)
    rule = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", weight_decay=0.1)
    optimizer = make_optimizer(rule, make_schedule(rule, 10))
    zeros = jax.tree.map(np.zeros_like, jax.device_get(params))
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = {name for name, leaf in named_leaves(updates).items() if np.asarray(leaf).any()}
    wanted = {name for name in named_leaves(params) if name.split("/")[-1] in MATRICES}
    assert moved == wanted
    decayed, undecayed = decay_counts(params)
    assert decayed + undecayed == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert undecayed == sum(leaf.size for name, leaf in named_leaves(params).items() if name not in wanted)


@pytest.mark.parametrize("setting", ["momentum", "eps"])
def test_muon_heeds_its_settings(setting):
    params = build(tiny(), jax.devices()[:1]).init(jax.random.key(0)).params
    found = []
    for value in (0.1, 0.9):
        rule = OptimizerConfig(name="muon", learning_rate=1.0, schedule="constant", **{setting: value})
        optimizer = make_optimizer(rule, make_schedule(rule, 10))
        state = optimizer.init(params)
        for scale in (1.0, -0.3):
            grads = jax.tree.map(lambda p, scale=scale: scale * jax.numpy.cos(37.0 * p), params)
            updates, state = optimizer.update(grads, state, params)
        found.append(named_leaves(updates)["blocks/mlp/up"])
    assert relative_error(*map(np.asarray, found)) > 1e-3


def test_names_decide_not_ranks():
    assert not is_matrix(("layer", "embed"))
    assert not is_matrix(("layer", "heads", "head_dim"))
    assert is_matrix(("layer", "embed", "heads", "head_dim"))
    assert is_matrix(("expert", "embed", "mlp"))
    assert not is_matrix(("expert", "mlp"))


def test_schedules():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1)
    cosine = make_schedule(config, 100)
    assert [float(cosine(n)) for n in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert float(cosine(55)) == pytest.approx(0.55, abs=1e-6)
    assert float(cosine(100)) == pytest.approx(0.1)
    wsd = make_schedule(dataclasses.replace(config, schedule="wsd", decay_steps=20), 100)
    assert [float(wsd(n)) for n in (10, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    linear = make_schedule(dataclasses.replace(config, schedule="linear"), 100)
    assert float(linear(55)) == pytest.approx(0.55)
    constant = make_schedule(dataclasses.replace(config, schedule="constant"), 100)
    assert float(constant(99)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_every_optimizer_learns_and_keeps_the_contract(name):
    optimizer = OptimizerConfig(name=name, learning_rate=1e-2, schedule="constant", momentum=0.9)
    config = tiny(parallel={"data": 4, "tensor": 2, "zero": 2}, optimizer=optimizer)
    built = build(config)
    compiled = built.step.lower(built.abstract_state, built.abstract_batch).compile()
    rows = check_step(built, compiled)
    state, batch, losses = built.init(jax.random.key(0)), put(built, random_batch(config)), []
    for _ in range(5):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    if name == "adamw":
        held = {row.name: row.promised for row in rows}
        whole = 2 * 64 * 64 * 4  # a layer-stacked [64, 64] matrix
        moment = next(
            bytes_ for leaf, bytes_ in held.items() if leaf.startswith("opt_state") and "mu/blocks/mlp/up" in leaf
        )
        assert moment == whole // 8
        assert held["params/blocks/mlp/up"] == whole // 2


def test_adafactor_does_not_count_the_empty_slots_of_a_stage():
    rule = OptimizerConfig(name="adafactor", learning_rate=1.0, schedule="constant", weight_decay=0.0)
    optimizer = make_optimizer(rule, make_schedule(rule, 10))
    blocks = build(tiny(), jax.devices()[:1]).init(jax.random.key(0)).params.blocks
    longer = jax.tree.map(lambda a: np.concatenate([a, np.zeros_like(a)]), jax.device_get(blocks))

    def second_update(gradients):
        first = optimizer.update(gradients, optimizer.init(gradients), gradients)[1]
        return named_leaves(optimizer.update(jax.tree.map(lambda a: 9.0 * a, gradients), first, gradients)[0])

    found, wanted = second_update(longer), second_update(blocks)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found[name][:2], leaf, rtol=1e-5)
        assert not found[name][2:].any()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_lie_where_zero_promises(zero):
    built = build(tiny(parallel={"data": 4, "tensor": 2, "zero": zero}))
    rows = {row.name: row.compiled for row in check_gradients(built)}
    up = 2 * 64 * 64 * 4 // 2
    assert rows["blocks/mlp/up"] == (up // 4 if zero >= 2 else up)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_run_does_not_start_where_gradients_lie_whole(zero, monkeypatch):
    config = tiny(parallel={"data": 4, "tensor": 2, "zero": zero}, optimizer=OptimizerConfig())
    compile_step(build(config))
    monkeypatch.setattr(sharding.Placement, "gradient", property(lambda placed: placed.compute))
    with pytest.raises(ContractError, match="gradients blocks/mlp/up: 16384 bytes per device, promised 4096"):
        compile_step(build(config))


def test_a_broken_promise_is_named():
    built, other = (
        build(tiny(parallel={"data": 4, "tensor": 2, "zero": zero}, optimizer=OptimizerConfig())) for zero in (1, 0)
    )
    compiled = other.step.lower(other.abstract_state, other.abstract_batch).compile()
    with pytest.raises(ContractError, match="mu/blocks/mlp/up"):
        check_step(built, compiled)


def as_told(built):
    """A compiled step that holds its state where the layout says, which may be wrong: the promise is not read there."""
    told: Any = SimpleNamespace(input_shardings=((built.shardings, None), {}), output_shardings=(built.shardings, None))
    return told


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_the_layout_of_every_optimizer_is_the_promise(name, zero):
    optimizer = OptimizerConfig(name=name, momentum=0.9)
    for parallel in ({"data": 4, "tensor": 2}, {"stage": 2, "data": 2, "tensor": 2}):
        config = tiny(parallel=parallel | {"zero": zero}, optimizer=optimizer, model={"embed_dim": 128, "mlp_dim": 128})
        rows = check_step(built := build(config), as_told(built))
        factored = [row for row in rows if "/v_row/" in row.name and row.promised > 4]
        assert bool(factored) == (name == "adafactor")


@pytest.mark.parametrize(("zero", "leaf"), [(1, "mu/blocks/mlp/up"), (2, "nu/embedding"), (3, "params/embedding")])
def test_a_layout_that_forgets_to_split_is_named(zero, leaf, monkeypatch):
    if zero == 3:
        monkeypatch.setattr(sharding.Placement, "parameter", property(lambda placed: placed.compute))
    else:
        monkeypatch.setattr(state_module, "_optimizer_sharding", lambda name, leaf, owners, layout: layout.whole)
    built = build(tiny(parallel={"data": 4, "tensor": 2, "zero": zero}, optimizer=OptimizerConfig()))
    with pytest.raises(ContractError, match=leaf):
        check_step(built, as_told(built))


def test_a_split_that_is_lost_in_the_mapping_itself_is_named(monkeypatch):
    monkeypatch.setattr(sharding.Layout, "_split_further", lambda self, axes, shape, compute, path: compute)
    built = build(tiny(parallel={"data": 4, "tensor": 2, "zero": 3}, optimizer=OptimizerConfig()))
    with pytest.raises(ContractError, match="params/blocks/mlp/up"):
        check_step(built, as_told(built))


WIDE = {"embed_dim": 128, "mlp_dim": 128, "vocab_multiple": 128, "num_layers": 1}  # Adafactor factors from 128 on


def changes_of_two_updates(built):
    """By how much two updates from fixed gradients move every parameter."""
    rng = np.random.default_rng(0)
    start = built.init(jax.random.key(0))
    before = {name: np.asarray(leaf) for name, leaf in named_leaves(start.params).items()}
    shares = [{name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in before.items()} for _ in range(2)]
    place = lambda grads: built.layout.place(grads, built.placements, lambda placed: placed.optimizer)  # noqa: E731

    @functools.partial(jax.jit, out_shardings=(built.shardings.params, built.shardings.opt_state))
    def update(params, opt_state, grads):
        updates, opt_state = built.optimizer.update(place(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = start.params, start.opt_state
    for share in shares:
        params, opt_state = update(params, opt_state, from_named(params, share))
    factored = any("/v_row/" in name and leaf.size > 1 for name, leaf in named_leaves(opt_state).items())
    return {name: np.asarray(leaf) - before[name] for name, leaf in named_leaves(params).items()}, factored


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        pytest.param(name, zero, marks=() if zero == 3 and name in ("adafactor", "muon") else pytest.mark.sweep)
        for name in ("adamw", "adafactor", "lion", "sgd", "muon")
        for zero in (0, 3)
    ],
)
def test_a_mesh_updates_as_one_device_does(name, zero):
    optimizer = OptimizerConfig(name=name, learning_rate=1e-2, schedule="constant", momentum=0.9)
    one = build(tiny(optimizer=optimizer, model=WIDE), jax.devices()[:1])
    many = build(tiny(parallel={"data": 4, "tensor": 2, "zero": zero}, optimizer=optimizer, model=WIDE))
    wanted, factored = changes_of_two_updates(one)
    found, _ = changes_of_two_updates(many)
    assert factored == (name == "adafactor")
    assert not {leaf: error for leaf in wanted if (error := relative_error(found[leaf], wanted[leaf])) > 1e-4}
    assert all(change.any() for change in wanted.values())
