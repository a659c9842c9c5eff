"""Attention over a row that several devices hold: from the sharded arrays to a kernel on every device, and back.

Dims: B batch, T sequence, H query heads, G KV heads, K head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.context import ring
from jaxpar.context.rotation import PairedRing, Ring
from jaxpar.context.tiles import Place, Scores, tile_length
from jaxpar.context_plan import ContextPlan, stream_order
from jaxpar.manual import split_by_hand

AXIS = "context"
# (q, k, v, segments, window, sinks) of whole rows in order -> attention
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None], jax.Array]


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | int | None,
    sinks: jax.Array | None = None, *, scores: Scores, plan: ContextPlan, mesh: Mesh, q_spec: P, kv_spec: P,
    kernel: Kernel | None = None,
) -> jax.Array:  # fmt: skip
    """Causal attention of q [B, T, H, K] over k, v [B, T, G, K], all in the plan's stream order; sinks [H].

    Every mesh axis that is not split by hand already is split by hand here, as the specs say. `kernel`, where given,
    replaces our own wherever a device has whole rows in order (cuDNN under all_to_all).
    """
    window = None if window is None else jnp.asarray(window, jnp.int32)

    def body(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        if plan.mode == "all_gather":
            return _gathering(q, k, v, segments, window, sinks, scores, plan)
        return _swapping(q, k, v, segments, window, sinks, scores, plan, kernel)

    mapped = split_by_hand(
        body,
        mesh,
        in_specs=(
            q_spec,
            kv_spec,
            kv_spec,
            None if segments is None else P(*q_spec[:2]),
            None if window is None else P(),
            None if sinks is None else P(q_spec[2]),
        ),
        out_specs=q_spec,
    )
    return mapped(q, k, v, segments, window, sinks)


def _gathering(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores, plan: ContextPlan,
) -> jax.Array:  # fmt: skip
    """Every device fetches all keys and values."""
    length = q.shape[1]
    order = jnp.asarray(stream_order(length * plan.size, plan.size))
    own = jax.lax.dynamic_slice_in_dim(order, jax.lax.axis_index(AXIS) * length, length)
    gather = lambda a: jax.lax.all_gather(a, AXIS, axis=1, tiled=True)  # noqa: E731
    all_segments = None if segments is None else gather(segments)
    # A tile never spans the two pieces of a place, so that what causality hides can be skipped.
    scores = scores._replace(tile=tile_length(length // 2, scores.tile))
    return ring.whole(q, gather(k), gather(v), Place(own, segments), Place(order, all_segments), window, sinks, scores)


def _swapping(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: jax.Array | None,
    sinks: jax.Array | None, scores: Scores, plan: ContextPlan, kernel: Kernel | None,
) -> jax.Array:  # fmt: skip
    """Groups swap sequence for heads, then each device has some heads of the group's tokens; groups form a ring."""
    groups = plan.groups
    repeat = groups // math.gcd(groups, k.shape[2])  # fewer KV heads than devices: each goes to all that need it
    k, v = (jnp.repeat(a, repeat, axis=2) if repeat > 1 else a for a in (k, v))
    q, k, v = (_swap(a, plan, split=2, join=1) for a in (q, k, v))
    if segments is not None:
        segments = _group_gather(segments, plan)
    if sinks is not None:
        heads = q.shape[2]
        sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index(AXIS) % groups * heads, heads)
    if plan.ring > 1:
        rotation = PairedRing if plan.in_branches else Ring
        out = ring.on_ring(q, k, v, segments, window, sinks, scores, rotation(AXIS, plan.ring, groups))
    elif kernel is not None:
        out = kernel(q, k, v, segments, window, sinks)
    else:
        place = Place(jnp.arange(q.shape[1]), segments)
        out = ring.whole(q, k, v, place, place, window, sinks, scores)
    return _swap_back(out, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _swap_back(out: jax.Array, plan: ContextPlan) -> jax.Array:
    """Heads for sequence again. Backward, the cotangent waits for `out`.

    A rematerialised layer has the cotangent first. Swapped at once, it would lie beside all that attention needs.
    """
    return _swap(out, plan, split=1, join=2)


def _swap_back_forward(out: jax.Array, plan: ContextPlan) -> tuple[jax.Array, jax.Array]:
    return _swap_back(out, plan), out


def _swap_back_backward(plan: ContextPlan, out: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_swap(jax.lax.optimization_barrier((cotangent, out))[0], plan, split=2, join=1),)


_swap_back.defvjp(_swap_back_forward, _swap_back_backward)


def _swap(a: jax.Array, plan: ContextPlan, *, split: int, join: int) -> jax.Array:
    if plan.groups == 1:
        return a
    return jax.lax.all_to_all(a, AXIS, split, join, axis_index_groups=_index_groups(plan), tiled=True)


def _group_gather(a: jax.Array, plan: ContextPlan) -> jax.Array:
    if plan.groups == 1:
        return a
    return jax.lax.all_gather(a, AXIS, axis=1, axis_index_groups=_index_groups(plan), tiled=True)


def _index_groups(plan: ContextPlan) -> list[list[int]] | None:
    """Neighbours on the axis form a group; None: all of them."""
    if plan.ring == 1:
        return None
    return [[place * plan.groups + i for i in range(plan.groups)] for place in range(plan.ring)]
