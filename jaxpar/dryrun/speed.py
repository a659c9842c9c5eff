"""Closed-form step time: compute per layer, the communication each axis adds, what hides, and the pipeline's bubble.

It shares the link and matmul model with the time line of compiled programs. It ranks layouts in microseconds; the
compiled program then has the last word.
"""

from __future__ import annotations

import dataclasses

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.links import collective_time_s, exposed_time_s, matmul_time_s
from jaxpar.dryrun.memory import state_leaves
from jaxpar.dryrun.shape import Layout, ModelShape, group_span, stage_layers
from jaxpar.dryrun.targets import GpuTarget
from jaxpar.dryrun.work import (
    REMAT,
    attention_flops_per_token,
    attention_runs,
    layer_matmuls,
    model_flops_per_token,
    recomputed_matmuls,
    tokens_per_pass,
)


@dataclasses.dataclass(frozen=True)
class Volume:
    """Payload one GPU moves over one mesh axis in a step."""

    kind: str
    axis: str
    size_bytes: float
    count: float
    time_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """Predicted time of one step. Every field is an estimate."""

    step_s: float
    compute_s: float
    exposed_s: float
    bubble_fraction: float
    optimizer_s: float
    volumes: tuple[Volume, ...]
    tokens_per_s_per_gpu: float
    mfu: float


