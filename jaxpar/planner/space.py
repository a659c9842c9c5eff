"""Every layout worth a thought: parallel degrees, ZeRO, remat and microbatches that divide as they must.

What a rule drops is counted with its reason, so that a plan can say what it did not consider.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from jaxpar.config import Config
from jaxpar.dryrun.shape import OPTIMIZER_FLOATS, Layout, ModelShape, can_fuse_attention, gradient_bytes, stage_layers
from jaxpar.errors import UserError

MOST_ACTIVE_CHUNKS = 4
SHORTEST_CONTEXT_SHARD = 2048
MOST_PADDING = 0.125  # of the time of all stages


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of the search; None leaves an axis free."""

    max_stage: int | None = None
    max_context: int | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    remat: tuple[str, ...] = ("none", "attention", "dots", "full")
    max_microbatches: int = 256


def divisors(number: int) -> list[int]:
    """Divisors in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`."""
    out = [1]
    while out[-1] * 2 <= limit:
        out.append(out[-1] * 2)
    return out


@dataclasses.dataclass
class Space:
    """Candidate layouts of a model on a number of GPUs."""

    config: Config
    shape: ModelShape
    num_gpus: int
    gpus_per_node: int
    limits: Limits = Limits()
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def meshes(self) -> Iterator[dict[str, int]]:
        """Degrees that multiply to the number of GPUs."""
        shape, N = self.shape, self.num_gpus
        for stage in divisors(N):
            if stage > min(shape.num_layers, self.limits.max_stage or shape.num_layers):
                self.rejected["more stages than layers or than the limit"] += 1
                continue
            if stage > 1 and self._padding(stage, 1) > MOST_PADDING:
                self.rejected["stages would hold too unequal numbers of layers"] += 1
                continue
            for tensor in divisors(N // stage):
                if not self._tensor_works(tensor):
                    continue
                if stage > 1 and shape.vocab % (stage * tensor):
                    self.rejected["vocabulary does not divide by stage x tensor"] += 1
                    continue
                for context in self._contexts(N // stage // tensor):
                    for expert in self._experts(N // stage // tensor // context):
                        left = N // stage // tensor // context // expert
                        for replica in self._replicas(left, expert * context * tensor):
                            yield {
                                "stage": stage,
                                "replica": replica,
                                "data": left // replica,
                                "expert": expert,
                                "context": context,
                                "tensor": tensor,
                            }

    def _tensor_works(self, tensor: int) -> bool:
        shape = self.shape
        if tensor > self.gpus_per_node:
            self.rejected["tensor does not fit in a node"] += 1
            return False
        kv = shape.kv_heads
        widths = (shape.num_heads, shape.mlp_dim, shape.vocab, shape.expert_dim or tensor)
        if any(width % tensor for width in widths) or (kv % tensor and tensor % kv):
            self.rejected["heads, width or vocabulary do not divide by tensor"] += 1
            return False
        return True

    def _contexts(self, left: int) -> list[int]:
        longest = max(1, self.shape.seq_len // SHORTEST_CONTEXT_SHARD)
        limit = self.limits.max_context
        if limit is None:
            limit = 1 if self.shape.seq_len < 16384 else self.gpus_per_node * 2
        # Zigzag order needs two pieces per shard.
        return [
            d for d in divisors(left) if d <= min(longest, limit) and (d == 1 or self.shape.seq_len % (2 * d) == 0)
        ]  # fmt: skip

    def _experts(self, left: int) -> list[int]:
        if not self.shape.num_experts:
            return [1]
        return [d for d in divisors(left) if self.shape.num_experts % d == 0]

    def _replicas(self, left: int, inner: int) -> list[int]:
        """No replicas, or ZeRO groups that are a node or a few."""
        out = [1]
        for nodes in (1, 4, 16, 64):
            data = nodes * self.gpus_per_node // inner
            if 1 < data < left and left % data == 0:
                out.append(left // data)
        return out

    def layouts(self) -> Iterator[Layout]:
        """Every candidate."""
        fused = can_fuse_attention(self.config)
        floats = OPTIMIZER_FLOATS[self.config.optimizer.name]
        for mesh in self.meshes():
            shards = mesh["replica"] * mesh["data"] * mesh["expert"]
            if self.config.global_batch % shards:
                self.rejected["global batch does not divide by replica x data x expert"] += 1
                continue
            rows = self.config.global_batch // shards
            for microbatches, chunks in self._passes(rows, mesh["stage"]):
                for zero in self._zero(mesh):
                    for sequence_parallel in (False, True) if mesh["tensor"] > 1 else (False,):
                        if sequence_parallel and self.shape.seq_len % (mesh["context"] * mesh["tensor"]):
                            continue
                        for remat in self._remat(mesh["stage"]):
                            yield Layout(
                                stage=mesh["stage"],
                                replica=mesh["replica"],
                                data=mesh["data"],
                                expert=mesh["expert"],
                                context=mesh["context"],
                                tensor=mesh["tensor"],
                                zero=zero,
                                sequence_parallel=sequence_parallel,
                                microbatch_rows=rows // microbatches,
                                num_microbatches=microbatches,
                                chunks=chunks,
                                remat=remat,
                                precision=self.config.precision,
                                fused_attention=fused,
                                optimizer_floats=floats,
                                gradient_bytes=gradient_bytes(self.config.precision, mesh["stage"]),
                                loss_chunk_tokens=self.config.loss.chunk_tokens,
                            )

    def _zero(self, mesh: dict[str, int]) -> tuple[int, ...]:
        if mesh["data"] * mesh["context"] * mesh["expert"] == 1:
            return (0,)
        # Replicas only make sense of a ZeRO group; with a pipeline, gathering weights in every tick never pays.
        levels = self.limits.zero if mesh["replica"] == 1 else tuple(z for z in self.limits.zero if z)
        if mesh["stage"] > 1 and len(levels) > 1:
            levels = tuple(z for z in levels if z < 3) or levels
        return levels

    def _remat(self, stage: int) -> tuple[str, ...]:
        if stage > 1 and self.shape.num_experts and self.shape.first_dense:
            return ("full",)  # stages skip slots, and keep only the inputs of layers
        return self.limits.remat

    def _passes(self, rows: int, stage: int) -> Iterator[tuple[int, int]]:
        """(microbatches, chunks) of a step."""
        counts = [d for d in divisors(rows) if d <= self.limits.max_microbatches]
        if stage == 1:
            yield from ((count, 1) for count in counts)
            return
        for count in counts:
            if count < stage:
                self.rejected["fewer microbatches than stages"] += 1
                continue
            for chunks in powers_of_two(MOST_ACTIVE_CHUNKS):
                if self._padding(stage, chunks) <= MOST_PADDING:
                    yield count, chunks

    def _padding(self, stage: int, chunks: int) -> float:
        """Share of its time that a stage of average work waits for the dearest one."""
        if stage * chunks > self.shape.num_layers:
            return 1.0
        layers = stage_layers(self.shape, Layout(stage=stage, chunks=chunks))
        return 1 - self.shape.num_layers / stage / layers.pacing


def config_of(config: Config, layout: Layout) -> Config:
    """`config` with this layout."""
    parallel = dataclasses.replace(
        config.parallel,
        stage=layout.stage,
        replica=layout.replica,
        data=layout.data,
        expert=layout.expert,
        context=layout.context,
        tensor=layout.tensor,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
    )
    pipeline, accumulation = config.pipeline, layout.num_microbatches
    if layout.stage > 1:
        pipeline = dataclasses.replace(
            pipeline, schedule=layout.schedule, chunks=layout.chunks, microbatches=layout.num_microbatches
        )
        accumulation = 1
    return dataclasses.replace(
        config, parallel=parallel, pipeline=pipeline, accumulation=accumulation, remat=layout.remat
    )


def check_batch(config: Config, num_gpus: int) -> None:
    """Raises `UserError` when no degree of data parallelism can split the global batch."""
    if config.global_batch < 1:
        raise UserError(f"global_batch = {config.global_batch}: wanted at least 1 row, such as {num_gpus}")
