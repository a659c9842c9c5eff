"""Does the compiled program keep the promise of the ZeRO level? Checked per leaf, in bytes per device.

A sharding that silently does nothing costs memory, not correctness, so no test of the loss ever finds it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxpar.build import Built
from jaxpar.sharding import Placement, shard_bytes
from jaxpar.state import TrainState
from jaxpar.tree import named_leaves


class ContractError(RuntimeError):
    """The compiled program does not hold an array as the layout promises: a bug, never the user's mistake."""


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """Promised and compiled bytes per device of one array."""

    kind: str  # "parameters", "optimizer" or "gradients"
    name: str
    promised: int
    compiled: int


def check_step(built: Built, compiled: jax.stages.Compiled) -> list[LeafBytes]:
    """Compare parameters and optimizer state of a compiled train step, in and out, with the promise.

    Returns the bytes per leaf; raises `ContractError` naming every leaf that differs.
    """
    promised = named_leaves(built.abstract_state)
    state_in = compiled.input_shardings[0][0]
    state_out = compiled.output_shardings[0]
    rows = [
        LeafBytes(_kind(name), name, _bytes(leaf, leaf.sharding), _bytes(leaf, found[name]))
        for found in (named_leaves(state_in), named_leaves(state_out))
        for name, leaf in promised.items()
    ]
    return _require(rows)


def check_gradients(built: Built) -> list[LeafBytes]:
    """Compile the gradient function alone, with free output shardings, and compare every gradient with the promise."""
    params, batch = built.abstract_state.params, built.abstract_batch

    def gradients(params: Any, batch: Any) -> Any:
        return built.grad_fn(params, batch, None, jax.numpy.float32(1.0))[1]

    compiled = jax.jit(gradients).lower(params, batch).compile()
    found = named_leaves(compiled.output_shardings)
    leaves = named_leaves(params)
    rows = [
        LeafBytes("gradients", p.path, shard_bytes(p.shape, leaves[name].dtype, p.gradient, built.mesh),
                  _bytes(leaves[name], found[name]))
        for name, p in named_placements(built).items()
    ]  # fmt: skip
    return _require(rows)


def named_placements(built: Built) -> dict[str, Placement]:
    """`Placement` of every parameter by its name."""
    names = named_leaves(built.abstract_state.params)
    placements = jax.tree.leaves(built.placements, is_leaf=lambda node: isinstance(node, Placement))
    return dict(zip(names, placements, strict=True))


def optimizer_bytes(built: Built) -> dict[str, int]:
    """Promised bytes per device of the optimizer leaves that belong to each parameter."""
    state = named_leaves(built.abstract_state.opt_state)
    totals = dict.fromkeys(named_placements(built), 0)
    for name, leaf in state.items():
        owner = next((parameter for parameter in totals if name.endswith("/" + parameter)), None)
        if owner is not None:
            totals[owner] += _bytes(leaf, leaf.sharding)
    return totals


def class_bytes(state: TrainState) -> dict[str, int]:
    """Promised bytes per device of the whole state, by class; `state` is abstract, with shardings."""
    totals = {"parameters": 0, "optimizer": 0, "other": 0}
    for name, leaf in named_leaves(state).items():
        totals[_kind(name)] += _bytes(leaf, leaf.sharding)
    return totals


def _kind(name: str) -> str:
    return {"params": "parameters", "opt_state": "optimizer"}.get(name.split("/")[0], "other")


def _bytes(leaf: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(tuple(leaf.shape))) * jax.numpy.dtype(leaf.dtype).itemsize


def _require(rows: list[LeafBytes]) -> list[LeafBytes]:
    broken = list(_broken(rows))
    if broken:
        raise ContractError("the compiled program breaks the sharding contract:\n  " + "\n  ".join(broken))
    return rows


def _broken(rows: list[LeafBytes]) -> Iterator[str]:
    for row in rows:
        if row.promised != row.compiled:
            yield f"{row.kind} {row.name}: {row.compiled} bytes per device, promised {row.promised}"
