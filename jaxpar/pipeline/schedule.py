"""A pipeline schedule as data: which action every stage runs in every tick.

Owns the tables and the laws they must obey; generators make them, `slots` turns them into buffer slots, `simulate`
prices them. Needs numpy only.

Words: a *stage* is a coordinate of the mesh axis `stage`; a *chunk* is one of the blocks of layers of a stage; block
`k = chunk * stages + stage` comes k-th in the model; a *microbatch* is a part of the rows of a step. Actions: F is the
forward of one microbatch through one chunk, B its backward, W the weight gradients where a schedule splits them off B.
Inside one tick a stage runs its B, then its W, then its F; after that all stages exchange once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxpar.errors import UserError

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
RUN_ORDER: tuple[Kind, ...] = ("B", "W", "F")  # inside a tick
IDLE = -1
_MAX_LISTED = 8  # problems printed before "and N more"


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Three int32 tables `[ticks, stages]`; an entry is `microbatch * chunks + chunk`, or -1 for idle.

    `b` is idle everywhere in a forward-only schedule; `w` is idle everywhere when B computes the weight gradients too.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    f: np.ndarray
    b: np.ndarray
    w: np.ndarray

    @property
    def ticks(self) -> int:
        """Number of ticks, each one round of actions and one exchange."""
        return self.f.shape[0]

    @property
    def blocks(self) -> int:
        """Number of consecutive parts the model is cut into."""
        return self.stages * self.chunks

    @property
    def has_backward(self) -> bool:
        """False for evaluation schedules."""
        return bool((self.b >= 0).any())

    @property
    def splits_weights(self) -> bool:
        """True when weight gradients are actions of their own (zero bubble)."""
        return bool((self.w >= 0).any())

    def table(self, kind: Kind) -> np.ndarray:
        """The int32 table `[ticks, stages]` of one kind of action."""
        return {"F": self.f, "B": self.b, "W": self.w}[kind]

    def times(self, kind: Kind) -> np.ndarray:
        """Tick of every action, int64 `[microbatches, blocks]` with blocks in model order; -1 where it is missing."""
        out = np.full((self.microbatches, self.blocks), -1, np.int64)
        tick, stage = np.nonzero(self.table(kind) >= 0)
        microbatch, chunk = np.divmod(self.table(kind)[tick, stage], self.chunks)
        out[microbatch, chunk * self.stages + stage] = tick
        return out

    def check(self) -> Schedule:
        """Return self, or raise `UserError` naming actions that are missing, doubled or too early."""
        problems = _shape_problems(self) or [*_count_problems(self), *_order_problems(self)]
        if problems:
            listed = "\n".join(f"  {line}" for line in problems[:_MAX_LISTED])
            more = len(problems) - _MAX_LISTED
            tail = f"\n  and {more} more" if more > 0 else ""
            raise UserError(f"pipeline schedule {self.name!r} is not valid:\n{listed}{tail}")
        return self


def make(
    name: str, stages: int, microbatches: int, chunks: int, *, f: np.ndarray, b: np.ndarray, w: np.ndarray | None = None
) -> Schedule:
    """A checked schedule from its tables, without the ticks in which nobody acts."""
    tables = [np.asarray(t, np.int32) for t in (f, b, np.full_like(f, IDLE) if w is None else w)]
    if len({t.shape for t in tables}) == 1 and tables[0].ndim == 2:
        busy = np.any([(t >= 0).any(axis=1) for t in tables], axis=0)
        tables = [t[busy] for t in tables]
    return Schedule(name, stages, microbatches, chunks, *tables).check()


def action_name(kind: str, microbatch: int, block: int, stages: int) -> str:
    """How messages call an action: `F of microbatch 3 on stage 1, chunk 0`."""
    chunk, stage = divmod(block, stages)
    return f"{kind} of microbatch {microbatch} on stage {stage}, chunk {chunk}"


def _shape_problems(schedule: Schedule) -> list[str]:
    problems = []
    for kind in KINDS:
        table = schedule.table(kind)
        if table.ndim != 2 or table.shape != schedule.f.shape or table.shape[1] != schedule.stages:
            problems.append(f"table {kind} has shape {table.shape}; wanted [ticks, {schedule.stages}] for all")
        elif table.size and table.max() >= schedule.microbatches * schedule.chunks:
            problems.append(
                f"table {kind} holds entry {table.max()}; with {schedule.microbatches} microbatches of "
                f"{schedule.chunks} chunks the last one is {schedule.microbatches * schedule.chunks - 1}"
            )
    return problems


def _count_problems(schedule: Schedule) -> list[str]:
    """Every action of every kind in use happens exactly once."""
    problems = []
    for kind in _kinds(schedule):
        count = np.zeros((schedule.microbatches, schedule.blocks), np.int64)
        tick, stage = np.nonzero(schedule.table(kind) >= 0)
        microbatch, chunk = np.divmod(schedule.table(kind)[tick, stage], schedule.chunks)
        np.add.at(count, (microbatch, chunk * schedule.stages + stage), 1)
        for m, k in zip(*np.nonzero(count != 1)):
            found = "is missing" if count[m, k] == 0 else f"happens {count[m, k]} times"
            problems.append(f"{action_name(kind, int(m), int(k), schedule.stages)} {found}")
    return problems


def _order_problems(schedule: Schedule) -> list[str]:
    """Every action comes after the ones whose results it reads."""
    f = schedule.times("F")
    pairs = [("F", f[:, 1:], "F", f[:, :-1], 1, "F of the block before it", 1)]
    if schedule.has_backward:
        b = schedule.times("B")
        pairs += [
            ("B", b[:, :-1], "B", b[:, 1:], 0, "B of the block after it", 1),
            ("B", b, "F", f, 0, "its own F", 1),
        ]
        if schedule.splits_weights:
            pairs.append(("W", schedule.times("W"), "B", b, 0, "its own B", 0))
    problems = []
    for kind, later, _, earlier, first_block, what, gap in pairs:
        early = (later >= 0) & (earlier >= 0) & (later < earlier + gap)
        for m, k in zip(*np.nonzero(early)):
            name = action_name(kind, int(m), int(k) + first_block, schedule.stages)
            problems.append(f"{name} is in tick {later[m, k]}, but {what} is in tick {earlier[m, k]}")
    return problems


def _kinds(schedule: Schedule) -> tuple[Kind, ...]:
    if not schedule.has_backward:
        return ("F",)
    return ("F", "B", "W") if schedule.splits_weights else ("F", "B")
