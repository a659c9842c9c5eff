"""Splitting by hand: a `shard_map` over every mesh axis that no surrounding one has taken already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
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
