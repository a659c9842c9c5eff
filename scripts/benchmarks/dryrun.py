"""Predicted against measured, and what a prediction costs.

`run()` prints one row per published run, predicted / measured tokens per second and GPU, by the closed form and, for
JAX programs, by compiling the same layout; then mean errors and rank correlation with their limits. Every run is
predicted by assumptions that were fitted without its cluster. The last rows are seconds and memory of compiles and of
a search. Their times are processor time of this process and its children, which other work on the machine does not
change; wall times stand beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar import config_file
from jaxpar.config import Config
from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.calibrate import (
    FAMILIES,
    Comparison,
    MeasuredRun,
    fit,
    leave_one_cluster_out,
    load_runs,
    mean_absolute_error,
    rank_correlation,
)
from jaxpar.dryrun.compile import CompiledStep, compile_step, missing_plugin
from jaxpar.dryrun.memory import memory_by_class
from jaxpar.dryrun.run import dry_run, time_step
from jaxpar.dryrun.speed import estimate_step
from jaxpar.planner.plan import plan

# Our nearest policy to a published one: "matmuls" keeps the attention's output too, "qkv" three matmuls and
# "all_but_mlp" all of attention, which ours compute again. The closed form says how much that is, 2 % to 5 % of a step.
OUR_REMAT = {
    "none": "none",
    "dots": "dots",
    "attention": "attention",
    "full": "full",
    "matmuls": "dots",
    "qkv": "full",
    "all_but_mlp": "full",
}
CLOSED_FORM_LIMIT, COMPILED_LIMIT, CORRELATION_LIMIT, MEMORY_LIMIT = 0.15, 0.07, 0.95, 1.1
COMPILE_LIMIT_S, COMPILE_LIMIT_GB, PLAN_LIMIT_S, PLAN_LIMIT_COMPILES = 90.0, 3.0, 300.0, 12
CORES = 2  # the limits are seconds of a machine with this many
ROOT = Path(__file__).resolve().parents[2]


def run(*, compiled: bool = True) -> list[dict[str, Any]]:
    """Prints every row as it comes; returns them as dicts."""
    every = load_runs()
    runs = [one for one in every if one.grade == "A"]
    families = sorted({family_of(one) for one in runs})
    comparisons: list[Comparison] = []
    rows: list[dict[str, Any]] = []
    for family in families:
        for one in leave_one_cluster_out([one for one in runs if family_of(one) == family]):
            comparisons.append(one)
            rows.append(row(f"closed form: {one.run.id}", one))
    rows += [memory_row(one) for one in runs if one.xla and one.memory_fraction]
    rows.append(summary("closed form: mean absolute error", mean_absolute_error(comparisons), CLOSED_FORM_LIMIT))
    correlation = rank_correlation(comparisons)
    rows.append(summary("closed form: 1 - rank correlation", 1 - correlation, 1 - CORRELATION_LIMIT))
    if compiled and missing_plugin() is None:
        programs: dict[tuple[Config, str], CompiledStep] = {}
        found = []
        for one in runs:
            if ours(one):
                found.append(compare_compiled(one, every, programs))
                rows.append(row(f"compiled: {one.id}", found[-1]))
        rows.append(summary("compiled: mean absolute error", mean_absolute_error(found), COMPILED_LIMIT))
        rows += compile_cost() + plan_cost()
    return rows


def family_of(one: MeasuredRun) -> str:
    """GPUs that are fitted together; those without a set of their own go with the H100."""
    return FAMILIES.get(one.gpu.name, "h100")


def ours(one: MeasuredRun) -> bool:
    """Whether jaxpar can compile this run's layout, precision and remat."""
    layout = one.layout
    return one.xla and layout.precision == "bf16" and layout.remat in OUR_REMAT and layout.stage == 1


def config_of_run(one: MeasuredRun) -> Config:
    """The run as a config of ours."""
    shape, layout = one.shape, one.layout
    model = {
        "family": "llama" if shape.gated else "gpt2",
        "num_layers": shape.num_layers,
        "embed_dim": shape.embed_dim,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "mlp_dim": shape.mlp_dim,
        "vocab_size": shape.vocab,
        "tied": shape.tied,
    }
    parallel = {"replica": layout.replica, "data": layout.data, "tensor": layout.tensor, "zero": layout.zero}
    return config_file.from_dict(
        {
            "global_batch": layout.global_batch,
            "seq_len": shape.seq_len,
            "accumulation": layout.num_microbatches,
            "remat": OUR_REMAT[layout.remat],
            "model": model,
            "parallel": parallel,
        }
    )


