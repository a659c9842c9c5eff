"""The schedules that come with jaxpar, and the one place that knows their names.

| name | chunks | in flight on stage s | what it is good for |
|---|---|---|---|
| gpipe | 1 | M | the simplest; memory grows with M |
| 1f1b | 1 | S - s | least memory; its lock-step ticks cost F or B, whichever is dearer |
| fused | 1 | 2 (S - s) - 1 | an F and a B in the same tick: the least bubble that one chunk allows |
| fused, chunks > 1 | V | about S (V + 1) | the same with V chunks: the bubble shrinks V-fold |
| interleaved | V | about S (V + 1) | the classic order of several chunks, one action per tick |
| zb_h1 | 1 | S | zero bubble: weight gradients fill the gaps; wants stored residuals, not remat |

Sources: GPipe (arXiv 1811.06965), 1F1B and interleaving (arXiv 2104.04473), zero bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.errors import UserError, raise_together
from jaxpar.pipeline.schedule import IDLE, Schedule, make

NAMES = ("gpipe", "1f1b", "fused", "interleaved", "zb_h1")
_ALIASES = {"one_f_one_b": "1f1b", "circular": "interleaved", "zero_bubble": "zb_h1"}
_ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")


def named(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`, or the one in the CSV file of that path; `UserError` when there is none."""
    if name.endswith(".csv"):
        from jaxpar.pipeline.table import read_csv

        return read_csv(Path(name), stages=stages, microbatches=microbatches, chunks=chunks)
    name = _ALIASES.get(name, name)
    if name not in NAMES:
        raise UserError(f"pipeline.schedule={name!r}: wanted one of {', '.join((*NAMES, 'auto'))}, or a .csv file")
    if chunks != 1 and name in _ONE_CHUNK:
        raise UserError(
            f"pipeline.schedule={name!r} has one chunk per stage, got pipeline.chunks={chunks}; "
            "set pipeline.chunks=1, or pipeline.schedule='fused' or 'interleaved'"
        )
    if name == "fused":
        return fused(stages, microbatches, chunks)
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1}[name](stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    _check_sizes(stages, microbatches, 1)
    forward = [_Action("F", m, 0) for m in range(microbatches)]
    backward = [_Action("B", m, 0) for m in range(microbatches)]
    return _place("gpipe", stages, microbatches, 1, [forward + backward] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Stage s runs S - 1 - s forwards ahead, then alternates F and B: at most S - s microbatches in flight."""
    _check_sizes(stages, microbatches, 1)
    forward = [(m, 0) for m in range(microbatches)]
    ahead = [stages - 1 - s for s in range(stages)]
    return _place("1f1b", stages, microbatches, 1, [_alternate(forward, forward, n) for n in ahead])


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """The classic interleaved 1F1B order: groups of S microbatches go round the stages once per chunk."""
    _check_sizes(stages, microbatches, chunks)
    groups = range(-(-microbatches // stages))
    forward = [(g * stages + r, v) for g in groups for v in range(chunks) for r in range(stages)]
    backward = [(m, chunks - 1 - v) for m, v in forward]
    ahead = [(stages - 1 - s) * 2 + (chunks - 1) * stages for s in range(stages)]
    if chunks == 1:
        ahead = [stages - 1 - s for s in range(stages)]
    whole = [_alternate(forward, backward, n) for n in ahead]  # as if the last group were full
    orders = [[action for action in order if action.microbatch < microbatches] for order in whole]
    return _place("interleaved", stages, microbatches, chunks, orders)


def fused(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with an F and a B in the same tick.

    A lock-step tick costs its dearest stage, so a tick where one stage runs F and its neighbour B wastes F; here every
    busy stage of the steady state runs both, and the bubble is (S - 1) / (V M + S - 1), the least possible.
    """
    _check_sizes(stages, microbatches, chunks)
    f = _wave(stages, microbatches, chunks)
    b = np.full_like(f, IDLE)
    f, b = (np.concatenate([t, np.full((stages * (chunks + 1), stages), IDLE, np.int32)]) for t in (f, b))
    for m in range(microbatches):
        for v in range(chunks):
            for s in range(stages):
                enter = _enter(stages, chunks, m, chunks - 1 - v)
                b[stages * chunks + enter + stages - 1 - s, s] = m * chunks + v
    return make("fused", stages, microbatches, chunks, f=f, b=b)


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Evaluation: the forwards of `fused` and nothing else."""
    _check_sizes(stages, microbatches, chunks)
    f = _wave(stages, microbatches, chunks)
    return make("forward_only", stages, microbatches, chunks, f=f, b=np.full_like(f, IDLE))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble within 1F1B's memory: a stage runs B when it can, else F within the bound, else a W."""
    _check_sizes(stages, microbatches, 1)
    S, M = stages, microbatches
    done = {kind: [0] * S for kind in "FBW"}  # actions finished per stage, before the current tick
    rows: list[dict[str, list[int]]] = []
    while min(done["W"]) < M:
        row = {kind: [IDLE] * S for kind in "FBW"}
        for s in range(S):
            nf, nb, nw = (done[kind][s] for kind in "FBW")
            can_b = nb < nf and (s == S - 1 or nb < done["B"][s + 1])
            can_f = nf < M and (s == 0 or nf < done["F"][s - 1]) and nf - nw < S and nf - nb < S - s
            kind = "B" if can_b else "F" if can_f else "W" if nw < nb else None
            if kind:
                row[kind][s] = done[kind][s]
        for kind in "FBW":
            done[kind] = [n + (entry >= 0) for n, entry in zip(done[kind], row[kind])]
        rows.append(row)
    f, b, w = (np.array([row[kind] for row in rows], np.int32) for kind in "FBW")
    return make("zb_h1", S, M, 1, f=f, b=b, w=w)


class _Action(NamedTuple):
    kind: str
    microbatch: int
    chunk: int


def _enter(stages: int, chunks: int, microbatch: int, chunk: int) -> int:
    """Tick in which a microbatch enters stage 0 for its `chunk`-th round of the circular order."""
    if chunks == 1:
        return microbatch
    group, place = divmod(microbatch, stages)
    return (group * chunks + chunk) * stages + place


def _wave(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """The table of forwards, int32 `[ticks, stages]`: one stage further in every tick."""
    ticks = _enter(stages, chunks, microbatches - 1, chunks - 1) + stages
    f = np.full((ticks, stages), IDLE, np.int32)
    for m in range(microbatches):
        for v in range(chunks):
            for s in range(stages):
                f[_enter(stages, chunks, m, v) + s, s] = m * chunks + v
    return f


def _alternate(forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int) -> list[_Action]:
    """`ahead` forwards, then F and B in turn, then the backwards that are left."""
    ahead = min(ahead, len(forward))
    order = [_Action("F", *item) for item in forward[:ahead]]
    for i in range(len(forward) - ahead):
        order += [_Action("F", *forward[ahead + i]), _Action("B", *backward[i])]
    return order + [_Action("B", *item) for item in backward[len(forward) - ahead :]]


def _place(name: str, stages: int, microbatches: int, chunks: int, orders: list[list[_Action]]) -> Schedule:
    """Earliest tick for every action of the stages' own orders, one action per stage and tick."""
    blocks = stages * chunks
    finished: set[tuple[str, int, int]] = set()
    position = [0] * stages
    rows: list[dict[str, list[int]]] = []
    while any(position[s] < len(orders[s]) for s in range(stages)):
        row = {kind: [IDLE] * stages for kind in "FBW"}
        now: list[tuple[str, int, int]] = []
        for s in range(stages):
            if position[s] == len(orders[s]):
                continue
            kind, m, v = orders[s][position[s]]
            k = v * stages + s
            needs = {("F", m, k - 1)} if kind == "F" else {("F", m, k), ("B", m, k + 1)}
            needs = {need for need in needs if 0 <= need[2] < blocks}
            if needs <= finished:
                row[kind][s] = m * chunks + v
                now.append((kind, m, k))
        assert now, f"{name}: the order waits for itself in tick {len(rows)}"
        finished.update(now)
        for _, _, k in now:
            position[k % stages] += 1
        rows.append(row)
    f, b = (np.array([row[kind] for row in rows], np.int32) for kind in "FB")
    return make(name, stages, microbatches, chunks, f=f, b=b)


def _check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    sizes = {"parallel.stage": stages, "pipeline.microbatches": microbatches, "pipeline.chunks": chunks}
    raise_together(f"{key}={value}: wanted at least 1" for key, value in sizes.items() if value < 1)
