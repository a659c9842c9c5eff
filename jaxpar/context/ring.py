"""The two kernels that run on every device inside the `shard_map` of `exchange`: whole keys, and keys on a ring.

Both are causal, keep no score matrix for the backward pass (it is computed again, tile by tile) and sum in float32.

On a ring of r places in zig-zag order, place i has an early piece of the row (number i of 2r) and a late one
(2r - 1 - i). Keys that came from place j < i are seen by both of its query pieces, but only their early half; those
of j > i by its late queries alone, both halves. So every hop costs each place the same two blocks, late queries on
early keys and one other, and the first step costs three: nobody waits.

Heads do not meet, so they go round in shares, each with all hops: only the blocks of one share exist at a time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.context import tiles
from jaxpar.context.rotation import Ring
from jaxpar.context.tiles import Grads, Partial, Place, Result, Scores, Stretch

# Shares of the heads that go round the ring one after the other: blocks under way are that much smaller.
SHARES = 4


def whole(
    q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores,
) -> jax.Array:  # fmt: skip
    """Attention of q [B, T, H, K] over keys that are all here, [B, S, G, K], and sinks [H]; out in the dtype of q."""
    return _whole(q, k, v, at_q, at_k, window, sinks, scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _whole(
    q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores,
) -> jax.Array:  # fmt: skip
    return _whole_forward(q, k, v, at_q, at_k, window, sinks, scores)[0]


def _whole_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, at_q: Place, at_k: Place, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores,
) -> tuple[jax.Array, tuple]:  # fmt: skip
    zero, q, k, v = tiles.held(q, k, v)
    part = tiles.forward(Partial.nothing(q, zero), q, k, v, at_q, at_k, window, scores)
    part = tiles.with_sinks(part, sinks)
    out = part.out.astype(q.dtype)
    return out, (q, k, v, out, part.log_sum, at_q, at_k, window, sinks)


def _whole_backward(scores: Scores, saved: tuple, cotangent: jax.Array) -> tuple:
    q, k, v, out, log_sum, at_q, at_k, window, sinks = saved
    zero, out, cotangent = tiles.held(out, cotangent)
    result, nothing = Result.of(out, log_sum, cotangent), Grads.zeros(q, k, v, zero=zero)
    grads = tiles.backward(nothing, q, k, v, result, at_q, at_k, window, scores)
    d_sinks = tiles.sink_gradient(result, sinks)
    return grads.q.astype(q.dtype), grads.k.astype(k.dtype), grads.v.astype(v.dtype), None, None, None, d_sinks


_whole.defvjp(_whole_forward, _whole_backward)


class _Half(NamedTuple):
    """Which of a place's two pieces, static or traced."""

    number: int | jax.Array

    def of(self, a: jax.Array) -> Stretch:
        """Where that half of [B, T, ...] is."""
        length = a.shape[1] // 2
        return Stretch(self.number * length, length)


EARLY, LATE = _Half(0), _Half(1)