class _Model:
    """The parts of one estimate; all times are seconds."""

    def __init__(
        self, shape: ModelShape, layout: Layout, gpu: GpuTarget, assumed: Assumptions, gpus_per_node: int
    ) -> None:
        self.shape, self.layout, self.gpu, self.assumed = shape, layout, gpu, assumed
        self.gpus_per_node = gpus_per_node
        self.tokens = tokens_per_pass(shape, layout)
        self.volumes: list[Volume] = []

    def collective_s(self, kind: str, size_bytes: float, axes: tuple[str, ...]) -> float:
        """Time of one collective over mesh axes."""
        nodes, members = group_span(self.layout.sizes, axes, self.gpus_per_node)
        return collective_time_s(
            kind, size_bytes, num_nodes=nodes, members_per_node=members, gpu=self.gpu, assumed=self.assumed
        )

    def moved(self, kind: str, axes: tuple[str, ...], size: float, count: float, exposed_s: float) -> None:
        """Notes a volume: `count` collectives of `size` bytes of which `exposed_s` in all is not hidden."""
        used = tuple(axis for axis in axes if self.layout.sizes[axis] > 1)
        if used and count:
            time_s = self.collective_s(kind, size, used) * count
            self.volumes.append(Volume(kind, "+".join(used), size * count, count, time_s, exposed_s))

    # --- one layer, one microbatch ---

    def _matmul_s(self, flops: float, dims: tuple[float, ...], *, attention: bool = False) -> float:
        dtype = "bf16" if attention else self.layout.matmul_dtype
        return matmul_time_s(dtype, flops, min(dims), attention=attention, gpu=self.gpu, assumed=self.assumed)

    def _attention_s(self, runs: float) -> float:
        flops = attention_flops_per_token(self.shape, self.layout, causal_half=self.layout.fused_attention)
        flops *= self.tokens * runs
        if self.layout.fused_attention:
            seconds = self._matmul_s(flops, (self.shape.attention_dim,), attention=True)
            if self.layout.first_flash:
                seconds *= self.assumed.attention_efficiency / self.assumed.first_flash_efficiency
            return seconds
        length = self.shape.seq_len / self.layout.context
        rows = self.layout.microbatch_rows * self.shape.num_heads / self.layout.tensor
        traffic = rows * length * length * 4 * 6 * runs  # scores, softmax and weights in float32
        return max(self._matmul_s(flops, (self.shape.attention_dim, length)), self._memory_s(traffic))

    def _memory_s(self, size_bytes: float) -> float:
        return size_bytes / (self.gpu.hbm_bytes_per_s * self.assumed.hbm_efficiency)

    def _elementwise_s(self, shape: ModelShape) -> float:
        """Norms, residual adds, rotation and activation of one forward pass: memory traffic and launches."""
        layout = self.layout
        stream = shape.embed_dim / (layout.tensor if layout.sequence_parallel else 1)
        heads = (shape.num_heads + 2 * shape.kv_heads) * shape.attention_dim / layout.tensor
        width = shape.mlp_dim
        if shape.num_experts:
            width = (shape.experts_per_token + shape.num_shared) * shape.expert_dim
            stream *= 1 + shape.experts_per_token / 2  # dispatch and combine
        hidden = shape.mlp_matrices * width / layout.tensor
        elements = 11 * stream + 2 * heads + hidden
        if layout.eager:
            elements *= self.assumed.eager_traffic
        return self._memory_s(elements * self.tokens * layout.compute_bytes) + 16 * self.assumed.launch_s

    def layer_times(self) -> tuple[float, float]:
        """(forward, backward with recomputation) compute of the average layer."""
        forward = backward = 0.0
        for kind, count in self.shape.kinds:
            one = self._kind_times(kind)
            forward += one[0] * count / self.shape.num_layers
            backward += one[1] * count / self.shape.num_layers
        return forward, backward

    def _kind_times(self, shape: ModelShape) -> tuple[float, float]:
        weights = {}
        for one in layer_matmuls(shape, self.layout):
            dims = (one.rows, one.columns, self.tokens * max(one.tokens_factor, 1.0))
            weights[one.name] = self._matmul_s(one.flops_per_token * self.tokens, dims)
        again = sum(weights[one.name] for one in recomputed_matmuls(shape, self.layout))
        again *= REMAT[self.layout.remat].share
        forward_runs, backward_runs = attention_runs(self.layout)
        elementwise = self._elementwise_s(shape)
        forward = sum(weights.values()) + self._attention_s(forward_runs) + elementwise
        backward = 2 * sum(weights.values()) + again + self._attention_s(backward_runs) + 2 * elementwise
        if self.layout.remat != "none":
            backward += elementwise
        return forward, backward

    def tensor_s(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """(forward, backward) exposed tensor-parallel communication of one layer; none of it hides in our programs."""
        layout = self.layout
        if layout.tensor == 1:
            return 0.0, 0.0
        size = self.tokens * self.shape.embed_dim * layout.compute_bytes
        again = 1 if layout.remat == "full" else 0
        if layout.sequence_parallel:
            # An all-gather before and a reduce-scatter after each half; the backward gathers the input once more.
            gather = self.collective_s("all-gather", size, ("tensor",))
            scatter = self.collective_s("reduce-scatter", size, ("tensor",))
            forward, backward = 2 * gather + 2 * scatter, (4 + again) * gather + (2 + again) * scatter
        else:
            reduce = self.collective_s("all-reduce", size, ("tensor",))
            forward, backward = 2 * reduce, (2 + again) * reduce
        if layout.overlapped_tensor:
            forward = exposed_time_s(forward, forward_s, self.assumed)
            backward = exposed_time_s(backward, backward_s, self.assumed)
        return forward, backward

    def context_s(self, forward_s: float) -> tuple[float, float]:
        """(forward, backward) exposed time of keys and values travelling over `context`."""
        layout = self.layout
        if layout.context == 1:
            return 0.0, 0.0
        one = self.collective_s("all-gather", self.context_payload(), ("context",))
        attention = self._attention_s(1.0)
        return exposed_time_s(one, attention, self.assumed), exposed_time_s(2 * one, 2 * attention, self.assumed)

    def context_payload(self) -> float:
        """Bytes of the keys and values of a whole row's heads."""
        layout = self.layout
        keys = 2 * self.tokens * self.shape.kv_heads * self.shape.attention_dim / layout.tensor
        return keys * layout.compute_bytes * layout.context

    def expert_s(self) -> float:
        """Exposed all-to-all of dispatch and combine of one layer, one direction."""
        layout, shape = self.layout, self.shape
        if layout.expert == 1 or not shape.num_experts:
            return 0.0
        size = self.tokens * shape.experts_per_token * shape.embed_dim * layout.compute_bytes
        return 2 * self.collective_s("all-to-all", size, ("expert",))

    # --- state ---

    def zero_s(self, forward_s: float, backward_s: float, layers: int) -> tuple[float, float]:
        """(per microbatch, per step) exposed time of parameters and gradients travelling over the data axes.

        Gathers and reductions of a layer hide behind another layer's compute as far as `overlap` allows.
        """
        layout = self.layout
        axes = tuple(axis for axis in ("data", "context", "expert") if layout.sizes[axis] > 1)
        copies = (("replica",) if layout.replica > 1 else ()) + axes
        if not copies:
            return 0.0, 0.0
        leaves = state_leaves(self.shape, layout)
        held = stage_layers(self.shape, layout).held
        layer = sum(one.gathered for leaf, one in leaves if leaf.in_layer) / held / 4
        outside = sum(one.gathered for leaf, one in leaves if not leaf.in_layer) / 4
        gathered, reduced = layer * layout.compute_bytes, layer * layout.gradient_bytes
        per_pass = per_step = 0.0
        M = layout.num_microbatches
        if layout.zero == 3 and axes:
            gather = self.collective_s("all-gather", gathered, axes)
            scatter = self.collective_s("reduce-scatter", reduced, axes)
            ahead = exposed_time_s(gather, forward_s, self.assumed)
            back = exposed_time_s(gather + scatter, backward_s, self.assumed)
            ends = self.collective_s("all-gather", outside * layout.compute_bytes, axes)
            per_pass = layers * (ahead + back) + gather + ends
            self.moved("all-gather", axes, gathered, 2 * layers * M, M * (layers * ahead + gather))
            self.moved("reduce-scatter", axes, reduced, layers * M, M * layers * back)
        elif axes:
            kind = "reduce-scatter" if layout.zero == 2 else "all-reduce"
            times = M if layout.zero == 2 else 1
            reduce = self.collective_s(kind, reduced, axes)
            exposed = layers * exposed_time_s(reduce, backward_s, self.assumed)
            ends = self.collective_s(kind, outside * layout.gradient_bytes, axes)
            if layout.zero == 2:
                per_pass += exposed + ends
            else:
                per_step += exposed + ends
            self.moved(kind, axes, reduced, layers * times, exposed * times)
            if layout.zero in (1, 2):
                # Our programs hand out float32 parameters, others the compute dtype.
                whole = (layer * layers + outside) * (layout.compute_bytes if layout.eager else 4)
                per_step += self.collective_s("all-gather", whole, axes)
                self.moved("all-gather", axes, whole, 1, self.collective_s("all-gather", whole, axes))
        if layout.replica > 1:
            split = 1
            if layout.zero >= 2:
                for axis in axes:
                    split *= layout.sizes[axis]
            reduce = self.collective_s("all-reduce", reduced / split, ("replica",))
            exposed = layers * exposed_time_s(reduce, backward_s, self.assumed)
            per_step += exposed
            self.moved("all-reduce", ("replica",), reduced / split, layers, exposed)
        return per_pass, per_step

    def note_layers(
        self, size: float, tensor: tuple[float, float], context: tuple[float, float], expert: float
    ) -> None:
        """Notes what the layers move over tensor, context and expert; `size` is that of the stream."""
        layout, shape = self.layout, self.shape
        runs = layout.num_microbatches * stage_layers(shape, layout).pacing
        if layout.tensor > 1:
            kind = "reduce-scatter" if layout.sequence_parallel else "all-reduce"
            per_layer = 5 if layout.remat == "full" else 4
            self.moved(kind, ("tensor",), size, runs * per_layer, runs * sum(tensor))
            if layout.sequence_parallel:
                self.moved("all-gather", ("tensor",), size, runs * (per_layer + 1), 0.0)
        if layout.context > 1:
            self.moved("all-gather", ("context",), self.context_payload(), 3 * runs, runs * sum(context))
        if expert > 0:
            passes = 3 if layout.remat == "full" else 2
            self.moved(
                "all-to-all", ("expert",), size * shape.experts_per_token, 2 * passes * runs, passes * expert * runs
            )

    def optimizer_s(self) -> float:
        """Update of the local part: gradients, parameters and moments are read, parameters and moments written."""
        local = sum(one.optimizer_per_float for _, one in state_leaves(self.shape, self.layout))
        return self._memory_s(local * (3 + 2 * self.layout.optimizer_floats))

    def weights_s(self) -> tuple[float, float]:
        """(forward, backward) of a pass: float32 parameters cast for the matmuls, and gradients added up.

        Counted in compiled programs: a cast reads 4 bytes and writes 2 an element, the sum of the passes' gradients
        moves 24 (the layers' gradients are stacked, cast and added). Other systems keep copies and fuse the sum.
        """
        layout = self.layout
        if layout.eager:
            return 0.0, 0.0
        leaves = state_leaves(self.shape, layout)
        cast = 0.0 if layout.precision == "float32" else sum(one.parameter for _, one in leaves) / 4 * (4 + 2)
        summed = sum(one.gradient for _, one in leaves) / 4 * 24 if layout.num_microbatches > 1 else 0.0
        return self._memory_s(cast), self._memory_s(cast + summed)

    def head_s(self) -> tuple[float, float]:
        """(per microbatch on the pacing stage) head forward and backward."""
        layout, shape = self.layout, self.shape
        shared = layout.stage if layout.stage > 1 and not layout.head_on_last_stage else 1
        columns = shape.vocab / layout.tensor / shared
        flops = 2 * self.tokens * shape.embed_dim * columns
        one = self._matmul_s(flops, (shape.embed_dim, columns, self.tokens))
        logits = self._memory_s(self.tokens * columns * 4 * 3)
        chunked = 1 if layout.loss_chunk_tokens is not None and layout.loss_chunk_tokens < shape.seq_len else 0
        return one + logits, (2 + chunked) * one + 2 * logits


def bubble_passes(layout: Layout, forward_s: float, backward_s: float) -> float:
    """Idle time of a step in seconds, for stage times of one microbatch.

    Fused and interleaved tables fill and drain (stage - 1) chunks; classic 1F1B in lock step makes each tick as long
    as a backward pass.
    """
    S, V, M = layout.stage, layout.chunks, layout.num_microbatches
    if S == 1:
        return 0.0
    both = forward_s + backward_s
    if layout.schedule in ("1f1b", "interleaved"):
        ticks = 2 * (M * V + S - 1) / V
        return max(0.0, ticks * backward_s - M * both)
    if layout.schedule == "zb_h1":
        return (S - 1) * forward_s
    return (S - 1) / V * both


def estimate_step(
    shape: ModelShape,
    layout: Layout,
    gpu: GpuTarget,
    assumed: Assumptions,
    *,
    gpus_per_node: int = 8,
    lock_step: bool = True,
) -> StepEstimate:
    """Predicts one step. `lock_step=False` is a pipeline whose stages run freely, as other systems have it."""
    model = _Model(shape, layout, gpu, assumed, gpus_per_node)
    held, layers = stage_layers(shape, layout).held, stage_layers(shape, layout).pacing
    M = layout.num_microbatches
    forward, backward = model.layer_times()
    tensor_forward, tensor_backward = model.tensor_s(forward, backward)
    context_forward, context_backward = model.context_s(forward)
    expert = model.expert_s()
    per_pass, per_step = model.zero_s(forward, backward, held)
    head_forward, head_backward = model.head_s()
    extra_forward = tensor_forward + context_forward + expert
    extra_backward = tensor_backward + context_backward + expert * (2 if layout.remat == "full" else 1)
    weights_forward, weights_backward = model.weights_s()
    stage_forward = layers * (forward + extra_forward) + head_forward + weights_forward
    stage_backward = layers * (backward + extra_backward) + head_backward + weights_backward
    size = model.tokens * shape.embed_dim * layout.compute_bytes
    model.note_layers(size, (tensor_forward, tensor_backward), (context_forward, context_backward), expert)
    free = layout if lock_step else dataclasses.replace(layout, schedule="fused")
    bubble = bubble_passes(free, stage_forward, stage_backward)
    exchange = 0.0
    if layout.stage > 1:
        chunk = size / (layout.tensor if layout.sequence_parallel else 1)
        hop = model.collective_s("collective-permute", chunk, ("stage",))
        exchange = 2 * hop * (layout.chunks * M if lock_step else layout.stage - 1 + layout.chunks)
        model.moved("collective-permute", ("stage",), chunk, 2 * layout.chunks * M, exchange)
    optimizer = model.optimizer_s()
    busy = M * (stage_forward + stage_backward)
    step = busy + bubble + exchange + M * per_pass + per_step + optimizer
    compute = M * (layers * (forward + backward) + head_forward + head_backward + weights_forward + weights_backward)
    tokens = layout.global_batch * shape.seq_len
    per_gpu = tokens / step / layout.num_gpus
    return StepEstimate(
        step_s=step,
        compute_s=compute,
        exposed_s=M * layers * (extra_forward + extra_backward) + exchange + M * per_pass + per_step,
        bubble_fraction=bubble / step,
        optimizer_s=optimizer,
        volumes=tuple(model.volumes),
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * model_flops_per_token(shape) / gpu.bf16_flops_per_s,
    )