def compare_compiled(
    one: MeasuredRun, runs: list[MeasuredRun], programs: dict[tuple[Config, str], CompiledStep]
) -> Comparison:
    """Compiles our program in the run's layout and lays it on a time line.

    The fit sees every run of the other clusters, also those with an assumption about their layout; none of this one.
    What our nearest remat policy computes more than the run's own is taken off, by the closed form. `programs` keeps
    what was compiled: some runs differ only in their cluster.
    """
    assumed = fit_to_others(one.cluster, family_of(one), tuple(runs))
    config = config_of_run(one)
    key = config, one.gpu.name
    if key not in programs:
        programs[key] = compile_step(config, one.gpu, one.layout.num_gpus, gpus_per_node=one.gpus_per_node)
    timeline = time_step(programs[key], one.shape, one.layout, one.gpu, assumed, one.gpus_per_node)

    def closed_s(remat: str) -> float:
        layout = dataclasses.replace(one.layout, remat=remat)
        return estimate_step(one.shape, layout, one.gpu, assumed, gpus_per_node=one.gpus_per_node).step_s

    step_s = timeline.step_s * closed_s(one.layout.remat) / closed_s(config.remat)
    return Comparison(one, config.global_batch * config.seq_len / step_s / one.layout.num_gpus)


@functools.cache
def fit_to_others(cluster: str, family: str, runs: tuple[MeasuredRun, ...]) -> Assumptions:
    """The assumptions of this kind of GPU without one cluster."""
    return fit([other for other in runs if family_of(other) == family and other.cluster != cluster])


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a piece of work took, processes it started included."""

    wall_s: float
    cpu_s: float

    @property
    def quiet_s(self) -> float:
        """Wall time on a machine with nothing else to do, were all cores busy to the end."""
        return self.cpu_s / CORES


def cost_of(work: Callable[[], Any]) -> tuple[Any, Cost]:
    """The result of `work` and its cost."""

    def processor_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    started, before = time.monotonic(), processor_s()
    result = work()
    return result, Cost(time.monotonic() - started, processor_s() - before)


def compile_cost() -> list[dict[str, Any]]:
    """Seconds and memory of the largest dry run, and seconds at 16,384 GPUs relative to 64."""
    largest = config_file.load(ROOT / "configs" / "llama31_405b.py")
    report, cost = cost_of(lambda: dry_run(largest, "h100", 16_384))
    detail = f"{cost.wall_s:.0f} s of wall time"
    rows = [
        summary("llama31_405b on 16384 H100: seconds on one core", cost.cpu_s, COMPILE_LIMIT_S, detail),
        summary("llama31_405b on 16384 H100: GB", report.compile["peak_rss_bytes"] / 1e9, COMPILE_LIMIT_GB),
    ]
    seconds = []
    for gpus in (64, 16_384):
        settings = {"num_layers": 32, "embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14336}
        config = config_file.from_dict(
            {
                "global_batch": gpus // 8,
                "seq_len": 4096,
                "remat": "full",
                "model": settings | {"vocab_size": 128_256},
                "parallel": {"tensor": 8, "zero": 3, "replica": max(1, gpus // 512), "data": -1},
            }
        )
        seconds.append(cost_of(lambda config=config, gpus=gpus: dry_run(config, "h100", gpus))[1])
    detail = f"{seconds[1].cpu_s:.1f} / {seconds[0].cpu_s:.1f} s on one core"
    ratio = seconds[1].cpu_s / seconds[0].cpu_s
    return [*rows, summary("time of a dry run, 16384 GPUs / 64 GPUs", ratio, 1.5, detail)]


def plan_cost() -> list[dict[str, Any]]:
    """Seconds and compiles of a search."""
    config = config_file.load(ROOT / "configs" / "llama3_70b.py")
    found, cost = cost_of(lambda: plan(config, "h100", 512))
    detail = f"{cost.wall_s:.0f} s of wall time, {cost.cpu_s:.0f} s on one core"
    return [
        summary("plan of llama3_70b on 512 H100: seconds on two cores", cost.quiet_s, PLAN_LIMIT_S, detail),
        summary("plan of llama3_70b on 512 H100: compiles", found.compiled, PLAN_LIMIT_COMPILES),
    ]


def row(name: str, one: Comparison) -> dict[str, Any]:
    """A printed ratio."""
    ratio = one.predicted / one.run.tokens_per_s_per_gpu
    detail = f"{one.predicted:.0f} of {one.run.tokens_per_s_per_gpu:.0f} tokens/s/GPU"
    print(f"{name:66} {ratio:6.3f}  {detail}", flush=True)
    return {"name": name, "ratio": ratio, "detail": detail}


def memory_row(one: MeasuredRun) -> dict[str, Any]:
    """Predicted peak relative to the memory that a JAX run was given and did with; 10 % too much is allowed."""
    assert one.memory_fraction is not None
    given = one.memory_fraction * one.gpu.memory_bytes
    peak = memory_by_class(one.shape, one.layout).peak
    detail = f"{peak / 2**30:.1f} of {given / 2**30:.1f} GiB"
    return summary(f"memory: {one.id}", peak / given, MEMORY_LIMIT, detail)


def summary(name: str, found: float, limit: float, detail: str = "") -> dict[str, Any]:
    """A number with its limit."""
    verdict = "ok" if found <= limit else "ABOVE"
    print(f"{name:66} {found:6.3f}  at most {limit:g} {verdict}  {detail}", flush=True)
    return {"name": name, "found": found, "limit": limit, "detail": detail}


if __name__ == "__main__":
    run()
