"""Attention of one block of queries over one block of keys, tile by tile, with the statistics to merge blocks.

The largest score matrix that exists is one tile, so memory is linear in the length. The result of a block is its
normalised output and the log of its softmax denominator; `merge` joins the results of disjoint sets of keys. The
backward pass takes the final denominator, so it too works block by block.
Dims: B batch, T queries, S keys, H query heads, G KV heads, R = H / G, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")
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

    def part(self, start: int | jax.Array, length: int) -> Place:
        """A stretch of the tokens."""
        cut = lambda a, axis: jax.lax.dynamic_slice_in_dim(a, start, length, axis)  # noqa: E731
        return Place(cut(self.index, 0), None if self.segments is None else cut(self.segments, 1))


class Stretch(NamedTuple):
    """`length` tokens of an array that begin at `start`."""

    start: int | jax.Array
    length: int


class Partial(NamedTuple):
    """Attention over some of the keys: out float32 [B, T, H, K], log of the denominator float32 [B, T, H]."""

    out: jax.Array
    log_sum: jax.Array

    @staticmethod
    def nothing(q: jax.Array, zero: jax.Array | float = 0.0) -> Partial:
        """What attention of q [B, T, H, K] over no keys is; `zero` as in `held`."""
        return Partial(jnp.full(q.shape, zero, jnp.float32), jnp.full(q.shape[:-1], zero + NEVER, jnp.float32))


class Result(NamedTuple):
    """What the backward pass knows of attention over all keys.

    Its cotangent [B, T, H, K]; float32 [B, T, H]: log of the denominator, and the cotangent times the output.
    """

    cotangent: jax.Array
    log_sum: jax.Array
    delta: jax.Array

    @staticmethod
    def of(out: jax.Array, log_sum: jax.Array, cotangent: jax.Array) -> Result:
        """From the output [B, T, H, K], its statistics and its cotangent."""
        return Result(cotangent, log_sum, jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), -1))


class Grads(NamedTuple):
    """Gradients of a block, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array

    @staticmethod
    def zeros(*like: jax.Array, zero: jax.Array | float = 0.0) -> Grads:
        """No gradient of q, k and v yet; `zero` as in `held`."""
        return Grads(*(jnp.full(a.shape, zero, jnp.float32) for a in like))


