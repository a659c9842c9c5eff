"""Ranks layouts: the closed-form model over all, the compiler over a short list, with a reason for each rank."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence

from jaxpar import validate
from jaxpar.config import Config
from jaxpar.dryrun.assumptions import Assumptions, default_assumptions
from jaxpar.dryrun.compile import DEFAULT_TIMEOUT_S, missing_plugin
from jaxpar.dryrun.memory import memory_by_class
from jaxpar.dryrun.report import Report
from jaxpar.dryrun.run import Options, analytic_report, dry_run
from jaxpar.dryrun.shape import Layout, ModelShape, model_shape
from jaxpar.dryrun.targets import GpuTarget, find_target
from jaxpar.errors import UserError
from jaxpar.planner.candidates import Candidate, ShortList, search
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


def nothing_fits(space: Space, smallest: Candidate | None, gpu: GpuTarget, assumed: Assumptions) -> UserError:
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
    found = search(space, target, assumed)
    if not found.fitting:
        raise nothing_fits(space, found.smallest, target, assumed)
    progress(f"{found.considered} layouts considered, {len(found.fitting)} fit by the closed-form model")

    def works(layout: Layout) -> bool:
        problems = validate.problems(config_of(config, layout), num_gpus)
        if problems:
            space.rejected[f"refused: {problems[0].split(':')[0][:80]}"] += 1
        return not problems

    missing = missing_plugin() if search_options.compile else None
    compiling = search_options.compile and missing is None
    count = search_options.max_compiles if compiling else search_options.shown
    chosen = ShortList(found.fitting, count, assumed.usable_bytes(target.memory_bytes), works)
    if compiling:
        progress(f"compiling at most {count} of them; each takes seconds for a small model, a minute for a large one")
    making = _Making(config, shape, target, assumed, per_node, search_options, progress)
    reports = making.compile(chosen) if compiling else making.closed_form(chosen)
    if not reports:
        reasons = making.refused or [reason for reason, _ in space.rejected.most_common()]
        raise UserError(
            f"none of the {len(found.fitting)} layouts that fit passes the checks of a run: {'; '.join(reasons[:3])}"
        )
    return Plan(
        layouts=_ranked(config, reports),
        rejected=tuple(space.rejected.most_common()),
        considered=found.considered,
        fitting=len(found.fitting),
        compiled=sum(report.compiled for _, report in reports),
        refused=tuple(making.refused),
        notes=(missing,) if missing is not None else (),
    )


class _Making:
    """Makes the reports of short-listed layouts."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        gpu: GpuTarget,
        assumed: Assumptions,
        per_node: int,
        options: Search,
        progress: Callable[[str], None],
    ) -> None:
        self.config, self.shape, self.gpu, self.assumed = config, shape, gpu, assumed
        self.per_node, self.options, self.progress = per_node, options, progress
        self.refused: list[str] = []

    def closed_form(self, chosen: ShortList) -> list[tuple[Layout, Report]]:
        """Closed-form reports, fastest first."""
        out = []
        while (one := chosen.next()) is not None:
            report = analytic_report(
                self.config, self.shape, one.layout, self.gpu, self.assumed, gpus_per_node=self.per_node
            )
            out.append((one.layout, report))
        return out

    def compile(self, chosen: ShortList) -> list[tuple[Layout, Report]]:
        """Reports of compiled layouts; each compile is a process, and the next pick knows those that are done."""
        out: list[tuple[Layout, Report]] = []
        with concurrent.futures.ThreadPoolExecutor(self.options.parallel_compiles) as pool:
            running: dict[concurrent.futures.Future[Report], Candidate] = {}
            while True:
                while len(running) < self.options.parallel_compiles and (one := chosen.next()) is not None:
                    running[pool.submit(self._compiled, one.layout)] = one
                if not running:
                    return out
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    candidate = running.pop(future)
                    words = mesh_words(candidate.layout)
                    try:
                        report = future.result()
                    except UserError as error:
                        self.refused.append(f"{words}: {error}")
                        continue
                    chosen.learn(candidate, report)
                    out.append((candidate.layout, report))
                    fits = f"{report.step_time_s:.3f} s" if report.fits else "does not fit"
                    self.progress(f"compiled {len(out)} of at most {chosen.count}: {fits}, {words}")

    def _compiled(self, layout: Layout) -> Report:
        options = Options(gpus_per_node=self.per_node, timeout_s=self.options.timeout_s, assumed=self.assumed)
        return dry_run(config_of(self.config, layout), self.gpu, layout.num_gpus, options=options)


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
