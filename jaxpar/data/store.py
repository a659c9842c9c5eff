"""Token files: documents as token ids on disk, memory-mapped, with a manifest.

A token set is a folder: `manifest.json`, and per shard `tokens-NNNNN.bin` (little-endian uint16 or uint32 ids, one
document after the other) and `documents-NNNNN.bin` (one record per document: where it ends in the shard, a hash of its
text, the length of its text in bytes). Every reader of a format (this one, Megatron, headerless) is a `TokenStore`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.hashing import content_identity
from jaxpar.data.json_files import write_json
from jaxpar.data.manifest import FORMAT, FORMAT_VERSION, open_manifest, shards_identity
from jaxpar.data.tokenizers import damaged_copy
from jaxpar.errors import UserError

DOCUMENT = np.dtype([("end", "<i8"), ("hash", "<u8"), ("bytes", "<i8")])
SHARD_TOKENS = 1 << 30
WINDOW_DOCUMENTS = 1 << 20


class Documents(NamedTuple):
    """A run of documents: arrays [N]; `start` counts tokens over the whole store, `bytes` is the length of the text."""

    start: np.ndarray
    length: np.ndarray
    hash: np.ndarray
    bytes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Shard:
    """One memory-mapped file of ids, `first` of them before it in the store.

    `windows` gives its documents in runs, their starts counted from the beginning of the shard.
    """

    path: Path
    tokens: np.ndarray
    first: int
    windows: Callable[[], Iterator[Documents]]


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Documents as token ids with random access.

    `identity` hashes the content (or what stands for it), `max_id` is the largest id in use, `knows_bytes` tells
    whether the lengths of the texts are known, `whole_files` that a document is a whole file without boundaries.
    `tokenizer_dir` should hold a copy of the tokenizer, and `tokenizer_facts` are the manifest's account of it.
    """

    name: str
    shards: tuple[Shard, ...]
    num_tokens: int
    identity: str
    max_id: int
    vocab_size: int | None
    tokenizer_sha256: str | None
    knows_bytes: bool
    tokenizer_dir: Path | None = None
    tokenizer_facts: Mapping[str, Any] | None = None
    whole_files: bool = False

    @property
    def width(self) -> int:
        """Bytes of one stored id (the widest shard's)."""
        return max(shard.tokens.dtype.itemsize for shard in self.shards)

    def read(self, start: int, length: int) -> np.ndarray:
        """Ids [length] from token `start` on; the run must lie inside one document."""
        number = 0
        if len(self.shards) > 1:
            number = int(np.searchsorted([shard.first for shard in self.shards], start, side="right")) - 1
        shard = self.shards[number]
        offset = start - shard.first
        ids = shard.tokens[offset : offset + length]
        largest = int(ids.max()) if len(ids) else 0
        if largest > self.max_id:  # a model would clip it to its vocabulary, silently
            raise UserError(
                f"{shard.path}: holds the id {largest} at one of its tokens {offset} to {offset + length - 1}, but none"
                f" above {self.max_id} when it was written or first read: it is damaged or was changed"
            )
        return ids

    def documents(self) -> Iterator[Documents]:
        """All documents in order, in windows."""
        for shard in self.shards:
            for window in shard.windows():
                yield window._replace(start=window.start + shard.first)


def record_windows(path: Path, records: np.ndarray) -> Iterator[Documents]:
    """Documents of an array of DOCUMENT records, in windows; `path` is where they lie."""
    before = 0
    for low in range(0, len(records), WINDOW_DOCUMENTS):
        window = records[low : low + WINDOW_DOCUMENTS]
        ends = window["end"].astype(np.int64)
        starts = np.concatenate([[before], ends[:-1]])
        before = int(ends[-1])
        if np.any(ends < starts):
            raise UserError(
                f"{path}: document {low + int(np.argmax(ends < starts))} ends before it starts; it is damaged"
            )
        yield Documents(starts, ends - starts, window["hash"], window["bytes"])