def held(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """A float32 zero, then `arrays`, none of which anything uses before all of them are there.

    Sums that begin with this zero are not allocated while the arrays are still computed. Left to itself the compiler
    sets them to zero early, and for a layer of attention that is a quarter of its memory.
    """
    return jax.lax.optimization_barrier((jnp.float32(0), *arrays))


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


def sink_gradient(result: Result, sinks: jax.Array | None) -> jax.Array | None:
    """Gradient of `sinks` [H] from the result that they are part of."""
    if sinks is None:
        return None
    weight = jnp.exp(sinks.astype(jnp.float32) - result.log_sum)
    return -(weight * result.delta).sum(tuple(range(weight.ndim - 1))).astype(sinks.dtype)


def forward(
    total: Partial, q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None,
    scores: Scores, rows: Stretch | None = None, columns: Stretch | None = None,
) -> Partial:  # fmt: skip
    """`total` [B, T, H, K] merged with causal attention of q [B, T, H, K] over k, v [B, S, G, K], in place.

    `rows` and `columns` name the stretch of queries and of keys that meet; None: all of them.
    """
    row_tiles, column_tiles = _cut(rows, q, scores), _cut(columns, k, scores)
    always = row_tiles.num * column_tiles.num == 1

    def row(total: Partial, start: jax.Array) -> Partial:
        """One tile of queries over all tiles of keys."""
        own = lambda a: row_tiles.of(a, start)  # noqa: E731
        q_tile, at_q_tile = own(q), at_q.part(start, row_tiles.length)

        def absorb(part: Partial, start: jax.Array) -> Partial:
            """`part` with one tile of keys; one that no query sees is left out."""
            at_k_tile = at_k.part(start, column_tiles.length)
            visible = lambda: merge(  # noqa: E731
                part,
                _forward_tile(
                    q_tile, column_tiles.of(k, start), column_tiles.of(v, start), at_q_tile, at_k_tile, window, scores
                ),
            )
            return (
                visible() if always else jax.lax.cond(_any_visible(at_q_tile, at_k_tile, window), visible, lambda: part)
            )

        part = column_tiles.fold(absorb, Partial(own(total.out), own(total.log_sum)))
        return Partial(row_tiles.put(total.out, part.out, start), row_tiles.put(total.log_sum, part.log_sum, start))

    return row_tiles.fold(row, total)


def backward(
    total: Grads, q: jax.Array, k: jax.Array, v: jax.Array, result: Result, at_q: Place, at_k: Place,
    window: jax.Array | None, scores: Scores, rows: Stretch | None = None, columns: Stretch | None = None,
) -> Grads:  # fmt: skip
    """`total` and the gradients of a block, in place, given the result over all keys; stretches as in `forward`."""
    row_tiles, column_tiles = _cut(rows, q, scores), _cut(columns, k, scores)
    always = row_tiles.num * column_tiles.num == 1

    def column(total: Grads, start: jax.Array) -> Grads:
        """One tile of keys under all tiles of queries."""
        own = lambda a: column_tiles.of(a, start)  # noqa: E731
        k_tile, v_tile, at_k_tile = own(k), own(v), at_k.part(start, column_tiles.length)

        def absorb(sums: Grads, start: jax.Array) -> Grads:
            """Add one tile of queries: to the gradients of this tile of keys, and to its own."""
            of = lambda a: row_tiles.of(a, start)  # noqa: E731
            at_q_tile, before = at_q.part(start, row_tiles.length), Grads(of(sums.q), sums.k, sums.v)

            def visible() -> Grads:
                more = _backward_tile(
                    of(q), k_tile, v_tile, Result(*map(of, result)), at_q_tile, at_k_tile, window, scores
                )
                return jax.tree.map(jnp.add, before, more)

            reached = _any_visible(at_q_tile, at_k_tile, window)
            dq, dk, dv = visible() if always else jax.lax.cond(reached, visible, lambda: before)
            return Grads(row_tiles.put(sums.q, dq, start), dk, dv)

        sums = row_tiles.fold(absorb, Grads(total.q, own(total.k), own(total.v)))
        return Grads(sums.q, column_tiles.put(total.k, sums.k, start), column_tiles.put(total.v, sums.v, start))

    return column_tiles.fold(column, total)


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
    q: jax.Array, k: jax.Array, v: jax.Array, result: Result, at_q: Place, at_k: Place, window: jax.Array | None,
    scores: Scores,
) -> Grads:  # fmt: skip
    G, groups = k.shape[2], (k.shape[2], q.shape[2] // k.shape[2])
    s_BGRTS, slope = _scores(q, k, scores)
    by_head = lambda a: jnp.moveaxis(a.reshape(*a.shape[:2], *groups), 1, -1)[..., None]  # noqa: E731
    allowed = _visible(at_q, at_k, window)[:, None, None]
    p_BGRTS = jnp.where(allowed, jnp.exp(s_BGRTS - by_head(result.log_sum)), 0.0)
    do_BTGRK = result.cotangent.reshape(*q.shape[:2], *groups, -1)
    dp_BGRTS = jnp.einsum("BTGRK,BSGK->BGRTS", do_BTGRK, v, preferred_element_type=jnp.float32)
    ds_BGRTS = p_BGRTS * (dp_BGRTS - by_head(result.delta)) * scores.scale
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


def loop(num: int, body: Callable[[Carry, jax.Array], Carry], carry: Carry) -> Carry:
    """`body` applied to 0, ..., num - 1 in turn; a single step is written out and reads better in a profile.

    A while loop and not a scan: rematerialisation splits a scan into what the inputs touch and what they do not, and
    would keep the masks of all tiles, which depend on positions alone.
    """
    if num <= 1:
        return body(carry, jnp.int32(0)) if num else carry
    step = lambda state: (state[0] + 1, body(state[1], state[0]))  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0] < num, step, (jnp.int32(0), carry))[1]


class _Tiles(NamedTuple):
    """A stretch of dim 1 of an array, in `num` tiles of `length` tokens."""

    start: int | jax.Array
    num: int
    length: int

    def of(self, a: jax.Array, start: jax.Array) -> jax.Array:
        """The tile of [B, T, ...] that begins at `start`."""
        return jax.lax.dynamic_slice_in_dim(a, start, self.length, axis=1)

    def put(self, a: jax.Array, tile: jax.Array, start: jax.Array) -> jax.Array:
        """[B, T, ...] with that tile replaced."""
        return jax.lax.dynamic_update_slice_in_dim(a, tile, start, axis=1)

    def fold(self, body: Callable[[Carry, jax.Array], Carry], carry: Carry) -> Carry:
        """`body` applied at the start of every tile in turn; a single one is written out and reads better."""
        return loop(self.num, lambda carry, i: body(carry, self.start + i * self.length), carry)


def _cut(stretch: Stretch | None, a: jax.Array, scores: Scores) -> _Tiles:
    """A stretch of [B, T, ...] in equal tiles of about `scores.tile` tokens."""
    start, length = stretch or Stretch(0, a.shape[1])
    tile = tile_length(length, scores.tile)
    return _Tiles(start, length // tile, tile)


def tile_length(length: int, wanted: int) -> int:
    """The divisor of `length` nearest to `wanted` as a ratio, all of it if no longer than that.

    A length without divisors in between (a prime) is better off in one large tile than in tiny ones.
    """
    if length <= wanted:
        return length
    divisors = (n for n in range(1, length + 1) if length % n == 0)
    return min(divisors, key=lambda n: (max(n / wanted, wanted / n), n))
