"""Frozen weights as codes: close to the weights, exact as a base, small, and the same on every mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_models import DATA, batch_of, model_of

from jaxpar.config import Config, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from jaxpar.config_file import load
from jaxpar.errors import UserError
from jaxpar.hf.convert import abstract_params
from jaxpar.layout_check import put
from jaxpar.lora import make_adapter, make_tuning, merge, merging, with_adapter
from jaxpar.models.sharder import UNSHARDED
from jaxpar.quantised import Held, held, quantised, rounded
from jaxpar.tree import named_leaves
from jaxpar.weights import open_weights

KINDS = ("int8", "nf4")
ONE_QUICK = (pytest.param("int8", marks=pytest.mark.sweep), "nf4")
NAME = "qwen2"


def weight_of(shape=(3, 128, 96), axes=("layer", "embed", "mlp")):
    return nnx.Param(jax.random.normal(jax.random.key(0), shape), axes=axes)


@functools.cache
def dense():
    return open_weights(DATA / NAME).load(abstract_params(model_of(DATA / NAME)))


def config_of(kind: str, **settings) -> Config:
    parallel = settings.pop("parallel", {"data": 1})
    return Config(
        model=model_of(DATA / NAME), precision="float32", seq_len=24, global_batch=2, steps=10, remat="full",
        init_from=str(DATA / NAME), lora=LoraConfig(rank=4, targets=("q", "v", "down"), base=kind),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"), **settings,
    )  # fmt: skip


@functools.cache
def tuning_of(kind: str, **parallel):
    devices = jax.devices()[: parallel.get("data", 1) * parallel.get("tensor", 1)]
    return make_tuning(config_of(kind, parallel=parallel or {"data": 1}), devices)


def test_int8_is_within_half_a_step_and_nf4_takes_the_nearest_level():
    weight = weight_of()
    value = np.asarray(weight[...])
    blocks = np.abs(value.reshape(3, 2, 64, 96))
    largest = np.repeat(blocks.max(2, keepdims=True), 64, 2).reshape(value.shape)
    error = np.abs(np.asarray(held(weight, "int8").restored()[...]) - value)
    assert (error <= largest / 127 * 0.5001).all()
    got = held(weight, "nf4")
    assert got.codes[...].shape == (3, 64, 96)
    assert got.codes[...].dtype == jnp.uint8
    error = np.abs(np.asarray(got.restored()[...]) - value)
    assert (error <= largest * 0.1520).all()  # half of the widest gap, that between -1 and -0.696
    assert error.mean() < 0.06 * np.abs(value).mean() + 0.03


def test_nf4_gives_the_codes_of_qwix():
    qwix = pytest.importorskip("qwix", reason="qwix is not installed")
    weight = weight_of()
    theirs = qwix.quantize(weight[...], "nf4", channelwise_axes=[0, 2], tiled_axes={1: 64})
    np.testing.assert_array_equal(held(weight, "nf4").restored()[...], qwix.dequantize(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_restored_gives_the_same_codes_and_zeros_stay_zero(kind):
    weight = weight_of()
    weight = weight.replace(weight[...].at[:, :64].set(0.0))
    once = held(weight, kind)
    again = held(once.restored(), kind)
    np.testing.assert_array_equal(once.codes[...], again.codes[...])
    assert not np.asarray(once.restored()[...])[:, :64].any()


def test_matrices_are_held_and_the_rest_is_not():
    model = jax.eval_shape(lambda m: quantised(m, "nf4"), dense())
    names = {name for name in named_leaves(model) if not name.endswith(("/codes", "/scales"))}
    assert names == {name for name in named_leaves(dense()) if "norm" in name or "_bias" in name}
    assert model.embedding.kind == "int8"
    assert model.blocks.attention.q.kind == "nf4"
    moe = jax.eval_shape(lambda m: quantised(m, "int8"), abstract_params(model_of(DATA / "mixtral")))
    assert isinstance(moe.blocks.moe.down, Held)
    assert isinstance(moe.blocks.moe.router, nnx.Variable)


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_a_fresh_adapter_on_codes_is_the_restored_model_exactly(kind):
    """And a merged one is the restored model with the update, not the original."""
    batch = batch_of(NAME)
    base, exact = jax.jit(lambda m: quantised(m, kind))(dense()), jax.jit(lambda m: rounded(m, kind))(dense())
    logits = jax.jit(lambda m: m.logits(batch))
    adapted = jax.jit(lambda m, a: with_adapter(m, a).logits(batch, merging(UNSHARDED)))
    fresh = make_adapter(jax.random.key(0), LoraConfig(rank=4, targets=("q", "down")), dense())
    wanted = np.asarray(logits(exact))
    assert np.array_equal(adapted(base, fresh), wanted)
    assert np.abs(wanted - np.asarray(logits(dense()))).max() > 1e-3
    keys = iter(jax.random.split(jax.random.key(1), 9))
    adapter = jax.tree.map(lambda a: 0.2 * jax.random.normal(next(keys), a.shape), fresh)
    whole = jax.jit(lambda m, a: merge(m, a, kind))(dense(), adapter)
    on_the_side = np.asarray(adapted(base, adapter))
    assert np.abs(np.asarray(logits(whole)) - on_the_side).max() < 1e-5
    assert np.abs(np.asarray(logits(jax.jit(merge)(dense(), adapter))) - on_the_side).max() > 1e-3


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_training_on_codes_leaves_them_alone_and_is_the_same_on_a_mesh(kind):
    losses = {}
    for parallel in ({}, {"data": 2, "tensor": 2}):
        tuning = tuning_of(kind, **parallel)
        base = tuning.load(open_weights(DATA / NAME))
        before = {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(base).items()}
        state = tuning.built.init(jax.random.key(0))
        assert not any("codes" in name or "scales" in name for name in named_leaves(state))
        step, built = tuning.bind(base, tuning.built.step)
        seen = []
        for _ in range(3):
            state, metrics = step(state, put(built, batch_of(NAME)))
            seen.append(float(metrics["loss"]))
        assert {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(base).items()} == before
        losses[len(parallel)] = seen
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)
    exact = jax.jit(lambda m: rounded(m, kind))(dense())
    sums = jax.jit(lambda m: m(batch_of(NAME)))(exact)
    assert losses[0][0] == pytest.approx(float(sums.loss / sums.tokens), rel=1e-6)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"data": 2, "tensor": 2},
        pytest.param({"data": 2, "tensor": 2, "zero": 3}, marks=pytest.mark.sweep),
    ],
)
def test_the_compiled_step_takes_a_quarter_and_an_eighth_of_the_bytes(parallel):
    """Scales add 4 bytes per 64 weights: 1/16 of a byte to 1 and to 1/2. Nothing whole is kept for the backward."""
    model = ModelConfig(
        num_layers=4, embed_dim=256, num_heads=4, num_kv_heads=4, mlp_dim=512, vocab_size=128, vocab_multiple=16
    )
    found = {}
    for kind in ("float32", *KINDS):
        config = config_of(kind, parallel=parallel or {"data": 1})
        config = dataclasses.replace(config, model=model)
        tuning = make_tuning(config, jax.devices()[: 4 if parallel else 1])
        built = tuning.built
        compiled = built.step.lower(built.abstract_state, built.abstract_batch, tuning.abstract_base).compile()
        memory = compiled.memory_analysis()
        rest = sum(map(_shard_bytes, jax.tree.leaves((built.abstract_state, built.abstract_batch))))
        found[kind] = memory.argument_size_in_bytes - rest
        if kind != "float32" and "zero" not in parallel:  # a layer gathered is as much as this model's share
            assert memory.temp_size_in_bytes < 0.6 * found["float32"], memory
    assert found["int8"] / found["float32"] == pytest.approx(1.0625 / 4, rel=0.03)
    assert found["nf4"] / found["float32"] == pytest.approx(0.5625 / 4, rel=0.06)


def _shard_bytes(leaf) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * jnp.dtype(leaf.dtype).itemsize


def test_codes_are_not_gathered_to_be_restored():
    """With tensor parallelism every device restores its own part."""
    tuning = tuning_of("nf4", data=2, tensor=2)
    text = tuning.built.evaluate.lower(
        tuning.built.abstract_state.params, tuning.built.abstract_batch, tuning.abstract_base
    ).compile().as_text()  # fmt: skip
    assert not [line for line in text.splitlines() if "all-gather(" in line and ("u8[" in line or "s8[" in line)]


def test_a_matrix_without_blocks_is_refused_by_name():
    weight = nnx.Param(jnp.ones((2, 13, 7)), axes=("layer", "embed", "mlp"))
    with pytest.raises(UserError, match=r"lora.base = 'int8': no dim of up \(2, 13, 7\) is a multiple"):
        quantised({"up": weight}, "int8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"lora": {"base": "int4", "rank": 2}}', r"lora\.base"),
        ('{"lora": {"base": "nf4"}}', r"lora.base = 'nf4' is for frozen weights, but lora.rank = 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, text, message):
    from jaxpar import validate

    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        validate.check(load(path), 1)