class _Keys(NamedTuple):
    """What travels: keys and values [B, T, G, K], documents int32 [B, T] or None."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


def on_ring(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores, ring: Ring,
) -> jax.Array:  # fmt: skip
    """Attention of q [B, T, H, K] over the keys of the ring's places, and sinks [H]; T is this place's two pieces."""
    return _on_ring(q, k, v, segments, window, sinks, scores, ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _on_ring(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores, ring: Ring,
) -> jax.Array:  # fmt: skip
    return _on_ring_forward(q, k, v, segments, window, sinks, scores, ring)[0]


def _on_ring_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores, ring: Ring,
) -> tuple[jax.Array, tuple]:  # fmt: skip
    share = _Share.of(k)
    zero, q, k, v = tiles.held(q, k, v)

    def go_round(done: Partial, number: jax.Array) -> Partial:
        """The ring of one share of the heads."""
        mine = _Queries(share.take(q, number), segments, window, share.scores(scores, q.shape[1]), ring)
        keys = _Keys(share.take(k, number), share.take(v, number), segments)
        part = tiles.with_sinks(_ring_forward(mine, keys), share.take(sinks, number, axis=0))
        return Partial(share.put(done.out, part.out, number), share.put(done.log_sum, part.log_sum, number))

    out = Partial(jnp.full(q.shape, zero, q.dtype), jnp.full(q.shape[:-1], zero))
    out, log_sum = tiles.loop(share.num, go_round, out)
    return out, (q, k, v, segments, window, sinks, out, log_sum)


def _on_ring_backward(scores: Scores, ring: Ring, saved: tuple, cotangent: jax.Array) -> tuple:
    q, k, v, segments, window, sinks, out, log_sum = saved
    result, share = Result.of(out, log_sum, cotangent), _Share.of(k)

    def go_round(left: Grads, number: jax.Array) -> Grads:
        """The ring of one share of the heads; its gradients take the place of its queries, keys and values."""
        mine_q, mine_k, mine_v = (share.take(a, number) for a in left)
        mine = _Queries(mine_q, segments, window, share.scores(scores, q.shape[1]), ring)
        part = _ring_backward(mine, _Keys(mine_k, mine_v, segments), Result(*(share.take(a, number) for a in result)))
        return Grads(*(share.put(a, more, number) for a, more in zip(left, part, strict=True)))

    dq, dk, dv = tiles.loop(share.num, go_round, Grads(q, k, v))
    return dq, dk, dv, None, None, tiles.sink_gradient(result, sinks)


_on_ring.defvjp(_on_ring_forward, _on_ring_backward)


class _Share(NamedTuple):
    """Heads go round in `num` shares, so that only one share of the blocks under way exists at a time."""

    num: int

    def scores(self, scores: Scores, length: int) -> Scores:
        """With fewer heads at work tiles grow, so that each has as much to do; not above a quarter of a piece.

        Score matrices do not shrink with the ring, so on short pieces large ones would be most of the memory.
        """
        piece = length // 2
        return scores._replace(tile=max(scores.tile, min(int(scores.tile * math.sqrt(self.num)), piece // 4)))

    @staticmethod
    def of(k: jax.Array) -> _Share:
        """As many as `SHARES` allows and the KV heads of k [B, T, G, K] divide by."""
        return _Share(math.gcd(SHARES, k.shape[2]))

    def take(self, a: Any, number: jax.Array, axis: int = 2) -> Any:
        """A share of the heads of [B, T, heads, ...]."""
        if self.num == 1 or a is None:
            return a
        size = a.shape[axis] // self.num
        return jax.lax.dynamic_slice_in_dim(a, number * size, size, axis)

    def put(self, a: jax.Array, share: jax.Array, number: jax.Array) -> jax.Array:
        """`a` with that share, converted to its dtype."""
        return jax.lax.dynamic_update_slice_in_dim(a, share.astype(a.dtype), number * share.shape[2], 2)


def _ring_forward(mine: _Queries, keys: _Keys) -> Partial:
    ring, own = mine.ring, mine.ring.own()

    def absorb(total: Partial, keys: _Keys, source: jax.Array, pairs: list[tuple[_Half, _Half]]) -> Partial:
        for queries, theirs in pairs:
            total = mine.forward(total, queries, theirs, keys, source)
        return total

    arriving = ring.pass_on(keys, 1)  # asked for before the work that it overlaps with
    total = absorb(Partial.nothing(mine.q), keys, own, _own_pairs())

    def hop(total: Partial, keys: _Keys, number: jax.Array, turn: int) -> tuple[Partial, _Keys]:
        arriving = ring.pass_on(keys, turn + 1)
        source = ring.source(number)
        return absorb(total, keys, source, _pairs(source, own)), arriving

    total, arriving = ring.between(hop, total, arriving)
    source = ring.source(ring.places - 1)
    return absorb(total, arriving, source, _pairs(source, own))


def _ring_backward(mine: _Queries, keys: _Keys, result: Result) -> Grads:
    """Keys travel round once more, and with them, in float32, the gradients that each place adds to."""
    ring, own = mine.ring, mine.ring.own()

    def absorb(dq: jax.Array, keys: _Keys, source: jax.Array, pairs: list[tuple[_Half, _Half]]) -> Grads:
        """The gradients of these keys alone, and of the queries so far."""
        grads = Grads.zeros(mine.q, keys.k, keys.v)._replace(q=dq)
        for queries, theirs in pairs:
            grads = mine.backward(grads, queries, theirs, keys, source, result)
        return grads

    arriving = ring.pass_on(keys, 1)
    grads = absorb(jnp.zeros(mine.q.shape, jnp.float32), keys, own, _own_pairs())

    def follow(grads: Grads, keys: _Keys, source: jax.Array, hop: int) -> Grads:
        """One hop: the gradients follow the keys that they belong to while this place's part of them is computed."""
        dk, dv = ring.pass_on((grads.k, grads.v), hop)
        grads = absorb(grads.q, keys, source, _pairs(source, own))
        return Grads(grads.q, dk + grads.k, dv + grads.v)

    def hop(grads: Grads, keys: _Keys, number: jax.Array, turn: int) -> tuple[Grads, _Keys]:
        arriving = ring.pass_on(keys, turn + 1)
        return follow(grads, keys, ring.source(number), turn), arriving

    grads, arriving = ring.between(hop, grads, arriving)
    grads = follow(grads, arriving, ring.source(ring.places - 1), ring.places - 1)
    return Grads(grads.q, *ring.pass_on((grads.k, grads.v), ring.places))  # and home


class _Queries(NamedTuple):
    """This place's queries [B, T, H, K], met by blocks of keys."""

    q: jax.Array
    segments: jax.Array | None
    window: jax.Array | None
    scores: Scores
    ring: Ring

    def place(self, place: jax.Array, segments: jax.Array | None) -> Place:
        """Where the two pieces of a place stand in the row."""
        length = self.q.shape[1] // 2
        pieces = jnp.stack([place, 2 * self.ring.places - 1 - place])
        return Place((pieces[:, None] * length + jnp.arange(length)).reshape(-1), segments)

    def forward(self, total: Partial, queries: _Half, theirs: _Half, keys: _Keys, source: jax.Array) -> Partial:
        """`total` with attention of a half of the queries over a half of the keys that place `source` sent."""
        at_q, at_k = self._places(keys, source)
        return tiles.forward(
            total, self.q, keys.k, keys.v, at_q, at_k, self.window, self.scores, queries.of(self.q), theirs.of(keys.k)
        )

    def backward(
        self, total: Grads, queries: _Half, theirs: _Half, keys: _Keys, source: jax.Array, result: Result
    ) -> Grads:
        """`total` with the gradients of that, given the result over all keys."""
        at_q, at_k = self._places(keys, source)
        return tiles.backward(
            total, self.q, keys.k, keys.v, result, at_q, at_k, self.window, self.scores, queries.of(self.q),
            theirs.of(keys.k),
        )  # fmt: skip

    def _places(self, keys: _Keys, source: jax.Array) -> tuple[Place, Place]:
        return self.place(self.ring.own(), self.segments), self.place(source, keys.segments)


def _own_pairs() -> list[tuple[_Half, _Half]]:
    return [(EARLY, EARLY), (LATE, EARLY), (LATE, LATE)]


def _pairs(source: jax.Array, own: jax.Array) -> list[tuple[_Half, _Half]]:
    other = _Half(jnp.where(source < own, 0, 1))  # early on early, or late on late
    return [(LATE, EARLY), (other, other)]
