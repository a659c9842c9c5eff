"""Schedules as CSV files, for tables made by hand or by another program.

One action a line: `tick,stage,action,microbatch,chunk`, where action is F, B or W and everything counts from 0. Lines
may come in any order; a line that starts with # is a comment.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.errors import UserError, raise_together
from jaxpar.pipeline.schedule import IDLE, RUN_ORDER, Schedule, make

HEADER = ("tick", "stage", "action", "microbatch", "chunk")


class _Line(NamedTuple):
    number: int
    tick: int
    stage: int
    action: str
    microbatch: int
    chunk: int


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write every action of a schedule, in the order of its ticks."""
    rows = []
    for kind in RUN_ORDER:
        for tick, stage in zip(*np.nonzero(schedule.table(kind) >= 0)):
            microbatch, chunk = divmod(int(schedule.table(kind)[tick, stage]), schedule.chunks)
            rows.append((int(tick), int(stage), kind, microbatch, chunk))
    rows.sort(key=_tick_and_stage)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(rows)


def read_csv(
    path: Path, *, stages: int | None = None, microbatches: int | None = None, chunks: int | None = None
) -> Schedule:
    """The checked schedule of a file; sizes that are given must be the file's. Raises `UserError` naming lines."""
    lines = _lines(path)
    found = {
        "stages": 1 + max(line.stage for line in lines),
        "microbatches": 1 + max(line.microbatch for line in lines),
        "chunks": 1 + max(line.chunk for line in lines),
    }
    wanted = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    keys = {"stages": "parallel.stage", "microbatches": "pipeline.microbatches", "chunks": "pipeline.chunks"}
    raise_together(
        f"{path}: the table has {found[name]} {name}, but {keys[name]}={value}; change one of them"
        for name, value in wanted.items()
        if value is not None and value != found[name]
    )
    shape = (1 + max(line.tick for line in lines), found["stages"])
    tables = {kind: np.full(shape, IDLE, np.int32) for kind in "FBW"}
    problems = []
    for line in lines:
        table = tables[line.action]
        if table[line.tick, line.stage] >= 0:
            problems.append(
                f"{path}, line {line.number}: a second {line.action} on stage {line.stage} in tick {line.tick}"
            )
        table[line.tick, line.stage] = line.microbatch * found["chunks"] + line.chunk
    raise_together(problems)
    return make(path.stem, **found, f=tables["F"], b=tables["B"], w=tables["W"])


def _tick_and_stage(row: tuple[int, int, str, int, int]) -> tuple[int, int]:
    return row[:2]


def _lines(path: Path) -> list[_Line]:
    if not path.is_file():
        raise UserError(f"pipeline.schedule={str(path)!r}: no such file")
    lines, problems = [], []
    for number, row in enumerate(csv.reader(path.read_text().splitlines()), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or tuple(cells) == HEADER:
            continue
        numbers = [cells[i] for i in (0, 1, 3, 4)] if len(cells) == len(HEADER) else []
        if not numbers or cells[2] not in ("F", "B", "W") or not all(cell.isdecimal() for cell in numbers):
            problems.append(f"{path}, line {number}: {','.join(row)!r}; wanted {','.join(HEADER)}, e.g. 0,0,F,0,0")
            continue
        tick, stage, microbatch, chunk = map(int, numbers)
        lines.append(_Line(number, tick, stage, cells[2], microbatch, chunk))
    raise_together(problems)
    if not lines:
        raise UserError(f"{path}: no action in it; wanted lines of {','.join(HEADER)}")
    return lines
