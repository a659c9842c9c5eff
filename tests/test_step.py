"""Loss, gradients, clipping, skipping, dropout: the laws of the train step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import References, tiny

import jaxpar.step as step_module
from jaxpar.build import build
from jaxpar.config import LossConfig, OptimizerConfig
from jaxpar.errors import UserError
from jaxpar.layout_check import gradient_errors, loss_and_gradients, put, random_batch
from jaxpar.models.loss import cross_entropy
from jaxpar.step import row_keys_of, train_step
from jaxpar.tree import named_leaves

SGD = OptimizerConfig(name="sgd", schedule="constant", learning_rate=0.1, weight_decay=0.0)
UNEVEN = (3, 50, 1, 64, 20, 64, 7, 0)  # trained tokens per row


@pytest.fixture(scope="module")
def references():
    return References()


def uneven_batch(config):
    batch = random_batch(config)
    batch["weights"] = (np.arange(config.seq_len) < np.array(UNEVEN)[:, None]).astype(np.float32)
    return batch


def named(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


@pytest.mark.parametrize(("accumulation", "data"), [(8, 1), (4, 2), (2, 4)])
def test_mean_over_the_trained_tokens_of_the_global_batch(accumulation, data):
    one = tiny()
    batch = uneven_batch(one)
    wanted_loss, wanted = loss_and_gradients(build(one, jax.devices()[:1]), batch)
    config = tiny(parallel={"data": data}, accumulation=accumulation)
    loss, gradients = loss_and_gradients(build(config, jax.devices()[:data]), batch)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert max(gradient_errors(gradients, wanted).values()) <= 1e-4


def test_batch_without_a_trained_token_changes_nothing():
    built = build(tiny(optimizer=dataclasses.replace(SGD, weight_decay=0.1)), jax.devices()[:1])
    state = built.init(jax.random.key(0))
    before = named(state.params)
    batch = random_batch(built.config)
    batch["weights"][:] = 0.0
    state, metrics = built.step(state, put(built, batch))
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0
    assert float(metrics["tokens"]) == 0.0
    assert (int(state.step), int(state.updates), int(state.skipped)) == (1, 0, 0)
    assert all(np.array_equal(value, before[name]) for name, value in named(state.params).items())


@pytest.mark.parametrize(("bad", "way"), [(np.nan, "_branch"), (np.inf, "_select")])  # as on CPUs, and as elsewhere
def test_step_that_is_not_finite_is_skipped_everywhere_and_counted(bad, way, monkeypatch):
    monkeypatch.setattr(step_module, "_branch", getattr(step_module, way))
    config = tiny(parallel={"data": 4, "tensor": 2, "zero": 1}, optimizer=OptimizerConfig(learning_rate=0.1))
    built = build(config)
    honest = built.grad_fn

    def poisoned(params, batch, row_keys, scale):
        sums, grads = honest(params, batch, row_keys, scale)
        wrong = jnp.where(batch["tokens"][0, 0] == 1, bad, 0.0)
        down = grads.blocks.mlp.down
        grads.blocks.mlp.down = down.replace(down[...].at[0, -1, -1].add(wrong))
        return sums, grads

    from jaxpar.step import StepRules

    rules = StepRules(poisoned, lambda grads: grads, built.optimizer, built.schedule, 1.0, False, False, 0)
    step = jax.jit(lambda state, batch: train_step(state, batch, rules), out_shardings=(built.shardings, None))
    good, poison = random_batch(config), random_batch(config)
    good["tokens"][0, 0], poison["tokens"][0, 0] = 2, 1
    state, _ = step(built.init(jax.random.key(0)), put(built, good))
    before = named((state.params, state.opt_state))
    state, metrics = step(state, put(built, poison))
    assert (int(metrics["skipped"]), int(metrics["skipped_total"])) == (1, 1)
    assert (int(state.step), int(state.updates)) == (2, 1)
    after = named((state.params, state.opt_state))
    assert all(np.array_equal(value, before[name]) for name, value in after.items())
    state, metrics = step(state, put(built, good))
    assert (int(metrics["skipped"]), int(metrics["skipped_total"])) == (0, 1)
    assert int(state.updates) == 2


def test_skipping_is_a_conditional_on_cpus_and_selects_on_gpus():
    built = build(tiny(), jax.devices()[:1])
    traced = built.step.trace(built.abstract_state, built.abstract_batch)
    # the choice of the platform is two conditionals on constants, which XLA resolves
    programs = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert {name: text.count("stablehlo.case") for name, text in programs.items()} == {"cpu": 3, "cuda": 2}


def test_fp16_scale_halves_on_overflow_and_grows_later():
    from jaxpar.state import LossScale
    from jaxpar.step import _next_scale

    state = LossScale(jnp.float32(8.0), jnp.int32(998))
    state = _next_scale(state, jnp.bool_(True))
    assert (float(state.scale), int(state.good)) == (8.0, 999)
    state = _next_scale(state, jnp.bool_(True))
    assert (float(state.scale), int(state.good)) == (16.0, 0)
    for _ in range(6):
        state = _next_scale(state, jnp.bool_(False))
    assert (float(state.scale), int(state.good)) == (1.0, 0)


def test_fp16_trains_and_its_scale_does_not_change_the_update():
    finals = []
    for name in ("float32", "fp16"):
        built = build(tiny(precision=name, optimizer=SGD), jax.devices()[:1])
        state, metrics = built.step(built.init(jax.random.key(0)), put(built, random_batch(built.config)))
        finals.append((float(metrics["grad_norm"]), named(state.params)))
    assert finals[1][0] == pytest.approx(finals[0][0], rel=2e-2)
    for name, value in finals[0][1].items():
        np.testing.assert_allclose(finals[1][1][name], value, atol=2e-3)


def test_clipping_sees_the_whole_gradient_on_every_layout():
    norms, finals = [], []
    layouts = ({"data": 8, "zero": 3}, {"data": 2, "tensor": 4}, {"data": 2, "context": 4}, {"data": 1, "context": 8})
    for parallel, count in (({}, 1), *((layout, 8) for layout in layouts)):
        config = tiny(parallel=parallel, model={"tied": True}, optimizer=dataclasses.replace(SGD, clip_norm=0.01))
        built = build(config, jax.devices()[:count])
        state, metrics = built.step(built.init(jax.random.key(0)), put(built, random_batch(config)))
        norms.append(float(metrics["grad_norm"]))
        finals.append(named(state.params))
    assert norms[0] > 0.01
    np.testing.assert_allclose(norms[1:], norms[0], rtol=1e-4)
    for final in finals[1:]:
        for name, value in final.items():
            np.testing.assert_allclose(value, finals[0][name], atol=1e-6)


def test_dropout_masks_differ_by_row_and_step_and_repeat():
    from jaxpar.models.layers import dropout

    ones = jnp.ones((8, 16, 32))
    masks = dropout(ones, row_keys_of(0, jnp.int32(3), 8), 0.5, 1, 2) > 0
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 8
    assert np.array_equal(masks, dropout(ones, row_keys_of(0, jnp.int32(3), 8), 0.5, 1, 2) > 0)
    for other in ((0, 4, (1, 2)), (1, 3, (1, 2)), (0, 3, (0, 2)), (0, 3, (1, 1))):
        seed, step, salt = other
        assert not np.array_equal(masks, dropout(ones, row_keys_of(seed, jnp.int32(step), 8), 0.5, *salt) > 0)
    assert 0.45 < float(masks.mean()) < 0.55
    assert np.array_equal(dropout(ones, None, 0.5, 1, 2), ones)


@pytest.mark.parametrize("scale", [1.0, 20.0, 100.0])
def test_loss_is_float32_whatever_the_logits(scale):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 16, 97)) * scale, jnp.bfloat16).astype(jnp.float32)
    targets = jnp.asarray(rng.integers(0, 97, (2, 16)), jnp.int32)
    sums = cross_entropy(lambda x: x, logits, targets, jnp.ones((2, 16)), LossConfig(), 97)
    exact = np.asarray(logits, np.float64)
    shifted = exact - exact.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(log_p, np.asarray(targets)[..., None], -1).sum()
    assert float(sums.loss) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("extras", [{}, {"z_loss": 1e-3}, {"label_smoothing": 0.1}])
def test_chunked_loss_is_the_plain_one(extras):
    plain, chunked = (tiny(loss=LossConfig(chunk_tokens=n, **extras)) for n in (None, 24))
    results = [loss_and_gradients(build(c, jax.devices()[:1]), random_batch(c)) for c in (plain, chunked)]
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert max(gradient_errors(results[1][1], results[0][1]).values()) <= 1e-5


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(chunk_tokens=16, z_loss=1e-3, label_smoothing=0.1)])
@pytest.mark.parametrize("model", [{}, {"tied": True}], ids=["head", "tied"])
def test_no_part_of_a_split_vocabulary_is_gathered(model: dict[str, Any], loss: LossConfig):
    """The padded vocabulary is 8 x 13 rows, and no other size is a multiple of 13."""
    built = build(tiny(parallel={"data": 2, "tensor": 4, "sequence_parallel": True}, model=model, loss=loss))
    text = built.step.lower(built.abstract_state, built.abstract_batch).compile().as_text()
    moved = re.findall(r" = (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    shapes = [dims for result in moved for dims in re.findall(r"\[([\d,]+)\]", result)]
    assert shapes  # sequence parallelism gathers the residual stream
    assert not [dims for dims in shapes if any(int(dim) % 13 == 0 for dim in dims.split(","))]


def test_gradient_agrees_with_finite_differences():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 7)), jnp.float32)
    targets, weights = jnp.array([[1, 2, 3, 4]]), jnp.array([[1.0, 0.0, 1.0, 1.0]])
    config = LossConfig(z_loss=0.1, label_smoothing=0.2)

    def loss(logits):
        return cross_entropy(lambda x: x, logits, targets, weights, config, 5).objective

    from jax.test_util import check_grads

    check_grads(loss, (logits,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_padded_vocabulary_rows_get_no_probability_and_no_gradient():
    config = tiny(model={"vocab_size": 97, "vocab_multiple": 128})
    _, gradients = loss_and_gradients(build(config, jax.devices()[:1]), random_batch(config))
    assert gradients["embedding"].shape[0] == 128
    assert not gradients["embedding"][97:].any()
    assert not gradients["head"][:, 97:].any()


def test_a_kernel_that_cannot_run_here_is_refused():
    config = tiny()
    cudnn = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="cudnn"))
    with pytest.raises(UserError, match=r"model.attention.*GPU.*auto"):
        build(cudnn, jax.devices()[:1])


def test_rows_of_a_batch_do_not_touch_each_other():
    built = build(tiny(), jax.devices()[:1])
    state, batch = built.init(jax.random.key(0)), random_batch(built.config)
    order = np.array([3, 1, 0, 2, 7, 6, 5, 4])
    rows = jax.jit(lambda params, batch: params.logits(batch))
    plain = np.asarray(rows(state.params, batch))
    permuted = np.asarray(rows(state.params, {name: value[order] for name, value in batch.items()}))
    np.testing.assert_allclose(permuted, plain[order], atol=1e-5)


def test_counting_sequence_is_learned_without_an_offset():
    """Targets are shifted once: after 5 6 7 comes 8."""
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.0)
    built = build(tiny(optimizer=optimizer), jax.devices()[:1])
    state = built.init(jax.random.key(0))
    sequence = (np.arange(8)[:, None] * 11 + np.arange(65)) % 97
    batch = random_batch(built.config) | {
        "tokens": sequence[:, :-1].astype(np.int32),
        "targets": sequence[:, 1:].astype(np.int32),
        "weights": np.ones((8, 64), np.float32),
        "positions": np.tile(np.arange(64, dtype=np.int32), (8, 1)),
        "segment_ids": np.ones((8, 64), np.int32),
    }
    for _ in range(60):
        state, _ = built.step(state, put(built, batch))
    prompt = {name: value[:1] for name, value in batch.items()}
    prompt["tokens"] = np.array([[5, 6, 7] + [0] * 61], np.int32)
    for position, wanted in ((2, 8), (3, 9), (4, 10)):
        logits = np.asarray(state.params.logits(prompt))
        assert logits[0, position].argmax() == wanted
        prompt["tokens"][0, position + 1] = wanted


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("remat", ["none", "attention", "dots", "full"])
def test_no_second_copy_of_the_weights_waits_for_the_backward_pass(remat, precision, zero):
    built = build(tiny(parallel={"data": 2, "zero": zero}, remat=remat, precision=precision), jax.devices()[:2])

    def kept(params, batch):
        return jax.tree.leaves(jax.vjp(lambda p: p(batch, built.layout).loss, params)[1])

    params = built.abstract_state.params
    jaxpr = jax.make_jaxpr(kept)(params, built.abstract_batch).jaxpr
    leaves = named_leaves(params).items()
    stacked = {leaf.shape for name, leaf in leaves if name.startswith("blocks/") and leaf.ndim > 2}
    assert any(v.aval.shape in stacked for v in jaxpr.outvars)
    assert not [v.aval for v in jaxpr.outvars if v.aval.shape in stacked and v not in jaxpr.invars]
