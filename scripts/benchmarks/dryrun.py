"""Predicted against measured: published runs, by the closed form and by compiling the same layout.

`run()` prints one row per published run, predicted / measured tokens per second and GPU, and returns them; the last
rows are mean errors and rank correlation with their limits. Every run is predicted by assumptions that were fitted
without its cluster.
"""

from __future__ import annotations

import time
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
from jaxpar.dryrun.run import Options, dry_run, time_step

# Our nearest policy to a published one: "matmuls" keeps the attention's output too and "qkv" three matmuls, which ours
# compute again, about 2 % of a step.
OUR_REMAT = {
    "none": "none",
    "dots": "dots",
    "attention": "attention",
    "full": "full",
    "matmuls": "dots",
    "qkv": "full",
}
CLOSED_FORM_LIMIT, COMPILED_LIMIT, CORRELATION_LIMIT = 0.15, 0.07, 0.95


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
    rows.append(summary("closed form: mean absolute error", mean_absolute_error(comparisons), CLOSED_FORM_LIMIT))
    correlation = rank_correlation(comparisons)
    rows.append(summary("closed form: 1 - rank correlation", 1 - correlation, 1 - CORRELATION_LIMIT))
    if compiled and missing_plugin() is None:
        programs: dict[tuple[Config, str], CompiledStep] = {}
        found = [compare_compiled(one, every, programs) for one in runs if ours(one)]
        rows += [row(f"compiled: {one.run.id}", one) for one in found]
        rows.append(summary("compiled: mean absolute error", mean_absolute_error(found), COMPILED_LIMIT))
        rows += compile_cost()
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
    `programs` keeps what was compiled: some runs differ only in their cluster.
    """
    others = [other for other in runs if family_of(other) == family_of(one) and other.cluster != one.cluster]
    assumed = fit(others)
    config = config_of_run(one)
    key = config, one.gpu.name
    if key not in programs:
        programs[key] = compile_step(config, one.gpu, one.layout.num_gpus, gpus_per_node=one.gpus_per_node)
    timeline = time_step(programs[key], one.layout, one.gpu, assumed, one.gpus_per_node)
    tokens = config.global_batch * config.seq_len
    return Comparison(one, tokens / timeline.step_s / one.layout.num_gpus)


def compile_cost() -> list[dict[str, Any]]:
    """Seconds of a dry run at 16,384 GPUs relative to 64."""
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
        started = time.monotonic()
        dry_run(config, "h100", gpus, options=Options(assumed=Assumptions()))
        seconds.append(time.monotonic() - started)
    return [summary("time of a dry run, 16384 GPUs / 64 GPUs", seconds[1] / seconds[0], 1.5)]


def row(name: str, one: Comparison) -> dict[str, Any]:
    """A printed ratio."""
    ratio = one.predicted / one.run.tokens_per_s_per_gpu
    detail = f"{one.predicted:.0f} of {one.run.tokens_per_s_per_gpu:.0f} tokens/s/GPU"
    print(f"{name:66} {ratio:6.3f}  {detail}", flush=True)
    return {"name": name, "ratio": ratio, "detail": detail}


def summary(name: str, found: float, limit: float) -> dict[str, Any]:
    """A number with its limit."""
    print(f"{name:66} {found:6.3f}  at most {limit:g} {'ok' if found <= limit else 'ABOVE'}", flush=True)
    return {"name": name, "found": found, "limit": limit}


if __name__ == "__main__":
    run()
