"""Two streams, compute and communication, walked in the compiler's own schedule order.

A collective's start takes the communication stream, its done makes the compute stream wait; that wait, and a share of
what runs hidden (it slows the compute beside it), is the exposed time and is charged to the collective. Loop bodies
count trip-count times. In a pipeline, stages move in lock step: a conditional takes as long as its longest branch in
every tick in which any stage takes it, while FLOPs and bytes count the ticks in which the average stage does.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.groups import axes_of
from jaxpar.dryrun.hlo import Computation, Instruction, Module, Shape
from jaxpar.dryrun.links import collective_time_s, matmul_time_s
from jaxpar.dryrun.ops import (
    FREE,
    Communication,
    HostCopy,
    collective_kind,
    communication_of,
    host_copy_of,
    matmuls_of,
    sol_s,
    traffic_bytes,
)
from jaxpar.dryrun.targets import GpuTarget


@dataclasses.dataclass
class CollectiveTotal:
    """All collectives of one kind over the same mesh axes, per device and step."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    asynchronous: bool
    between_nodes: bool
    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    count: float = 0.0
    time_s: float = 0.0
    exposed_s: float = 0.0
    sol_s: float = 0.0  # by XLA's own cost model
    arrays: dict[Shape, float] = dataclasses.field(default_factory=dict)  # operands, and how often each is moved

    @property
    def axis(self) -> str:
        """Mesh axes joined by "+"; "-" for a group of one."""
        return "+".join(self.axes) or "-"


MOST_SPANS = 20_000  # a loop that would make more is one bar


@dataclasses.dataclass(frozen=True)
class Span:
    """One bar of the picture of a step; what computes without a gap is one bar."""

    stream: str  # "compute" | "communication" | "host"
    start_s: float
    end_s: float
    label: str


@dataclasses.dataclass(frozen=True)
class _Pending:
    """An operation that runs beside the compute stream."""

    end_s: float
    duration_s: float = 0.0
    total: CollectiveTotal | None = None


@dataclasses.dataclass(frozen=True)
class BranchShares:
    """Shares of a pipeline's ticks in which a conditional has work: on one stage, on any stage.

    Embedding and head run once per microbatch on all stages together, in `vocabulary` of the ticks; their
    conditionals are those with arrays of `vocabulary_dim` (a stage's share of the vocabulary). Conditionals inside of
    others are slots that hold a layer or not: on the average stage `slots_own` of them do, on the dearest one
    `slots_any_stage`.
    """

    own: float = 1.0
    any_stage: float = 1.0
    vocabulary: float = 1.0
    vocabulary_dim: int | None = None
    slots_own: float = 1.0
    slots_any_stage: float = 1.0


@dataclasses.dataclass
class Timeline:
    """What one step of the compiled program does and how long it is estimated to take."""

    flops_by_dtype: dict[str, float]
    attention_flops: float
    traffic_bytes: float
    collectives: list[CollectiveTotal]
    host_bytes: dict[str, float]
    compute_s: float
    communication_s: float
    exposed_s: float
    step_s: float
    sol_compute_s: float  # by XLA's own cost model, which knows nothing of fused attention
    kernels: float
    custom_calls: dict[str, float]
    spans: list[Span]
    top_operations: list[tuple[str, float, float]]  # name, seconds, count
    warnings: list[str]

    @property
    def flops(self) -> float:
        """Matmul FLOPs per device and step."""
        return sum(self.flops_by_dtype.values())


