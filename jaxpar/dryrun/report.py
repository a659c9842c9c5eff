"""The answer of a dry run, as JSON and as tables. Times are estimates and say so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.energy import RunCost
from jaxpar.dryrun.targets import GpuTarget

if TYPE_CHECKING:
    from rich.console import Console

    from jaxpar.dryrun.timeline import Span


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over one mesh axis, per GPU and step."""

    kind: str
    axis: str
    size_bytes: float  # payload: the larger of operand and result
    count: float
    time_s: float
    exposed_s: float
    dtype: str = ""
    between_nodes: bool = False
    sol_s: float = 0.0  # by XLA's own cost model; 0 where there is none


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything a dry run found out."""

    gpu: GpuTarget
    num_gpus: int
    mesh: dict[str, int]
    compiled: bool  # False: closed-form figures only
    assumed: Assumptions
    peak_bytes: float
    argument_bytes: float
    temp_bytes: float
    bytes_by_class: dict[str, float]
    flops_per_gpu: float
    collectives: tuple[CollectiveRow, ...]
    bubble_fraction: float
    step_time_s: float
    compute_s: float
    exposed_s: float
    tokens_per_s_per_gpu: float
    rows_per_s: float
    mfu: float
    model_flops_per_token: float
    num_parameters: int
    warnings: tuple[str, ...]
    sol_compute_s: float = 0.0  # by XLA's own cost model, fused attention not counted; 0 where there is none
    top_buffers: tuple[dict[str, Any], ...] = ()
    top_operations: tuple[dict[str, Any], ...] = ()
    host_bytes: float = 0.0
    closed_form: dict[str, Any] = dataclasses.field(default_factory=dict)
    cost: RunCost | None = None
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    spans: tuple[Span, ...] = ()

    @property
    def usable_bytes(self) -> float:
        """What the margin rule leaves of a GPU's memory."""
        return self.assumed.usable_bytes(self.gpu.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether the peak stays below the margin rule."""
        return self.peak_bytes <= self.usable_bytes

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, with the keys other tools rely on."""
        return {
            "estimate": True,
            "compiled": self.compiled,
            "gpu": self.gpu.name,
            "gpus": self.num_gpus,
            "mesh": self.mesh,
            "fits": self.fits,
            "fits_rule": self.assumed.rule(),
            "peak_bytes": self.peak_bytes,
            "usable_bytes": self.usable_bytes,
            "memory_bytes": self.gpu.memory_bytes,
            "argument_bytes": self.argument_bytes,
            "temp_bytes": self.temp_bytes,
            "host_bytes": self.host_bytes,
            "bytes_by_class": self.bytes_by_class,
            "top_buffers": list(self.top_buffers),
            "flops_per_gpu": self.flops_per_gpu,
            "model_flops_per_token": self.model_flops_per_token,
            "num_parameters": self.num_parameters,
            "collectives": [
                {
                    "kind": row.kind,
                    "axis": row.axis,
                    "bytes": row.size_bytes,
                    "count": row.count,
                    "time_s": row.time_s,
                    "exposed_s": row.exposed_s,
                    "hidden_s": max(0.0, row.time_s - row.exposed_s),
                    "dtype": row.dtype,
                    "between_nodes": row.between_nodes,
                    "sol_s": row.sol_s,
                }
                for row in self.collectives
            ],
            "bubble_fraction": self.bubble_fraction,
            "step_time_s": self.step_time_s,
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_s,
            "sol_compute_s": self.sol_compute_s,
            "communication_share": self.exposed_s / self.step_time_s if self.step_time_s else 0.0,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "rows_per_s": self.rows_per_s,
            "mfu": self.mfu,
            "mfu_formula": MFU_FORMULA,
            "top_operations": list(self.top_operations),
            "warnings": list(self.warnings),
            "closed_form": self.closed_form,
            "cost": dataclasses.asdict(self.cost) if self.cost is not None else None,
            "compile": self.compile,
            "assumptions": dataclasses.asdict(self.assumed),
        }

    def write_json(self, path: str | Path) -> None:
        """Writes `to_dict` to a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


MFU_FORMULA = (
    "tokens/s/GPU x FLOPs per token (6 x matmul parameters + causal attention, nothing recomputed) / bf16 peak"
)


def gib(size_bytes: float) -> str:
    """A size in GiB, or in MiB when small."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**28 else f"{size_bytes / 2**20:.1f} MiB"


def print_report(report: Report, console: Console) -> None:
    """Tables for a terminal."""
    how = "compiled for the absent GPUs" if report.compiled else "closed form, not compiled"
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    console.print(f"[bold]{report.num_gpus} x {report.gpu.name}[/bold]: {mesh} ({how})")
    _print_memory(report, console)
    _print_collectives(report, console)
    _print_speed(report, console)
    if report.cost is not None:
        _print_cost(report.cost, console)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)


