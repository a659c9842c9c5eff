"""A plan as a table, as JSON and as a ready config file."""

from __future__ import annotations

import json
import pprint
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
    from rich.table import Table

    how = f"{plan.compiled} compiled" if plan.compiled else "closed form only"
    title = f"{plan.considered} layouts considered, {plan.fitting} fit, {how}; times are estimates"
    table = Table(title=title, title_justify="left")
    for column in ("#", "step ms", "tokens/s/GPU", "MFU", "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layout")
    table.add_column("reason")
    for one in plan.layouts:
        report = one.report
        table.add_row(
            str(one.rank) if report.fits else "-",
            f"{report.step_time_s * 1e3:.1f}",
            f"{report.tokens_per_s_per_gpu:,.0f}",
            f"{report.mfu:.1%}",
            gib(report.peak_bytes),
            mesh_words(one.layout),
            one.reason,
        )
    console.print(table)
    if plan.rejected:
        listed = "; ".join(f"{reason} ({count})" for reason, count in plan.rejected[:6])
        console.print(f"left out: {listed}", highlight=False)
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
    """Nested settings of a config that are not the defaults of its family."""
    default = config_file.to_dict(config_file.from_dict({"model": {"family": config.model.family}}))
    return {"model": {"family": config.model.family}} | _difference(config_file.to_dict(config), default)


def _difference(values: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            inner = _difference(value, default[key])
            if key == "family" or inner:
                out[key] = inner
        elif value != default[key]:
            out[key] = value
    return out


def write_config(one: PlannedLayout, path: str | Path, *, command: str) -> None:
    """A config file that trains this layout."""
    settings = settings_that_differ(one.config)
    settings.setdefault("model", {})["family"] = one.config.model.family
    report = one.report
    text = f'''"""Layout found by the planner for {report.num_gpus} x {report.gpu.name}: {mesh_words(one.layout)}.

Predicted: {report.step_time_s:.3f} s per step, {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {report.mfu:.1%},
peak {gib(report.peak_bytes)} per GPU.
Made by: {command}
"""


def get_config():
    return {pprint.pformat(settings, width=110, sort_dicts=False)}
'''
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
