"""Sorts the bytes of a compiled program into classes a user knows.

Parameters, optimizer state and the batch are exact: they are the program's arguments. On top of them the compiler
sets one block aside, in which values follow one another. Every byte of the block counts for the largest value that
ever lies there, by the shape and origin of that value; what cannot be told, and gaps, count as temporaries, so that the
classes always add up to the peak.
"""

from __future__ import annotations

import collections
import dataclasses

from jaxpar.dryrun.compile import CompiledStep
from jaxpar.dryrun.hlo import Instruction, Module, Shape
from jaxpar.dryrun.shape import Layout, ModelShape, stage_layers

CLASSES: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries", "logits", "buffers")


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A value that makes the block of temporaries as large as it is."""

    kind: str  # one of CLASSES
    size_bytes: int  # of its place that no larger value takes
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
        self.layers = stage_layers(shape, layout).slots
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
        """Class of one buffer, by its dims and the operation that made it."""
        signature = _signature(shape.dims)
        stacked = self.layers > 1 and self.layers in shape.dims
        where = shape.dims.index(self.layers) if stacked else 0
        inner = _signature(shape.dims[:where] + shape.dims[where + 1 :]) if stacked else signature
        if stacked and shape.dtype != "f32" and "while" in instruction.op_name:
            return "activations"
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


class _Cover:
    """The part of a range of bytes that is taken."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # disjoint, sorted

    def add(self, start: int, end: int) -> int:
        """Takes [start, end) and returns how many of its bytes were free."""
        free = end - start
        merged = []
        for low, high in self.taken:
            if high < start or low > end:
                merged.append((low, high))
                continue
            free -= max(0, min(high, end) - max(low, start))
            start, end = min(start, low), max(end, high)
        self.taken = sorted([*merged, (start, end)])
        return free


def live_buffers(step: CompiledStep, shape: ModelShape, layout: Layout) -> list[LiveBuffer]:
    """What fills the block of temporaries, largest first."""
    by_name = _instructions_by_name(step.module)
    classifier = _Classifier(step, shape, layout)
    cover = _Cover()
    out = []
    for buffer in step.temporaries:
        free = cover.add(buffer.offset, buffer.offset + buffer.size_bytes)
        name, _, path = buffer.name.partition("{")
        if free <= 0 or name not in by_name:
            continue
        instruction = by_name[name]
        array = _element(instruction.shape, path.rstrip("}"))
        kind = classifier.kind(array, instruction)
        out.append(LiveBuffer(kind, free, str(array), instruction.op_name or instruction.opcode))
    return sorted(out, key=lambda one: -one.size_bytes)


def bytes_by_class(step: CompiledStep, buffers: list[LiveBuffer]) -> dict[str, float]:
    """Bytes per device of every class; they add up to the peak."""
    found: dict[str, float] = collections.defaultdict(float)
    for buffer in buffers:
        found[buffer.kind] += buffer.size_bytes
    out: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for kind in ("gradients", "activations", "logits", "buffers"):
        out[kind] = found[kind]
    out["temporaries"] = step.temp_bytes - sum(out.values())
    out["parameters"] = float(step.state["parameters"])
    out["optimizer"] = float(step.state["optimizer"])
    out["buffers"] += step.peak_bytes - sum(out.values())  # batch, counters and metrics
    return out
