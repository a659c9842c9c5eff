"""Mixture of experts: exact dispatch, routers, losses that no layout changes, padding that never routes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import References, assert_same
from moe_cases import DEEPSEEK, MOE, meshes, tiny_moe

from jaxpar.build import build
from jaxpar.config import MoeConfig, OptimizerConfig
from jaxpar.context_plan import stream_order
from jaxpar.layout_check import loss_and_gradients, put, random_batch
from jaxpar.models import moe as moe_module
from jaxpar.models.experts import Experts, buffer_size, feed
from jaxpar.models.layers import Activation
from jaxpar.tree import named_leaves

MESHES = meshes()
QUICK = ["expert2-data2-tensor2-zero1", "context-ring-capacity"]


@pytest.fixture(scope="module")
def references():
    return References()


@pytest.mark.parametrize("name", QUICK)
def test_layout(name: str, references: References):
    parallel, moe, settings = MESHES[name]
    assert_same(tiny_moe(parallel, moe, **settings), references)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in MESHES if name not in QUICK])
def test_every_layout(name: str, references: References):
    parallel, moe, settings = MESHES[name]
    assert_same(tiny_moe(parallel, moe, **settings), references)


def test_sweep_is_wide():
    tried = [mesh for mesh, _, _ in MESHES.values()]
    assert {(mesh.get("expert", 1), mesh.get("data", 1)) for mesh in tried} >= {
        (e, d) for e in (1, 2, 4) for d in (1, 2)
    }
    assert {mesh.get("zero", 0) for mesh in tried} == {0, 1, 2, 3}
    assert len(tried) >= 35


# Dispatch


N, D, F, E = 96, 16, 32, 4


def experts_and_tokens(skew: float, gated: bool = True) -> tuple[jax.Array, jax.Array, jax.Array, Experts]:
    """Tokens of which the last 16 are padding, choices skewed towards expert 0, weights."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((E, D, F), (E, D, F), (E, F, D))
    gate, up, down = (0.2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
    x = jax.random.normal(keys[3], (N, D))
    scores = jax.random.normal(keys[4], (N, E)) + skew * jnp.array([3.0, 1.0, 0.0, -1.0])
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores), 2)
    real = (jnp.arange(N) < N - 16)[:, None]
    return x, jnp.where(real, chosen, E), jnp.where(real, weights, 0.0), Experts(gate if gated else None, up, down)


def by_hand(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts) -> jax.Array:
    """Every expert on every token."""
    hidden = jnp.einsum("ND,EDF->NEF", x, experts.up)
    hidden = jax.nn.silu(hidden if experts.gate is None else jnp.einsum("ND,EDF->NEF", x, experts.gate)) * (
        1.0 if experts.gate is None else hidden
    )
    outputs = jnp.einsum("NEF,EFD->NED", hidden, experts.down)
    weight = jnp.sum((chosen[..., None] == jnp.arange(E)) * weights[..., None], 1)
    return jnp.einsum("NE,NED->ND", weight, outputs)


@pytest.mark.parametrize(("skew", "gated"), [(0.0, True), (1.0, False), (9.0, True)])
def test_nothing_is_dropped_however_skewed(skew: float, gated: bool):
    x, chosen, weights, experts = experts_and_tokens(skew, gated)
    fullest = int(np.bincount(np.asarray(chosen).ravel(), minlength=E + 1)[:E].max())
    assert (fullest > buffer_size(N, 2, E)) == (skew > 0)  # both ways through: one round, and several

    def loss(x: jax.Array, weights: jax.Array, experts: Experts, run) -> tuple[jax.Array, jax.Array]:
        y = run(x, chosen, weights, experts)
        return jnp.sum(y * jnp.cos(jnp.arange(D))), y

    ours = functools.partial(feed, num_experts=E, activation=Activation("silu"))
    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, run=run), (0, 1, 2), has_aux=True))(x, weights, experts)
        for run in (ours, by_hand)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_unused_experts_get_zero_gradients():
    x, chosen, weights, experts = experts_and_tokens(0.0)
    chosen = jnp.where(chosen == 3, E, chosen)
    run = lambda experts: feed(x, chosen, weights, experts, E, Activation("silu")).sum()  # noqa: E731
    grads = jax.jit(jax.grad(run))(experts)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
        assert not np.asarray(leaf[3]).any()
        assert np.asarray(leaf[0]).any()


# Router


routed = jax.jit(moe_module.route, static_argnums=3, static_argnames="num_layers")


def logits_of(rows: int = 3, length: int = 16, experts: int = 8) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (rows, length, experts))


ALL = jnp.ones((3, 16), bool)


def test_largest_is_top_k_with_its_order_of_equal_values():
    values = jnp.round(logits_of(experts=16) * 2) / 2 + 0.25  # many are equal, none is -0
    np.testing.assert_array_equal(moe_module.largest(values, 5), jax.lax.top_k(values, 5)[1])


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_every_device_routes_its_own_tokens(dispatch: str):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    moe = dataclasses.replace(DEEPSEEK, dispatch=dispatch)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    logits, valid = jax.device_put((logits_of(rows=8), jnp.ones((8, 16), bool)), rows)
    routing = functools.partial(moe_module.route, bias=None, moe=moe, num_layers=2)
    program = jax.jit(lambda logits, valid: routing(logits, valid).chosen, out_shardings=rows)
    assert "all-" not in program.lower(logits, valid).compile().as_text()


