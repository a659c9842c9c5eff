"""Fits the assumptions of one kind of GPU to measured runs, and shows how far predictions are off.

Runs are rows of a JSON file: model shape, layout, tokens per second and GPU. The fit moves a few efficiencies, the
same for all rows of a GPU kind, never one per row. Leaving out one cluster at a time tells how good a prediction
is for a cluster the fit has not seen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.shape import Layout, ModelShape
from jaxpar.dryrun.speed import estimate_step
from jaxpar.dryrun.targets import GpuTarget, find_target
from jaxpar.errors import UserError

# What the fit may move: name, lowest, highest, and how firmly the prior holds it (smaller is firmer).
FITTED: tuple[tuple[str, float, float, float], ...] = (
    ("matmul_efficiency", 0.3, 0.95, 0.3),
    ("fp8_efficiency", 0.2, 0.9, 0.3),
    ("matmul_half_size", 20.0, 2000.0, 0.7),
    ("attention_efficiency", 0.1, 0.85, 0.4),
    ("first_flash_efficiency", 0.05, 0.8, 0.4),
    ("eager_traffic", 1.0, 6.0, 0.4),
    ("overlap_cost", 0.02, 1.0, 0.5),
    ("hbm_efficiency", 0.3, 0.95, 0.3),
    ("nvlink_efficiency", 0.2, 0.95, 0.4),
    ("network_efficiency", 0.2, 0.95, 0.4),
    ("overlap", 0.2, 1.0, 0.4),
)
# GPUs fitted together: the same generation in other memory sizes.
FAMILIES: dict[str, str] = {"a100-80g": "a100-80g", "a100-40g": "a100-80g", "h100": "h100"}


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One measurement with its configuration."""

    id: str
    cluster: str
    gpu: GpuTarget
    gpus_per_node: int
    shape: ModelShape
    layout: Layout
    tokens_per_s_per_gpu: float
    grade: str  # A: the layout is fully known; B: one assumption
    xla: bool  # a JAX program: the same compiler as ours
    memory_fraction: float | None = None  # of the device, which the run was given and did with
    lock_step: bool = False

    def predicted(self, assumed: Assumptions) -> float:
        """Tokens per second and GPU by the closed-form model."""
        estimate = estimate_step(
            self.shape, self.layout, self.gpu, assumed, gpus_per_node=self.gpus_per_node, lock_step=self.lock_step
        )
        return estimate.tokens_per_s_per_gpu


def read_run(row: dict[str, Any]) -> MeasuredRun:
    """One row of a file of runs."""
    gpu = find_target(row["gpu"])
    changes = {key: row[key] for key in ("network_bytes_per_s", "hbm_bytes_per_s") if key in row}
    return MeasuredRun(
        id=row["id"],
        cluster=row["cluster"],
        gpu=dataclasses.replace(gpu, **changes),
        gpus_per_node=row.get("gpus_per_node", 8),
        shape=ModelShape(**row["shape"]),
        layout=Layout(**row["layout"]),
        tokens_per_s_per_gpu=row["tokens_per_s_per_gpu"],
        grade=row.get("grade", "A"),
        xla=row.get("xla", False),
        memory_fraction=row.get("memory_fraction"),
        lock_step=row.get("lock_step", False),
    )


def load_runs(path: str | Path | None = None) -> list[MeasuredRun]:
    """Runs of a file; without one the published runs that come with jaxpar.

    Raises:
        UserError: the file is missing, or a row is not a run.
    """
    file = Path(path) if path is not None else Path(__file__).with_name("measured_runs.json")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file of measured runs")
    try:
        return [read_run(row) for row in json.loads(file.read_text())]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{file}: not a list of measured runs ({type(error).__name__}: {error}); a row needs id, cluster, gpu, "
            "shape {...}, layout {...} and tokens_per_s_per_gpu"
        ) from error


