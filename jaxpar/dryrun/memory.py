"""Closed-form bytes per GPU: state exactly, by ZeRO level and layout; activations by what remat keeps.

The largest stage of a pipeline is described. State follows the rules of jaxpar.sharding leaf by leaf. Activation
bytes are counts of the arrays a layer must keep for its backward pass, the temporaries those of one layer at work.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxpar.dryrun.shape import Layout, Leaf, ModelShape, stage_layers

ZERO_AXES = ("data", "context", "expert")
_TENSOR_NAMES = ("heads", "mlp", "vocab")


@dataclasses.dataclass(frozen=True)
class MemoryByClass:
    """Bytes per GPU. `peak` is what must fit; the classes add up to it."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    logits: float
    buffers: float

    @property
    def state(self) -> float:
        """Parameters and optimizer state: what a step is given and gives back."""
        return self.parameters + self.optimizer

    @property
    def peak(self) -> float:
        """Everything at the fullest moment."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Exact bytes per GPU of each class of state; gradients are those of one step, in float32."""

    parameters: float
    gradients: float
    optimizer: float


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """Float32 bytes of one parameter's state on one GPU, all its layers on the GPU together."""

    parameter: float
    gradient: float
    optimizer_per_float: float
    gathered: float  # the parameter with its ZeRO split undone, float32, all layers


def _parts(leaf: Leaf, shape: ModelShape, layout: Layout) -> list[int]:
    """Parts of every dim under the compute mapping."""
    out = []
    for name in leaf.axes:
        split = name in _TENSOR_NAMES or (name == "kv_heads" and shape.kv_heads % layout.tensor == 0)
        stages = layout.stage if name == "vocab" and not layout.head_on_last_stage else 1
        out.append(layout.tensor * stages if split else layout.expert if name == "expert" else 1)
    return out


def _zero_parts(leaf: Leaf, parts: list[int], layout: Layout) -> int:
    """How much further ZeRO splits the leaf: one dim takes all of it; vectors that do not divide stay whole."""
    axes = [axis for axis in ZERO_AXES if not (axis == "expert" and "expert" in leaf.axes)]
    extra = math.prod(layout.sizes[axis] for axis in axes)
    fits = [
        i for i, name in enumerate(leaf.axes) if name != "expert" and leaf.shape[i] % (extra * parts[i]) == 0
    ]  # fmt: skip
    return extra if fits else 1


def leaf_bytes(leaf: Leaf, shape: ModelShape, layout: Layout, *, layers: int) -> LeafBytes:
    """State bytes of a leaf; `layers` is how many copies of it the GPU's stage holds."""
    parts = _parts(leaf, shape, layout)
    whole = 4.0 * leaf.size * layers / math.prod(parts)
    split = whole / _zero_parts(leaf, parts, layout) if layout.zero else whole
    return LeafBytes(
        parameter=split if layout.zero >= 3 else whole,
        gradient=split if layout.zero >= 2 else whole,
        optimizer_per_float=split if layout.zero >= 1 else whole,
        gathered=whole,
    )


def state_leaves(shape: ModelShape, layout: Layout) -> tuple[tuple[Leaf, LeafBytes], ...]:
    """Every parameter with its bytes on one GPU."""
    # What does not matter here is set to its default, so that layouts that differ only there share one computation.
    return _state_leaves(shape, _state_key(layout))


def _state_key(layout: Layout) -> Layout:
    return Layout(
        stage=layout.stage,
        data=layout.data,
        expert=layout.expert,
        context=layout.context,
        tensor=layout.tensor,
        zero=layout.zero,
        chunks=layout.chunks,
        head_on_last_stage=layout.head_on_last_stage,
    )


@functools.lru_cache(maxsize=4096)
def _state_leaves(shape: ModelShape, layout: Layout) -> tuple[tuple[Leaf, LeafBytes], ...]:
    layers = stage_layers(shape, layout)
    out = []
    for leaf in shape.leaves():
        copies = layers.slots if leaf.in_layer else 1
        out.append((leaf, leaf_bytes(leaf, shape, layout, layers=copies)))
    for leaf in shape.leaves(moe=False) if layers.leading_slots else ():
        if leaf.in_layer:
            out.append((leaf, leaf_bytes(leaf, shape, layout, layers=layers.leading_slots)))
    return tuple(out)


def state_bytes(shape: ModelShape, layout: Layout) -> StateBytes:
    """Parameters, gradients and optimizer state of one GPU, without the optimizer's counters."""
    leaves = state_leaves(shape, layout)
    return StateBytes(
        parameters=sum(one.parameter for _, one in leaves),
        gradients=sum(one.gradient for _, one in leaves),
        optimizer=layout.optimizer_floats * sum(one.optimizer_per_float for _, one in leaves),
    )


