"""Candidates by the closed-form model, and which of them to compile next, learning from those that are compiled.

The closed form is off by a few percent for most layouts, and by more for some kinds of them. What a compiled layout
took, relative to its closed form, corrects the candidates that are like it before the next one is picked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.memory import memory_by_class
from jaxpar.dryrun.report import Report
from jaxpar.dryrun.shape import Layout
from jaxpar.dryrun.speed import estimate_step
from jaxpar.dryrun.targets import GpuTarget
from jaxpar.planner.space import Space

HOPELESS = 1.25  # a candidate this much behind the best compiled layout, corrected, is not worth a compile
# How alike two layouts are: fields that are equal count this much.
_LIKENESS = {
    "tensor": 4, "sequence_parallel": 4, "remat": 4, "context": 4, "expert": 4, "zero": 2, "stage": 2, "chunks": 2,
    "microbatch_rows": 1, "num_microbatches": 1, "replica": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """A layout with its closed-form step time and peak memory."""

    step_s: float
    order: int
    layout: Layout = dataclasses.field(compare=False)
    peak_bytes: float = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Found:
    """What the closed form says of a space: candidates that fit, fastest first, and the layout that needs least."""

    fitting: list[Candidate]
    considered: int
    smallest: Candidate | None


def search(space: Space, gpu: GpuTarget, assumed: Assumptions) -> Found:
    """Every layout of the space by the closed-form model."""
    usable = assumed.usable_bytes(gpu.memory_bytes)
    fitting: list[Candidate] = []
    considered = 0
    smallest: Candidate | None = None
    for layout in space.layouts():
        considered += 1
        peak = memory_by_class(space.shape, layout).peak
        if smallest is None or peak < smallest.peak_bytes:
            smallest = Candidate(math.inf, considered, layout, peak)
        if peak > usable:
            space.rejected["does not fit"] += 1
            continue
        estimate = estimate_step(space.shape, layout, gpu, assumed, gpus_per_node=space.gpus_per_node)
        fitting.append(Candidate(estimate.step_s, considered, layout, peak))
    return Found(sorted(fitting), considered, smallest)


def family(layout: Layout) -> tuple[int, ...]:
    """Layouts that differ in more than detail; the short list takes from several families."""
    return (layout.stage, layout.tensor, layout.context, layout.expert, layout.replica)


def _kind(layout: Layout) -> tuple[bool, ...]:
    """Layouts of different kinds say nothing about each other."""
    return (layout.stage > 1, layout.context > 1, layout.expert > 1, layout.remat == "none")


@dataclasses.dataclass(frozen=True)
class _Seen:
    layout: Layout
    time_ratio: float  # compiled / closed form
    memory_ratio: float


class ShortList:
    """Picks at most `count` candidates, one after the other, at most a third of them of one family."""

    def __init__(
        self, candidates: Sequence[Candidate], count: int, usable_bytes: float, works: Callable[[Layout], bool]
    ) -> None:
        self.candidates, self.count, self.usable_bytes, self.works = candidates, count, usable_bytes, works
        self.per_family: dict[tuple[int, ...], int] = {}
        self.picked: set[int] = set()
        self.failing: set[int] = set()
        self.seen: list[_Seen] = []
        self.best_s = math.inf

    def learn(self, candidate: Candidate, report: Report) -> None:
        """Takes in what a compiled candidate came to."""
        ratios = report.step_time_s / candidate.step_s, report.peak_bytes / candidate.peak_bytes
        self.seen.append(_Seen(candidate.layout, *ratios))
        if report.fits:
            self.best_s = min(self.best_s, report.step_time_s)

    def next(self) -> Candidate | None:
        """The fastest candidate that is left, corrected by what was learned; None when nothing is worth a compile."""
        if len(self.picked) == self.count:
            return None
        found = self._fastest(per_family=max(2, math.ceil(self.count / 3))) or self._fastest(per_family=self.count)
        if found is not None:
            self.picked.add(found.order)
            name = family(found.layout)
            self.per_family[name] = self.per_family.get(name, 0) + 1
        return found

    def _fastest(self, *, per_family: int) -> Candidate | None:
        lowest = min((one.time_ratio for one in self.seen), default=1.0)
        best, best_s = None, HOPELESS * self.best_s
        for one in self.candidates:
            if one.step_s * min(lowest, 1.0) >= best_s:
                break
            if one.order in self.picked or one.order in self.failing:
                continue
            if self.per_family.get(family(one.layout), 0) >= per_family:
                continue
            time_ratio, memory_ratio = self._correction(one.layout)
            if one.peak_bytes * memory_ratio > self.usable_bytes or one.step_s * time_ratio >= best_s:
                continue
            if not self.works(one.layout):
                self.failing.add(one.order)
                continue
            best, best_s = one, one.step_s * time_ratio
        return best

    def _correction(self, layout: Layout) -> tuple[float, float]:
        """(time, memory) ratios of the compiled layout that is most like this one; 1 where none is of its kind."""
        alike = [one for one in self.seen if _kind(one.layout) == _kind(layout)]
        if not alike:
            return 1.0, 1.0
        nearest = max(alike, key=lambda one: _likeness(one.layout, layout))
        return nearest.time_ratio, nearest.memory_ratio


def _likeness(one: Layout, other: Layout) -> int:
    return sum(weight for name, weight in _LIKENESS.items() if getattr(one, name) == getattr(other, name))
