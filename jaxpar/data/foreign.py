"""Token files of other systems, read where they lie: Megatron .bin/.idx and headerless uint16 or uint32.

Every inconsistency refuses and names the file; a memory map is made only over bytes that are known to be there.
Layout of the index, little-endian: magic (9 bytes), version u64, type code u8, number of sequences S u64, number of
document bounds D u64, S lengths i32, S byte offsets i64, D bounds i64 (numbers of sequences, from 0 to S).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar.data.cache import cached
from jaxpar.data.hashing import content_identity, mix64
from jaxpar.data.json_files import read_json, write_json
from jaxpar.data.store import WINDOW_DOCUMENTS, Documents, Shard, TokenStore, map_array
from jaxpar.data.tokenizers import hash_files
from jaxpar.errors import UserError

log = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
TYPE_NAMES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
SCAN_TOKENS = 1 << 24


def open_megatron(prefix: Path, cache_dir: Path) -> TokenStore:
    """The documents of PREFIX.bin and PREFIX.idx; refuses every malformed pair."""
    index, data = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    for path in (index, data):
        if not path.is_file():
            raise UserError(f"{path}: missing; a Megatron data set is a .bin and an .idx of the same name")
    dtype, lengths, pointers, bounds = _read_index(index)
    num_tokens = _check_index(index, data, dtype, lengths, pointers, bounds)
    tokens = map_array(data, dtype, num_tokens)
    content = _scan(data, tokens, cache_dir)
    windows = functools.partial(_megatron_windows, pointers, bounds, num_tokens, dtype.itemsize)
    return TokenStore(
        name=str(prefix),
        shards=(Shard(data, tokens, 0, windows),),
        num_tokens=num_tokens,
        identity=content_identity(["megatron", hash_files([index]), content.sha256]),
        max_id=content.largest_id,
        vocab_size=None,
        tokenizer_sha256=None,
        knows_bytes=False,
    )


def open_raw(path: Path, dtype_name: str, document_end: int | None, cache_dir: Path) -> TokenStore:
    """A headerless file of ids; `document_end` is the id that ends a document, None: the file is one document."""
    dtype = np.dtype(dtype_name).newbyteorder("<")
    size = path.stat().st_size
    if not size:
        raise UserError(f"{path}: is empty (0 bytes)")
    if size % dtype.itemsize:
        raise UserError(f"{path}: {size} bytes is no multiple of {dtype.itemsize}; it is cut, or not {dtype_name}")
    tokens = map_array(path, dtype, size // dtype.itemsize)
    content = _scan(path, tokens, cache_dir)
    return TokenStore(
        name=str(path),
        shards=(Shard(path, tokens, 0, functools.partial(_raw_windows, tokens, document_end)),),
        num_tokens=len(tokens),
        identity=content_identity(["raw", dtype.str, document_end, content.sha256]),
        max_id=content.largest_id,
        vocab_size=None,
        tokenizer_sha256=None,
        knows_bytes=False,
        whole_files=document_end is None,
    )


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(type of the ids, lengths [S], byte offsets [S], document bounds [D]) of an index."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header.startswith(OLD_MAGIC):
        raise UserError(f"{path}: the older fairseq layout (TNTIDX); write it again with a Megatron of today")
    if not header.startswith(MAGIC):
        raise UserError(f"{path}: does not start with MMIDIDX: no Megatron index, or .bin and .idx are swapped")
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path}: cut inside its header ({size} bytes; want at least {HEADER_BYTES})")
    version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", header[len(MAGIC) :])
    if version != 1:
        raise UserError(f"{path}: version {version}; want 1")
    if code not in TYPE_NAMES:
        raise UserError(f"{path}: type code {code}; want one of {sorted(TYPE_NAMES)}")
    dtype = np.dtype("<" + TYPE_NAMES[code])
    if dtype.kind == "f":
        raise UserError(f"{path}: its type code {code} means {dtype.name}, no token ids")
    wanted = HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if size == wanted + num_sequences and num_sequences:
        raise UserError(f"{path}: has a mode per sequence (multimodal data), which is not supported")
    if size != wanted:
        raise UserError(
            f"{path}: {size} bytes; {num_sequences} sequences and {num_bounds} document bounds make {wanted}:"
            f" it is {'cut' if size < wanted else 'longer than it says'}"
        )
    if not num_sequences:
        raise UserError(f"{path}: holds no sequence")
    content = np.asarray(np.memmap(path, np.uint8, mode="r"))
    edges = np.cumsum([HEADER_BYTES, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds])
    lengths, pointers, bounds = (content[a:b] for a, b in itertools.pairwise(edges))
    return dtype, lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8")


def _check_index(
    index: Path, data: Path, dtype: np.dtype, lengths: np.ndarray, pointers: np.ndarray, bounds: np.ndarray
) -> int:
    """Number of tokens; refuses an index that does not describe its data file."""
    if not len(bounds) or bounds[0] != 0:
        raise UserError(f"{index}: its document bounds do not start at 0")
    if bounds[-1] != len(lengths):
        raise UserError(
            f"{index}: its last document ends at sequence {bounds[-1]}, but it has {len(lengths)} sequences"
        )
    for low in range(0, len(bounds) - 1, WINDOW_DOCUMENTS):
        if np.any(np.diff(bounds[low : low + WINDOW_DOCUMENTS + 1]) < 0):
            raise UserError(f"{index}: its document bounds go backwards")
    offset = 0
    for low in range(0, len(lengths), WINDOW_DOCUMENTS):
        part = lengths[low : low + WINDOW_DOCUMENTS].astype(np.int64)
        if np.any(part < 0):
            raise UserError(f"{index}: sequence {low + int(np.argmax(part < 0))} has a negative length")
        ends = offset + np.cumsum(part) * dtype.itemsize
        wrong = pointers[low : low + WINDOW_DOCUMENTS] != ends - part * dtype.itemsize
        if np.any(wrong):
            at = int(np.argmax(wrong))
            want = int(ends[at]) - int(part[at]) * dtype.itemsize
            raise UserError(
                f"{index}: the byte offset of sequence {low + at} is {int(pointers[low + at])}, its lengths make {want}"
                " (overflowed when it was written?)"
            )
        offset = int(ends[-1])
    size = data.stat().st_size
    if size != offset:
        raise UserError(f"{data}: {size} bytes; its index describes {offset} bytes: the two do not belong together")
    if not offset:
        raise UserError(f"{data}: holds no token")
    return offset // dtype.itemsize


def _megatron_windows(pointers: np.ndarray, bounds: np.ndarray, num_tokens: int, itemsize: int) -> Iterator[Documents]:
    for low in range(0, len(bounds) - 1, WINDOW_DOCUMENTS):
        edges = bounds[low : low + WINDOW_DOCUMENTS + 1]
        known = edges < len(pointers)
        places = np.full((len(edges),), num_tokens, np.int64)
        places[known] = pointers[edges[known]] // itemsize
        yield _numbered(places, low)


def _raw_windows(tokens: np.ndarray, document_end: int | None) -> Iterator[Documents]:
    if document_end is None:
        yield _numbered(np.array([0, len(tokens)], np.int64), 0)
        return
    before, number = 0, 0
    for low in range(0, len(tokens), SCAN_TOKENS):
        ends = low + 1 + np.flatnonzero(tokens[low : low + SCAN_TOKENS] == document_end)
        last = low + SCAN_TOKENS >= len(tokens)
        if last and (not len(ends) or ends[-1] != len(tokens)):
            ends = np.append(ends, len(tokens))
        if len(ends):
            yield _numbered(np.concatenate([[before], ends]).astype(np.int64), number)
            before, number = int(ends[-1]), number + len(ends)


def _numbered(edges: np.ndarray, first: int) -> Documents:
    """Documents between `edges`; their hashes come from their numbers, as hashing the tokens would read everything."""
    numbers = np.arange(first, first + len(edges) - 1, dtype=np.uint64)
    return Documents(edges[:-1], np.diff(edges), mix64(numbers), np.zeros((len(numbers),), np.int64))


class _Content(NamedTuple):
    """What one pass over a file of ids tells."""

    largest_id: int
    sha256: str


def _scan(path: Path, tokens: np.ndarray, cache_dir: Path) -> _Content:
    """The largest id and the hash of a file, from one pass over it that is remembered; refuses negative ids."""
    stat = path.stat()
    state = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, tokens.dtype.str]

    def scan(folder: Path) -> None:
        log.info("%s: looking for the largest of %d ids", path, len(tokens))
        smallest, largest, digest = 0, 0, hashlib.sha256()
        for low in range(0, len(tokens), SCAN_TOKENS):
            part = tokens[low : low + SCAN_TOKENS]
            smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
            digest.update(part.data)
        write_json(folder / "ids.json", {"smallest": smallest, "largest": largest, "sha256": digest.hexdigest()})

    key = content_identity([2, *state])
    found = cached(cache_dir, f"ids-{key}", scan, lambda folder: read_json(folder / "ids.json"))
    if found["smallest"] < 0:
        raise UserError(f"{path}: holds the negative id {found['smallest']}")
    return _Content(found["largest"], found["sha256"])
