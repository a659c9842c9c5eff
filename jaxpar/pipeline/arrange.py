"""Natural `[layer, ...]` leaves <-> the `[stage, chunk, layer, ...]` leaves that a pipelined run keeps.

Checkpoints and one-device runs have the natural order; a pipelined state has one slot per layer of every chunk, with
zeros in slots that pad a shorter chunk. Leaves are recognised by their logical axes, so whole train states can be
turned: parameters, gradients and optimizer moments alike. Each axis that counts layers has an assignment of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.pipeline.assign import Assignment

Tree = TypeVar("Tree")
PLACE = ("stage", "chunk")  # what stands before the axis that counts layers in an arranged leaf


def to_stages(tree: Tree, assignments: Mapping[str, Assignment]) -> Tree:
    """`tree` with every natural stack in slots, by the name of its leading axis; other leaves stay as they are."""
    for axis, assignment in assignments.items():
        sizes = (assignment.num_layers,)
        tree = _turn_stacks(tree, (axis,), sizes, (*PLACE, axis), functools.partial(_to_slots, assignment=assignment))
    return tree


def from_stages(tree: Tree, assignments: Mapping[str, Assignment]) -> Tree:
    """The inverse of `to_stages`; what padding slots hold is dropped."""
    for axis, assignment in assignments.items():
        sizes = assignment.layers().shape
        tree = _turn_stacks(tree, (*PLACE, axis), sizes, (axis,), functools.partial(_from_slots, assignment=assignment))
    return tree


def _to_slots(leaf: jax.Array, assignment: Assignment) -> jax.Array:
    if assignment.is_even:  # a reshape, which moves nothing between devices when there is one chunk
        parts = leaf.reshape(assignment.chunks, assignment.stages, assignment.slots, *leaf.shape[1:])
        return parts.swapaxes(0, 1)
    slots = assignment.layers()
    taken = leaf[jnp.maximum(slots, 0)]
    live = (slots >= 0).reshape(slots.shape + (1,) * (leaf.ndim - 1))
    return jnp.where(live, taken, jnp.zeros_like(taken))


def _from_slots(leaf: jax.Array, assignment: Assignment) -> jax.Array:
    if assignment.is_even:
        return leaf.swapaxes(0, 1).reshape(assignment.num_layers, *leaf.shape[3:])
    return leaf.reshape(-1, *leaf.shape[3:])[assignment.positions()]


def _turn_stacks(
    tree: Any,
    old: tuple[str, ...],
    sizes: tuple[int, ...],
    new: tuple[str, ...],
    turn: Callable[[jax.Array], jax.Array],
) -> Any:
    """Apply `turn` to arrays whose leading axes are `old`, and rename these axes to `new`."""

    def visit(node: Any) -> Any:
        if not isinstance(node, nnx.Variable) or tuple(getattr(node, "axes", ())[: len(old)]) != old:
            return node
        value = node[...]
        if tuple(value.shape[: len(old)]) == sizes:  # not so for the placeholders of factored moments
            value = turn(value)
        return node.replace(value, axes=new + tuple(node.axes[len(old) :]))

    return jax.tree.map(visit, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
