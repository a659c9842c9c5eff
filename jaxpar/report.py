"""The sharding of every parameter as rows, as a rich table and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.build import Built
from jaxpar.contract import class_bytes, named_placements, optimizer_bytes
from jaxpar.names import is_matrix
from jaxpar.sharding import shard_bytes
from jaxpar.tree import named_leaves

UNLIMITED_COLUMNS = 100_000


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter; bytes are per device."""

    name: str
    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    parameter_axes: tuple[str, ...]  # mesh axes per dim, "" where whole
    gradient_axes: tuple[str, ...]
    optimizer_axes: tuple[str, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    decayed: bool


def rows(built: Built) -> list[Row]:
    """A row per parameter, in the order of the model."""
    leaves, moments = named_leaves(built.abstract_state.params), optimizer_bytes(built)
    found = []
    for name, p in named_placements(built).items():
        dtype = leaves[name].dtype
        found.append(
            Row(
                name, p.shape, p.axes, _words(p.parameter), _words(p.gradient), _words(p.optimizer),
                shard_bytes(p.shape, dtype, p.parameter, built.mesh),
                shard_bytes(p.shape, jnp.float32, p.gradient, built.mesh),
                moments[name],
                is_matrix(p.axes),
            )
        )  # fmt: skip
    return found


def as_json(built: Built) -> dict[str, Any]:
    """Mesh, rows and totals per device."""
    table = rows(built)
    return {
        "mesh": dict(built.mesh.shape),
        "zero": built.config.parallel.zero,
        "parameters": [dataclasses.asdict(row) for row in table],
        "bytes_per_device": {**class_bytes(built.abstract_state), "gradients": sum(r.gradient_bytes for r in table)},
    }


def as_table(built: Built) -> Any:
    """A rich table; dims are written name=size[mesh axes]."""
    from rich.table import Table

    sizes = " x ".join(f"{axis} {size}" for axis, size in built.mesh.shape.items() if size > 1) or "one device"
    table = Table(title=f"{sizes}, ZeRO-{built.config.parallel.zero}; bytes per device")
    table.add_column("parameter", overflow="fold")
    table.add_column("dims", overflow="fold")
    table.add_column("optimizer dims", overflow="fold")
    for title in ("parameter", "gradient", "optimizer"):
        table.add_column(title, justify="right")
    listed = rows(built)
    for row in listed:
        same = row.optimizer_axes == row.parameter_axes
        table.add_row(
            row.name, _dims(row, row.parameter_axes), "same" if same else _dims(row, row.optimizer_axes),
            *(size_text(n) for n in (row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes)),
        )  # fmt: skip
    table.add_section()
    totals = (sum(getattr(row, f"{kind}_bytes") for row in listed) for kind in ("parameter", "gradient", "optimizer"))
    table.add_row("total", "", "", *(size_text(n) for n in totals))
    return table


def print_table(table: Any) -> None:
    """Print a rich table: as wide as the terminal, or as its content where the output goes elsewhere."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        wide = console.options.update(max_width=UNLIMITED_COLUMNS)
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)


def size_text(count: int) -> str:
    """Bytes as people read them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def _words(spec: P) -> tuple[str, ...]:
    return tuple("" if group is None else group if isinstance(group, str) else ",".join(group) for group in spec)


def _dims(row: Row, axes: tuple[str, ...]) -> str:
    dims = zip(row.logical_axes, row.shape, axes)
    return " ".join(f"{name}={size}" + (f"\\[{axis}]" if axis else "") for name, size, axis in dims)
