"""The two kernels that run on every device inside the `shard_map` of `exchange`: whole keys, and keys on a ring.

Both are causal, keep no score matrix for the backward pass (it is computed again, tile by tile) and sum in float32.

On a ring of r places in zig-zag order, place i has an early piece of the row (number i of 2r) and a late one
(2r - 1 - i). Keys that came from place j < i are seen by both of its query pieces, but only their early half; those
of j > i by its late queries alone, both halves. So every hop costs each place the same two blocks, late queries on
early keys and one other, and the first step costs three: nobody waits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.context import tiles
from jaxpar.context.tiles import Grads, Partial, Place, Scores


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
    part = tiles.with_sinks(tiles.forward(q, k, v, at_q, at_k, window, scores), sinks)
    out = part.out.astype(q.dtype)
    return out, (q, k, v, out, part.log_sum, at_q, at_k, window, sinks)


def _whole_backward(scores: Scores, saved: tuple, cotangent: jax.Array) -> tuple:
    q, k, v, out, log_sum, at_q, at_k, window, sinks = saved
    result = Partial(out.astype(jnp.float32), log_sum)
    grads = tiles.backward(q, k, v, result, cotangent, at_q, at_k, window, scores)
    d_sinks = tiles.sink_gradient(result, cotangent, sinks)
    return grads.q.astype(q.dtype), grads.k.astype(k.dtype), grads.v.astype(v.dtype), None, None, None, d_sinks


_whole.defvjp(_whole_forward, _whole_backward)


class Ring(NamedTuple):
    """`places` on the mesh axis `axis`; neighbours on the ring are `stride` apart on the axis."""

    axis: str
    places: int
    stride: int

    def pass_on(self, tree):  # noqa: ANN001, ANN201 (any pytree)
        """Every place gives its arrays to the next."""
        size = self.places * self.stride
        pairs = [(device, (device + self.stride) % size) for device in range(size)]
        return jax.tree.map(lambda a: jax.lax.ppermute(a, self.axis, pairs), tree)

    def own(self) -> jax.Array:
        """This device's place."""
        return jax.lax.axis_index(self.axis) // self.stride


class _Half(NamedTuple):
    """Which of two pieces, static or traced."""

    number: int | jax.Array

    def of(self, a: jax.Array) -> jax.Array:
        """That half of [2, ...]."""
        return jax.lax.dynamic_index_in_dim(a, self.number, 0, keepdims=False)

    def add(self, total: jax.Array, value: jax.Array) -> jax.Array:
        """`total` [2, ...] with `value` added to that half."""
        return self.put(total, self.of(total) + value)

    def put(self, total: jax.Array, value: jax.Array) -> jax.Array:
        """`total` [2, ...] with that half replaced."""
        return jax.lax.dynamic_update_index_in_dim(total, value, self.number, 0)


EARLY, LATE = _Half(0), _Half(1)


class _Keys(NamedTuple):
    """What travels: keys and values [2, B, t, G, K], documents int32 [2, B, t] or None."""

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
    own, blocks = ring.own(), _Blocks(_halves(q), _maybe(segments), window, scores, ring)
    keys = _Keys(_halves(k), _halves(v), _maybe(segments))
    total = Partial(jnp.zeros(blocks.q.shape, jnp.float32), jnp.full(blocks.q.shape[:-1], tiles.NEVER, jnp.float32))

    def absorb(total: Partial, keys: _Keys, source: jax.Array, pairs: list[tuple[_Half, _Half]]) -> Partial:
        for mine, theirs in pairs:
            part = blocks.forward(mine, theirs, keys, source)
            joined = tiles.merge(Partial(mine.of(total.out), mine.of(total.log_sum)), part)
            total = Partial(mine.put(total.out, joined.out), mine.put(total.log_sum, joined.log_sum))
        return total

    arriving = ring.pass_on(keys)  # asked for before the work that it overlaps with
    total = absorb(total, keys, own, _own_pairs())

    def hop(carry: tuple[Partial, _Keys], step: jax.Array) -> tuple[tuple[Partial, _Keys], None]:
        total, keys = carry
        arriving = ring.pass_on(keys)
        source = (own - step) % ring.places
        return (absorb(total, keys, source, _pairs(source, own)), arriving), None

    (total, arriving), _ = jax.lax.scan(hop, (total, arriving), jnp.arange(1, ring.places - 1))
    source = (own - ring.places + 1) % ring.places
    total = tiles.with_sinks(absorb(total, arriving, source, _pairs(source, own)), sinks)
    out = _rejoin(total.out).astype(q.dtype)
    return out, (q, k, v, segments, window, sinks, out, total.log_sum)


