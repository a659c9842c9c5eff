"""Rows of `seq_len` tokens with random access: what a batch is made of.

A row is a dict of arrays [T]: tokens, targets (the token after each), weights (0 where nothing is to be learned),
positions (from 0 in every document of the row) and segment_ids (documents from 1, padding 0).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from jaxpar.data.packing import Plan
from jaxpar.data.store import TokenStore

Row = dict[str, np.ndarray]
KEYS = ("tokens", "targets", "weights", "positions", "segment_ids")


class Rows(Protocol):
    """Random access to rows. `identity` hashes their content; equal identities mean equal rows."""

    @property
    def seq_len(self) -> int:
        """Positions of a row."""
        ...

    @property
    def identity(self) -> str:
        """Hash of what the rows hold."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        ...

    def sample_id(self, index: int) -> str:
        """A name of the row that does not depend on the run."""
        ...


def empty_row(seq_len: int, pad_id: int = 0) -> Row:
    """A row of padding: weight 0 and segment 0 everywhere."""
    return {
        "tokens": np.full((seq_len,), pad_id, np.int32),
        "targets": np.full((seq_len,), pad_id, np.int32),
        "weights": np.zeros((seq_len,), np.float32),
        "positions": np.zeros((seq_len,), np.int32),
        "segment_ids": np.zeros((seq_len,), np.int32),
    }


@dataclasses.dataclass(frozen=True)
class StreamRows:
    """Rows cut from the documents laid end to end (packing "concat").

    Row i holds the tokens i T to i T + T of the stream, the last one as a target only, so every token but the very
    first is a target exactly once. A row that starts inside a document counts its positions from 0.
    """

    store: TokenStore
    plan: Plan
    seq_len: int
    mask_document_starts: bool
    name: str
    identity: str
    pad_id: int = 0

    def __len__(self) -> int:
        return self.plan.stats.rows

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = empty_row(self.seq_len, self.pad_id)
        bounds = self.plan.bounds
        low = index * self.seq_len
        high = min(low + self.seq_len + 1, int(bounds[-1]))
        first = int(np.searchsorted(bounds, low, side="right")) - 1
        last = int(np.searchsorted(bounds, high, side="left"))
        edges = np.clip(bounds[first : last + 1], low, high)
        lengths = np.diff(edges)
        begins = self.plan.start[first:last] + (edges[:-1] - bounds[first:last])
        stream = np.concatenate([self.store.read(b, n) for b, n in zip(begins.tolist(), lengths.tolist())])
        used = len(stream) - 1
        row["tokens"][:used] = stream[:-1]
        row["targets"][:used] = stream[1:]
        row["weights"][:used] = 1.0
        inside = edges[1:-1] - low  # where a new document starts, as a place in the stream
        if self.mask_document_starts:
            row["weights"][inside - 1] = 0.0
        starts = np.concatenate([[0], inside[inside < used]])
        marks = np.zeros((used,), np.int32)
        marks[starts] = 1
        row["segment_ids"][:used] = np.cumsum(marks)
        counts = np.diff(np.append(starts, used))
        row["positions"][:used] = np.arange(used) - np.repeat(starts, counts)
        return row

    def sample_id(self, index: int) -> str:
        """A name of the row that does not depend on the run."""
        return f"{self.name}:{index}"


@dataclasses.dataclass(frozen=True)
class PieceRows:
    """Rows of whole pieces (packing "best_fit" and "none"): every slot is trained, no piece knows of another."""

    store: TokenStore
    plan: Plan
    seq_len: int
    name: str
    identity: str
    pad_id: int = 0

    def __len__(self) -> int:
        return self.plan.stats.rows

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = empty_row(self.seq_len, self.pad_id)
        first, last = self.plan.bounds[index : index + 2].tolist()
        at = 0
        starts, sizes = self.plan.start[first:last].tolist(), self.plan.slots[first:last].tolist()
        for segment, (start, slots) in enumerate(zip(starts, sizes), 1):
            piece = self.store.read(start, slots + 1)
            here = slice(at, at + slots)
            row["tokens"][here] = piece[:-1]
            row["targets"][here] = piece[1:]
            row["positions"][here] = np.arange(slots)
            row["segment_ids"][here] = segment
            at += slots
        row["weights"][:at] = 1.0
        return row

    def sample_id(self, index: int) -> str:
        """A name of the row that does not depend on the run."""
        return f"{self.name}:{index}"


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """The rows of several sources, one source after the other."""

    parts: tuple[Rows, ...]
    seq_len: int
    identity: str

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def _find(self, index: int) -> tuple[Rows, int]:
        for part in self.parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(f"row index past {len(self)} rows")

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        part, inner = self._find(index)
        return part.row(inner)

    def sample_id(self, index: int) -> str:
        """A name of the row that does not depend on the run."""
        part, inner = self._find(index)
        return part.sample_id(inner)
