"""Which tokens go into which row: a plan made ahead of time, vectorised, stored as memory-mapped arrays.

A plan cuts the documents of a store into pieces and lays the pieces into rows of `seq_len` slots. A slot is one
trained position: an input token and the token after it. `concat` lays the documents end to end and cuts the stream;
`best_fit` never cuts a document that fits a row; `none` gives every document (or part of a long one) its own row.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxpar.data.json_files import read_json, write_json
from jaxpar.data.store import Documents, TokenStore, map_array
from jaxpar.errors import UserError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How rows are laid out, and which part of the documents they hold."""

    seq_len: int
    method: Literal["concat", "best_fit", "none"] = "concat"
    long_documents: Literal["split", "truncate", "drop"] = "split"
    mask_document_starts: bool = True
    part: Literal["all", "train", "evaluation"] = "all"
    eval_fraction: float = 0.0


@dataclasses.dataclass
class PlanStats:
    """The account of a plan: tokens = packed_tokens + dropped_tokens over its documents."""

    documents: int = 0
    tokens: int = 0
    packed_tokens: int = 0
    dropped_tokens: int = 0
    dropped_documents: int = 0
    truncated_documents: int = 0
    trained_targets: int = 0
    text_bytes: int = 0
    rows: int = 0

    def describe(self) -> str:
        """One line for the log."""
        line = f"{self.documents} documents, {self.tokens} tokens in {self.rows} rows"
        if self.dropped_documents or self.truncated_documents:
            line += (
                f"; {self.dropped_documents} documents dropped, {self.truncated_documents} truncated,"
                f" {self.dropped_tokens} tokens lost"
            )
        return line


class Plan(NamedTuple):
    """A stored plan. `start` int64 [P]: first token of each piece in the store.

    concat: `bounds` int64 [P + 1] are the running token counts of the pieces.
    Otherwise: `slots` int32 [P], and row r holds the pieces bounds[r] to bounds[r + 1] (int64 [rows + 1]).
    """

    start: np.ndarray
    slots: np.ndarray
    bounds: np.ndarray
    stats: PlanStats


