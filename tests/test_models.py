"""Attention masks, rotary tables, recomputation, unrolled layers: the laws of the model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import tiny

from jaxpar import context
from jaxpar.build import build
from jaxpar.config import LatentConfig, RopeConfig
from jaxpar.errors import UserError
from jaxpar.layout_check import random_batch
from jaxpar.models import rope
from jaxpar.models.attention import Mask, attend
from jaxpar.tree import named_leaves

SETTINGS = {
    "plain": {},
    "window": {"window": 9},
    "mixed windows": {"window": 9, "window_pattern": (True, False)},
    "soft cap": {"attention_soft_cap": 5.0},
    "learned positions": {"positions": "learned", "max_position": 64},
    "grouped heads": {"num_kv_heads": 2, "qk_norm": "head"},
    "sinks": {"attention_sinks": True, "num_kv_heads": 2},
    "latent": {"latent": LatentConfig(kv_rank=12, rope_dim=4), "rope": RopeConfig(interleaved=True)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_documents_in_a_row_do_not_see_each_other(name):
    built = build(tiny(model=SETTINGS[name]), jax.devices()[:1])
    params = built.init(jax.random.key(0)).params
    batch = {key: value[:4] for key, value in random_batch(built.config).items()}
    second = batch["segment_ids"] == 2
    noise = np.random.default_rng(9).integers(0, 97, batch["tokens"].shape).astype(np.int32)
    logits = jax.jit(lambda batch: params.logits(batch))
    plain = np.asarray(logits(batch))
    replaced = np.asarray(logits(batch | {"tokens": np.where(second, batch["tokens"], noise)}))
    np.testing.assert_allclose(replaced[second], plain[second], atol=1e-6)
    assert np.abs(replaced - plain)[~second].max() > 1e-2


def test_packed_document_is_the_document_alone():
    built = build(tiny(), jax.devices()[:1])
    params = built.init(jax.random.key(0)).params
    packed = {key: value[:1] for key, value in random_batch(built.config).items()}
    cut = int((packed["segment_ids"] == 1).sum())
    alone = {key: np.roll(value, -cut, 1) for key, value in packed.items()}
    together, single = np.asarray(params.logits(packed)), np.asarray(params.logits(alone))
    np.testing.assert_allclose(single[:, : 64 - cut], together[:, cut:], atol=1e-5)


def test_sinks_take_their_share_of_every_softmax():
    """A sink that no score reaches takes all, one far below none, and one as likely as all tokens together a half."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 16, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
    run = jax.jit(lambda sinks: attend(q, k, v, Mask(sinks=sinks), scale=0.3))
    plain = jax.jit(lambda: attend(q, k, v, Mask(), scale=0.3))()
    scores = 0.3 * np.einsum("HK,SHK->HS", q[0, 9], np.repeat(k, 2, 2)[0, :10])
    total = jnp.asarray(np.log(np.exp(scores).sum(-1)))
    np.testing.assert_allclose(run(jnp.full(4, -100.0)), plain, atol=1e-6)
    assert np.abs(run(jnp.full(4, 100.0))).max() <= 1e-6
    np.testing.assert_allclose(run(total)[0, 9], plain[0, 9] / 2, atol=1e-6)
    with pytest.raises(UserError, match="has no attention sinks"):
        attend(q, k, v, Mask(sinks=total), scale=0.3, kernel="cudnn")


@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather"])
def test_sinks_where_rows_are_split(mode):
    built = build(tiny(parallel={"context": 2, "tensor": 2, "data": 2, "context_mode": mode}))
    segments = jnp.asarray(np.arange(64) // 40 + 1)[None].repeat(2, 0)
    mask = Mask(segments, 20, jnp.array([-1.0, 0.0, 1.0, 2.0]))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
    order = built.layout.order(64)
    order = np.arange(64) if order is None else order

    def split(q, k, v, sinks):
        layout, heads = built.layout, ("batch", "seq", "heads", "head_dim")
        assert layout.context is not None
        spec = layout.rules.spec(heads)
        y = context.attend(
            *(a[:, order] for a in (q, k, v)), segments[:, order], mask.window, sinks,
            scores=context.Scores(0.3), plan=layout.context, mesh=built.mesh, q_spec=spec, kv_spec=spec,
        )  # fmt: skip
        return y[:, np.argsort(order)]

    def loss(attention, *args):
        y = attention(*args)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    def whole(q, k, v, sinks):
        return attend(q, k, v, mask._replace(sinks=sinks), scale=0.3)

    run = lambda f: jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2, 3), has_aux=True))(q, k, v, mask.sinks)  # noqa: E731
    for got, wanted in zip(jax.tree.leaves(run(split)), jax.tree.leaves(run(whole)), strict=True):
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_pairs_of_neighbours_rotate_as_pairs_of_halves_do():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 10))
    cos, sin = (f(jnp.arange(12.0)).reshape(1, 3, 4) for f in (jnp.cos, jnp.sin))
    woven = jnp.concatenate([jnp.stack([x[..., :4], x[..., 4:8]], -1).reshape(1, 3, 2, 8), x[..., 8:]], -1)
    np.testing.assert_array_equal(rope.rotate(woven, cos, sin, interleaved=True), rope.rotate(x, cos, sin))


