"""What the compiler makes of a function for eight absent H100s: FLOPs, bytes on the wire and temporary memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.child import absent_devices
from jaxpar.dryrun.hlo import read_module
from jaxpar.dryrun.targets import find_target
from jaxpar.dryrun.timeline import Timeline, estimate_timeline

GPUS = 8


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Per GPU: matmul FLOPs, bytes on the wire by kind of collective, bytes of temporaries."""

    flops: float
    wire_bytes: dict[str, float]
    temp_bytes: int
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of a benchmark: right when `found` lies in `limits`."""

    name: str
    found: float
    limits: tuple[float, float]
    detail: str = ""

    def line(self) -> str:
        """For a terminal."""
        low, high = self.limits
        mark = "ok" if low <= self.found <= high else "ABOVE" if self.found > high else "BELOW"
        return f"{self.name:66} {self.found:10.4g}  in [{low:.4g}, {high:.4g}] {mark:8} {self.detail}"


def report(rows: Any) -> list[dict[str, Any]]:
    """Print every row as it comes; return them as dicts."""
    found = []
    for row in rows:
        print(row.line(), flush=True)
        found.append(dataclasses.asdict(row))
    return found


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """A mesh of absent H100s; the sizes multiply to at most eight."""
    count = int(np.prod(list(sizes.values())))
    devices = absent_devices(find_target("h100").target_config(None), f"1x1x{count}")
    return Mesh(
        np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def compile_for(function: Callable[..., Any], mesh: Mesh, *inputs: Any) -> Compiled:
    """Compile `function` of `ShapeDtypeStruct`s that carry their shardings on `mesh`."""
    compiled = jax.jit(function).lower(*inputs).compile()
    executable = compiled.runtime_executable()
    assert executable is not None
    (module,) = executable.hlo_modules()
    timeline = estimate_timeline(
        read_module(module.as_serialized_hlo_module_proto()),
        dict(mesh.shape),
        find_target("h100"),
        Assumptions(overlap_cost=0.0),  # exposed is what the work waits for, not how it is slowed
    )
    wire: dict[str, float] = {}
    for total in timeline.collectives:
        wire[total.kind] = wire.get(total.kind, 0.0) + total.wire_bytes
    memory: Any = compiled.memory_analysis()
    return Compiled(timeline.flops, wire, int(memory.temp_size_in_bytes), timeline)
