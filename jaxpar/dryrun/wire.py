"""Reads Protocol Buffers without a schema: just enough to walk the compiler's own output."""

from __future__ import annotations

import collections
from collections.abc import Iterator


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at byte `at` and the position after it."""
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class Message:
    """One message: field number -> raw values in order. Absent fields read as their default."""

    __slots__ = ("fields",)

    def __init__(self, data: bytes) -> None:
        self.fields: dict[int, list[int | bytes]] = collections.defaultdict(list)
        at, end = 0, len(data)
        while at < end:
            tag, at = read_varint(data, at)
            kind = tag & 7
            value: int | bytes
            if kind == 0:
                value, at = read_varint(data, at)
            elif kind == 2:
                size, at = read_varint(data, at)
                value, at = data[at : at + size], at + size
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                value, at = data[at : at + size], at + size
            else:
                raise ValueError(f"wire type {kind} at byte {at}: not a protocol buffer this reader knows")
            self.fields[tag >> 3].append(value)

    def has(self, number: int) -> bool:
        """Whether the field occurs."""
        return number in self.fields

    def integer(self, number: int, default: int = 0) -> int:
        """The last value of an integer field."""
        values = self.fields.get(number)
        return _signed(values[-1]) if values and isinstance(values[-1], int) else default

    def integers(self, number: int) -> list[int]:
        """A repeated integer field, packed or not."""
        out: list[int] = []
        for value in self.fields.get(number, ()):
            if isinstance(value, int):
                out.append(_signed(value))
                continue
            at = 0
            while at < len(value):
                one, at = read_varint(value, at)
                out.append(_signed(one))
        return out

    def raw(self, number: int) -> bytes:
        """The last value of a bytes field."""
        values = self.fields.get(number)
        return values[-1] if values and isinstance(values[-1], bytes) else b""

    def text(self, number: int) -> str:
        """The last value of a string field."""
        return self.raw(number).decode(errors="replace")

    def each(self, number: int) -> Iterator[bytes]:
        """The values of a repeated message field, still encoded."""
        for value in self.fields.get(number, ()):
            if isinstance(value, bytes):
                yield value

    def message(self, number: int) -> Message:
        """The last value of a message field."""
        return Message(self.raw(number))