def fit(runs: Sequence[MeasuredRun], start: Assumptions | None = None) -> Assumptions:
    """The assumptions that predict these runs best, held near `start` where the runs say little."""
    import numpy as np
    from scipy.optimize import least_squares

    start = start or Assumptions()
    names = [name for name, *_ in FITTED]
    prior = np.array([math.log(getattr(start, name)) for name in names])
    width = np.array([entry[3] for entry in FITTED])
    low = np.array([math.log(entry[1]) for entry in FITTED])
    high = np.array([math.log(entry[2]) for entry in FITTED])
    # Rows of one campaign that differ only in scale say nearly the same: each cluster weighs as the root of its rows.
    counts = {run.cluster: sum(other.cluster == run.cluster for other in runs) for run in runs}
    weights = np.array([counts[run.cluster] ** -0.25 for run in runs])

    def residuals(logs: Any) -> Any:
        assumed = dataclasses.replace(start, **dict(zip(names, map(float, np.exp(logs)))))
        errors = [math.log(run.predicted(assumed) / run.tokens_per_s_per_gpu) for run in runs]
        return np.concatenate([weights * np.array(errors) / 0.08, (logs - prior) / width])

    found = least_squares(residuals, np.clip(prior, low + 1e-6, high - 1e-6), bounds=(low, high), loss="soft_l1")
    return dataclasses.replace(start, **{name: round(float(v), 4) for name, v in zip(names, np.exp(found.x))})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured run next to its prediction by a fit that has not seen its cluster."""

    run: MeasuredRun
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens per second."""
        return self.predicted / self.run.tokens_per_s_per_gpu - 1


def leave_one_cluster_out(runs: Sequence[MeasuredRun], start: Assumptions | None = None) -> list[Comparison]:
    """Predicts each cluster with the assumptions fitted to the others."""
    out = []
    for cluster in dict.fromkeys(run.cluster for run in runs):
        assumed = fit([run for run in runs if run.cluster != cluster], start)
        out += [Comparison(run, run.predicted(assumed)) for run in runs if run.cluster == cluster]
    return out


def mean_absolute_error(comparisons: Iterable[Comparison]) -> float:
    """Mean of |relative error|."""
    errors = [abs(one.error) for one in comparisons]
    return sum(errors) / len(errors)


def rank_correlation(comparisons: Sequence[Comparison]) -> float:
    """Spearman's rank correlation of predicted and measured tokens per second."""
    predicted = _ranks([one.predicted for one in comparisons])
    measured = _ranks([one.run.tokens_per_s_per_gpu for one in comparisons])
    count = len(comparisons)
    squares = sum((a - b) ** 2 for a, b in zip(predicted, measured))
    return 1 - 6 * squares / (count * (count**2 - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def print_calibration(path: str | None, gpu: str) -> Assumptions:
    """Fits the assumptions of a GPU kind to the runs of a file and prints every row and the result."""
    from rich.console import Console
    from rich.table import Table

    name = find_target(gpu).name
    family = FAMILIES.get(name, name)
    runs = [run for run in load_runs(path) if FAMILIES.get(run.gpu.name, run.gpu.name) == family and run.grade == "A"]
    if len(runs) < 3:
        raise UserError(f"--gpu={gpu}: {len(runs)} measured runs of this GPU; a fit needs at least 3")
    console = Console(soft_wrap=True)
    comparisons = leave_one_cluster_out(runs)
    table = Table(title="predicted by a fit to the other clusters")
    for column in ("run", "measured tokens/s/GPU", "predicted", "error"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for one in comparisons:
        measured = f"{one.run.tokens_per_s_per_gpu:,.1f}"
        table.add_row(one.run.id, measured, f"{one.predicted:,.1f}", f"{one.error:+.1%}")
    console.print(table)
    console.print(
        f"mean absolute error {mean_absolute_error(comparisons):.1%}, "
        f"rank correlation {rank_correlation(comparisons):.3f}, {len(runs)} runs"
    )
    fitted = fit(runs)
    settings = " ".join(f"--assume {name}={getattr(fitted, name):g}" for name, *_ in FITTED)
    console.print(f"fitted to all of them: {settings}")
    return fitted