class _Walk:
    """One pass over a module."""

    def __init__(
        self,
        module: Module,
        mesh_shape: Mapping[str, int],
        gpu: GpuTarget,
        assumed: Assumptions,
        *,
        gpus_per_node: int,
        branches: BranchShares,
    ) -> None:
        self.module, self.mesh_shape, self.gpu, self.assumed = module, mesh_shape, gpu, assumed
        self.gpus_per_node, self.branches = gpus_per_node, branches
        self.num_devices = 1
        for size in mesh_shape.values():
            self.num_devices *= size
        self.flops: dict[str, float] = collections.defaultdict(float)
        self.attention_flops = self.traffic = self.compute_s = self.sol_compute_s = self.kernels = 0.0
        self.collectives: dict[tuple, CollectiveTotal] = {}
        self.host: dict[str, float] = collections.defaultdict(float)
        self.custom: dict[str, float] = collections.defaultdict(float)
        self.operations: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        self.spans: list[Span] = []
        self.vocabulary: dict[int, bool] = {}
        self.in_branch = False
        self.warnings: list[str] = []

    # Each of these returns seconds and adds to the totals, `times` being how often the instruction runs.

    def _kernel(self, computation: Computation, instruction: Instruction, times: float) -> float:
        matmuls = matmuls_of(self.module, computation, instruction)
        if instruction.opcode == "custom-call":
            self.custom[instruction.target] += times
        busy_s = 0.0
        for one in matmuls:
            self.flops[one.dtype] += one.flops * times
            self.attention_flops += one.flops * times * one.attention
            busy_s += matmul_time_s(
                one.dtype, one.flops, one.smallest_dim, attention=one.attention, gpu=self.gpu, assumed=self.assumed
            )
        moved = traffic_bytes(self.module, computation, instruction)
        memory_s = moved / (self.gpu.hbm_bytes_per_s * self.assumed.hbm_efficiency)
        seconds = max(busy_s, memory_s) + self.assumed.launch_s
        self.traffic += moved * times
        self.kernels += times
        self.compute_s += seconds * times
        self.sol_compute_s += sol_s(instruction) * times
        name = instruction.op_name.rsplit("/", 1)[-1] or instruction.name.split(".")[0]
        entry = self.operations[f"{'matmul' if matmuls else instruction.opcode} {name}"]
        entry[0] += seconds * times
        entry[1] += times
        return seconds

    def _communicate(self, one: Communication, times: float) -> tuple[CollectiveTotal, float]:
        seconds = collective_time_s(
            one.kind,
            one.payload_bytes,
            num_nodes=one.num_nodes,
            members_per_node=one.members_per_node,
            gpu=self.gpu,
            assumed=self.assumed,
        )
        axes = axes_of(one.axes_key, self.mesh_shape) if one.group_size > 1 else ()
        key = (one.kind, axes, one.group_size, one.dtype, one.asynchronous)
        total = self.collectives.setdefault(
            key, CollectiveTotal(one.kind, axes, one.group_size, one.dtype, one.asynchronous, one.num_nodes > 1)
        )
        total.payload_bytes += one.payload_bytes * times
        total.wire_bytes += one.wire_bytes * times
        total.count += times
        total.time_s += seconds * times
        total.sol_s += one.sol_s * times
        for array in one.arrays:
            total.arrays[array] = total.arrays.get(array, 0.0) + times
        return total, seconds

    def _span(self, top: bool, stream: str, start_s: float, end_s: float, label: str) -> None:
        if not top or end_s <= start_s:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last.stream == stream == "compute" and abs(start_s - last.end_s) < 1e-9:
            self.spans[-1] = dataclasses.replace(last, end_s=end_s)
        else:
            self.spans.append(Span(stream, start_s, end_s, label))

    def _loop(self, instruction: Instruction, times: float, start_s: float | None) -> float:
        """`start_s`: when the loop starts, where its iterations belong into the picture."""
        trips = instruction.config.get("known_trip_count", {}).get("n")
        if trips is None:
            self.warnings.append(f"loop {instruction.name}: trip count not known, counted once")
            trips = 1
        seconds, before = 0.0, self.spans
        one: list[Span] = []  # of one iteration: the condition, then the body
        for called in instruction.called:
            self.spans = []
            taken_s = self.walk(self.module.computations[called], times * int(trips), top=start_s is not None)
            one += [dataclasses.replace(s, start_s=s.start_s + seconds, end_s=s.end_s + seconds) for s in self.spans]
            seconds += taken_s
        self.spans = before
        if start_s is not None:
            self._repeat(one, int(trips), start_s, seconds, _label(instruction))
        return seconds * int(trips)

    def _repeat(self, one: list[Span], trips: int, start_s: float, trip_s: float, label: str) -> None:
        """Adds the spans of a loop, given those of one iteration."""
        if len(self.spans) + len(one) * trips > MOST_SPANS:
            self._span(True, "compute", start_s, start_s + trips * trip_s, label)
            return
        for trip in range(trips):
            shift = start_s + trip * trip_s
            for span in one:
                self._span(True, span.stream, span.start_s + shift, span.end_s + shift, span.label)

    def _branches(self, instruction: Instruction, times: float) -> float:
        """The longest branch sets the pace; the counts are those of the share of ticks it runs in."""
        called = [self.module.computations[one] for one in instruction.called]
        own, any_stage = self.branches.own, self.branches.any_stage
        if self.in_branch:
            own, any_stage = self.branches.slots_own, self.branches.slots_any_stage
        elif any(self._has_vocabulary(computation) for computation in called):
            own = any_stage = self.branches.vocabulary
        outer, self.in_branch = self.in_branch, True
        longest = max(self.walk(computation, times * own) for computation in called)
        self.in_branch = outer
        return any_stage * longest

    def _has_vocabulary(self, computation: Computation) -> bool:
        found = self.vocabulary.get(computation.id)
        if found is None:
            self.vocabulary[computation.id] = False
            found = any(
                self.branches.vocabulary_dim in array.dims
                for instruction in computation.instructions
                for array in instruction.shape.arrays()
            ) or any(
                self._has_vocabulary(self.module.computations[called])
                for instruction in computation.instructions
                for called in instruction.called
            )
            self.vocabulary[computation.id] = found
        return found

    def walk(self, computation: Computation, times: float, *, top: bool = False) -> float:
        """Seconds of one run of the computation."""
        now = network_free = host_free = 0.0
        pending: dict[int, _Pending] = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            start = now
            if opcode in FREE:
                continue
            if opcode.endswith("-done"):
                now = self._wait(pending.pop(self._start_of(computation, instruction, pending), None), now, times)
                continue
            if opcode in ("while", "call", "conditional"):
                if opcode == "while":
                    now += self._loop(instruction, times, start if top else None)
                    continue
                if opcode == "conditional":
                    now += self._branches(instruction, times)
                else:
                    now += sum(self.walk(self.module.computations[called], times) for called in instruction.called)
                self._span(top, "compute", start, now, _label(instruction))
                continue
            found = self._collective(computation, instruction)
            if found is not None:
                total, seconds = self._communicate(found, times)
                begin = max(now, network_free)
                network_free = begin + seconds
                self._span(top, "communication", begin, network_free, f"{found.kind} over {total.axis}")
                if found.asynchronous:
                    pending[instruction.id] = _Pending(network_free, seconds, total)
                else:
                    total.exposed_s += (network_free - now) * times
                    now = network_free
                    pending[instruction.id] = _Pending(now)
                continue
            if opcode == "async-start":
                called = self.module.computations[instruction.called[0]]
                seconds = self.walk(called, times)
                if self._copies_to_host(called):
                    begin = max(now, host_free)
                    host_free = begin + seconds
                    self._span(top, "host", begin, host_free, _label(instruction))
                    pending[instruction.id] = _Pending(host_free)
                else:  # kernels on a stream of their own take the same multiprocessors
                    now += seconds
                    self._span(top, "compute", start, now, _label(instruction))
                    pending[instruction.id] = _Pending(now)
                continue
            copy = host_copy_of(self.module, computation, instruction)
            if copy is not None:
                host_free = max(now, host_free) + self._host_copy(copy, times)
                if opcode == "copy-start":
                    pending[instruction.id] = _Pending(host_free)
                else:
                    now = host_free
                continue
            now += self._kernel(computation, instruction, times)
            self._span(top, "compute", start, now, _label(instruction))
        return now

    def _host_copy(self, copy: HostCopy, times: float) -> float:
        """Seconds of a copy between a GPU and its host, which is counted."""
        self.host["to_host" if copy.to_host else "to_device"] += copy.size_bytes * times
        return copy.size_bytes / (self.gpu.pcie_bytes_per_s * self.assumed.pcie_efficiency)

    def _copies_to_host(self, computation: Computation) -> bool:
        return any(host_copy_of(self.module, computation, one) is not None for one in computation.instructions)

    def _wait(self, started: _Pending | None, now: float, times: float) -> float:
        """When the compute stream goes on after a done: waiting, and the slowdown by what ran beside it."""
        if started is None:
            return now
        exposed = max(0.0, started.end_s - now)
        if started.total is not None:
            exposed += self.assumed.overlap_cost * max(0.0, started.duration_s - exposed)
            started.total.exposed_s += exposed * times
        return now + exposed

    def _start_of(self, computation: Computation, done: Instruction, pending: Mapping[int, object]) -> int:
        start = done.operands[0]
        while start not in pending and computation.by_id[start].opcode in (
            "async-update",
            "get-tuple-element",
            "bitcast",
        ):
            start = computation.by_id[start].operands[0]
        return start

    def _collective(self, computation: Computation, instruction: Instruction) -> Communication | None:
        inner_computation, inner = computation, instruction
        if instruction.opcode == "async-start":
            inner_computation = self.module.computations[instruction.called[0]]
            inner = inner_computation.root
        if collective_kind(inner.opcode) is None:
            return None
        synchronous = instruction.config.get("collective_backend_config", {}).get("is_sync", False)
        return communication_of(
            inner_computation,
            inner,
            num_devices=self.num_devices,
            gpus_per_node=self.gpus_per_node,
            asynchronous=instruction.opcode.endswith("-start") and not synchronous,
        )


