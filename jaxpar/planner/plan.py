"""Ranks layouts: the closed-form model over all, the compiler over a short list, with a reason for each rank."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

from jaxpar import validate
from jaxpar.config import Config
from jaxpar.dryrun.assumptions import Assumptions, default_assumptions
from jaxpar.dryrun.compile import DEFAULT_TIMEOUT_S, missing_plugin
from jaxpar.dryrun.memory import memory_by_class
from jaxpar.dryrun.report import Report
from jaxpar.dryrun.run import Options, analytic_report, dry_run
from jaxpar.dryrun.shape import Layout, ModelShape, model_shape
from jaxpar.dryrun.speed import StepEstimate, estimate_step
from jaxpar.dryrun.targets import GpuTarget, find_target
from jaxpar.errors import UserError
from jaxpar.planner.space import Limits, Space, check_batch, config_of

MOST_GPUS = 1 << 17  # where the search for a number of GPUs that fits gives up


@dataclasses.dataclass(frozen=True)
class PlannedLayout:
    """One ranked layout."""

    rank: int
    layout: Layout
    config: Config
    report: Report
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Ranked layouts, best first, and what was left out."""

    layouts: tuple[PlannedLayout, ...]
    rejected: tuple[tuple[str, int], ...]
    considered: int
    fitting: int
    compiled: int
    refused: tuple[str, ...]  # short-listed layouts that the build or the compiler refused
    notes: tuple[str, ...]

    @property
    def best(self) -> PlannedLayout:
        """The winner."""
        return self.layouts[0]


@dataclasses.dataclass(frozen=True)
class Search:
    """How much is searched and compiled."""

    max_compiles: int = 12
    parallel_compiles: int = 2
    compile: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    shown: int = 12


@dataclasses.dataclass(frozen=True, order=True)
class _Candidate:
    step_s: float
    order: int
    layout: Layout = dataclasses.field(compare=False)
    estimate: StepEstimate = dataclasses.field(compare=False)


