"""Sorts the bytes of a compiled program into classes a user knows.

Parameters, optimizer state and the batch are exact: they are the program's arguments. What the compiler allocates on
top is sorted by the shape and origin of the buffers alive at the peak; what cannot be told, and the gaps between
buffers, count as temporaries, so that the classes always add up to the peak.
"""

from __future__ import annotations

import collections
import dataclasses

from jaxpar.dryrun.compile import CompiledStep
from jaxpar.dryrun.hlo import Instruction, Module, Shape
from jaxpar.dryrun.memory import layers_per_stage
from jaxpar.dryrun.shape import Layout, ModelShape

CLASSES: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries", "logits", "buffers")


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """One buffer at the peak, with what it is."""

    kind: str  # one of CLASSES
    size_bytes: int
    shape: str
    origin: str  # where in the model it comes from


def _instructions_by_name(module: Module) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in module.instructions()}


def _element(shape: Shape, path: str) -> Shape:
    for index in filter(None, path.split(",")):
        if not shape.elements:
            return shape
        shape = shape.elements[min(int(index), len(shape.elements) - 1)]
    return shape


class _Classifier:
    def __init__(self, step: CompiledStep, shape: ModelShape, layout: Layout) -> None:
        self.layers = layers_per_stage(shape, layout)
        self.vocab = {shape.vocab, shape.vocab // layout.tensor, shape.vocab // (layout.tensor * layout.stage)}
        self.embed = {shape.embed_dim}
        self.weights: set[tuple[int, ...]] = set()
        for weight in step.weights:
            if len(weight["shape"]) < 2:
                continue
            splits = (layout.data, layout.context, layout.expert, layout.data * layout.context * layout.expert)
            for dims in (tuple(weight["shape"]), tuple(weight["local"])):
                self.weights.add(_signature(dims))
                for parts in splits:
                    for i, dim in enumerate(dims):
                        if dim % parts == 0:
                            self.weights.add(_signature((*dims[:i], dim // parts, *dims[i + 1 :])))

    def kind(self, shape: Shape, instruction: Instruction) -> str:
        signature = _signature(shape.dims)
        stacked = bool(shape.dims) and shape.dims[0] == self.layers
        inner = _signature(shape.dims[1:]) if stacked else signature
        if inner in self.weights and shape.dtype != "pred":
            collective = instruction.opcode.startswith(("all-gather", "reduce-scatter", "all-reduce"))
            return "gradients" if shape.dtype == "f32" and not collective else "buffers"
        if self.vocab & set(shape.dims) and not self.embed & set(shape.dims):
            return "logits"
        if stacked and len(shape.dims) >= 3:
            return "activations"
        return "buffers" if instruction.opcode.startswith("all-") else "temporaries"


def _signature(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dims without ones, in any order: layouts and bitcasts do not matter."""
    return tuple(sorted(dim for dim in dims if dim != 1))


def live_buffers(step: CompiledStep, shape: ModelShape, layout: Layout) -> list[LiveBuffer]:
    """Buffers at the peak besides the step's arguments, largest first."""
    by_name = _instructions_by_name(step.module)
    arguments = {one.name for one in step.module.entry.instructions if one.opcode == "parameter"}
    classifier = _Classifier(step, shape, layout)
    out = []
    for buffer in step.live_at_peak:
        name, _, path = buffer.name.partition("{")
        if name in arguments or name not in by_name:
            continue
        instruction = by_name[name]
        array = _element(instruction.shape, path.rstrip("}"))
        kind = classifier.kind(array, instruction)
        out.append(LiveBuffer(kind, buffer.size_bytes, str(array), instruction.op_name or instruction.opcode))
    return out


def bytes_by_class(step: CompiledStep, buffers: list[LiveBuffer]) -> dict[str, float]:
    """Bytes per device of every class; they add up to the peak."""
    found: dict[str, float] = collections.defaultdict(float)
    for buffer in buffers:
        found[buffer.kind] += buffer.size_bytes
    temp = float(step.temp_bytes)
    known = sum(size for kind, size in found.items() if kind != "temporaries")
    if known > temp > 0:  # buffers that share memory with arguments or with each other
        found = collections.defaultdict(float, {kind: size * temp / known for kind, size in found.items()})
        known = temp
    out: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for kind in ("gradients", "activations", "logits", "buffers"):
        out[kind] = found[kind]
    out["temporaries"] = temp - known
    out["parameters"] = float(step.state["parameters"])
    out["optimizer"] = float(step.state["optimizer"])
    out["buffers"] += step.peak_bytes - sum(out.values())  # batch, counters and metrics
    return out