def join_stores(stores: Sequence[TokenStore], name: str) -> TokenStore:
    """Several stores as one, in order; refuses stores of different tokenizers."""
    first = stores[0]
    if len(stores) == 1:
        return first
    for store in stores[1:]:
        if store.tokenizer_sha256 != first.tokenizer_sha256:
            raise UserError(f"{store.name} and {first.name} were written with different tokenizers; use one of them")
    shards: list[Shard] = []
    before = 0
    for store in stores:
        shards += [dataclasses.replace(shard, first=shard.first + before) for shard in store.shards]
        before += store.num_tokens
    vocab_sizes = [store.vocab_size for store in stores if store.vocab_size is not None]
    return dataclasses.replace(
        first,
        name=name,
        shards=tuple(shards),
        num_tokens=before,
        identity=content_identity([store.identity for store in stores]),
        max_id=max(store.max_id for store in stores),
        vocab_size=max(vocab_sizes, default=None),
        knows_bytes=all(store.knows_bytes for store in stores),
    )


def map_array(path: Path, dtype: np.dtype | type, count: int) -> np.ndarray:
    """Read-only memory map of `count` items; refuses a file of another size."""
    dtype = np.dtype(dtype)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if size != count * dtype.itemsize:
        raise UserError(f"{path}: {size} bytes; want {count} x {dtype.itemsize} = {count * dtype.itemsize}")
    # The plain array type: slicing a memmap object costs several times more.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,))) if count else np.zeros((0,), dtype)


def open_store(folder: Path) -> TokenStore:
    """Open a token set; refuses an unfinished or damaged one, naming the file."""
    manifest = open_manifest(folder)
    shards: list[Shard] = []
    first = 0
    for entry in manifest["shards"]:
        tokens = map_array(folder / entry["tokens_file"], np.dtype(manifest["dtype"]), entry["tokens"])
        records = map_array(folder / entry["documents_file"], DOCUMENT, entry["documents"])
        if len(records) and int(records["end"][-1]) != len(tokens):
            raise UserError(f"{folder / entry['documents_file']}: its last document does not end at {len(tokens)}")
        windows = functools.partial(record_windows, folder / entry["documents_file"], records)
        shards.append(Shard(folder / entry["tokens_file"], tokens, first, windows))
        first += len(tokens)
    return TokenStore(
        name=str(folder),
        shards=tuple(shards),
        num_tokens=first,
        identity=manifest["identity"],
        max_id=manifest["max_id"],
        vocab_size=manifest["tokenizer"]["vocab_size"],
        tokenizer_sha256=manifest["tokenizer"]["sha256"],
        knows_bytes=True,
        tokenizer_dir=folder / "tokenizer" if manifest["tokenizer"]["kind"] != "bytes" else None,
        tokenizer_facts=manifest["tokenizer"],
    )


def verify_store(folder: Path) -> list[str]:
    """Files of a token set whose checksum is not the manifest's, those of the tokenizer's copy included."""
    open_store(folder)
    manifest = open_manifest(folder)
    wrong = damaged_copy(folder / "tokenizer", manifest["tokenizer"])
    for entry in manifest["shards"]:
        for kind in ("tokens", "documents"):
            file = folder / entry[f"{kind}_file"]
            if file_crc32(file) != entry[f"{kind}_crc32"]:
                wrong.append(str(file))
    return wrong


