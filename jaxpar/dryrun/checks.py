"""What a compiled program tells about a layout: broken promises and known pitfalls, as sentences for the report."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxpar.dryrun.compile import CompiledStep
from jaxpar.dryrun.shape import Layout, ModelShape, group_span
from jaxpar.dryrun.timeline import Timeline
from jaxpar.dryrun.work import flops_per_gpu

_LARGE_BYTES = 1 << 20
MOST_COPIES = 0.08  # of a step


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))


def zero_contract(step: CompiledStep, timeline: Timeline, layout: Layout) -> list[str]:
    """Where the program breaks the promise of its ZeRO level; empty when it keeps it.

    Levels 2 and 3 promise that gradients of matrices are reduce-scattered, never all-reduced whole over the axes
    that ZeRO splits.
    """
    split = {axis for axis in ("data", "context", "expert") if layout.sizes[axis] > 1}
    if layout.zero < 2 or not split:
        return []
    matrices = [weight for weight in step.weights if len(weight["local"]) > 1]
    whole = {_dims(tuple(weight["local"])): weight["path"] for weight in matrices}
    sizes = sorted((math.prod(weight["local"]), weight["path"]) for weight in matrices)
    broken = []
    for total in timeline.collectives:
        if total.kind != "all-reduce" or not split & set(total.axes):
            continue
        for array, count in total.arrays.items():
            path = whole.get(_dims(array.dims))
            if len(array.dims) == 1:  # several arrays joined into one before they are reduced
                path = next((path for size, path in reversed(sizes) if size <= array.dims[0] <= 1.01 * size), None)
            if path is not None and array.size_bytes >= _LARGE_BYTES:
                broken.append(
                    f"ZeRO-{layout.zero} promises reduce-scatter, but {array} (shaped like {path}) is all-reduced over "
                    f"{total.axis}, {count:.0f} times a step"
                )
    if not any(total.kind == "reduce-scatter" and split & set(total.axes) for total in timeline.collectives):
        broken.append(f"ZeRO-{layout.zero} promises reduce-scatter over {'+'.join(sorted(split))}, but there is none")
    return broken


def gathered_weights(step: CompiledStep, timeline: Timeline) -> Iterator[str]:
    """Weights that tensor parallelism splits and the program gathers again."""
    split = {
        _dims(tuple(weight["shape"])): weight["path"]
        for weight in step.weights
        if weight["shape"] != weight["local"] and len(weight["shape"]) > 1
    }
    for total in timeline.collectives:
        if total.kind != "all-gather" or "tensor" not in total.axes:
            continue
        for array in total.arrays:
            for i, dim in enumerate(array.dims):
                whole = _dims((*array.dims[:i], dim * total.group_size, *array.dims[i + 1 :]))
                if whole in split:
                    yield (
                        f"a full weight shaped like {split[whole]} is gathered over {total.axis}: some activation "
                        "lacks a sharding constraint"
                    )
                    break


def all_warnings(
    step: CompiledStep,
    timeline: Timeline,
    shape: ModelShape,
    layout: Layout,
    *,
    gpus_per_node: int,
    unlimited_flops: float | None = None,
) -> list[str]:
    """Every warning about the program, most serious first. `unlimited_flops`: of a compile without memory limit."""
    out = zero_contract(step, timeline, layout)
    out += dict.fromkeys(gathered_weights(step, timeline))
    by_hand = flops_per_gpu(shape, layout)
    if unlimited_flops is not None and timeline.flops > 1.005 * unlimited_flops:
        extra = timeline.flops / unlimited_flops - 1
        out.append(f"the compiler recomputes silently to save memory: {extra:.1%} more FLOPs than with memory to spare")
    elif timeline.flops > 1.02 * by_hand:
        extra = timeline.flops / by_hand - 1
        out.append(
            f"FLOPs are {extra:.1%} above the formula for this layout: recomputation the compiler added, or work done "
            "twice (--check-recompute compiles again with memory to spare and tells)"
        )
    if any("ragged_dot" in one.op_name for one in step.module.instructions() if one.opcode in ("dot", "fusion")):
        out.append(
            f"ragged_dot compiles to a dense masked matmul over all {shape.num_experts} experts: its FLOPs are that "
            "many times the useful ones"
        )
    out += large_copies(timeline)
    out += unfused_attention(shape, layout)
    if layout.tensor > 1:
        nodes, _ = group_span(layout.sizes, ("tensor",), gpus_per_node)
        if nodes > 1:
            out.append(
                f"parallel.tensor = {layout.tensor} spans {nodes} nodes of {gpus_per_node} GPUs: every layer waits for "
                "the network"
            )
    out += timeline.warnings
    return out


def large_copies(timeline: Timeline) -> list[str]:
    """A warning when plain copies, which no model asks for, take a good part of a step."""
    copied_s = sum(seconds for name, seconds, _ in timeline.top_operations if name.startswith("copy "))
    if copied_s < MOST_COPIES * timeline.step_s:
        return []
    return [
        f"the compiler copies arrays for {copied_s:.2f} s of the step ({copied_s / timeline.step_s:.0%}), most likely "
        "what a loop carries; the largest are in the list of what fills the temporaries"
    ]


def unfused_attention(shape: ModelShape, layout: Layout) -> list[str]:
    """A warning when the scores of unfused attention are large."""
    if layout.fused_attention:
        return []
    length = shape.seq_len / layout.context
    scores = 4 * layout.microbatch_rows * math.ceil(shape.num_heads / layout.tensor) * length**2
    if scores < 1 << 30:
        return []
    return [
        f"seq_len = {shape.seq_len} is long for unfused attention: its float32 scores take {scores / 2**30:.1f} GiB "
        "per layer; use bf16 and a head size that cuDNN supports (a multiple of 8, at most 128), or parallel.context"
    ]