def write_plan(store: TokenStore, packing: Packing, folder: Path) -> None:
    """Plan the rows of `store` into `folder`; memory does not grow with the number of documents."""
    stats = PlanStats()
    with (
        (folder / "start.bin").open("wb") as starts,
        (folder / "slots.bin").open("wb") as slots,
        (folder / "bounds.bin").open("wb") as bounds,
    ):
        bounds.write(np.zeros((1,), np.int64).tobytes())
        pieces = 0
        for documents in _selected(store, packing):
            start, length = _cut_long(documents, packing, stats)
            if packing.method == "concat":
                starts.write(start.tobytes())
                bounds.write((stats.packed_tokens + np.cumsum(length)).astype(np.int64).tobytes())
                stats.packed_tokens += int(length.sum())
                pieces += len(start)
                continue
            start, size = _split(start, length, packing.seq_len)
            order, ends = _lay_out(size, packing)
            starts.write(start[order].tobytes())
            slots.write(size[order].astype(np.int32).tobytes())
            bounds.write((pieces + ends).astype(np.int64).tobytes())
            pieces += len(order)
            stats.packed_tokens += int(length.sum())
            stats.trained_targets += int(size.sum())
            stats.rows += len(ends)
    if packing.method == "concat":
        stats.rows = -(-max(stats.packed_tokens - 1, 0) // packing.seq_len)
        masked = pieces if packing.mask_document_starts else min(pieces, 1)
        stats.trained_targets = stats.packed_tokens - masked
    write_json(folder / "plan.json", {"pieces": pieces, "method": packing.method, **dataclasses.asdict(stats)})


def open_plan(folder: Path) -> Plan:
    """Memory-map a stored plan; refuses a damaged one."""
    meta = read_json(folder / "plan.json")
    pieces, method = meta.pop("pieces"), meta.pop("method")
    stats = PlanStats(**meta)
    concat = method == "concat"
    return Plan(
        start=map_array(folder / "start.bin", np.int64, pieces),
        slots=map_array(folder / "slots.bin", np.int32, 0 if concat else pieces),
        bounds=map_array(folder / "bounds.bin", np.int64, (pieces if concat else stats.rows) + 1),
        stats=stats,
    )


def packing_key(store: TokenStore, packing: Packing) -> str:
    """Text that changes with everything that changes a plan."""
    return json.dumps([1, store.identity, dataclasses.asdict(packing)], sort_keys=True)


def _selected(store: TokenStore, packing: Packing) -> Iterator[Documents]:
    """The documents of the wanted part: by the hash of their text, or by place where a document is a whole file."""
    for documents in store.documents():
        if packing.part == "all" or packing.eval_fraction == 0:
            yield documents if packing.part != "evaluation" else _take(documents, np.zeros((0,), np.int64))
        elif store.whole_files:
            kept = np.round(documents.length * (1 - packing.eval_fraction)).astype(np.int64)
            if packing.part == "train":
                yield documents._replace(length=kept)
            else:
                yield documents._replace(start=documents.start + kept, length=documents.length - kept)
        else:
            held_out = documents.hash < np.uint64(packing.eval_fraction * 2.0**64)
            yield _take(documents, held_out if packing.part == "evaluation" else ~held_out)


def _take(documents: Documents, which: np.ndarray) -> Documents:
    return Documents(*(column[which] for column in documents))


def _cut_long(documents: Documents, packing: Packing, stats: PlanStats) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of the documents that are kept, long ones treated as asked, and the account of it."""
    start, length = documents.start, documents.length
    stats.documents += len(length)
    stats.tokens += int(length.sum())
    stats.text_bytes += int(documents.bytes.sum())
    # A document of seq_len + 1 tokens fills a row: its last token is a target only.
    too_long = length > packing.seq_len + 1
    if packing.long_documents == "truncate":
        stats.truncated_documents += int(too_long.sum())
        length = np.minimum(length, packing.seq_len + 1)
    keep = np.ones(len(length), bool)
    if packing.long_documents == "drop":
        keep &= ~too_long
    # Alone in its segment, a single token has nothing to predict; in a stream it still ends one row and starts another.
    keep &= length > (0 if packing.method == "concat" else 1)
    stats.dropped_documents += int((~keep).sum())
    start, length = start[keep], length[keep]
    stats.dropped_tokens += int(documents.length.sum() - length.sum())
    return start, length


def _split(start: np.ndarray, length: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, slots) of pieces of at most `seq_len` slots; every token but a document's first is a target once."""
    slots = length - 1
    parts = -(-slots // seq_len)
    document = np.repeat(np.arange(len(start)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    return start[document] + number * seq_len, np.minimum(slots[document] - number * seq_len, seq_len)


def _lay_out(size: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray]:
    """(order of the pieces, running piece count after every row)."""
    if packing.method == "none":
        return np.arange(len(size)), np.arange(1, len(size) + 1)
    return best_fit(size, packing.seq_len)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces of `sizes` [N] (1 to `capacity`) into rows, each into the fullest row that still has room.

    Longest pieces first; all pieces of one size are placed at once. Returns the order of the pieces, row by row, and
    the running piece count after every row. Rows are ordered by their first piece, so the order of the input is kept
    as far as packing allows.
    """
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty((len(sizes),), np.int64)
    rows_by_room: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []  # sorted keys of rows_by_room
    num_rows = 0
    position = 0
    values, counts = np.unique(-sizes, return_counts=True)
    for size, count in zip((-values).tolist(), counts.tolist()):
        pieces = order[position : position + count]
        position += count
        while len(pieces):
            at = bisect.bisect_left(rooms, size)
            if at == len(rooms):
                per_row = capacity // size  # rows opened together take as many of this size as they can hold
                needed = -(-len(pieces) // per_row)
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
                room = capacity
            else:
                room = rooms[at]
                rows = rows_by_room[room].pop()
                if not rows_by_room[room]:
                    del rows_by_room[room], rooms[at]
            used = min(len(rows), len(pieces))
            if used < len(rows):
                _add_rows(rows_by_room, rooms, room, rows[used:])
            row_of[pieces[:used]] = rows[:used]
            pieces = pieces[used:]
            if room > size:
                _add_rows(rows_by_room, rooms, room - size, rows[:used])
    return _by_row(row_of, num_rows)


def _add_rows(rows_by_room: dict[int, list[np.ndarray]], rooms: list[int], room: int, rows: np.ndarray) -> None:
    if room not in rows_by_room:
        rows_by_room[room] = []
        bisect.insort(rooms, room)
    rows_by_room[room].append(rows)


def _by_row(row_of: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces sorted by row, rows sorted by their first piece."""
    first = np.full((num_rows,), len(row_of), np.int64)
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    rank = np.empty((num_rows,), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(num_rows)
    row_of = rank[row_of]
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=num_rows))


def check_packing(packing: Packing) -> None:
    """Refuse settings that contradict each other."""
    if not packing.mask_document_starts and packing.method != "concat":
        raise UserError(
            f"data.mask_document_starts=false needs data.packing=concat: with {packing.method!r} no document follows"
            " another in a stream"
        )
