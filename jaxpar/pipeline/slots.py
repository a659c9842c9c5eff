"""Register allocation: which buffer slot holds every value that a schedule carries from one tick to another.

A value is alive from the action (or exchange) that makes it to the one that reads it last. Colouring these intervals
greedily gives each its slot in a ring and the ring its exact size, so the executor needs no index arithmetic of its
own and a new schedule is nothing but a new table.

Rings: `x` activations that arrived for an F, `g` gradients that arrived for a B, `fb` residuals F -> B, `fw` residuals
F -> W (B reads them too), `bw` values B -> W.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpar.pipeline.schedule import KINDS, Schedule

RINGS = ("x", "g", "fb", "fw", "bw")
_PHASES = 8  # more than the phases of one tick
_PHASE = {"B": 1, "W": 2, "F": 3, "exchange": 4}  # their order inside a tick


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What the executor scans over: int32 columns, and how many slots each ring has.

    Per stage, `[ticks, stages]`: `{f,b,w}_microbatch` (-1: idle) and `{f,b,w}_chunk`; for every ring a `*_put` and a
    `*_get` slot, and `fw_peek`, the slot that B reads before W frees it; `x_get` is -1 when the embedding is the
    input. `x_put`, `g_put` and `head_put` point at the extra slot behind the ring when nothing arrives.
    The same on every stage, `[ticks]`: the microbatch that is embedded, that enters the head, and whose embedding
    gradient is due (-1: none). The last stage can get a gradient from the head and one from its neighbour in one
    tick, so the head writes through a column of its own.
    """

    columns: dict[str, np.ndarray]
    sizes: dict[str, int]


class _Interval(NamedTuple):
    """Life of one value: when it is written and read last, in phases since the start of the step."""

    start: int
    end: int


def allocate(schedule: Schedule) -> Program:
    """The program of a checked schedule. No cell of a column is ever written twice (asserted)."""
    shape = (schedule.ticks, schedule.stages)
    names = [f"{ring}_{verb}" for ring in RINGS for verb in ("put", "get")] + ["head_put", "fw_peek"]
    columns = {name: np.full(shape, -1, np.int32) for name in names}
    sizes: dict[str, int] = dict.fromkeys(RINGS, 0)
    for stage in range(schedule.stages):
        for ring, lives in _lives(schedule, stage).items():
            slots, size = _colour(lives)
            sizes[ring] = max(sizes[ring], size)
            for (m, k), life in lives.items():
                at_head = ring == "g" and k == schedule.blocks - 1
                _write(columns["head_put" if at_head else f"{ring}_put"], life.start, stage, slots[m, k])
                _write(columns[f"{ring}_get"], life.end, stage, slots[m, k])
            if ring == "fw":
                b = schedule.times("B")
                for (m, k), slot in slots.items():
                    _write(columns["fw_peek"], int(b[m, k]) * _PHASES, stage, slot)
    for column, ring in (("x_put", "x"), ("g_put", "g"), ("head_put", "g")):
        columns[column] = np.where(columns[column] < 0, sizes[ring], columns[column]).astype(np.int32)
    return Program(columns | _actions(schedule) | _ends(schedule), sizes)


def _lives(schedule: Schedule, stage: int) -> dict[str, dict[tuple[int, int], _Interval]]:
    """Every value of one stage, by ring and (microbatch, block)."""
    f = schedule.times("F") * _PHASES + _PHASE["F"]
    arrives = _PHASE["exchange"] - _PHASE["F"]
    lives: dict[str, dict[tuple[int, int], _Interval]] = {ring: {} for ring in RINGS}
    if schedule.has_backward:
        b = schedule.times("B") * _PHASES + _PHASE["B"]
        w = schedule.times("W") * _PHASES + _PHASE["W"]
    for k in range(stage, schedule.blocks, schedule.stages):
        for m in range(schedule.microbatches):
            if k:
                lives["x"][m, k] = _Interval(f[m, k - 1] + arrives, f[m, k])
            if not schedule.has_backward:
                continue
            made = f[m, k] + arrives if k == schedule.blocks - 1 else b[m, k + 1] - _PHASE["B"] + _PHASE["exchange"]
            lives["g"][m, k] = _Interval(made, b[m, k])
            lives["fb"][m, k] = _Interval(f[m, k], b[m, k])
            if schedule.splits_weights:
                lives["fw"][m, k] = _Interval(f[m, k], w[m, k])
                lives["bw"][m, k] = _Interval(b[m, k], w[m, k])
    return lives


def _colour(lives: dict[tuple[int, int], _Interval]) -> tuple[dict[tuple[int, int], int], int]:
    """Slot of every value and the number of slots; a slot is free again at the end of its value's life."""
    slots: dict[tuple[int, int], int] = {}
    free_at: list[int] = []
    for key, life in sorted(lives.items(), key=lambda item: item[1]):
        slot = next((i for i, end in enumerate(free_at) if end <= life.start), len(free_at))
        if slot == len(free_at):
            free_at.append(0)
        free_at[slot] = life.end
        slots[key] = slot
    return slots, len(free_at)


def _write(column: np.ndarray, phase: int, stage: int, slot: int) -> None:
    tick = phase // _PHASES
    assert column[tick, stage] < 0, f"two values meet in tick {tick} of stage {stage}"
    column[tick, stage] = slot


def _actions(schedule: Schedule) -> dict[str, np.ndarray]:
    columns = {}
    for kind in KINDS:
        table, name = schedule.table(kind), kind.lower()
        columns[f"{name}_microbatch"] = np.where(table >= 0, table // schedule.chunks, -1).astype(np.int32)
        columns[f"{name}_chunk"] = np.where(table >= 0, table % schedule.chunks, 0).astype(np.int32)
    return columns


def _ends(schedule: Schedule) -> dict[str, np.ndarray]:
    """Columns of the embedding and the head, in which all stages take part."""

    def microbatch_at(entries: np.ndarray, chunk: int) -> np.ndarray:
        there = (entries >= 0) & (entries % schedule.chunks == chunk)
        return np.where(there, entries // schedule.chunks, -1).astype(np.int32)

    return {
        "embed": microbatch_at(schedule.f[:, 0], 0),
        "head": microbatch_at(schedule.f[:, -1], schedule.chunks - 1),
        "unembed": microbatch_at(schedule.b[:, 0], 0),
    }
