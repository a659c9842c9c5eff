"""Keys and values of earlier tokens, so that a new token costs one position and not the whole row.

The model itself runs unchanged: a sharder that keeps a cache answers its call for attention. Latent attention is asked
to work on compressed vectors, so that the cache holds one of them for a token and not keys and values of all heads.
Dims: L layers, B batch, T new positions, S slots of the cache, H query heads, G KV heads, K head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.models.attention import Mask, ScoreRules, softmax_with_sinks
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import Transformer

SLOT_AXES = ("batch", "position")
LATENT_HEAD = "latent"  # the one key of all heads, whole on every device


class Cache(NamedTuple):
    """Keys and values [L, B, S, G, K] of a stack of layers, in the compute dtype; slot s holds position s of its row.

    `values` None: a value is the first features of its key, and all heads share them (latent attention).
    """

    keys: jax.Array
    values: jax.Array | None


Caches = tuple[Cache, ...]  # one for every stack of the model


def empty_caches(model: Transformer, rows: int, slots: int, sharder: Sharder) -> Caches:
    """Caches of zeros, placed as the keys will be."""
    config = model.config
    heads, width = config.kv_heads * sharder.kv_repeat, config.head_size
    if config.latent.kv_rank:
        heads, width = 1, config.latent.kv_rank + config.latent.rope_dim

    def empty(layers: int) -> Cache:
        zeros = jnp.zeros((layers, rows, slots, heads, width), model.precision.compute)
        name = LATENT_HEAD if config.latent.kv_rank else _heads(sharder)
        zeros = sharder.activation(zeros, "layer", *SLOT_AXES, name, "head_dim")
        return Cache(zeros, None if config.latent.kv_rank else zeros)

    return tuple(empty(len(traits["index"])) for _, traits in model.stacks())


def extend(
    model: Transformer, tokens: jax.Array, positions: jax.Array, real: jax.Array, caches: Caches, sharder: Sharder
) -> tuple[jax.Array, Caches]:
    """Run tokens int32 [B, T] at `positions` [B, T] -> stream after the last block [B, T, D], and the caches with them.

    A token sees the slots up to its own position, so a slot that holds padding (`real` [B, T] false) is seen by no
    token before it is overwritten.
    """
    batch = {"tokens": tokens, "positions": positions, "segment_ids": real.astype(jnp.int32)}
    side = dataclasses.replace(model.side(batch), compressed=True)

    def layer(x: jax.Array, xs: tuple[Any, Any, Cache]) -> tuple[jax.Array, Cache]:
        block, traits, own = xs
        caching = _CachingSharder(sharder, positions, own)
        x, _ = caching.weights(block)(x, side, caching, traits)
        return x, caching.cache

    x, grown = model.embed(batch, sharder), []
    for (blocks, traits), cache in zip(model.stacks(), caches, strict=True):
        x, longer = jax.lax.scan(layer, x, (blocks, traits, cache))
        grown.append(longer)
    return x, tuple(grown)


class _CachingSharder:
    """`inner` for one layer, whose attention goes to the cache."""

    def __init__(self, inner: Sharder, positions: jax.Array, cache: Cache) -> None:
        self.inner, self.positions, self.cache = inner, positions, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: ScoreRules
    ) -> jax.Array:
        """Attention of the new positions over all slots; the new keys and values are written first."""
        del kernel
        keys = self._written(self.cache.keys, k)
        values = None if self.cache.values is None else self._written(self.cache.values, v)
        self.cache = Cache(keys, values)
        if values is None:
            values = keys[..., : v.shape[-1]]
        return _attend(q, keys, values, self.positions, mask, rules)

    def _written(self, slots: jax.Array, new: jax.Array) -> jax.Array:
        """The slots [B, S, G, K] with the new positions [B, T, G, K] in them."""
        slots = slots.at[jnp.arange(new.shape[0])[:, None], self.positions].set(new.astype(slots.dtype))
        heads = LATENT_HEAD if self.cache.values is None else _heads(self.inner)
        return self.inner.activation(slots, *SLOT_AXES, heads, "head_dim")


def _attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, mask: Mask, rules: ScoreRules
) -> jax.Array:
    """Q [B, T, H, K] over keys [B, S, G, K] and values [B, S, G, V] -> [B, T, H, V]; softmax in float32."""
    B, T, H, K = q.shape
    S, G = keys.shape[1:3]
    distance = positions[:, :, None] - jnp.arange(S)  # [B, T, S]
    visible = distance >= 0
    if mask.window is not None:
        visible &= distance < mask.window
    q_BTGRK = q.reshape(B, T, G, H // G, K)
    scores = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK, keys, preferred_element_type=jnp.float32) * rules.scale
    if rules.soft_cap is not None:
        scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = softmax_with_sinks(scores, mask.sinks).astype(values.dtype)
    return jnp.einsum("BGRTS,BSGV->BTGRV", weights, values).reshape(B, T, H, values.shape[-1])


def _heads(sharder: Sharder) -> str:
    return "kv_heads" if sharder.kv_repeat == 1 else "heads"
