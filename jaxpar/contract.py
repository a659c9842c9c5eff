"""Does the compiled program keep the promise of the ZeRO level? Checked per leaf, in bytes per device.

A sharding that silently does nothing costs memory, not correctness, so no test of the loss ever finds it. The promise
is worked out here from the level in the config and the two mappings of each parameter, not read from the shardings
that the program was compiled with: those may be what is wrong.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.build import Built
from jaxpar.manual import entry_axes
from jaxpar.names import is_matrix
from jaxpar.sharding import Placement, shard_bytes
from jaxpar.state import TrainState
from jaxpar.tree import named_leaves

# The program is only looked at. Where the arrays lie is decided long before the code is made fast.
_COARSE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_gpu_autotune_level": 0}


class ContractError(RuntimeError):
    """The compiled program does not hold an array as the layout promises: a bug, never the user's mistake."""


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """Promised and compiled bytes per device of one array."""

    kind: str  # "parameters", "optimizer" or "gradients"
    name: str
    promised: int
    compiled: int


def compile_step(built: Built, *base: Any) -> jax.stages.Compiled:
    """The compiled train step, once its state and, from ZeRO-2 on, its gradients are seen to lie as promised.

    In the step the gradients are temporaries without a name, so they are looked at in a program of their own, which is
    compiled at the same time. Below level 2 they lie as the weights do in the computation, and there is nothing to see.
    """
    lowered = built.step.lower(built.abstract_state, built.abstract_batch, *base)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as beside:
        splits = built.config.parallel.zero >= 2 and any(built.mesh.shape[axis] > 1 for axis in built.layout.zero_axes)
        gradients = beside.submit(check_gradients, built, *base) if splits else None
        compiled = lowered.compile()
        if gradients is not None:
            gradients.result()
    check_step(built, compiled)
    return compiled


def check_step(built: Built, compiled: jax.stages.Compiled) -> list[LeafBytes]:
    """Compare parameters and optimizer state of a compiled train step, in and out, with the promise.

    Returns the bytes per leaf; raises `ContractError` naming every leaf that differs.
    """
    leaves = named_leaves(built.abstract_state)
    promised = {name: _promise(built, name, leaf) for name, leaf in leaves.items()}
    state_in = compiled.input_shardings[0][0]
    state_out = compiled.output_shardings[0]
    rows = [
        LeafBytes(_kind(name), name, promised[name], _bytes(leaf, found[name]))
        for found in (named_leaves(state_in), named_leaves(state_out))
        for name, leaf in leaves.items()
    ]
    return _require(rows)


def check_gradients(built: Built, *base: Any) -> list[LeafBytes]:
    """Compile the gradient function alone, with free output shardings, and compare every gradient with the promise.

    `base`: the frozen weights, abstract, of a run that trains an adapter.
    """
    params = built.abstract_state.params
    lowered = built.gradients.lower(params, built.abstract_batch, *base)
    found = named_leaves(lowered.compile(_COARSE).output_shardings)
    leaves = named_leaves(params)
    rows = [
        LeafBytes("gradients", p.path, _held(built, p, leaves[name], from_level=2), _bytes(leaves[name], found[name]))
        for name, p in named_placements(built).items()
    ]
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


def _promise(built: Built, name: str, leaf: Any) -> int:
    """Bytes per device of a leaf of the state: parameters are split from level 3 on, their moments from level 1 on."""
    kind, placements = _kind(name), named_placements(built)
    if kind == "parameters":
        return _held(built, placements[name.partition("/")[2]], leaf, from_level=3)
    owner = max((path for path in placements if name.endswith(f"/{path}")), key=len, default=None)
    if kind == "other" or owner is None or leaf.shape in ((), (1,)):  # counters; what Adafactor leaves out is (1,)
        return _whole_bytes(leaf)
    placed = placements[owner]
    if leaf.shape == placed.shape:
        return _held(built, placed, leaf, from_level=1)
    # A factored moment has one dim summed away and lies like the others; of equal dims the first counts as summed.
    spec = placed.zero if built.config.parallel.zero >= 1 else placed.compute
    left = next(kept for kept in _without_one(len(placed.shape)) if leaf.shape == tuple(placed.shape[i] for i in kept))
    return shard_bytes(leaf.shape, leaf.dtype, P(*(spec[i] for i in left)), built.mesh)


def _held(built: Built, placed: Placement, leaf: Any, *, from_level: int) -> int:
    """Bytes per device of a leaf of a parameter's shape that is split further from a ZeRO level on."""
    compute = shard_bytes(leaf.shape, leaf.dtype, placed.compute, built.mesh)
    if built.config.parallel.zero < from_level:
        return compute
    if not is_matrix(placed.axes):  # a vector may be too short to split, which the sharding report says
        return shard_bytes(leaf.shape, leaf.dtype, placed.zero, built.mesh)
    used = {axis for group in placed.compute for axis in entry_axes(group)}
    return compute // math.prod(built.mesh.shape[axis] for axis in built.layout.zero_axes if axis not in used)


def _without_one(num_dims: int) -> Iterator[list[int]]:
    return ([i for i in range(num_dims) if i != dropped] for dropped in range(num_dims))


def _whole_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize


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