def file_crc32(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(4 << 20):
            value = zlib.crc32(chunk, value)
    return value


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest stored type that holds every id below `vocab_size`."""
    if vocab_size > 1 << 32:
        raise UserError(f"a vocabulary of {vocab_size} ids does not fit 32 bits")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Appends documents to a token set; what `progress` told can be continued after a kill."""

    def __init__(
        self, folder: Path, dtype: np.dtype, *, shard_tokens: int = SHARD_TOKENS, progress: dict[str, Any] | None = None
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._open_tokens = 0  # of the document whose parts are still coming
        self._open_bytes = 0
        self._open_hash = b""
        self._files: list[Any] = []
        self.max_id = -1
        folder.mkdir(parents=True, exist_ok=True)
        if progress is None:
            self._next_shard()
        else:
            self._restore(progress)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard["tokens"] for shard in self._shards)

    @property
    def num_documents(self) -> int:
        """Whole documents written so far."""
        return sum(shard["documents"] for shard in self._shards)

    @property
    def inside_document(self) -> bool:
        """Whether parts of the last document are still to come."""
        return self._open_tokens > 0

    @property
    def open_hash(self) -> bytes:
        """Hash of the parts of the open document, which the next part's hash continues."""
        return self._open_hash

    def add(self, tokens: np.ndarray, lengths: np.ndarray, hashes: np.ndarray, sizes: np.ndarray) -> None:
        """Append whole documents: their ids one after the other, and arrays [N] of token counts, hashes, text bytes."""
        assert not self._open_tokens, "a document is open"
        if not len(lengths):
            return
        if self._shards[-1]["tokens"] >= self._shard_tokens:
            self._next_shard()
        self._write_tokens(tokens)
        records = np.empty((len(lengths),), DOCUMENT)
        records["end"] = self._shards[-1]["tokens"] - len(tokens) + np.cumsum(lengths, dtype=np.int64)
        records["hash"] = hashes
        records["bytes"] = sizes
        self._write_documents(records)

    def add_part(self, tokens: np.ndarray, digest: bytes, size_bytes: int, *, closes: bool) -> None:
        """Append a part of one document; `digest` (8 bytes) covers the parts so far."""
        if not self._open_tokens and self._shards[-1]["tokens"] >= self._shard_tokens:
            self._next_shard()
        self._write_tokens(tokens)
        self._open_tokens += len(tokens)
        self._open_bytes += size_bytes
        self._open_hash = digest
        if closes:
            record = np.array(
                [(self._shards[-1]["tokens"], int.from_bytes(digest, "little"), self._open_bytes)], DOCUMENT
            )
            self._write_documents(record)
            self._open_tokens, self._open_bytes, self._open_hash = 0, 0, b""

    def progress(self) -> dict[str, Any]:
        """Everything so far is on disk; what a later writer needs to go on from here."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return {
            "shards": [dict(shard) for shard in self._shards],
            "open": [self._open_tokens, self._open_bytes, self._open_hash.hex()],
            "max_id": self.max_id,
        }

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the manifest: `facts` and what the writer counted."""
        assert not self._open_tokens, "a document is open"
        self.progress()
        self.close()
        manifest = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "dtype": self._dtype.str,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "max_id": self.max_id,
            "shards": self._shards,
            "identity": shards_identity(self._dtype.str, self._shards),
            **facts,
        }
        write_json(self._folder / "manifest.json", manifest)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files = []

    def _write_tokens(self, tokens: np.ndarray) -> None:
        if not len(tokens):
            return
        largest = int(tokens.max())
        assert largest <= np.iinfo(self._dtype).max, "an id is wider than the stored type"
        self.max_id = max(self.max_id, largest)
        data = np.ascontiguousarray(tokens, self._dtype).data
        self._files[0].write(data)
        shard = self._shards[-1]
        shard["tokens"] += len(tokens)
        shard["tokens_crc32"] = zlib.crc32(data, shard["tokens_crc32"])

    def _write_documents(self, records: np.ndarray) -> None:
        data = records.tobytes()
        self._files[1].write(data)
        shard = self._shards[-1]
        shard["documents"] += len(records)
        shard["documents_crc32"] = zlib.crc32(data, shard["documents_crc32"])

    def _next_shard(self) -> None:
        self.progress()
        self.close()
        number = len(self._shards)
        self._shards.append(
            {
                "tokens_file": f"tokens-{number:05d}.bin",
                "documents_file": f"documents-{number:05d}.bin",
                "tokens": 0,
                "documents": 0,
                "tokens_crc32": 0,
                "documents_crc32": 0,
            }
        )
        self._files = [(self._folder / self._shards[-1][key]).open("wb") for key in ("tokens_file", "documents_file")]

    def _restore(self, progress: dict[str, Any]) -> None:
        """Open the last shard again and cut off what was written after the progress was told."""
        self._shards = progress["shards"]
        self._open_tokens, self._open_bytes, digest = progress["open"]
        self._open_hash = bytes.fromhex(digest)
        self.max_id = progress["max_id"]
        shard = self._shards[-1]
        sizes = (shard["tokens"] * self._dtype.itemsize, shard["documents"] * DOCUMENT.itemsize)
        for key, size in zip(("tokens_file", "documents_file"), sizes):
            path = self._folder / shard[key]
            if not path.is_file() or path.stat().st_size < size:
                raise UserError(f"{path}: shorter than its progress file tells; delete {self._folder} and start again")
            file = path.open("r+b")
            file.truncate(size)
            file.seek(size)
            self._files.append(file)
