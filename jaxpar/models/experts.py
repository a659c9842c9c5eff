"""Feed-forward experts over tokens that each go to a few of them, with static shapes and without dropping any.

Every expert gets a buffer with room for an eighth more than an even share of the tokens, so that the experts are one
batched matmul (a grouped matmul becomes a dense one over all experts on GPUs). What does not fit waits for further,
smaller rounds of a loop that usually runs a few times or not at all. With experts on several devices, every round
sends its buffers by one all-to-all and gets them back by another; rounds follow one another through their data, since
XLA:CPU may run a loop beside what does not depend on it, and exchanges of both would meet in one rendezvous.
Dims: N tokens, k choices of a token, E experts, C buffer size, D embed, F expert hidden.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.models.layers import Activation

HEADROOM = 9 / 8  # of the first buffer over an even share
LATER = 1 / 16  # of the first buffer: the size of the buffers of later rounds
MULTIPLE = 8  # buffer sizes are multiples of this, for the matmul units


class Experts(NamedTuple):
    """Weights in the compute dtype: gate (or None) and up [E, D, F], down [E, F, D]; biases [E, F] or None.

    A bias on the output is no business of this file: a token's is a weighted sum of a few rows (see `moe`).
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None


class Across(NamedTuple):
    """The devices that share the experts: the name of their mesh axis and how many they are; hashable."""

    axis: str | None = None
    size: int = 1

    def send(self, slots: jax.Array) -> jax.Array:
        """Buffers for all experts [E, C, D] -> buffers from all devices for the experts here [E / size, size C, D]."""
        if self.axis is None or self.size == 1:
            return slots
        return jax.lax.all_to_all(slots, self.axis, 0, 1, tiled=True)

    def fetch(self, slots: jax.Array) -> jax.Array:
        """The inverse of `send`."""
        if self.axis is None or self.size == 1:
            return slots
        return jax.lax.all_to_all(slots, self.axis, 1, 0, tiled=True)

    def largest(self, value: jax.Array) -> jax.Array:
        """The largest value on any of the devices."""
        return value if self.axis is None or self.size == 1 else jax.lax.pmax(value, self.axis)


LOCAL = Across()


class Claims(NamedTuple):
    """Who goes where: the i-th token of an expert is `tokens[starts[e] + i]`, its choice `choices[starts[e] + i]`.

    tokens, choices int32 [N k], sorted by expert; starts, counts int32 [E]; expert and rank within the expert of every
    choice int32 [N, k] (expert E: nowhere).
    """

    tokens: jax.Array
    choices: jax.Array
    starts: jax.Array
    counts: jax.Array
    expert: jax.Array
    rank: jax.Array