def test_softmax_weights_are_those_of_the_chosen_logits():
    logits = logits_of()
    found = routed(logits, ALL, None, MoeConfig(num_experts=8), num_layers=2)
    values, chosen = jax.lax.top_k(logits, 2)
    np.testing.assert_array_equal(found.chosen, chosen)
    np.testing.assert_allclose(found.weights, jax.nn.softmax(values), rtol=1e-5)
    raw = routed(logits, ALL, None, MoeConfig(num_experts=8, normalize_weights=False), num_layers=2)
    np.testing.assert_allclose(raw.weights, np.take_along_axis(jax.nn.softmax(logits), chosen, -1), rtol=1e-5)


def test_sigmoid_router_chooses_by_bias_and_groups_but_weighs_by_score():
    logits, bias = logits_of(), jnp.zeros(8).at[5].set(10.0).at[0].set(-10.0)
    found = routed(logits, ALL, bias, DEEPSEEK, num_layers=2)
    scores = np.asarray(jax.nn.sigmoid(logits))
    assert (np.asarray(found.chosen) == 5).any(-1).all()
    assert not (np.asarray(found.chosen) == 0).any()
    picked = np.take_along_axis(scores, np.asarray(found.chosen), -1)
    np.testing.assert_allclose(found.weights, 2.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-5)
    one_group = dataclasses.replace(DEEPSEEK, groups_per_token=1)
    chosen = np.asarray(routed(logits, ALL, None, one_group, num_layers=2).chosen)
    best = (scores.reshape(3, 16, 4, 2).sum(-1)).argmax(-1)
    np.testing.assert_array_equal(chosen // 2, np.broadcast_to(best[..., None], chosen.shape))


def test_capacity_drops_the_smallest_weights_of_each_row():
    moe = MoeConfig(num_experts=2, experts_per_token=1, dispatch="capacity", capacity_factor=1.0)
    logits = jnp.stack([jnp.linspace(1.0, 2.0, 16), jnp.zeros(16)], -1)[None]  # all prefer expert 0; room for 8
    found = routed(logits, ALL[:1], None, moe, num_layers=1)
    np.testing.assert_array_equal(np.asarray(found.chosen)[0, :, 0], [2] * 8 + [0] * 8)
    assert float(found.aux["dropped_share"]) == 8
    order = np.random.default_rng(0).permutation(16)
    shuffled = routed(logits[:, order], ALL[:1], None, moe, num_layers=1)
    np.testing.assert_array_equal(np.asarray(shuffled.chosen)[0, :, 0], np.asarray(found.chosen)[0, order, 0])


def test_equal_scores_go_to_the_earliest_in_the_row():
    """However the row is held: the first tokens of documents are alike in every layer, so scores do tie."""
    moe = MoeConfig(num_experts=2, experts_per_token=1, dispatch="capacity", capacity_factor=1.0)
    logits = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (3, 16, 2))  # all alike; room for 8
    wanted = np.asarray(routed(logits, ALL, None, moe, num_layers=1).chosen)
    np.testing.assert_array_equal(wanted[0, :, 0], [0] * 8 + [2] * 8)
    order = stream_order(16, 2)
    held = np.asarray(moe_module.route(logits, ALL, None, moe, num_layers=1, order=order).chosen)
    np.testing.assert_array_equal(held, wanted[:, order])


def test_balance_is_one_when_even_and_grows_with_skew():
    moe = dataclasses.replace(MOE, num_experts=8, router_z_loss=0.0)
    even = jnp.tile(10.0 * jnp.eye(8), (3, 2, 1))
    even = even + jnp.roll(even, 1, -1)  # every expert twice per 8 tokens
    found = routed(even, ALL, None, moe, num_layers=2)
    assert float(found.aux["loss"]) == pytest.approx(0.1 * 48, rel=1e-5)  # coefficient x tokens
    skewed = routed(even + jnp.arange(8) * 4.0, ALL, None, moe, num_layers=2)
    assert float(skewed.aux["loss"]) > 1.5 * float(found.aux["loss"])


def test_padding_changes_no_sum():
    """Rows of padding, and padding at the end of rows, leave every loss and count as they were."""
    for moe in (MOE, dataclasses.replace(MOE, dispatch="capacity"), DEEPSEEK):
        logits = logits_of(experts=moe.num_experts)
        bias = jnp.zeros(moe.num_experts)
        wanted = routed(logits, ALL, bias, moe, num_layers=2)
        noise = 5 * jax.random.normal(jax.random.key(3), (6, 24, moe.num_experts))
        padded = noise.at[:3, :16].set(logits)
        valid = jnp.zeros((6, 24), bool).at[:3, :16].set(True)
        found = routed(padded, valid, bias, moe, num_layers=2)
        np.testing.assert_array_equal(found.chosen[:3, :16], wanted.chosen)
        assert (np.asarray(found.chosen)[~np.asarray(valid)] == moe.num_experts).all()
        for name, value in wanted.aux.items():
            np.testing.assert_allclose(found.aux[name], value, rtol=1e-5, err_msg=name)


