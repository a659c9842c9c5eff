"""What a schedule costs: step time, bubble and activations in flight, and the choice between schedules.

Two clocks. *Lock-step* is what one SPMD program pays: all stages exchange in every tick, so a tick lasts as long as
its dearest stage. *Asynchronous* is what a pipeline of separate processes would pay, each waiting for its inputs only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpar.errors import UserError
from jaxpar.pipeline import generators
from jaxpar.pipeline.schedule import RUN_ORDER, Kind, Schedule

Cost = float | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Seconds (or any unit) of one microbatch; a float is a whole stage, an array `[stages, chunks]` its chunks.

    `backward` is the part that gives the gradient of the input, `weight` the weight gradients; a schedule that does
    not split them pays both in B. `recompute` is the forward that a rematerialising B runs again.
    """

    forward: Cost = 1.0
    backward: Cost = 1.0
    weight: Cost = 1.0
    recompute: Cost = 0.0
    head: float = 0.0  # head, loss and their gradient of one microbatch, split over the stages
    exchange: float = 0.0  # one exchange with the neighbours
    tick_overhead: float = 0.0  # anything else that a tick costs whatever it does


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Prices of one schedule; times in the unit of the costs."""

    ticks: int
    lockstep_s: float
    asynchronous_s: float
    bubble_lockstep: float  # share of the step in which the average stage does no work
    bubble_asynchronous: float
    in_flight: tuple[int, ...]  # per stage: most chunk activations that wait for their backward at one time


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Price a schedule."""
    costs = costs or Costs()
    durations = _durations(schedule, costs)
    cells = np.sum([*cell_times(schedule, costs).values()], axis=0)
    heads = schedule.microbatches * costs.head
    fixed = schedule.ticks * (costs.exchange + costs.tick_overhead)
    lockstep = float(cells.max(axis=1).sum()) + heads + fixed
    asynchronous = _asynchronous(schedule, durations, costs) + heads
    work = float(cells.sum()) / schedule.stages + heads
    return Simulation(
        ticks=schedule.ticks,
        lockstep_s=lockstep,
        asynchronous_s=asynchronous,
        bubble_lockstep=1 - work / lockstep,
        bubble_asynchronous=1 - work / asynchronous,
        in_flight=in_flight(schedule),
    )


def cell_times(schedule: Schedule, costs: Costs) -> dict[Kind, np.ndarray]:
    """Time that every kind of action takes in every cell, float `[ticks, stages]` each."""
    stage = np.arange(schedule.stages)
    cells: dict[Kind, np.ndarray] = {}
    for kind, duration in _durations(schedule, costs).items():
        table = schedule.table(kind)
        cells[kind] = np.where(table >= 0, duration[stage, table % schedule.chunks], 0.0)
    return cells


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most chunk activations that exist at one time between their F and their last use."""
    if not schedule.has_backward:
        return (0,) * schedule.stages
    first, last = schedule.times("F"), schedule.times("W" if schedule.splits_weights else "B")
    counts = []
    for stage in range(schedule.stages):
        # B and W run before F inside a tick, so a slot that frees in a tick is there for its F
        alive = np.zeros(schedule.ticks + 1, np.int64)
        np.add.at(alive, first[:, stage :: schedule.stages].ravel(), 1)
        np.add.at(alive, last[:, stage :: schedule.stages].ravel(), -1)
        counts.append(int(alive.cumsum().max()))
    return tuple(counts)


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The schedule that `choose` took, and every candidate with its price."""

    schedule: Schedule
    simulation: Simulation
    candidates: tuple[tuple[Schedule, Simulation], ...]

    def table(self) -> str:
        """One line per candidate, the chosen one marked."""
        lines = [f"{'schedule':14}{'chunks':>7}{'ticks':>7}{'step':>12}{'bubble':>9}{'in flight':>11}"]
        for schedule, result in self.candidates:
            mark = " <-" if schedule is self.schedule else ""
            lines.append(
                f"{schedule.name:14}{schedule.chunks:>7}{result.ticks:>7}{result.lockstep_s:>12.4g}"
                f"{result.bubble_lockstep:>9.1%}{max(result.in_flight):>11}{mark}"
            )
        return "\n".join(lines)


def choose(
    stages: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    chunks: Sequence[int] = (1,),
    names: Sequence[str] = generators.NAMES,
    stage_activation_bytes: float = 0.0,
    budget_bytes: float | None = None,
) -> Choice:
    """The schedule with the shortest lock-step time whose activations fit; `UserError` when none does.

    `stage_activation_bytes` is what one microbatch leaves on one stage (all its chunks) between F and B; the budget
    bounds the fullest stage. `chunks` are the counts that the layers allow. Of equals, fewer activations win.
    """
    candidates = []
    for name in names:
        for count in chunks if name in ("fused", "interleaved") else (1,):
            if name == "interleaved" and count == 1:
                continue  # the same as 1f1b
            schedule = generators.named(name, stages=stages, microbatches=microbatches, chunks=count)
            candidates.append((schedule, simulate(schedule, costs)))
    used = [max(result.in_flight) * stage_activation_bytes / schedule.chunks for schedule, result in candidates]
    fitting = [i for i, size in enumerate(used) if budget_bytes is None or size <= budget_bytes]
    if not fitting:
        raise UserError(
            f"pipeline.schedule='auto': no schedule of {stages} stages keeps its activations within {budget_bytes:.4g} "
            f"bytes; the smallest needs {min(used):.4g}. Use more stages, smaller microbatches or remat='full'"
        )
    best = min(fitting, key=lambda i: (round(candidates[i][1].lockstep_s, 9), used[i], candidates[i][0].ticks))
    schedule, simulation = candidates[best]
    return Choice(schedule, simulation, tuple(candidates))


def _durations(schedule: Schedule, costs: Costs) -> dict[Kind, np.ndarray]:
    """Duration of every kind of action, float `[stages, chunks]`."""
    shape = (schedule.stages, schedule.chunks)

    def per_chunk(cost: Cost) -> np.ndarray:
        if isinstance(cost, np.ndarray):
            if cost.shape != shape:
                raise UserError(f"a cost array has shape {cost.shape}; wanted [stages, chunks] = {shape}")
            return cost
        return np.full(shape, cost / schedule.chunks)

    backward, weight = per_chunk(costs.backward) + per_chunk(costs.recompute), per_chunk(costs.weight)
    if not schedule.splits_weights:
        backward, weight = backward + weight, np.zeros(shape)
    return {"F": per_chunk(costs.forward), "B": backward, "W": weight}


def _asynchronous(schedule: Schedule, durations: dict[Kind, np.ndarray], costs: Costs) -> float:
    """End of the last action when a stage waits for nothing but its inputs and its own order."""
    S, V = schedule.stages, schedule.chunks
    end: dict[tuple[str, int, int], float] = {}
    free = [0.0] * S
    for tick in range(schedule.ticks):
        for kind in RUN_ORDER:
            for stage in range(S):
                entry = int(schedule.table(kind)[tick, stage])
                if entry < 0:
                    continue
                m, v = divmod(entry, V)
                k = v * S + stage
                inputs = [0.0]
                if kind == "F" and k:
                    inputs.append(end["F", m, k - 1] + costs.exchange)
                if kind == "B":
                    inputs.append(end["F", m, k])
                    if k < S * V - 1:
                        inputs.append(end["B", m, k + 1] + costs.exchange)
                free[stage] = max(free[stage], max(inputs)) + float(durations[kind][stage, v]) + costs.tick_overhead
                end[kind, m, k] = free[stage]
    return max(free)
