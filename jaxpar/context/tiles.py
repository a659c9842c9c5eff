"""Attention of one block of queries over one block of keys, tile by tile, with the statistics to merge blocks.

The largest score matrix that exists is one tile, so memory is linear in the length. The result of a block is its
normalised output and the log of its softmax denominator; `merge` joins the results of disjoint sets of keys. The
backward pass takes the final denominator, so it too works block by block.
Dims: B batch, T queries, S keys, H query heads, G KV heads, R = H / G, K head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEVER = -1e30  # score of a hidden key: finite, because inf - inf is nan


class Scores(NamedTuple):
    """How scores are made of products; hashable. `tile`: tokens along each side of the largest score matrix."""

    scale: float
    soft_cap: float | None = None
    tile: int = 512


class Place(NamedTuple):
    """Where tokens stand: index in the row int32 [T], document number int32 [B, T] or None."""

    index: jax.Array
    segments: jax.Array | None

    def part(self, start: int, length: int) -> Place:
        """A stretch of the tokens, with static borders."""
        segments = None if self.segments is None else self.segments[:, start : start + length]
        return Place(self.index[start : start + length], segments)


class Partial(NamedTuple):
    """Attention over some of the keys: out float32 [B, T, H, K], log of the denominator float32 [B, T, H]."""

    out: jax.Array
    log_sum: jax.Array


class Grads(NamedTuple):
    """Gradients of a block, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    weight = lambda part: jnp.exp(part.log_sum - log_sum)[..., None]  # noqa: E731
    return Partial(a.out * weight(a) + b.out * weight(b), log_sum)


def with_sinks(total: Partial, sinks: jax.Array | None) -> Partial:
    """`total`, and one more place per head with the score `sinks` [H] and no value; None: there is none."""
    if sinks is None:
        return total
    log_sum = jnp.logaddexp(total.log_sum, sinks.astype(jnp.float32))
    return Partial(total.out * jnp.exp(total.log_sum - log_sum)[..., None], log_sum)


