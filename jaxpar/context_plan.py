"""How attention crosses the `context` axis: the modes, the choice among them, and the order of tokens in the stream.

The axis of size c is read as `ring` x `groups`: `groups` neighbours swap sequence for heads (all-to-all), and `ring`
such groups pass keys and values round. all_to_all is ring = 1, ring is groups = 1, ring_all_to_all is both above 1.
In all_gather every device fetches all keys and values. In a pipeline a ring swaps blocks in pairs (`rotation`), which
sends as much but wants an even number of places.

A causal token sees only what came before, so a device with the last piece of the row would work most. Modes with a
ring (and all_gather) therefore hold the row in zig-zag order: cut into 2 x ring pieces, place i holds pieces i and
2 x ring - 1 - i. Tokens, targets, weights, positions and segment ids are reordered alike, once, so that everything
outside attention, which works position by position, never notices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from jaxpar.config import Config
from jaxpar.errors import UserError

if TYPE_CHECKING:
    import numpy as np

# FLOPs per byte above which a hop round the ring hides behind the block it overlaps with: bf16 FLOP/s of an H100
# over one 400 Gb/s link, with the kernel at half its peak.
HIDDEN_FLOPS_PER_BYTE = 1e4


@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """A mode for one axis size. `reason` says why it was chosen; `zigzag` how many places share a row (1: in order)."""

    mode: str
    size: int
    ring: int
    groups: int
    reason: str
    in_branches: bool = False  # attention runs in the stages of a pipeline, where a ring has to swap blocks in pairs

    @property
    def zigzag(self) -> int:
        """Places of the zig-zag order; 1 when the stream keeps the order of the row."""
        return self.size if self.mode == "all_gather" else self.ring

    def order(self, length: int) -> np.ndarray | None:
        """Index in the row of every position of the stream, int32 [T]; None when they are the same."""
        return None if self.zigzag == 1 else stream_order(length, self.zigzag)


def stream_order(length: int, places: int) -> np.ndarray:
    """Zig-zag order, int32 [length]: place i holds pieces i and 2 x places - 1 - i of the row."""
    import numpy as np  # not needed to check a config, which has to be quick

    pieces = np.arange(length, dtype=np.int32).reshape(2 * places, -1)
    pairs = [(i, 2 * places - 1 - i) for i in range(places)]
    return np.concatenate([pieces[piece] for pair in pairs for piece in pair])


def choose(config: Config, *, context: int, tensor: int, stage: int) -> ContextPlan | None:
    """The plan of `parallel.context_mode` for the mesh's axis sizes; None without context parallelism.

    Raises `UserError` for a mode that the head counts, the row length or a pipeline (a ring of odd size) rule out.
    """
    if context == 1:
        return None
    if config.seq_len % context:
        near = config.seq_len // context * context
        works = f"{near} or {near + context}" if near else f"{context}"
        raise UserError(f"seq_len = {config.seq_len} is not divisible by parallel.context = {context}; use {works}")
    facts = _Facts.of(config, context, tensor, stage)
    mode = config.parallel.context_mode
    if mode != "auto":
        if problem := facts.problem(mode):
            raise UserError(f'parallel.context_mode = "{mode}": {problem}')
        return facts.plan(mode, "as configured")
    return facts.best()


@dataclasses.dataclass(frozen=True)
class _Facts:
    size: int
    heads: int  # query heads of one tensor shard
    heads_per_kv: int
    length: int  # tokens of a row that one device holds
    stage: int

    @staticmethod
    def of(config: Config, context: int, tensor: int, stage: int) -> _Facts:
        model = config.model
        return _Facts(
            context, model.num_heads // tensor, model.num_heads // model.kv_heads, config.seq_len // context, stage
        )

    @property
    def groups(self) -> int:
        """The largest number of devices that can swap sequence for heads."""
        return math.gcd(self.size, self.heads)

    def problem(self, mode: str) -> str | None:
        """Why a mode cannot be used, and what would work; None when it can."""
        rings = mode in ("ring", "ring_all_to_all")
        if rings and self.stage > 1 and self.ring(mode) > 1 and self.ring(mode) % 2:
            return (
                f"in a pipeline (parallel.stage = {self.stage}) a ring swaps blocks in pairs, and {self.ring(mode)} "
                'places is an odd number; use "all_gather" or "auto"'
            )
        if mode == "all_to_all" and self.groups != self.size:
            return (
                f"{self.heads} query heads per tensor shard do not divide by parallel.context = {self.size}; "
                f'use parallel.context = {self.groups}, or "auto"'
            )
        if mode == "ring_all_to_all" and self.groups in (1, self.size):
            other = "ring" if self.groups == 1 else "all_to_all"
            return (
                f"with {self.heads} query heads per tensor shard and parallel.context = {self.size} there is nothing "
                f'to combine; use "{other}"'
            )
        if (rings or mode == "all_gather") and self.length % 2:
            length, unit = self.length * self.size, 2 * self.size
            works = f"{length // unit * unit} or {(length // unit + 1) * unit}" if length > unit else f"{unit}"
            return (
                f"seq_len = {length} is not divisible by parallel.context x 2 (a device has an early and a late piece "
                f"of the row) = {self.size} x 2 = {unit}; use {works}"
            )
        return None

    def plan(self, mode: str, reason: str) -> ContextPlan:
        ring = self.ring(mode)
        return ContextPlan(mode, self.size, ring, self.size // ring, reason, in_branches=self.stage > 1)

    def ring(self, mode: str) -> int:
        """Places of the ring that a mode reads the axis as."""
        return self.size // {"ring": 1, "all_gather": 1, "all_to_all": self.size}.get(mode, self.groups)

    def best(self) -> ContextPlan:
        """The ring when it hides behind the work, else as much all-to-all as the heads allow.

        In a pipeline the ring is not counted on to hide, as how exchanges overlap in branches has not been timed.
        """
        intensity = self.length * self.heads_per_kv / 2  # FLOPs per byte of a hop: causal block over bf16 keys, values
        if intensity > HIDDEN_FLOPS_PER_BYTE and self.stage == 1 and self.problem("ring") is None:
            reason = f"a hop hides behind its block ({intensity:.0f} FLOPs per byte, over {HIDDEN_FLOPS_PER_BYTE:.0f})"
            return self.plan("ring", reason)
        heads = f"{self.heads} query heads per tensor shard"
        no_ring = "a ring is not counted on to hide in a pipeline"
        if self.stage == 1:
            no_ring = f"at {intensity:.0f} FLOPs per byte a ring would not hide"
        reasons = {
            "all_to_all": f"{heads} divide by the axis, and {no_ring}",
            "ring_all_to_all": f"{heads} allow groups of {self.groups}",
            "ring": f"{heads} do not divide by the axis",
            "all_gather": f"{heads} do not divide by the axis, and a pipeline has no ring of {self.size} places",
        }
        for mode, reason in reasons.items():
            if self.problem(mode) is None:
                return self.plan(mode, reason)
        raise UserError(f"parallel.context = {self.size}: {self.problem('all_gather')}")