def sort_claims(chosen: jax.Array, num_experts: int) -> Claims:
    """Claims of chosen int32 [N, k]; `num_experts` in it means nowhere. One expert is never chosen twice by a token."""
    num_tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts)[None, :], 0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    place = jnp.argsort(order).astype(jnp.int32)  # of every choice among the sorted ones
    rank = place - jnp.append(starts, 0)[flat]
    return Claims(order // k, order % k, starts, counts, chosen, rank.reshape(num_tokens, k))


def buffer_size(num_tokens: int, k: int, num_experts: int) -> int:
    """Room of one expert in the first round, in tokens of one device."""
    even = num_tokens * k / num_experts
    return min(num_tokens, math.ceil(even * HEADROOM / MULTIPLE) * MULTIPLE)


def feed(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, num_experts: int, activation: Activation,
    across: Across = LOCAL,
) -> jax.Array:  # fmt: skip
    """Sum over the choices of weight x expert output; x [N, D], chosen int32 and weights float32 [N, k] -> [N, D].

    `experts` are those of this device. Exact for any distribution of the tokens: nothing is dropped.
    """
    claims = sort_claims(chosen, num_experts)
    size = buffer_size(chosen.shape[0], chosen.shape[1], num_experts)
    y = _round(x, weights, experts, claims, jnp.int32(0), size, activation, across)
    if size < x.shape[0]:
        later = math.ceil(size * LATER / MULTIPLE) * MULTIPLE
        with_more: Any = _later_rounds(x, weights, experts, y, claims, size, later, activation, across)
        return with_more
    return y


def _round(
    x: jax.Array, weights: jax.Array, experts: Experts, claims: Claims, first: jax.Array, size: int,
    activation: Activation, across: Across,
) -> jax.Array:  # fmt: skip
    """What the tokens with ranks first .. first + size - 1 get from their experts; zeros for all others."""
    slots = across.send(_spread(x, claims, first, size))
    up = _project(slots, experts.up, experts.up_bias)
    gate = None if experts.gate is None else _project(slots, experts.gate, experts.gate_bias)
    slots = across.fetch(jnp.einsum("ECF,EFD->ECD", activation(gate, up), experts.down))
    y = jnp.zeros(x.shape, jnp.float32)
    for choice in range(weights.shape[1]):
        y = y + weights[:, choice, None] * _pick(slots, claims, first, choice)
    return y.astype(x.dtype)


def _project(slots: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Buffers [E, C, D] -> hidden features [E, C, F]. Empty places get the bias too, and nobody picks it up."""
    hidden = jnp.einsum("ECD,EDF->ECF", slots, weight)
    return hidden if bias is None else hidden + bias[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _later_rounds(
    x: jax.Array, weights: jax.Array, experts: Experts, y: jax.Array, claims: Claims, first: int, size: int,
    activation: Activation, across: Across,
) -> jax.Array:  # fmt: skip
    """`y` and all rounds from rank `first` on: as many as the fullest expert needs on any device that exchanges."""
    last = across.largest(claims.counts.max())

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rank, y = carry
        return rank + size, y + _round(x, weights, experts, claims, rank, size, activation, across)

    return jax.lax.while_loop(lambda carry: carry[0] < last, body, (jnp.int32(first), y))[1]


def _later_forward(
    x: jax.Array, weights: jax.Array, experts: Experts, y: jax.Array, claims: Claims, first: int, size: int,
    activation: Activation, across: Across,
) -> tuple[jax.Array, tuple]:  # fmt: skip
    y = _later_rounds(x, weights, experts, y, claims, first, size, activation, across)
    return y, (x, weights, experts, claims)


def _later_backward(
    first: int, size: int, activation: Activation, across: Across, saved: tuple, cotangent: jax.Array
) -> tuple:
    """A loop of unknown length has no automatic gradient: every round is computed again and differentiated."""
    x, weights, experts, claims = saved
    last = across.largest(claims.counts.max())

    def body(carry: tuple[jax.Array, tuple]) -> tuple[jax.Array, tuple]:
        rank, total = carry
        run = lambda x, weights, experts: _round(  # noqa: E731
            x, weights, experts, claims, rank, size, activation, across
        )
        grads = jax.vjp(run, x, weights, experts)[1](cotangent)
        return rank + size, jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, grads)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, weights, experts))
    total = jax.lax.while_loop(lambda carry: carry[0] < last, body, (jnp.int32(first), zeros))[1]
    dx, dweights, dexperts = jax.tree.map(lambda a, b: a.astype(b.dtype), total, (x, weights, experts))
    # No count is negative, but only data keeps the first round's backward pass waiting for this loop.
    return dx, dweights, dexperts, jnp.where(last < 0, dx, cotangent), None


_later_rounds.defvjp(_later_forward, _later_backward)


def _spread(x: jax.Array, claims: Claims, first: jax.Array, size: int) -> jax.Array:
    """Tokens [N, D] -> buffers [E, C, D]; places without a token are zero."""
    return _spread_rows(x, claims, first, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread_rows(x: jax.Array, claims: Claims, first: jax.Array, size: int) -> jax.Array:
    index, filled = _slots(claims, first, size)
    return jnp.where(filled[..., None], x[claims.tokens[index]], 0)


def _spread_backward(size: int, saved: tuple[Claims, jax.Array], cotangent: jax.Array) -> tuple:
    claims, first = saved  # a gather again, where the automatic transpose would be a scatter
    parts = [_picked(cotangent, claims, first, choice).astype(jnp.float32) for choice in range(claims.rank.shape[1])]
    del size
    return sum(parts).astype(cotangent.dtype), None, None  # pyright: ignore[reportAttributeAccessIssue]


_spread_rows.defvjp(
    lambda x, claims, first, size: (_spread_rows(x, claims, first, size), (claims, first)), _spread_backward
)


def _pick(slots: jax.Array, claims: Claims, first: jax.Array, choice: int) -> jax.Array:
    """Buffers [E, C, D] -> what each token got from one of its choices [N, D]; zero if that is not of this round."""
    return _pick_rows(slots, claims, first, choice)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pick_rows(slots: jax.Array, claims: Claims, first: jax.Array, choice: int) -> jax.Array:
    return _picked(slots, claims, first, choice)


def _pick_backward(choice: int, saved: tuple[Claims, jax.Array, tuple[int, ...]], cotangent: jax.Array) -> tuple:
    claims, first, shape = saved
    index, filled = _slots(claims, first, shape[1])
    mine = filled & (claims.choices[index] == choice)
    return jnp.where(mine[..., None], cotangent[claims.tokens[index]], 0), None, None


_pick_rows.defvjp(
    lambda slots, claims, first, choice: (_picked(slots, claims, first, choice), (claims, first, slots.shape)),
    _pick_backward,
)


def _picked(slots: jax.Array, claims: Claims, first: jax.Array, choice: int) -> jax.Array:
    num_experts, size = slots.shape[:2]
    expert, place = claims.expert[:, choice], claims.rank[:, choice] - first
    here = (expert < num_experts) & (place >= 0) & (place < size)
    row = jnp.where(here, expert * size + place, 0)
    return jnp.where(here[:, None], slots.reshape(num_experts * size, -1)[row], 0)


def _slots(claims: Claims, first: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Index among the sorted choices of every place in the buffers, and whether it is filled; [E, C]."""
    rank = first + jnp.arange(size)[None, :]
    index = claims.starts[:, None] + rank
    return jnp.minimum(index, claims.tokens.shape[0] - 1), rank < claims.counts[:, None]
