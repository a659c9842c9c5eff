"""Experts on several devices: a layer's tokens stay where they are, its experts are split, buffers travel.

Dims: B batch, T sequence, D embed, k choices of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.manual import entry_axes, split_by_hand

EXPERT, TENSOR = "expert", "tensor"


def run_experts(
    kernel: Callable[..., jax.Array], x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Any, *,
    mesh: Mesh, x_spec: P, y_spec: P, experts_specs: Any,
) -> jax.Array:  # fmt: skip
    """`kernel(x, chosen, weights, experts, (axis, size))` on every device; x [B, T, D], chosen and weights [B, T, k].

    Its outputs are partial sums over the tensor shards of the experts' hidden features; they are added up, and where
    `y_spec` splits the sequence over `tensor` too, each shard gets its part alone.
    """
    scattered = TENSOR in entry_axes(y_spec[1])

    def body(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Any) -> jax.Array:
        y = kernel(x, chosen, weights, experts, (EXPERT, mesh.shape[EXPERT]))
        if mesh.shape[TENSOR] == 1:
            return y
        if scattered:
            return jax.lax.psum_scatter(y, TENSOR, scatter_dimension=1, tiled=True)
        return _sum_of_parts(y, mesh.shape[TENSOR])

    choices = P(*x_spec[:2], None)
    mapped = split_by_hand(body, mesh, in_specs=(x_spec, choices, choices, experts_specs), out_specs=y_spec)
    return mapped(x, chosen, weights, experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_of_parts(y: jax.Array, shards: int) -> jax.Array:
    """Sum over the tensor shards. Every shard then has the whole cotangent, which needs no second sum.

    The transpose of `shard_map` hands out a cotangent divided by the number of shards that hold the same output.
    """
    del shards
    return jax.lax.psum(y, TENSOR)


_sum_of_parts.defvjp(
    lambda y, shards: (_sum_of_parts(y, shards), None), lambda shards, _, cotangent: (cotangent * shards,)
)
