"""Pipeline parallelism: schedules as tables, their simulator, and one SPMD executor for all of them.

Schedules, simulator and pictures need numpy only; jax is imported with the first use of the executor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxpar.pipeline.assign import Assignment, assign_layers
from jaxpar.pipeline.draw import gantt, text
from jaxpar.pipeline.generators import forward_only, fused, gpipe, interleaved, named, one_f_one_b, zb_h1
from jaxpar.pipeline.lint import divergent_permutes
from jaxpar.pipeline.schedule import Schedule, make
from jaxpar.pipeline.simulate import Choice, Costs, Simulation, choose, simulate
from jaxpar.pipeline.slots import Program, allocate
from jaxpar.pipeline.table import read_csv, write_csv

if TYPE_CHECKING:
    from jaxpar.pipeline.executor import evaluate, value_and_grad
    from jaxpar.pipeline.interface import Params, Side, Totals
    from jaxpar.pipeline.split import StageOut

_WITH_JAX = {
    "value_and_grad": "executor",
    "evaluate": "executor",
    "Params": "interface",
    "Side": "interface",
    "Totals": "interface",
    "StageOut": "split",
}

__all__ = [
    "Assignment",
    "Choice",
    "Costs",
    "Params",
    "Program",
    "Schedule",
    "Side",
    "Simulation",
    "StageOut",
    "Totals",
    "allocate",
    "assign_layers",
    "choose",
    "divergent_permutes",
    "evaluate",
    "forward_only",
    "fused",
    "gantt",
    "gpipe",
    "interleaved",
    "make",
    "named",
    "one_f_one_b",
    "read_csv",
    "simulate",
    "text",
    "value_and_grad",
    "write_csv",
    "zb_h1",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_JAX:
        return getattr(importlib.import_module(f"{__name__}.{_WITH_JAX[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
