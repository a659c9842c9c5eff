"""Where the time of a run goes, over all its attempts: `goodput.jsonl`.

One line per event: `start` (the first finished step, so that a run that never got there leaves nothing behind),
`progress` (at most one per interval) and `end`, each with the attempt's number, the wall
clock, the step and the seconds spent so far in each phase. `step` is what is left between two finished steps when the
named phases (compile, data, evaluation, save, ...) are taken out. A killed attempt simply stops writing; what it
trained after the step that the next attempt resumes from is lost work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpar.lines import Lines, read_objects

NAME = "goodput.jsonl"
_INTERVAL_S = 5.0
_NOT_OWN = ("step", "other", "compile", "restore")  # phases in which processes wait for each other, or that pass once


class Ledger:
    """Adds up the seconds of one attempt and writes them; `path` None only adds."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._lines = None if path is None else Lines(path)
        self._began = self._mark = clock()
        self._written = float("-inf")
        self._phases: list[str] = []
        self.seconds: dict[str, float] = {}
        self.step: int | None = None
        self._attempt = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`; phases may nest, the innermost counts."""
        self._count()
        self._phases.append(name)
        try:
            yield
        finally:
            self._count()
            self._phases.pop()

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        self._count()
        first, self.step = self.step is None, step
        if first:
            if self._path is not None:
                self._attempt = max((row["attempt"] for row in read(self._path)), default=-1) + 1
            self._write("start")
        elif self._clock() - self._written >= _INTERVAL_S:
            self._write("progress")

    def end(self) -> None:
        """Close the attempt, if it finished a step."""
        self._count()
        if self.step is not None:
            self._write("end")

    def _count(self) -> None:
        now = self._clock()
        name = self._phases[-1] if self._phases else ("other" if self.step is None else "step")
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now

    def _write(self, event: str) -> None:
        self._written = self._clock()
        if self._lines is None:
            return
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        row = {"event": event, "attempt": self._attempt, "time": round(self._written, 3), "step": self.step}
        self._lines.append({**row, "began": round(self._began, 3), "seconds": seconds})


@dataclasses.dataclass(frozen=True)
class Summary:
    """All attempts of a run; `lost` is trained again, `down` passed between the attempts."""

    attempts: int
    wall_s: float
    seconds: dict[str, float]
    lost_s: float
    down_s: float

    @property
    def goodput(self) -> float:
        """Share of the wall time that trained steps which count."""
        return max(self.seconds.get("step", 0.0) - self.lost_s, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    def line(self) -> str:
        """One line for people."""
        parts = {**self.seconds, "lost": self.lost_s, "down": self.down_s}
        shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if value >= 0.05)
        attempts = f"{self.attempts} attempts" if self.attempts > 1 else "1 attempt"
        return f"goodput {self.goodput:.1%} of {self.wall_s:.1f} s in {attempts} (seconds: {shown})"


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a ledger; what a kill cut short, and what is no row of one, is left out."""
    return [row for row in read_objects(path) if _is_row(row)]


def _is_row(row: dict[str, Any]) -> bool:
    seconds = row.get("seconds")
    numbers = [row.get("time"), row.get("began"), *(seconds.values() if isinstance(seconds, dict) else [None])]
    whole = isinstance(row.get("attempt"), int) and isinstance(row.get("step"), int | None)
    return whole and all(isinstance(number, int | float) for number in numbers)


def summarize(rows: list[dict[str, Any]]) -> Summary:
    """Add up the attempts in the rows of a ledger."""
    last: dict[int, dict[str, Any]] = {row["attempt"]: row for row in rows}
    first_step: dict[int, int] = {}
    for row in rows:
        if row["step"] is not None:
            first_step.setdefault(row["attempt"], row["step"])
    attempts = [last[number] for number in sorted(last)]
    seconds: dict[str, float] = {}
    lost_s = down_s = 0.0
    for row in attempts:
        for name, value in row["seconds"].items():
            seconds[name] = seconds.get(name, 0.0) + value
    for before, after in itertools.pairwise(attempts):
        down_s += max(after["began"] - before["time"], 0.0)
        lost_s += _lost_s(before, first_step.get(before["attempt"]), first_step.get(after["attempt"]))
    wall_s = attempts[-1]["time"] - attempts[0]["began"] if attempts else 0.0
    return Summary(len(attempts), wall_s, seconds, lost_s, down_s)


def _lost_s(before: dict[str, Any], first: int | None, resumed_first: int | None) -> float:
    """Seconds of `before` spent on steps that the next attempt did again; `first` is its own first finished step."""
    if before["step"] is None or first is None or resumed_first is None:
        return 0.0
    repeated = before["step"] - resumed_first + 1
    done = before["step"] - first + 1
    return before["seconds"].get("step", 0.0) * min(max(repeated, 0) / max(done, 1), 1.0)


def slowest(seconds_by_process: dict[int, dict[str, float]]) -> str | None:
    """A sentence on the process that kept the others waiting; None when all are alike.

    Between two steps every process waits for the last one, so the slowest is the one that spent most time on its own
    affairs (data, saving), not the one with the longest steps.
    """
    phases = {
        rank: {name: value for name, value in seconds.items() if name not in _NOT_OWN}
        for rank, seconds in seconds_by_process.items()
    }
    own = {rank: sum(seconds.values()) for rank, seconds in phases.items()}
    if len(own) < 2:
        return None
    rank = max(own, key=lambda key: own[key])
    median = sorted(own.values())[(len(own) - 1) // 2]
    if own[rank] < median + 1.0 or own[rank] < 1.1 * median:
        return None
    phases = {name: value for name, value in seconds_by_process[rank].items() if name not in ("step", "other")}
    most = max(phases, key=lambda name: phases[name])
    return (
        f"slowest process: {rank}, {own[rank]:.1f} s outside of steps ({most} {phases[most]:.1f}), median {median:.1f}"
    )
