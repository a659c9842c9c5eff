"""Pictures of a schedule: text for terminals, a Gantt chart for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxpar.pipeline.schedule import KINDS, RUN_ORDER, Kind, Schedule
from jaxpar.pipeline.simulate import Costs, cell_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"F": ("#9ecae1", "#3182bd"), "B": ("#fdae6b", "#e6550d"), "W": ("#a1d99b", "#31a354")}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text(schedule: Schedule, *, max_ticks: int = 40) -> str:
    """One line per stage and kind of action, one column per tick: `3` is microbatch 3, `3b` in the second chunk."""
    kinds: list[Kind] = [kind for kind in KINDS if (schedule.table(kind) >= 0).any()]
    shown = min(schedule.ticks, max_ticks)
    width = len(_label(schedule, schedule.microbatches * schedule.chunks - 1)) + 1
    header = "tick".ljust(10) + "".join(
        str(tick).rjust(width) if tick % 5 == 0 else " " * width for tick in range(shown)
    )
    lines = [f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.ticks} ticks"]
    lines.append(header)
    for stage in range(schedule.stages):
        for kind in kinds:
            name = f"stage {stage}".ljust(8) if kind == kinds[0] else " " * 8
            entries = schedule.table(kind)[:shown, stage]
            cells = "".join((_label(schedule, int(e)) if e >= 0 else ".").rjust(width) for e in entries)
            lines.append(f"{name}{kind} {cells}")
    if shown < schedule.ticks:
        lines.append(f"({schedule.ticks - shown} more ticks)")
    return "\n".join(lines)


def gantt(schedule: Schedule, *, costs: Costs | None = None, axes: Axes | None = None) -> Axes:
    """Draw when every stage is busy in lock-step; darker colours are later chunks, white is the bubble."""
    if axes is None:
        from matplotlib import pyplot as plt

        axes = plt.subplots(figsize=(12, 0.5 * schedule.stages + 1))[1]
    cells = cell_times(schedule, costs or Costs())
    start = np.concatenate([[0.0], np.cumsum(np.sum([*cells.values()], axis=0).max(axis=1))])
    for stage in range(schedule.stages):
        for tick in range(schedule.ticks):
            at = start[tick]
            for kind in RUN_ORDER:
                if (entry := int(schedule.table(kind)[tick, stage])) < 0:
                    continue
                duration = float(cells[kind][tick, stage])
                late = entry % schedule.chunks >= (schedule.chunks + 1) // 2
                axes.barh(stage, duration, left=at, color=_COLOURS[kind][late], edgecolor="white", linewidth=0.5)
                if schedule.ticks <= 60:
                    axes.text(at + duration / 2, stage, _label(schedule, entry), ha="center", va="center", fontsize=7)
                at += duration
    axes.set(
        yticks=range(schedule.stages),
        yticklabels=[f"stage {stage}" for stage in range(schedule.stages)],
        xlabel="time",
        title=f"{schedule.name}, {schedule.microbatches} microbatches, chunks {schedule.chunks}",
        xlim=(0, start[-1]),
    )
    axes.invert_yaxis()
    return axes


def _label(schedule: Schedule, entry: int) -> str:
    microbatch, chunk = divmod(entry, schedule.chunks)
    return str(microbatch) + (_LETTERS[chunk % len(_LETTERS)] if schedule.chunks > 1 else "")