def mesh_words(layout: Layout) -> str:
    """A layout in a few words."""
    parts = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1] or ["one device"]
    parts.append(f"zero {layout.zero}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(f"remat {layout.remat}")
    parts.append(f"{layout.num_microbatches} x {layout.microbatch_rows} rows")
    if layout.stage > 1:
        parts.append(f"{layout.schedule}, {layout.chunks} chunks")
    return ", ".join(parts)


def _family(layout: Layout) -> tuple:
    """Layouts that differ in more than detail; the short list takes from several families."""
    return (layout.stage, layout.tensor, layout.context, layout.expert, layout.replica)


def search(space: Space, gpu: GpuTarget, assumed: Assumptions) -> tuple[list[_Candidate], int, _Candidate | None]:
    """(fitting candidates by predicted time, number considered, the one with the least memory)."""
    usable = assumed.usable_bytes(gpu.memory_bytes)
    found: list[_Candidate] = []
    considered = 0
    least: tuple[float, Layout] | None = None
    for layout in space.layouts():
        considered += 1
        memory = memory_by_class(space.shape, layout)
        if least is None or memory.peak < least[0]:
            least = (memory.peak, layout)
        if memory.peak > usable:
            space.rejected["does not fit"] += 1
            continue
        estimate = estimate_step(space.shape, layout, gpu, assumed, gpus_per_node=space.gpus_per_node)
        found.append(_Candidate(estimate.step_s, considered, layout, estimate))
    smallest = None
    if least is not None:
        estimate = estimate_step(space.shape, least[1], gpu, assumed, gpus_per_node=space.gpus_per_node)
        smallest = _Candidate(estimate.step_s, 0, least[1], estimate)
    found.sort()
    return found, considered, smallest


def short_list(candidates: Sequence[_Candidate], count: int, works: Callable[[Layout], bool]) -> list[_Candidate]:
    """The fastest candidates that `works`, at most a third of them of one family."""
    per_family: dict[tuple, int] = {}
    chosen: list[_Candidate] = []
    spare: list[_Candidate] = []
    for candidate in candidates:
        if len(chosen) == count:
            break
        if candidates and candidate.step_s > 1.5 * candidates[0].step_s and len(chosen) >= count // 2:
            break
        if not works(candidate.layout):
            continue
        family = _family(candidate.layout)
        if per_family.get(family, 0) >= max(2, math.ceil(count / 3)):
            heapq.heappush(spare, candidate)
            continue
        per_family[family] = per_family.get(family, 0) + 1
        chosen.append(candidate)
    while len(chosen) < count and spare:
        chosen.append(heapq.heappop(spare))
    return sorted(chosen)


def nothing_fits(space: Space, smallest: _Candidate | None, gpu: GpuTarget, assumed: Assumptions) -> UserError:
    """The error that says by how much nothing fits, and what would help most."""
    if smallest is None:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in space.rejected.most_common(4))
        return UserError(
            f"no layout divides this model and global_batch = {space.config.global_batch} over {space.num_gpus} GPUs: "
            f"{reasons}; try --gpus={_nearest(space)} or a global batch that is a multiple of it"
        )
    usable = assumed.usable_bytes(gpu.memory_bytes)
    memory = memory_by_class(space.shape, smallest.layout)
    largest = max(dataclasses.asdict(memory).items(), key=lambda item: item[1])
    shape = space.shape
    shorter = dataclasses.replace(shape, seq_len=max(1, shape.seq_len // 2))
    chunked = dataclasses.replace(smallest.layout, loss_chunk_tokens=min(1024, shape.seq_len))
    more = dataclasses.replace(smallest.layout, zero=3)
    while memory_by_class(shape, more).peak > usable and more.num_gpus < MOST_GPUS:
        more = dataclasses.replace(more, data=2 * more.data)
    helps = {
        f"more GPUs with ZeRO-3 (--gpus={more.num_gpus})": memory_by_class(shape, more).peak,
        f"seq_len = {shorter.seq_len}": memory_by_class(shorter, smallest.layout).peak,
        "loss.chunk_tokens = 1024": memory_by_class(shape, chunked).peak,
    }
    words, peak = min(helps.items(), key=lambda item: item[1])
    return UserError(
        f"nothing fits on {space.num_gpus} x {gpu.name}: the smallest layout ({mesh_words(smallest.layout)}) needs "
        f"{memory.peak / 2**30:.1f} GiB per GPU, {(memory.peak - usable) / 2**30:.1f} GiB more than the "
        f"{usable / 2**30:.1f} GiB usable; the largest part is {largest[0]} with {largest[1] / 2**30:.1f} GiB; what "
        f"helps most: {words}, down to {peak / 2**30:.1f} GiB"
    )


def _nearest(space: Space) -> int:
    lower = 1
    while lower * 2 <= space.num_gpus:
        lower *= 2
    return lower


def plan(
    config: Config,
    gpu: str | GpuTarget,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    assumed: Assumptions | None = None,
    search_options: Search = Search(),
    progress: Callable[[str], None] = lambda message: None,
) -> Plan:
    """The best layouts of `config` on `num_gpus`; its own layout, remat and microbatches are not looked at.

    Raises:
        UserError: no layout divides, or nothing fits (by how much, and what would help most).
    """
    target = gpu if isinstance(gpu, GpuTarget) else find_target(gpu)
    per_node = min(gpus_per_node or target.gpus_per_node, num_gpus)
    assumed = assumed or default_assumptions(target.name)
    check_batch(config, num_gpus)
    shape = model_shape(config)
    space = Space(config, shape, num_gpus, per_node, search_options.limits)
    candidates, considered, smallest = search(space, target, assumed)
    if not candidates:
        raise nothing_fits(space, smallest, target, assumed)
    progress(f"{considered} layouts considered, {len(candidates)} fit by the closed-form model")
    refused: list[str] = []

    def works(layout: Layout) -> bool:
        found = validate.problems(config_of(config, layout), num_gpus)
        if found:
            space.rejected[f"refused: {found[0].split(':')[0][:80]}"] += 1
        return not found

    notes = []
    compiling = search_options.compile
    if compiling and (missing := missing_plugin()) is not None:
        compiling = False
        notes.append(missing)
    count = search_options.max_compiles if compiling else search_options.shown
    chosen = short_list(candidates, count, works)
    if not chosen:
        raise UserError(
            f"none of the {len(candidates)} layouts that fit passes the checks of a run: "
            + "; ".join(reason for reason, _ in space.rejected.most_common(3))
        )
    reports = _reports(config, shape, chosen, target, assumed, per_node, search_options, compiling, refused, progress)
    ranked = _ranked(config, reports)
    if not ranked:
        raise UserError(f"every short-listed layout was refused: {'; '.join(refused[:3])}")
    return Plan(
        layouts=ranked,
        rejected=tuple(space.rejected.most_common()),
        considered=considered,
        fitting=len(candidates),
        compiled=sum(report.compiled for _, report in reports),
        refused=tuple(refused),
        notes=tuple(notes),
    )


def _reports(
    config: Config,
    shape: ModelShape,
    chosen: Sequence[_Candidate],
    gpu: GpuTarget,
    assumed: Assumptions,
    per_node: int,
    options: Search,
    compiling: bool,
    refused: list[str],
    progress: Callable[[str], None],
) -> list[tuple[Layout, Report]]:
    """A report per short-listed layout; compiles run side by side, each in its own process."""

    def closed(layout: Layout) -> Report:
        return analytic_report(config, shape, layout, gpu, assumed, gpus_per_node=per_node)

    if not compiling:
        return [(one.layout, closed(one.layout)) for one in chosen]

    def compiled(layout: Layout) -> Report:
        run_options = Options(gpus_per_node=per_node, timeout_s=options.timeout_s, assumed=assumed)
        return dry_run(config_of(config, layout), gpu, layout.num_gpus, options=run_options)

    out: list[tuple[Layout, Report]] = []
    with concurrent.futures.ThreadPoolExecutor(options.parallel_compiles) as pool:
        waiting = {pool.submit(compiled, one.layout): one.layout for one in chosen}
        for done in concurrent.futures.as_completed(waiting):
            layout = waiting[done]
            try:
                out.append((layout, done.result()))
            except UserError as error:
                refused.append(f"{mesh_words(layout)}: {error}")
                continue
            progress(f"compiled {len(out)} of {len(chosen)}: {mesh_words(layout)}")
    return out


def _ranked(config: Config, reports: Sequence[tuple[Layout, Report]]) -> tuple[PlannedLayout, ...]:
    """Fitting layouts by step time, then those that turned out not to fit."""
    ordered = sorted(reports, key=lambda pair: (not pair[1].fits, pair[1].step_time_s))
    best = ordered[0][1] if ordered else None
    out = []
    for rank, (layout, report) in enumerate(ordered, 1):
        assert best is not None
        out.append(PlannedLayout(rank, layout, config_of(config, layout), report, reason_for(rank, report, best)))
    return tuple(out)


def reason_for(rank: int, report: Report, best: Report) -> str:
    """Why a layout has its rank: what its step spends more time on than the winner's."""
    if not report.fits:
        over = (report.peak_bytes - report.usable_bytes) / 2**30
        return f"compiled, it needs {over:.1f} GiB more than there is"
    step = report.step_time_s
    parts = {
        "compute": report.compute_s,
        "exposed communication": report.exposed_s,
        "pipeline bubble": report.bubble_fraction * step,
    }
    if rank == 1:
        shares = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in parts.items() if seconds > 0.005 * step)
        return f"fastest that fits: {shares}"
    theirs = {
        "compute": best.compute_s,
        "exposed communication": best.exposed_s,
        "pipeline bubble": best.bubble_fraction * best.step_time_s,
    }
    more = {name: parts[name] - theirs[name] for name in parts}
    name, seconds = max(more.items(), key=lambda item: item[1])
    slower = step / best.step_time_s - 1
    return f"{slower:.1%} slower: {seconds * 1e3:+.1f} ms of {name}" if slower > 0 else "as fast"


def best_config(
    config: Config,
    gpu: str | GpuTarget,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    assumed: Assumptions | None = None,
    search_options: Search = Search(compile=False),
) -> Config:
    """`config` with the planner's first choice; by the closed-form model unless told to compile."""
    found = plan(config, gpu, num_gpus, gpus_per_node=gpus_per_node, assumed=assumed, search_options=search_options)
    return found.best.config
