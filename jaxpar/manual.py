"""Splitting by hand: a `shard_map` over every mesh axis that no surrounding one has taken already, and sums in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def split_by_hand(function: Callable[..., Any], mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` of one device's shards, mapped over the mesh; usable inside another `shard_map` of that mesh."""
    surrounding = jax.sharding.get_abstract_mesh()
    taken = () if surrounding.empty else surrounding.manual_axes
    return jax.shard_map(
        function,
        mesh=mesh if surrounding.empty else surrounding,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(taken),
        check_vma=False,  # the types of what varies would have to agree with a surrounding map that does not check
    )


def sum_over(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """The sum of `x` over manual mesh axes, in the dtype of `x`.

    XLA:CPU ends the process on a 16-bit sum whose adding function carries an annotation, as it does where other axes
    are automatic; there the sum is made in float32. Remove when `lax.psum` of a bfloat16 compiles under such a map.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return jax.lax.psum(x, axes)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype),
        default=lambda x: jax.lax.psum(x, axes),
    )


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a `PartitionSpec` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
