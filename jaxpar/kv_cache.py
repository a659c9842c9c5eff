"""Keys and values of earlier tokens, so that a new token costs one position and not the whole row.

The model itself runs unchanged: a sharder that keeps a cache answers its call for attention.
Dims: L layers, B batch, T new positions, S slots of the cache, H query heads, G KV heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.errors import UserError
from jaxpar.models.attention import Mask, Rules
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import Transformer

SLOT_AXES = ("batch", "position")


class Cache(NamedTuple):
    """Keys and values [L, B, S, G, K] in the compute dtype; slot s holds position s of its row."""

    keys: jax.Array
    values: jax.Array


def empty_cache(model: Transformer, rows: int, slots: int, sharder: Sharder) -> Cache:
    """A cache of zeros, placed as the keys will be."""
    config = model.config
    if config.latent.kv_rank or model.leading is not None:
        found = "model.latent" if config.latent.kv_rank else "model.moe.first_dense"
        raise UserError(
            f"{found} is set: generation keeps keys and values of equal layers with ordinary attention only"
        )
    shape = (config.num_layers, rows, slots, config.kv_heads * sharder.kv_repeat, config.head_size)
    zeros = jnp.zeros(shape, model.precision.compute)
    zeros = sharder.activation(zeros, "layer", *SLOT_AXES, _heads(sharder), "head_dim")
    return Cache(zeros, zeros)


def extend(
    model: Transformer, tokens: jax.Array, positions: jax.Array, real: jax.Array, cache: Cache, sharder: Sharder
) -> tuple[jax.Array, Cache]:
    """Run tokens int32 [B, T] at `positions` [B, T] -> stream after the last block [B, T, D], and the cache with them.

    A token sees the slots up to its own position, so a slot that holds padding (`real` [B, T] false) is seen by no
    token before it is overwritten.
    """
    batch = {"tokens": tokens, "positions": positions, "segment_ids": real.astype(jnp.int32)}
    side = model.side(batch)

    def layer(x: jax.Array, xs: tuple[Any, Any, Cache]) -> tuple[jax.Array, Cache]:
        block, traits, own = xs
        caching = _CachingSharder(sharder, positions, own)
        x, _ = caching.weights(block)(x, side, caching, traits)
        return x, caching.cache

    return jax.lax.scan(layer, model.embed(batch, sharder), (model.blocks, model.layer_traits(), cache))


class _CachingSharder:
    """`inner` for one layer, whose attention goes to the cache."""

    def __init__(self, inner: Sharder, positions: jax.Array, cache: Cache) -> None:
        self.inner, self.positions, self.cache = inner, positions, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: Rules
    ) -> jax.Array:
        """Attention of the new positions over all slots; the new keys and values are written first."""
        del kernel
        rows = jnp.arange(k.shape[0])[:, None]
        place = lambda a: self.inner.activation(a, *SLOT_AXES, _heads(self.inner), "head_dim")  # noqa: E731
        keys = place(self.cache.keys.at[rows, self.positions].set(k.astype(self.cache.keys.dtype)))
        values = place(self.cache.values.at[rows, self.positions].set(v.astype(self.cache.values.dtype)))
        self.cache = Cache(keys, values)
        return _attend(q, keys, values, self.positions, mask.window, rules)


def _attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, window: jax.Array | int | None, rules: Rules
) -> jax.Array:
    """Q [B, T, H, K] over keys and values [B, S, G, K] -> [B, T, H, K]; softmax in float32."""
    B, T, H, K = q.shape
    S, G = keys.shape[1:3]
    distance = positions[:, :, None] - jnp.arange(S)  # [B, T, S]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    q_BTGRK = q.reshape(B, T, G, H // G, K)
    scores = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK, keys, preferred_element_type=jnp.float32) * rules.scale
    if rules.soft_cap is not None:
        scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("BGRTS,BSGK->BTGRK", weights, values).reshape(B, T, H, K)


def _heads(sharder: Sharder) -> str:
    return "kv_heads" if sharder.kv_repeat == 1 else "heads"
