"""A plan as a table, as JSON and as a ready config file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar import config_file
from jaxpar.config import Config
from jaxpar.dryrun.report import gib
from jaxpar.planner.plan import Plan, PlannedLayout, mesh_words

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(plan: Plan, console: Console) -> None:
    """The ranked table, and what was left out."""
    from rich import box
    from rich.table import Table

    how = f"{plan.compiled} compiled" if plan.compiled else "closed form only"
    title = f"{plan.considered} layouts considered, {plan.fitting} fit, {how}; times are estimates"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("#", "step s", "tokens/s/GPU", "MFU", "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layout, and the reason of its rank")
    for one in plan.layouts:
        report = one.report
        table.add_row(
            str(one.rank) if report.fits else "-",
            f"{report.step_time_s:.3f}",
            f"{report.tokens_per_s_per_gpu:,.0f}",
            f"{report.mfu:.1%}",
            gib(report.peak_bytes),
            f"{mesh_words(one.layout)}\n[dim]{one.reason}[/dim]",
        )
    console.print(table)
    if plan.rejected:
        console.print(
            "left out: " + "; ".join(f"{count} x {reason}" for reason, count in plan.rejected), highlight=False
        )
    for line in (*plan.refused, *plan.notes):
        console.print(f"[yellow]note:[/yellow] {line}", highlight=False)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """JSON values: layouts best first, each with its config and the keys of a dry run."""
    return {
        "layouts": [layout_to_dict(one) for one in plan.layouts],
        "rejected": [{"reason": reason, "count": count} for reason, count in plan.rejected],
        "considered": plan.considered,
        "fitting": plan.fitting,
        "compiled": plan.compiled,
        "refused": list(plan.refused),
        "notes": list(plan.notes),
    }


def layout_to_dict(one: PlannedLayout) -> dict[str, Any]:
    """One ranked layout."""
    return {
        "rank": one.rank,
        "reason": one.reason,
        "layout": mesh_words(one.layout),
        "config": config_file.to_dict(one.config),
        **one.report.to_dict(),
    }


def write_json(plan: Plan, path: str | Path) -> None:
    """Writes `plan_to_dict` to a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(plan_to_dict(plan), indent=2) + "\n")


def settings_that_differ(config: Config) -> dict[str, Any]:
    """Nested settings of a config that are not the defaults of its family, the family first."""
    default = config_file.to_dict(config_file.from_dict({"model": {"family": config.model.family}}))
    settings = _difference(config_file.to_dict(config), default)
    return {**settings, "model": {"family": config.model.family, **settings.get("model", {})}}


def _difference(values: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            if inner := _difference(value, default[key]):
                out[key] = inner
        elif value != default[key]:
            out[key] = value
    return out


def write_config(one: PlannedLayout, path: str | Path, *, command: str) -> None:
    """A config file that trains this layout."""
    report = one.report
    text = f'''"""{mesh_words(one.layout)}: found by the planner for {report.num_gpus} x {report.gpu.name}.

    {command}

Predicted: {report.step_time_s:.3f} s per step, {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {report.mfu:.1%},
peak {gib(report.peak_bytes)} per GPU.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {_as_code(settings_that_differ(one.config), 8)}
    )
'''
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def _as_code(settings: dict[str, Any], indent: int) -> str:
    """Nested `dict(...)` calls, as the configs that come with jaxpar have them."""
    lines = ["dict("]
    for key, value in settings.items():
        text = _as_code(value, indent + 4) if isinstance(value, dict) else repr(value)
        lines.append(f"{' ' * (indent + 4)}{key}={text},")
    return "\n".join([*lines, " " * indent + ")"])
