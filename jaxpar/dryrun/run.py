"""One dry run from a config to a report: closed form always, compiled where the compiler is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpar.config import Config
from jaxpar.dryrun.assumptions import Assumptions, default_assumptions
from jaxpar.dryrun.checks import all_warnings, unfused_attention
from jaxpar.dryrun.classes import bytes_by_class, live_buffers
from jaxpar.dryrun.compile import DEFAULT_TIMEOUT_S, CompiledStep, compile_step, missing_plugin
from jaxpar.dryrun.energy import EnergyAssumptions, run_cost
from jaxpar.dryrun.memory import memory_by_class
from jaxpar.dryrun.report import CollectiveRow, Report
from jaxpar.dryrun.shape import Layout, ModelShape, layout_of, model_shape, stage_layers
from jaxpar.dryrun.speed import estimate_step
from jaxpar.dryrun.targets import GpuTarget, find_target
from jaxpar.dryrun.timeline import BranchShares, Timeline, estimate_timeline
from jaxpar.dryrun.work import flops_per_gpu, model_flops_per_token


@dataclasses.dataclass(frozen=True)
class Options:
    """How a dry run is made."""

    gpus_per_node: int | None = None  # None: as usual for the GPU
    compile: bool = True  # False: closed form only
    check_recompute: bool = False  # compile twice to catch silent recomputation
    timeout_s: float = DEFAULT_TIMEOUT_S
    assumed: Assumptions | None = None  # None: fitted for the GPU
    energy: EnergyAssumptions | None = None  # None: no cost
    compiler_options: dict[str, Any] | None = None


def dry_run(
    config: Config,
    gpu: str | GpuTarget,
    num_gpus: int,
    *,
    options: Options = Options(),
) -> Report:
    """What `config` needs and how fast it is on `num_gpus` of `gpu`.

    Without the compiler plugin the closed-form model answers and a warning says what is missing.

    Raises:
        UserError: unknown GPU, a layout that does not fit the GPUs, or a failed compile.
    """
    target = gpu if isinstance(gpu, GpuTarget) else find_target(gpu)
    assumed = options.assumed or default_assumptions(target.name)
    shape, layout = model_shape(config), layout_of(config, num_gpus)
    per_node = options.gpus_per_node or target.gpus_per_node
    report = analytic_report(config, shape, layout, target, assumed, gpus_per_node=per_node)
    if options.compile:
        missing = missing_plugin()
        if missing is None:
            report = _compiled_report(config, report, shape, layout, options, per_node)
        else:
            report = dataclasses.replace(report, warnings=(missing, *report.warnings))
    if not report.fits:
        helps = advice(config, report, gpus_per_node=per_node)
        over = (report.peak_bytes - report.usable_bytes) / 2**30
        note = f"does not fit by {over:.1f} GiB per GPU" + (f"; {'; '.join(helps[:3])}" if helps else "")
        report = dataclasses.replace(report, warnings=(note, *report.warnings))
    if options.energy is not None:
        cost = run_cost(
            target, num_gpus=num_gpus, steps=config.steps, step_s=report.step_time_s, assumed=options.energy
        )
        report = dataclasses.replace(report, cost=cost)
    return report


def analytic_report(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    gpu: GpuTarget,
    assumed: Assumptions,
    *,
    gpus_per_node: int,
) -> Report:
    """The closed-form answer."""
    memory = memory_by_class(shape, layout)
    speed = estimate_step(shape, layout, gpu, assumed, gpus_per_node=gpus_per_node)
    rows = [CollectiveRow(v.kind, v.axis, v.size_bytes, v.count, v.time_s, v.exposed_s) for v in speed.volumes]
    return Report(
        gpu=gpu,
        num_gpus=layout.num_gpus,
        mesh=layout.sizes,
        compiled=False,
        assumed=assumed,
        peak_bytes=memory.peak,
        argument_bytes=memory.state,
        temp_bytes=memory.peak - memory.state,
        bytes_by_class=dataclasses.asdict(memory),
        flops_per_gpu=flops_per_gpu(shape, layout),
        collectives=tuple(sorted(rows, key=lambda row: -row.time_s)),
        bubble_fraction=speed.bubble_fraction,
        step_time_s=speed.step_s,
        compute_s=speed.compute_s,
        exposed_s=speed.exposed_s,
        tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu,
        rows_per_s=config.global_batch / speed.step_s,
        mfu=speed.mfu,
        model_flops_per_token=model_flops_per_token(shape),
        num_parameters=shape.num_parameters(),
        warnings=tuple(unfused_attention(shape, layout)),
    )


def advice(config: Config, report: Report, *, gpus_per_node: int | None = None) -> list[str]:
    """What would help a run that does not fit, the most helpful change first, by the closed-form model."""
    layout, shape = layout_of(config, report.num_gpus), model_shape(config)
    now = memory_by_class(shape, layout).peak
    tries: list[tuple[str, ModelShape, Layout]] = []

    def attempt(words: str, **changes: Any) -> None:
        if any(getattr(layout, key) != value for key, value in changes.items()):
            tries.append((words, shape, dataclasses.replace(layout, **changes)))

    attempt("parallel.zero = 3", zero=3)
    attempt('remat = "full"', remat="full")
    attempt("loss.chunk_tokens = 1024", loss_chunk_tokens=min(1024, layout.loss_chunk_tokens or 1024))
    if layout.microbatch_rows > 1 and layout.stage == 1:
        times = layout.microbatch_rows
        attempt(
            f"accumulation = {layout.num_microbatches * times}",
            microbatch_rows=1,
            num_microbatches=layout.num_microbatches * times,
        )
    per_node = gpus_per_node or report.gpu.gpus_per_node
    if layout.tensor < per_node and layout.data % 2 == 0 and shape.num_heads % (2 * layout.tensor) == 0:
        attempt(f"parallel.tensor = {2 * layout.tensor}", tensor=2 * layout.tensor, data=layout.data // 2)
    attempt(f"twice the GPUs (--gpus={2 * report.num_gpus})", data=2 * layout.data)
    half = dataclasses.replace(shape, seq_len=shape.seq_len // 2)
    tries.append((f"seq_len = {half.seq_len}", half, layout))
    saved = sorted(((now - memory_by_class(s, o).peak, words) for words, s, o in tries), reverse=True)
    return [f"{words} saves about {size / 2**30:.1f} GiB per GPU" for size, words in saved if size > 0.01 * now]


def branch_shares(shape: ModelShape, layout: Layout, weights: Sequence[dict[str, Any]]) -> BranchShares:
    """How busy the conditionals of a pipeline program are, from its schedule table."""
    if layout.stage == 1:
        return BranchShares()
    from jaxpar.pipeline.generators import named

    schedule = named(layout.schedule, stages=layout.stage, microbatches=layout.num_microbatches, chunks=layout.chunks)
    busy, layers = schedule.table("F") >= 0, stage_layers(shape, layout)
    columns = {
        dim for weight in weights for name, dim in zip(weight["axes"], weight["local"]) if name == "vocab"
    }  # fmt: skip
    return BranchShares(
        own=float(busy.mean()),
        any_stage=float(busy.any(axis=1).mean()),
        vocabulary=layout.num_microbatches / schedule.ticks,
        vocabulary_dim=columns.pop(),
        slots_own=layers.average / layers.all_slots,
        slots_any_stage=layers.pacing / layers.all_slots,
    )


def time_step(
    step: CompiledStep, shape: ModelShape, layout: Layout, gpu: GpuTarget, assumed: Assumptions, per_node: int
) -> Timeline:
    """The time line of a compiled step."""
    return estimate_timeline(
        step.module,
        step.mesh_shape,
        gpu,
        assumed,
        gpus_per_node=per_node,
        branches=branch_shares(shape, layout, step.weights),
    )


def _compiled_report(
    config: Config, analytic: Report, shape: ModelShape, layout: Layout, options: Options, per_node: int
) -> Report:
    gpu, assumed = analytic.gpu, analytic.assumed

    def compiled(*, unlimited_memory: bool) -> CompiledStep:
        """The step for this GPU, or for one with memory to spare."""
        return compile_step(
            config,
            gpu,
            layout.num_gpus,
            gpus_per_node=per_node,
            timeout_s=options.timeout_s,
            unlimited_memory=unlimited_memory,
            compiler_options=options.compiler_options,
        )

    step = compiled(unlimited_memory=False)
    layout = dataclasses.replace(layout, **step.schedule)
    timeline = time_step(step, shape, layout, gpu, assumed, per_node)
    unlimited_flops = None
    if options.check_recompute:
        unlimited_flops = time_step(compiled(unlimited_memory=True), shape, layout, gpu, assumed, per_node).flops
    warnings = all_warnings(step, timeline, shape, layout, gpus_per_node=per_node, unlimited_flops=unlimited_flops)
    return report_of(config, analytic, step, timeline, shape, layout, warnings)


def collective_rows(timeline: Timeline) -> tuple[CollectiveRow, ...]:
    """One row per kind, axis and dtype, the dearest first."""
    rows: dict[tuple[str, str, str], CollectiveRow] = {}
    for total in timeline.collectives:
        if total.group_size == 1:
            continue
        key = (total.kind, total.axis, total.dtype)
        before = rows.get(key, CollectiveRow(*key[:2], 0.0, 0.0, 0.0, 0.0, total.dtype, total.between_nodes))
        rows[key] = dataclasses.replace(
            before,
            size_bytes=before.size_bytes + total.payload_bytes,
            count=before.count + total.count,
            time_s=before.time_s + total.time_s,
            exposed_s=before.exposed_s + total.exposed_s,
            sol_s=before.sol_s + total.sol_s,
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.time_s))


def report_of(
    config: Config,
    analytic: Report,
    step: CompiledStep,
    timeline: Timeline,
    shape: ModelShape,
    layout: Layout,
    warnings: list[str],
) -> Report:
    """The report of a compiled step; `analytic` keeps its figures beside it."""
    buffers = live_buffers(step, shape, layout)
    tokens_per_s = config.global_batch * config.seq_len / timeline.step_s / layout.num_gpus
    top = [
        {"bytes": one.size_bytes, "class": one.kind, "shape": one.shape, "origin": one.origin} for one in buffers[:20]
    ]
    closed = {
        "peak_bytes": analytic.peak_bytes,
        "bytes_by_class": analytic.bytes_by_class,
        "flops_per_gpu": analytic.flops_per_gpu,
        "step_time_s": analytic.step_time_s,
        "mfu": analytic.mfu,
    }
    return dataclasses.replace(
        analytic,
        compiled=True,
        mesh=step.mesh_shape,
        peak_bytes=float(step.peak_bytes),
        argument_bytes=float(step.argument_bytes),
        temp_bytes=float(step.temp_bytes),
        bytes_by_class=bytes_by_class(step, buffers),
        flops_per_gpu=timeline.flops,
        collectives=collective_rows(timeline),
        step_time_s=timeline.step_s,
        compute_s=timeline.compute_s,
        exposed_s=timeline.exposed_s,
        sol_compute_s=timeline.sol_compute_s,
        tokens_per_s_per_gpu=tokens_per_s,
        rows_per_s=config.global_batch / timeline.step_s,
        mfu=tokens_per_s * analytic.model_flops_per_token / analytic.gpu.bf16_flops_per_s,
        warnings=tuple(warnings),
        top_buffers=tuple(top),
        top_operations=tuple({"name": n, "time_s": s, "count": c} for n, s, c in timeline.top_operations),
        host_bytes=float(step.host_bytes),
        closed_form=closed,
        compile={
            "lower_s": step.lower_s,
            "compile_s": step.compile_s,
            "peak_rss_bytes": step.peak_rss_bytes,
            "alias_bytes": step.alias_bytes,
            "output_bytes": step.output_bytes,
            "state_bytes": step.state,
            "fused_attention": layout.fused_attention,
            "schedule": layout.schedule if layout.stage > 1 else None,
        },
        spans=tuple(timeline.spans),
    )