def sink_gradient(result: Partial, cotangent: jax.Array, sinks: jax.Array | None) -> jax.Array | None:
    """Gradient of `sinks` [H] from the result that they are part of and the cotangent of its output."""
    if sinks is None:
        return None
    delta = jnp.sum(result.out.astype(jnp.float32) * cotangent.astype(jnp.float32), -1)
    weight = jnp.exp(sinks.astype(jnp.float32) - result.log_sum)
    return -(weight * delta).sum(tuple(range(delta.ndim - 1))).astype(sinks.dtype)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None, scores: Scores
) -> Partial:
    """Causal attention of q [B, T, H, K] over k, v [B, S, G, K]."""
    q_tiles, k_tiles = _cut(q.shape[1], scores.tile), _cut(k.shape[1], scores.tile)
    keys = _tiles(k_tiles, k, v, at_k)

    def row(_: None, own: tuple[jax.Array, Place]) -> tuple[None, Partial]:
        """One tile of queries over all tiles of keys."""
        q, at_q = own

        def absorb(total: Partial, other: tuple[jax.Array, jax.Array, Place]) -> tuple[Partial, None]:
            k, v, at_k = other
            visible = lambda: merge(total, _forward_tile(q, k, v, at_q, at_k, window, scores))  # noqa: E731
            if q_tiles * k_tiles == 1:
                return visible(), None
            return jax.lax.cond(_any_visible(at_q, at_k, window), visible, lambda: total), None

        empty = Partial(jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], NEVER, jnp.float32))
        return None, _scan(absorb, empty, keys)[0]

    parts = _scan(row, None, _tiles(q_tiles, q, at_q))[1]
    return Partial(_join(parts.out), _join(parts.log_sum))


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, result: Partial, cotangent: jax.Array, at_q: Place, at_k: Place,
    window: jax.Array | None, scores: Scores,
) -> Grads:  # fmt: skip
    """Gradients of a block, given the merged result over all keys and the cotangent of its output [B, T, H, K]."""
    q_tiles, k_tiles = _cut(q.shape[1], scores.tile), _cut(k.shape[1], scores.tile)
    delta = jnp.sum(result.out * cotangent.astype(jnp.float32), -1)
    queries = _tiles(q_tiles, q, cotangent, result.log_sum, delta, at_q)

    def column(total_dq: jax.Array, own: tuple[jax.Array, jax.Array, Place]) -> tuple[jax.Array, tuple]:
        """One tile of keys under all tiles of queries."""
        k, v, at_k = own
        zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)

        def absorb(total: tuple[jax.Array, jax.Array], other: tuple) -> tuple[tuple, jax.Array]:
            """Add one query tile's share to the gradients of k and v; returns the tile's dq."""
            q, cotangent, log_sum, delta, at_q = other

            def visible() -> tuple[tuple, jax.Array]:
                dq, dk, dv = _backward_tile(q, k, v, cotangent, log_sum, delta, at_q, at_k, window, scores)
                return (total[0] + dk, total[1] + dv), dq

            if q_tiles * k_tiles == 1:
                return visible()
            nothing = lambda: (total, jnp.zeros(q.shape, jnp.float32))  # noqa: E731
            return jax.lax.cond(_any_visible(at_q, at_k, window), visible, nothing)

        (dk, dv), dq = _scan(absorb, zeros, queries)
        return total_dq + dq, (dk, dv)

    dq = jnp.zeros((q_tiles, q.shape[0], q.shape[1] // q_tiles, *q.shape[2:]), jnp.float32)
    dq, (dk, dv) = _scan(column, dq, _tiles(k_tiles, k, v, at_k))
    return Grads(_join(dq), _join(dk), _join(dv))


def _forward_tile(
    q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None, scores: Scores
) -> Partial:
    s_BGRTS, _ = _scores(q, k, scores)
    allowed = _visible(at_q, at_k, window)[:, None, None]
    largest = jnp.max(jnp.where(allowed, s_BGRTS, NEVER), -1, keepdims=True)
    weights = jnp.where(allowed, jnp.exp(s_BGRTS - largest), 0.0)
    total = weights.sum(-1)
    out = jnp.einsum("BGRTS,BSGK->BTGRK", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    safe = jnp.maximum(total, 1e-30)
    out = out / jnp.moveaxis(safe, -1, 1)[..., None]
    log_sum = jnp.where(total > 0, largest[..., 0] + jnp.log(safe), NEVER)
    return Partial(out.reshape(q.shape), jnp.moveaxis(log_sum, -1, 1).reshape(q.shape[:-1]))


def _backward_tile(
    q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, log_sum: jax.Array, delta: jax.Array,
    at_q: Place, at_k: Place, window: jax.Array | None, scores: Scores,
) -> Grads:  # fmt: skip
    G, groups = k.shape[2], (k.shape[2], q.shape[2] // k.shape[2])
    s_BGRTS, slope = _scores(q, k, scores)
    by_head = lambda a: jnp.moveaxis(a.reshape(*a.shape[:2], *groups), 1, -1)[..., None]  # noqa: E731
    allowed = _visible(at_q, at_k, window)[:, None, None]
    p_BGRTS = jnp.where(allowed, jnp.exp(s_BGRTS - by_head(log_sum)), 0.0)
    do_BTGRK = cotangent.reshape(*q.shape[:2], *groups, -1)
    dp_BGRTS = jnp.einsum("BTGRK,BSGK->BGRTS", do_BTGRK, v, preferred_element_type=jnp.float32)
    ds_BGRTS = p_BGRTS * (dp_BGRTS - by_head(delta)) * scores.scale
    if slope is not None:
        ds_BGRTS = ds_BGRTS * slope
    p_BGRTS, ds_BGRTS = p_BGRTS.astype(v.dtype), ds_BGRTS.astype(q.dtype)
    q_BTGRK = q.reshape(*q.shape[:2], G, -1, q.shape[-1])
    product = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)  # noqa: E731
    dv = product("BGRTS,BTGRK->BSGK", p_BGRTS, do_BTGRK)
    dk = product("BGRTS,BTGRK->BSGK", ds_BGRTS, q_BTGRK)
    return Grads(product("BGRTS,BSGK->BTGRK", ds_BGRTS, k).reshape(q.shape), dk, dv)


def _scores(q: jax.Array, k: jax.Array, scores: Scores) -> tuple[jax.Array, jax.Array | None]:
    """float32 scores [B, G, R, T, S] and, with a soft cap, its slope."""
    q_BTGRK = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    s = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK, k, preferred_element_type=jnp.float32) * scores.scale
    if scores.soft_cap is None:
        return s, None
    bent = jnp.tanh(s / scores.soft_cap)
    return bent * scores.soft_cap, 1 - bent * bent


def _visible(at_q: Place, at_k: Place, window: jax.Array | None) -> jax.Array:
    """Bool [B or 1, T, S]."""
    distance = at_q.index[:, None] - at_k.index[None, :]
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if at_q.segments is None or at_k.segments is None:
        return allowed[None]
    return allowed[None] & (at_q.segments[:, :, None] == at_k.segments[:, None, :])


def _any_visible(at_q: Place, at_k: Place, window: jax.Array | None) -> jax.Array:
    """Whether causality and window leave anything of a tile: what they hide costs nothing."""
    reached = at_k.index.min() <= at_q.index.max()
    return reached if window is None else reached & (at_q.index.min() - at_k.index.max() < window)


def _cut(length: int, tile: int) -> int:
    """Number of equal tiles of at most `tile` tokens."""
    return next(num for num in range(max(1, -(-length // tile)), length + 1) if length % num == 0)


def _tiles(num: int, *values: jax.Array | Place) -> tuple:
    """[B, T, ...] -> [tiles, B, T / tiles, ...]."""

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(a.shape[0], num, a.shape[1] // num, *a.shape[2:]), 1, 0)

    def cut_any(value: jax.Array | Place) -> jax.Array | Place:
        if not isinstance(value, Place):
            return cut(value)
        return Place(value.index.reshape(num, -1), None if value.segments is None else cut(value.segments))

    return tuple(cut_any(value) for value in values)


def _join(a: jax.Array) -> jax.Array:
    """[tiles, B, T / tiles, ...] -> [B, T, ...]."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])


def _scan(body, carry, xs):  # noqa: ANN001, ANN202 (as jax.lax.scan)
    """`jax.lax.scan`; a single step is written out, which compiles faster and reads better in a profile."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], y)
