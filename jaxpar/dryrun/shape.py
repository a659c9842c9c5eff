"""The model and its layout reduced to the numbers that memory and speed depend on.

`ModelShape` and `Layout` come from a run's config, or are written by hand to describe runs of other systems. The
table of parameters here mirrors the models: the dry run checks its byte counts against the compiled program's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from jaxpar.config import Config, LatentConfig, ModelConfig, MoeConfig
from jaxpar.errors import UserError
from jaxpar.pipeline.assign import assign_layers, layer_costs
from jaxpar.validate import SCHEDULE_ALIASES, resolved_degrees

BATCH_AXES = ("replica", "data", "expert")
OPTIMIZER_FLOATS = {"adamw": 2, "lion": 1, "muon": 1, "sgd": 1, "adafactor": 0}  # float32 per parameter


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of one layer, or of the model outside its layers."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    in_layer: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `vocab` is the padded one; `positions` is 0 without a learned table."""

    num_layers: int
    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab: int
    seq_len: int
    tied: bool = False
    gated: bool = True
    positions: int = 0
    layer_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: str = "none"
    window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)  # repeated over the layers; False: full attention there
    padding_rows: int = 0  # of `vocab`, which no token has
    kv_rank: int = 0  # latent attention: features that keys and values are made from; 0: ordinary attention
    query_rank: int = 0  # latent attention: the same of queries; 0: straight from the residual stream
    rope_dim: int = 0  # latent attention: rotary features of a head besides head_dim
    value_dim: int = 0  # latent attention: features of a head's values
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    num_shared: int = 0
    first_dense: int = 0
    balance_bias: bool = False
    router_bias: bool = False
    attention_sinks: bool = False

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def attention_dim(self) -> int:
        """Features of a head in the attention kernel; latent attention pads its values to that of its keys."""
        return max(self.head_dim + self.rope_dim, self.value_dim)

    @property
    def kinds(self) -> tuple[tuple[ModelShape, int], ...]:
        """The model cut into layers of one kind each, and how many of them: with experts, and dense."""
        dense = self.first_dense if self.num_experts else 0
        if dense == 0:
            return ((self, self.num_layers),)
        return (self, self.num_layers - dense), (dataclasses.replace(self, num_experts=0, first_dense=0), dense)

    def model(self) -> ModelConfig:
        """The sizes as `jaxpar.models.count` wants them."""
        return ModelConfig(
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab - self.padding_rows,
            tied=self.tied,
            gated=self.gated,
            window=self.window,
            window_pattern=self.window_pattern,
            moe=MoeConfig(
                num_experts=self.num_experts,
                experts_per_token=self.experts_per_token,
                expert_dim=self.expert_dim,
                num_shared=self.num_shared,
                first_dense=self.first_dense,
            ),
            latent=LatentConfig(
                kv_rank=self.kv_rank,
                query_rank=self.query_rank or None,
                rope_dim=self.rope_dim,
                value_dim=self.value_dim,
            ),
        )

    def leaves(self, *, moe: bool | None = None) -> tuple[Leaf, ...]:
        """Every parameter, those of a layer once; `moe` chooses between the two kinds of layer."""
        D, H, G, K, V = self.embed_dim, self.num_heads, self.kv_heads, self.head_dim, self.vocab
        moe = self.num_experts > 0 if moe is None else moe
        norms = 2 if self.layer_norm else 1  # scale, and bias
        out = [
            Leaf("embedding", (V, D), ("vocab", "embed"), False),
            Leaf("final_norm", (D,), ("embed",), False),
            *(self._latent_leaves(norms) if self.kv_rank else self._attention_leaves()),
        ]
        out += [Leaf(f"norm{i}", (D,), ("embed",)) for i in range(self.norms_per_layer * norms)]
        if self.layer_norm:
            out.append(Leaf("final_norm_bias", (D,), ("embed",), False))
        if self.positions:
            out.append(Leaf("positions", (self.positions, D), ("position", "embed"), False))
        if not self.tied:
            out.append(Leaf("head", (D, V), ("embed", "vocab"), False))
        if self.qkv_bias and not self.kv_rank:
            out.append(Leaf("q_bias", (H, K), ("heads", "head_dim")))
            out += [Leaf(f"{name}_bias", (G, K), ("kv_heads", "head_dim")) for name in "kv"]
        if self.out_bias:
            out.append(Leaf("out_bias", (D,), ("embed",)))
        if self.attention_sinks and not self.kv_rank:
            out.append(Leaf("sinks", (H,), ("heads",)))
        if self.qk_norm == "head":
            out += [Leaf(f"{name}_norm", (K,), ("head_dim",)) for name in "qk" for _ in range(norms)]
        elif self.qk_norm == "full":
            out += [Leaf("q_norm", (H, K), ("heads", "head_dim")) for _ in range(norms)]
            out += [Leaf("k_norm", (G, K), ("kv_heads", "head_dim")) for _ in range(norms)]
        return tuple(out) + (self._expert_leaves() if moe else self._mlp_leaves(self.mlp_dim))

    def _attention_leaves(self) -> tuple[Leaf, ...]:
        D, H, G, K = self.embed_dim, self.num_heads, self.kv_heads, self.head_dim
        return (
            Leaf("q", (D, H, K), ("embed", "heads", "head_dim")),
            Leaf("k", (D, G, K), ("embed", "kv_heads", "head_dim")),
            Leaf("v", (D, G, K), ("embed", "kv_heads", "head_dim")),
            Leaf("out", (H, K, D), ("heads", "head_dim", "embed")),
        )

    def _latent_leaves(self, norms: int) -> tuple[Leaf, ...]:
        D, H, K, R, C, Q = (
            self.embed_dim, self.num_heads, self.head_dim, self.rope_dim, self.kv_rank, self.query_rank,
        )  # fmt: skip
        into, width = ("embed", "latent"), ("latent", "heads", "head_dim")
        out = [Leaf("q", (D, H, K + R), ("embed", "heads", "head_dim"))]
        if Q:
            out = [Leaf("q_down", (D, Q), into), Leaf("q", (Q, H, K + R), width)]
            out += [Leaf("q_norm", (Q,), ("latent",)) for _ in range(norms)]
        out += [Leaf("kv_down", (D, C + R), into), Leaf("kv_up", (C, H, K + self.value_dim), width)]
        out += [Leaf("kv_norm", (C,), ("latent",)) for _ in range(norms)]
        if self.qkv_bias:
            out += [Leaf("down_bias", (width,), ("latent",)) for width in (Q, C + R) if width]
        return (*out, Leaf("out", (H, self.value_dim, D), ("heads", "head_dim", "embed")))

    def _mlp_leaves(self, width: int, prefix: str = "") -> tuple[Leaf, ...]:
        D = self.embed_dim
        into = ("gate", "up") if self.gated else ("up",)
        out = [Leaf(prefix + name, (D, width), ("embed", "mlp")) for name in into]
        out.append(Leaf(prefix + "down", (width, D), ("mlp", "embed")))
        if self.mlp_bias:
            out += [Leaf(f"{prefix}{name}_bias", (width,), ("mlp",)) for name in into]
            out.append(Leaf(prefix + "down_bias", (D,), ("embed",)))
        return tuple(out)

    def _expert_leaves(self) -> tuple[Leaf, ...]:
        D, E, F = self.embed_dim, self.num_experts, self.expert_dim
        into = ("gate", "up") if self.gated else ("up",)
        out = [Leaf("router", (D, E), ("embed", "choice"))]
        out += [Leaf("router_bias", (E,), ("choice",))] if self.router_bias else []
        out += [Leaf("balance", (E,), ("balance",))] if self.balance_bias else []
        out += [Leaf(f"expert_{name}", (E, D, F), ("expert", "embed", "mlp")) for name in into]
        out.append(Leaf("expert_down", (E, F, D), ("expert", "mlp", "embed")))
        if self.mlp_bias:
            out += [Leaf(f"expert_{name}_bias", (E, F), ("expert", "mlp")) for name in into]
            out.append(Leaf("expert_down_bias", (E, D), ("expert", "embed")))
        if self.num_shared:
            out += self._mlp_leaves(self.num_shared * F, "shared_")
        return tuple(out)

    def num_parameters(self) -> int:
        """All parameters."""
        dense = self.first_dense if self.num_experts else self.num_layers
        outside = sum(leaf.size for leaf in self.leaves() if not leaf.in_layer)
        moe_layer = sum(leaf.size for leaf in self.leaves() if leaf.in_layer)
        dense_layer = sum(leaf.size for leaf in self.leaves(moe=False) if leaf.in_layer)
        return outside + dense * dense_layer + (self.num_layers - dense) * moe_layer


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the model is spread and a step is cut."""

    stage: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    microbatch_rows: int = 1  # rows of one batch shard in one pass
    num_microbatches: int = 1  # passes per step: pipeline microbatches, or accumulation
    schedule: str = "fused"
    chunks: int = 1
    remat: str = "none"  # of config.py, or one of work.REMAT that describes another system
    precision: str = "bf16"
    fused_attention: bool = True
    optimizer_floats: float = 2
    gradient_bytes: int = 4  # of one element in a gradient collective
    loss_chunk_tokens: int | None = None
    eager: bool = False  # elementwise operations are not fused by a compiler (runs of other systems)
    first_flash: bool = False  # attention is a first-generation flash kernel (runs of other systems)
    overlapped_tensor: bool = False  # tensor-parallel collectives are pipelined with matmuls (runs of other systems)
    head_on_last_stage: bool = False  # True: the head is extra work of the last stage alone

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axes, outermost first."""
        axes = ("stage", "replica", "data", "expert", "context", "tensor")
        return {axis: getattr(self, axis) for axis in axes}

    @property
    def num_gpus(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Parts the global batch is split into."""
        return self.replica * self.data * self.expert

    @property
    def global_batch(self) -> int:
        """Rows of one step."""
        return self.batch_shards * self.microbatch_rows * self.num_microbatches

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation element."""
        return 4 if self.precision == "float32" else 2

    @property
    def matmul_dtype(self) -> str:
        """HLO name of the dtype of matmul operands."""
        return {"float32": "f32", "fp16": "f16", "fp8": "f8e4m3fn"}.get(self.precision, "bf16")


def group_span(sizes: Mapping[str, int], axes: tuple[str, ...], gpus_per_node: int) -> tuple[int, int]:
    """(nodes, members per node) of a group over `axes` of a mesh laid out row by row on nodes."""
    strides = {name: math.prod(list(sizes.values())[i + 1 :]) for i, name in enumerate(sizes)}
    return _span(tuple((sizes[axis], strides[axis]) for axis in axes), gpus_per_node)


@functools.lru_cache(maxsize=65536)
def _span(counted: tuple[tuple[int, int], ...], gpus_per_node: int) -> tuple[int, int]:
    """`group_span` of axes given as (size, stride)."""
    members = [0]
    for size, stride in counted:
        members = [base + step * stride for base in members for step in range(size)]
    nodes = len({member // gpus_per_node for member in members})
    return nodes, max(1, round(len(members) / nodes))


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of one stage: room for them, and work in units of an average layer.

    slots, leading_slots: what every stage has room for, of ordinary layers and of leading ones without experts.
    pacing: work of the dearest stage; average: work of the average one; all_slots: work if no slot were skipped.
    """

    slots: int
    leading_slots: int
    pacing: float
    average: float
    all_slots: float

    @property
    def held(self) -> int:
        """Slots of both kinds."""
        return self.slots + self.leading_slots


def stage_layers(shape: ModelShape, layout: Layout) -> StageLayers:
    """The layers that a stage holds, as a pipeline assigns them."""
    return _stage_layers(shape, layout.stage, layout.chunks)


@functools.lru_cache(maxsize=4096)
def _stage_layers(shape: ModelShape, stages: int, chunks: int) -> StageLayers:
    leading = shape.first_dense if shape.num_experts else 0
    if stages == 1:
        layers = float(shape.num_layers)
        return StageLayers(shape.num_layers - leading, leading, layers, layers, layers)
    costs = layer_costs(shape.model(), shape.seq_len)
    if np.ptp(costs) == 0:  # the most even cut, without searching for it
        slots = chunks * math.ceil(shape.num_layers / (stages * chunks))
        return StageLayers(slots, 0, slots, slots, slots)
    assignment = assign_layers(costs, stages=stages, chunks=chunks)
    rooms = [chunks * part.slots for part in (assignment.part(leading, shape.num_layers), assignment.part(0, leading))]
    if leading == 0:  # slots without a layer are computed for nothing
        return StageLayers(rooms[0], 0, rooms[0], rooms[0], rooms[0])
    unit = np.mean(costs)
    return StageLayers(
        *rooms,
        pacing=float(assignment.chunk_costs(costs).max(0).sum() / unit),
        average=shape.num_layers / stages,
        all_slots=float((rooms[0] * np.mean(costs[leading:]) + rooms[1] * np.mean(costs[:leading])) / unit),
    )


def model_shape(config: Config) -> ModelShape:
    """The sizes of a config's model; its vocabulary must be known."""
    model = config.model
    learned = (model.max_position or config.seq_len) if model.positions == "learned" else 0
    moe, latent = model.moe, model.latent
    return ModelShape(
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        num_heads=model.num_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_size,
        mlp_dim=model.mlp_dim,
        vocab=model.padded_vocab,
        seq_len=config.seq_len,
        tied=model.tied,
        gated=model.gated,
        positions=learned,
        layer_norm=model.norm == "layer",
        qkv_bias=model.qkv_bias,
        out_bias=model.out_bias,
        mlp_bias=model.mlp_bias,
        norms_per_layer=4 if model.norm_placement == "both" else 2,
        qk_norm=model.qk_norm,
        window=model.window,
        window_pattern=model.window_pattern,
        padding_rows=model.padded_vocab - model.true_vocab,
        kv_rank=latent.kv_rank,
        query_rank=(latent.query_rank or 0) if latent.kv_rank else 0,
        rope_dim=latent.rope_dim if latent.kv_rank else 0,
        value_dim=model.value_size if latent.kv_rank else 0,
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token if moe.num_experts else 0,
        expert_dim=(moe.expert_dim or model.mlp_dim) if moe.num_experts else 0,
        num_shared=moe.num_shared if moe.num_experts else 0,
        first_dense=moe.first_dense if moe.num_experts else 0,
        balance_bias=moe.num_experts > 0 and (moe.choice_bias or moe.bias_update_rate > 0),
        router_bias=moe.num_experts > 0 and moe.router_bias,
        attention_sinks=model.attention_sinks,
    )


def can_fuse_attention(config: Config) -> bool:
    """Whether the attention of this config has a cuDNN kernel on a GPU."""
    model = config.model
    head_dim = model.head_size
    if model.latent.kv_rank:
        head_dim = max(head_dim + model.latent.rope_dim, model.value_size)
    return (
        model.attention != "xla"
        and config.precision in ("bf16", "fp16", "fp8")
        and model.attention_soft_cap is None
        and not model.attention_sinks
        and head_dim % 8 == 0
        and head_dim <= 128
    )


def layout_of(config: Config, num_gpus: int) -> Layout:
    """The layout of a config on `num_gpus`; a degree of -1 takes what is left.

    Raises:
        UserError: the degrees do not fit the GPUs, or the batch does not divide.
    """
    sizes = resolved_degrees(config.parallel, num_gpus)
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    stage = sizes["stage"]
    passes = config.accumulation
    if stage > 1:
        passes = config.pipeline.microbatches or 2 * stage
    rows = config.global_batch / shards / passes
    if rows != int(rows) or rows < 1:
        knob = "pipeline.microbatches" if stage > 1 else "accumulation"
        smallest = shards * passes
        better = max(1, round(config.global_batch / smallest)) * smallest
        raise UserError(
            f"global_batch = {config.global_batch} does not split over replica x data x expert = {shards} with "
            f"{knob} = {passes}; a multiple of {smallest} would, such as {better}"
        )
    schedule = SCHEDULE_ALIASES.get(config.pipeline.schedule, config.pipeline.schedule)
    return Layout(
        stage=stage,
        replica=sizes["replica"],
        data=sizes["data"],
        expert=sizes["expert"],
        context=sizes["context"],
        tensor=sizes["tensor"],
        zero=config.parallel.zero,
        sequence_parallel=config.parallel.sequence_parallel,
        microbatch_rows=int(rows),
        num_microbatches=passes,
        schedule="fused" if schedule == "auto" else schedule,
        chunks=config.pipeline.chunks,
        remat=config.remat,
        precision=config.precision,
        fused_attention=can_fuse_attention(config),
        optimizer_floats=OPTIMIZER_FLOATS[config.optimizer.name],
        gradient_bytes=gradient_bytes(config.precision, stage),
        loss_chunk_tokens=config.loss.chunk_tokens,
    )


def gradient_bytes(precision: str, stage: int) -> int:
    """Bytes of an element when gradients are reduced: the compute dtype, but float32 sums in a pipeline."""
    return 4 if precision == "float32" or stage > 1 else 2