def _on_ring_backward(scores: Scores, ring: Ring, saved: tuple, cotangent: jax.Array) -> tuple:
    """Keys travel round once more, and with them, in float32, the gradients that each place adds to."""
    q, k, v, segments, window, sinks, out, log_sum = saved
    own, blocks = ring.own(), _Blocks(_halves(q), _maybe(segments), window, scores, ring)
    keys = _Keys(_halves(k), _halves(v), _maybe(segments))
    result = Partial(_halves(out), log_sum)
    cotangent = _halves(cotangent)
    zero = lambda a: jnp.zeros(a.shape, jnp.float32)  # noqa: E731
    grads = Grads(zero(blocks.q), zero(keys.k), zero(keys.v))

    def absorb(grads: Grads, keys: _Keys, source: jax.Array, pairs: list[tuple[_Half, _Half]]) -> Grads:
        for mine, theirs in pairs:
            more = blocks.backward(mine, theirs, keys, source, result, cotangent)
            grads = Grads(mine.add(grads.q, more.q), theirs.add(grads.k, more.k), theirs.add(grads.v, more.v))
        return grads

    arriving = ring.pass_on(keys)
    grads = absorb(grads, keys, own, _own_pairs())

    def hop(carry: tuple[Grads, _Keys], step: jax.Array) -> tuple[tuple[Grads, _Keys], None]:
        grads, keys = carry
        arriving = ring.pass_on(keys)
        dk, dv = ring.pass_on((grads.k, grads.v))  # they follow the keys that they belong to
        source = (own - step) % ring.places
        return (absorb(Grads(grads.q, dk, dv), keys, source, _pairs(source, own)), arriving), None

    (grads, arriving), _ = jax.lax.scan(hop, (grads, arriving), jnp.arange(1, ring.places - 1))
    source = (own - ring.places + 1) % ring.places
    dk, dv = ring.pass_on((grads.k, grads.v))
    grads = absorb(Grads(grads.q, dk, dv), arriving, source, _pairs(source, own))
    dk, dv = ring.pass_on((grads.k, grads.v))  # and home
    dq, dk, dv = (_rejoin(a).astype(like.dtype) for a, like in ((grads.q, q), (dk, k), (dv, v)))
    return dq, dk, dv, None, None, tiles.sink_gradient(result, cotangent, sinks)


_on_ring.defvjp(_on_ring_forward, _on_ring_backward)


class _Blocks(NamedTuple):
    """This place's queries [2, B, t, H, K], met by blocks of keys."""

    q: jax.Array
    segments: jax.Array | None
    window: jax.Array | None
    scores: Scores
    ring: Ring

    def place(self, half: _Half, place: jax.Array, segments: jax.Array | None) -> Place:
        """Where a half of a place's tokens stands in the row."""
        length = self.q.shape[2]
        piece = jnp.where(jnp.asarray(half.number) == 0, place, 2 * self.ring.places - 1 - place)
        return Place(piece * length + jnp.arange(length), None if segments is None else half.of(segments))

    def forward(self, mine: _Half, theirs: _Half, keys: _Keys, source: jax.Array) -> Partial:
        """Attention of my half's queries over a half of the keys that place `source` sent."""
        at_q, at_k = self._places(mine, theirs, keys, source)
        return tiles.forward(
            mine.of(self.q), theirs.of(keys.k), theirs.of(keys.v), at_q, at_k, self.window, self.scores
        )

    def backward(
        self, mine: _Half, theirs: _Half, keys: _Keys, source: jax.Array, result: Partial, cotangent: jax.Array
    ) -> Grads:
        """Its gradients, given the result over all keys and the cotangent of that."""
        at_q, at_k = self._places(mine, theirs, keys, source)
        known = Partial(mine.of(result.out).astype(jnp.float32), mine.of(result.log_sum))
        return tiles.backward(
            mine.of(self.q), theirs.of(keys.k), theirs.of(keys.v), known, mine.of(cotangent), at_q, at_k,
            self.window, self.scores,
        )  # fmt: skip

    def _places(self, mine: _Half, theirs: _Half, keys: _Keys, source: jax.Array) -> tuple[Place, Place]:
        return self.place(mine, self.ring.own(), self.segments), self.place(theirs, source, keys.segments)


def _own_pairs() -> list[tuple[_Half, _Half]]:
    return [(EARLY, EARLY), (LATE, EARLY), (LATE, LATE)]


def _pairs(source: jax.Array, own: jax.Array) -> list[tuple[_Half, _Half]]:
    other = _Half(jnp.where(source < own, 0, 1))  # early on early, or late on late
    return [(LATE, EARLY), (other, other)]


def _halves(a: jax.Array) -> jax.Array:
    """[B, T, ...] -> [2, B, T / 2, ...]."""
    return jnp.moveaxis(a.reshape(a.shape[0], 2, a.shape[1] // 2, *a.shape[2:]), 1, 0)


def _maybe(segments: jax.Array | None) -> jax.Array | None:
    return None if segments is None else _halves(segments)


def _rejoin(a: jax.Array) -> jax.Array:
    """[2, B, T / 2, ...] -> [B, T, ...]."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])