def _print_memory(report: Report, console: Console) -> None:
    from rich.table import Table

    table = Table(title="memory per GPU", title_justify="left")
    table.add_column("class")
    table.add_column("bytes", justify="right")
    table.add_column("of peak", justify="right")
    for name, size in report.bytes_by_class.items():
        table.add_row(name, gib(size), f"{size / report.peak_bytes:.1%}")
    table.add_section()
    table.add_row("peak", gib(report.peak_bytes), "")
    console.print(table)
    verdict = "[green]fits[/green]" if report.fits else "[red]does not fit[/red]"
    room = report.usable_bytes - report.peak_bytes
    side = f"{gib(room)} to spare" if room >= 0 else f"{gib(-room)} too much"
    console.print(f"{verdict}: {side} ({report.assumed.rule()}; {gib(report.gpu.memory_bytes)} on a {report.gpu.name})")
    if report.top_buffers:
        buffers = Table(title="what fills the temporaries", title_justify="left")
        for column in ("bytes", "class", "shape", "from"):
            buffers.add_column(column, justify="right" if column == "bytes" else "left")
        for one in report.top_buffers[:6]:
            buffers.add_row(gib(one["bytes"]), one["class"], one["shape"], one["origin"][-60:])
        console.print(buffers)


def _print_collectives(report: Report, console: Console) -> None:
    from rich import box
    from rich.table import Table

    if not report.collectives:
        return
    title = "collectives per GPU and step, times in ms (estimates)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("kind", "axis", "dtype"):
        table.add_column(column)
    for column in ("count", "bytes", "hidden", "exposed", "sol"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.collectives[:14]:
        hidden = max(0.0, row.time_s - row.exposed_s) * 1e3
        table.add_row(
            row.kind,
            row.axis,
            row.dtype,
            f"{row.count:.0f}",
            gib(row.size_bytes),
            f"{hidden:.2f}",
            f"{row.exposed_s * 1e3:.2f}",
            f"{row.sol_s * 1e3:.2f}" if report.sol_compute_s else "",
        )
    console.print(table)
    if report.sol_compute_s:
        console.print("sol: all of it by XLA's own cost model, a cross-check", style="dim", highlight=False)


def _print_speed(report: Report, console: Console) -> None:
    from rich.table import Table

    table = Table(title="speed (estimate)", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("FLOPs per GPU and step", f"{report.flops_per_gpu / 1e12:.3f} TF")
    table.add_row("compute", f"{report.compute_s * 1e3:.2f} ms")
    if report.sol_compute_s:
        table.add_row("  of it by XLA's own cost model (sol)", f"{report.sol_compute_s * 1e3:.2f} ms")
    table.add_row("exposed communication", f"{report.exposed_s * 1e3:.2f} ms")
    table.add_row("pipeline bubble", f"{report.bubble_fraction:.1%}")
    table.add_row("step", f"{report.step_time_s * 1e3:.2f} ms")
    table.add_row("tokens/s/GPU", f"{report.tokens_per_s_per_gpu:,.0f}")
    table.add_row("rows/s", f"{report.rows_per_s:,.1f}")
    table.add_row("MFU", f"{report.mfu:.1%}")
    console.print(table)
    console.print(f"MFU = {MFU_FORMULA}", style="dim", highlight=False)
    shown = ("matmul_efficiency", "fp8_efficiency", "attention_efficiency", "hbm_efficiency")
    links = ("nvlink_efficiency", "network_efficiency")
    figures = ", ".join(f"{name} {getattr(report.assumed, name):g}" for name in (*shown, *links))
    console.print(f"assumed: {figures} (--assume NAME=VALUE changes one)", style="dim", highlight=False)


def _print_cost(cost: RunCost, console: Console) -> None:
    console.print(
        f"whole run (estimate): {cost.hours:,.1f} h, {cost.gpu_hours:,.0f} GPU-hours, {cost.energy_kwh:,.0f} kWh, "
        f"rent ${cost.rent_usd:,.0f}, energy ${cost.energy_usd:,.0f}",
        highlight=False,
    )
    console.print("assumed: " + ", ".join(f"{k} {v:g}" for k, v in cost.assumed.items()), style="dim", highlight=False)
