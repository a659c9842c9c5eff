"""A compiled module as plain objects: computations in schedule order, instructions, shapes.

Read from the serialized `HloModuleProto` of an executable; needs no protobuf package. The module here is
the program of one device after partitioning, so every shape is a per-device shape.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from jaxpar.dryrun.groups import Groups, groups_of
from jaxpar.dryrun.wire import Message

HOST_MEMORY_SPACE = 5  # pinned host memory, in the layout of a shape

# XLA's PrimitiveType number: name and bits of one element.
_DTYPES = {
    number: (name, bits)
    for number, name, bits in (
        *((1, "pred", 8), (2, "s8", 8), (3, "s16", 16), (4, "s32", 32), (5, "s64", 64)),
        *((6, "u8", 8), (7, "u16", 16), (8, "u32", 32), (9, "u64", 64)),
        *((10, "f16", 16), (11, "f32", 32), (12, "f64", 64), (15, "c64", 64), (16, "bf16", 16), (18, "c128", 128)),
        *((19, "f8e5m2", 8), (20, "f8e4m3fn", 8), (21, "s4", 4), (22, "u4", 4), (23, "f8e4m3b11fnuz", 8)),
        *((24, "f8e5m2fnuz", 8), (25, "f8e4m3fnuz", 8), (28, "f8e4m3", 8), (29, "f8e3m4", 8)),
        *((32, "f4e2m1fn", 4), (33, "f8e8m0fnu", 8)),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes."""

    dtype: str = "none"
    bits: int = 0
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    memory_space: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays in it."""
        if self.elements:
            return sum(element.size_bytes for element in self.elements)
        return math.prod(self.dims) * self.bits // 8

    def arrays(self) -> Iterator[Shape]:
        """Its arrays, tuples flattened."""
        if self.elements:
            for element in self.elements:
                yield from element.arrays()
        else:
            yield self

    def __str__(self) -> str:
        if self.elements:
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.lru_cache(maxsize=65536)
def _read_shape(data: bytes) -> Shape:
    message = Message(data)
    if message.has(4):
        return Shape("tuple", elements=tuple(_read_shape(element) for element in message.each(4)))
    dtype, bits = _DTYPES.get(message.integer(2), ("none", 0))
    return Shape(dtype, bits, tuple(message.integers(3)), (), message.message(5).integer(8))


@dataclasses.dataclass(slots=True)
class Instruction:
    """One HLO instruction. `message` keeps the fields that only some opcodes have."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: list[int]
    called: list[int]
    op_name: str  # where in the traced program it comes from
    target: str  # of a custom call
    message: Message

    @property
    def config(self) -> dict[str, Any]:
        """The backend configuration; empty where it is none or not JSON."""
        text = self.message.raw(43)
        if not text.startswith(b"{"):
            return {}
        return json.loads(text)

    def groups(self, num_devices: int) -> Groups:
        """Replica groups of a collective, as mesh positions."""
        return groups_of(self.message, num_devices)

    def pairs(self) -> list[tuple[int, int]]:
        """(source, target) pairs of a collective permute."""
        pairs = [Message(data) for data in self.message.each(52)]
        return [(pair.integer(1), pair.integer(2)) for pair in pairs]


def _read_instruction(data: bytes) -> Instruction:
    message = Message(data)
    return Instruction(
        id=message.integer(35),
        name=message.text(1),
        opcode=message.text(2),
        shape=_read_shape(message.raw(3)),
        operands=message.integers(36),
        called=message.integers(38),
        op_name=message.message(7).text(2),
        target=message.text(28),
        message=message,
    )


@dataclasses.dataclass(slots=True)
class Computation:
    """A body of instructions, in schedule order where the module has a schedule."""

    id: int
    name: str
    instructions: list[Instruction]
    by_id: dict[int, Instruction]
    root_id: int

    @property
    def root(self) -> Instruction:
        """The instruction whose value is returned."""
        return self.by_id[self.root_id]

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Shapes of the operands."""
        return [self.by_id[operand].shape for operand in instruction.operands]


@dataclasses.dataclass(slots=True)
class Module:
    """A compiled program of one device."""

    name: str
    computations: dict[int, Computation]
    entry_id: int
    scheduled: bool

    @property
    def entry(self) -> Computation:
        """The computation that runs first."""
        return self.computations[self.entry_id]

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction of every computation."""
        for computation in self.computations.values():
            yield from computation.instructions


def read_module(data: bytes) -> Module:
    """Decodes a serialized HloModuleProto."""
    message = Message(data)
    computations: dict[int, Computation] = {}
    for data_of_computation in message.each(3):
        part = Message(data_of_computation)
        instructions = [_read_instruction(one) for one in part.each(2)]
        identifier = part.integer(5)
        by_id = {one.id: one for one in instructions}
        computations[identifier] = Computation(identifier, part.text(1), instructions, by_id, part.integer(6))
    if message.has(7):
        for entry in message.message(7).each(1):
            sequence = Message(entry)
            computation = computations.get(sequence.integer(1))
            order = sequence.message(2).integers(1)
            if computation is not None and order:
                computation.instructions = [computation.by_id[one] for one in order if one in computation.by_id]
    return Module(message.text(1), computations, message.integer(6), message.has(7))