def kept_elements_per_token(shape: ModelShape, layout: Layout) -> float:
    """Elements of the compute dtype that the backward pass of one layer needs, per token of the GPU's shard."""
    D, F = shape.embed_dim, _mlp_width(shape)
    queries, keys = shape.num_heads * shape.attention_dim, shape.kv_heads * shape.attention_dim
    tensor = layout.tensor
    stream = D / (tensor if layout.sequence_parallel else 1)
    kv = keys / tensor if shape.kv_heads % tensor == 0 else keys / shape.kv_heads
    qkv = queries / tensor + 2 * kv
    hidden = F * shape.mlp_matrices / tensor  # gate, up and their product
    if layout.remat == "full":
        return stream
    if layout.remat == "qkv":
        return stream + qkv
    if layout.remat in ("qkv_out", "all_but_mlp"):
        return stream + qkv + stream
    if layout.remat in ("dots", "matmuls"):
        return stream + qkv + stream + hidden - F / tensor
    # Counted in compiled programs: norms keep float32 copies, the activation keeps its parts, rotation its inputs.
    everything = 11 * stream + 2 * D + 2 * qkv + queries / tensor + (6 if shape.gated else 4) * F / tensor
    if not layout.fused_attention and layout.remat == "none":
        everything += 3 * shape.seq_len / layout.context * shape.num_heads / tensor
    if layout.remat == "half":
        return everything / 2
    return everything


def _mlp_width(shape: ModelShape) -> float:
    if shape.num_experts:
        return (shape.experts_per_token + shape.num_shared) * shape.expert_dim
    return shape.mlp_dim


def in_flight(layout: Layout) -> float:
    """Microbatches whose activations the first stage holds at one time, in units of a whole stage."""
    S, M, V = layout.stage, layout.num_microbatches, layout.chunks
    if S == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(M)
    if layout.schedule in ("1f1b", "zb_h1"):
        return float(min(S, M))
    if layout.schedule == "interleaved":
        return min(S * V + S - 1, M * V) / V
    if V == 1:
        return float(min(2 * S - 1, M))
    return min(S * V + S - 1, M * V) / V


def _logit_bytes(shape: ModelShape, layout: Layout) -> float:
    length = shape.seq_len / layout.context
    if layout.loss_chunk_tokens is not None:
        length = min(length, layout.loss_chunk_tokens)
    split = layout.tensor * (layout.stage if layout.stage > 1 and not layout.head_on_last_stage else 1)
    # The logits and their gradient in float32.
    return layout.microbatch_rows * length * shape.vocab / split * 4 * 2


def _layer_work_bytes(shape: ModelShape, layout: Layout) -> float:
    """Arrays of one layer while its backward pass runs."""
    tokens = layout.microbatch_rows * shape.seq_len / layout.context
    F = _mlp_width(shape) / layout.tensor
    elements = 2 * F + 2 * shape.embed_dim  # gradients of the MLP's hidden arrays and of the stream
    if layout.remat in ("full", "qkv", "qkv_out", "half", "all_but_mlp"):
        elements += kept_elements_per_token(shape, dataclasses.replace(layout, remat="attention"))
    elif layout.remat in ("dots", "matmuls"):
        elements += F + 2 * shape.embed_dim
    bytes_ = tokens * elements * layout.compute_bytes
    if not layout.fused_attention:
        scores = layout.microbatch_rows * shape.num_heads / layout.tensor * (shape.seq_len / layout.context) ** 2
        bytes_ += 3 * scores * 4
    return bytes_


def memory_by_class(shape: ModelShape, layout: Layout) -> MemoryByClass:
    """Bytes per GPU of a training step, at the fullest of its moments.

    Three moments count: head and loss, with every activation; the backward pass of the first layer, with every
    activation and gradient; and the update, with whole parameters where ZeRO-1 and 2 hand them out.
    """
    leaves = state_leaves(shape, layout)
    state = state_bytes(shape, layout)
    parameters, gradients, optimizer = state.parameters, state.gradients, state.optimizer
    tokens = layout.microbatch_rows * shape.seq_len / layout.context
    kept = kept_elements_per_token(shape, layout) * tokens * layout.compute_bytes
    layers = stage_layers(shape, layout).held
    activations = kept * layers * in_flight(layout)
    # Weights at work in the compute dtype, gathered: two layers, and the largest of embedding and head.
    share = layout.compute_bytes / 4
    layer = 2 * sum(one.gathered for leaf, one in leaves if leaf.in_layer) / layers * share
    table = max(one.gathered for leaf, one in leaves if not leaf.in_layer) * share
    whole = sum(one.gathered for _, one in leaves)
    added_up = gradients if layout.num_microbatches > 1 else 0.0
    moments = (
        MemoryByClass(
            parameters, added_up, optimizer, activations, 0.0, logits=_logit_bytes(shape, layout), buffers=2 * table
        ),
        MemoryByClass(
            parameters,
            gradients + added_up,
            optimizer,
            activations,
            temporaries=_layer_work_bytes(shape, layout),
            logits=0.0,
            buffers=layer,
        ),
        MemoryByClass(
            parameters,
            gradients,
            optimizer,
            0.0,
            0.0,
            0.0,
            buffers=whole if layout.zero in (1, 2) else 0.0,
        ),
    )
    return max(moments, key=lambda moment: moment.peak)