def _label(instruction: Instruction) -> str:
    return instruction.op_name or instruction.name


def estimate_timeline(
    module: Module,
    mesh_shape: Mapping[str, int],
    gpu: GpuTarget,
    assumed: Assumptions,
    *,
    gpus_per_node: int = 8,
    branches: BranchShares = BranchShares(),
) -> Timeline:
    """Walks the module; `branches` says how busy the conditionals of a pipeline are."""
    walk = _Walk(module, mesh_shape, gpu, assumed, gpus_per_node=gpus_per_node, branches=branches)
    if not module.scheduled:
        walk.warnings.append("the module has no schedule: overlap is not meaningful")
    step_s = walk.walk(module.entry, 1.0, top=True)
    totals = sorted(walk.collectives.values(), key=lambda total: -total.time_s)
    operations = sorted(((name, s, n) for name, (s, n) in walk.operations.items()), key=lambda entry: -entry[1])
    return Timeline(
        flops_by_dtype=dict(walk.flops),
        attention_flops=walk.attention_flops,
        traffic_bytes=walk.traffic,
        collectives=totals,
        host_bytes=dict(walk.host),
        compute_s=walk.compute_s,
        communication_s=sum(total.time_s for total in totals),
        exposed_s=sum(total.exposed_s for total in totals),
        step_s=step_s,
        sol_compute_s=walk.sol_compute_s,
        kernels=walk.kernels,
        custom_calls=dict(walk.custom),
        spans=walk.spans,
        top_operations=operations[:12],
        warnings=walk.warnings,
    )