def test_future_tokens_are_not_seen():
    built = build(tiny(), jax.devices()[:1])
    params = built.init(jax.random.key(0)).params
    batch = random_batch(built.config)
    changed = batch["tokens"].copy()
    changed[:, 40:] = 5
    plain, other = np.asarray(params.logits(batch)), np.asarray(params.logits(batch | {"tokens": changed}))
    np.testing.assert_allclose(other[:, :40], plain[:, :40], atol=1e-6)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"])
def test_rotary_tables_are_exact_far_out(scaling):
    settings = RopeConfig(base=500_000.0, scaling=scaling, factor=8.0)
    config = tiny(model={"head_dim": 64, "rope": settings}, precision="bf16").model
    positions = np.array([[0, 255, 257, 4095, 15962]])
    cos, sin = rope.tables(config, 64, jnp.asarray(positions))
    angles = positions[0][:, None] * rope.inverse_frequencies(settings, 64)[None, :]
    factor = rope.attention_factor(settings)
    assert cos.dtype == jnp.float32
    # float32 positions x frequencies keep about 1e-3 radians at 16k positions
    np.testing.assert_allclose(cos[0, 0], np.cos(angles) * factor, atol=2e-3)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles) * factor, atol=2e-3)


def test_rotation_depends_on_distance_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    config = tiny(model={"head_dim": 16}).model

    def score(i, j):
        rotated = []
        for x, position in ((q, i), (k, j)):
            cos, sin = rope.tables(config, 16, jnp.array([[position]]))
            rotated.append(rope.rotate(jnp.asarray(x), cos[0], sin[0]))
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_every_parameter_has_one_name_per_dim():
    from jaxpar.sharding import named_parameters

    for family in ("llama", "gpt2"):
        built = build(tiny(family, parallel={"data": 1}, model={"qk_norm": "head"}), jax.devices()[:1])
        for name, parameter in named_parameters(built.abstract_state.params):
            assert len(parameter.axes) == len(parameter.get_value().shape), name


def test_compute_dtype_is_bfloat16_and_state_is_float32():
    built = build(tiny(precision="bf16"), jax.devices()[:1])
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(built.abstract_state) if leaf.dtype.kind == "f"}
    assert dtypes == {jnp.dtype("float32")}
    params = built.init(jax.random.key(0)).params
    stream, _ = jax.eval_shape(lambda batch: params.hidden(batch), random_batch(built.config))
    assert stream.dtype == jnp.bfloat16


def test_gpt2_starts_as_published():
    """Weights of std 0.02, projections into the residual stream 0.02 / sqrt(2 layers), biases 0, norms 1."""
    config = tiny("gpt2", model={"num_layers": 4, "embed_dim": 128, "mlp_dim": 256, "tied": True})
    found = named_leaves(build(config, jax.devices()[:1]).init(jax.random.key(0)).params)
    scaled = 0.02 / np.sqrt(2 * 4)
    wanted = {"attention/q": 0.02, "attention/k": 0.02, "attention/v": 0.02, "attention/out": scaled,
              "mlp/up": 0.02, "mlp/down": scaled}  # fmt: skip
    for name, std in wanted.items():
        for layer in np.asarray(found[f"blocks/{name}"]):
            assert layer.std() == pytest.approx(std, rel=0.04), name
            assert abs(layer.mean()) < 0.05 * std, name
    assert np.asarray(found["embedding"])[:97].std() == pytest.approx(0.02, rel=0.03)
    assert np.asarray(found["positions"]).std() == pytest.approx(0.01, rel=0.03)
    for name, leaf in found.items():
        if name.endswith("bias"):
            assert not np.asarray(leaf).any(), name
        elif name.endswith("scale"):
            assert (np.asarray(leaf) == 1).all(), name