# In the model


def test_coefficients_reach_the_router():
    quiet = dataclasses.replace(MOE, balance_loss=0.0, router_z_loss=0.0)
    found = {}
    for name, moe in {"quiet": quiet, "balance": dataclasses.replace(quiet, balance_loss=0.1),
                      "z": dataclasses.replace(quiet, router_z_loss=0.1)}.items():  # fmt: skip
        config = tiny_moe({"data": 1}, moe, global_batch=2, seq_len=32, model={"num_layers": 1})
        loss, gradients = loss_and_gradients(build(config, jax.devices()[:1]), random_batch(config))
        found[name] = loss, gradients["blocks/moe/router"]
    for name in ("balance", "z"):
        assert found[name][0] == found["quiet"][0]  # what is reported as the loss is the cross entropy
        assert np.abs(found[name][1] - found["quiet"][1]).max() > 1e-3 * np.abs(found["quiet"][1]).max()


def test_balance_bias_falls_for_overloaded_experts_by_the_rate():
    config = tiny_moe({"expert": 4, "data": 2}, DEEPSEEK, model={"num_layers": 1})
    built = build(config)
    batch = put(built, random_batch(config))
    state = built.init(jax.random.key(0))
    before = jax.device_get(state.params)
    load = np.asarray(built.evaluate(state.params, batch).aux["expert_tokens"])
    state, metrics = built.step(state, batch)
    bias = np.asarray(named_leaves(state.params)["blocks/moe/balance"])[0]
    np.testing.assert_allclose(bias, -1e-3 * np.sign(load - load.mean()), rtol=1e-6)
    assert load.sum() == pytest.approx(2 * (random_batch(config)["segment_ids"] > 0).sum())  # every token twice
    np.testing.assert_allclose(metrics["aux_expert_tokens"], load, rtol=1e-6)
    assert np.asarray(metrics["aux_expert_tokens_max"]) == pytest.approx(load.max() / load.mean(), rel=1e-5)
    assert np.asarray(metrics["aux_fullest_expert"]) == pytest.approx(load.max() / load.mean(), rel=1e-5)
    assert {"aux_router_entropy", "aux_dropped_share", "aux_router_balance"} <= set(metrics)
    assert not np.asarray(before.blocks.moe.balance[...]).any()


def test_only_the_balance_bias_is_moved_by_the_rate():
    """A router's own bias (gpt-oss) is an ordinary parameter."""
    moe = dataclasses.replace(MOE, router_bias=True, bias_update_rate=1e-3)
    config = tiny_moe({"data": 1}, moe, global_batch=2, seq_len=32, model={"num_layers": 1})
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.0, clip_norm=None)
    )
    built, batch = build(config, jax.devices()[:1]), random_batch(config)
    state = built.init(jax.random.key(0))
    before = {name: np.array(leaf) for name, leaf in named_leaves(state.params).items()}
    _, gradients = loss_and_gradients(built, batch)
    after = named_leaves(built.step(state, put(built, batch))[0].params)
    for name in ("router_bias", "up"):
        path = f"blocks/moe/{name}"
        moved, wanted = before[path] - np.asarray(after[path]), 0.1 * gradients[path]
        np.testing.assert_allclose(moved, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)
    moved = np.abs(np.asarray(after["blocks/moe/balance"]) - before["blocks/moe/balance"])
    assert set(moved.round(7).flat) <= {0.0, np.float32(1e-3)}


def test_shares_are_of_routed_tokens_however_few_are_trained():
    config = tiny_moe({"data": 2, "expert": 2, "tensor": 2}, dataclasses.replace(MOE, dispatch="capacity"))
    built, batch = build(config), random_batch(config)
    few = batch | {"weights": np.where(np.arange(64) < 3, batch["weights"], 0.0).astype(np.float32)}
    found = []
    for one in (batch, few):
        _, metrics = built.step(built.init(jax.random.key(0)), put(built, one))
        found.append({name: np.asarray(value) for name, value in metrics.items() if name.startswith("aux_")})
    assert 0.0 < found[0]["aux_dropped_share"] < 1.0
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "parallel", [{"data": 2, "expert": 2, "tensor": 2, "zero": 3}, {"stage": 2, "expert": 4}], ids=str
)
def test_routers_work_in_float32_under_bf16(parallel: dict[str, Any]):
    config = tiny_moe(parallel, seq_len=32, global_batch=16, precision="bf16")
    built = build(config)
    batch, params = put(built, random_batch(config)), built.init(jax.random.key(0)).params
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, a: a.astype(jnp.bfloat16).astype(a.dtype) if "router" in jax.tree_util.keystr(path) else a, params
    )
    losses = [float(built.evaluate(each, batch).aux["router_z_loss"]) for each in (params, rounded)]
    assert losses[0] != losses[1]  # a router that is cast cannot tell
