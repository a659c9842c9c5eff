"""Compressed files and streams: gzip and zstandard, told by the suffix of a name or by the first bytes of a stream.

What is compressed otherwise is refused by name, with the command that makes it readable.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxpar.errors import UserError

KINDS = {".gz": "gzip", ".zst": "zstandard"}  # by suffix
# Suffix -> the command that writes the plain bytes to standard output.
UNREAD_SUFFIXES = {".bz2": "bzcat", ".xz": "xzcat", ".lzma": "xzcat", ".lz4": "lz4cat", ".zip": "unzip -p"}
BUFFER_BYTES = 1 << 20
MAGIC_BYTES = 10
_MAGIC = (
    (re.compile(rb"\x1f\x8b"), "gzip"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "zstandard"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bzip2"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz"),
    (re.compile(rb"PK\x03\x04"), "zip"),
    (re.compile(rb"PAR1\x15"), "Parquet"),
)


def suffix_of(path: Path) -> str:
    """The compression suffix of a name in lower case, or nothing."""
    suffix = path.suffix.lower()
    return suffix if suffix in KINDS else ""


def kind_of(head: bytes) -> str | None:
    """What the first bytes of a file tell: the name of a format that is not text."""
    return next((kind for pattern, kind in _MAGIC if pattern.match(head)), None)


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(the bytes of a file, decompressed by its suffix; the file itself)."""
    _refuse_unread(path)
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    with raw:
        if os.fstat(raw.fileno()).st_size == 0:
            raise UserError(f"{path}: is empty (0 bytes)")
        with _decompressed(raw, KINDS.get(suffix_of(path)), str(path)) as stream:
            yield stream, raw


@contextlib.contextmanager
def open_stream(stream: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """The bytes of a stream without a name, decompressed by what its first bytes tell."""
    head = stream.read(MAGIC_BYTES)
    kind = kind_of(head)
    if kind is not None and kind not in KINDS.values():
        raise UserError(f"{name}: is {kind}, which is not read; want text or JSONL, plain or from gzip or zstandard")
    with _decompressed(joined(head, stream), kind, name) as plain:
        yield plain


def joined(head: bytes, rest: IO[bytes]) -> IO[bytes]:
    """A stream whose head was read already."""
    return io.BufferedReader(_Joined(head, rest), BUFFER_BYTES)


class _Joined(io.RawIOBase):
    """The head first, then the rest."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; 0 at the end."""
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _decompressed(raw: IO[bytes], kind: str | None, name: str) -> Iterator[IO[bytes]]:
    if kind == "gzip":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream  # type: ignore[misc]
    elif kind == "zstandard":
        with open_zstandard(raw, name) as stream:
            yield stream
    else:
        yield raw


@contextlib.contextmanager
def open_zstandard(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """A zstandard stream, all its frames."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_library("zstandard", name) from error
    with io.BufferedReader(_Frames(raw, zstandard), BUFFER_BYTES) as stream:
        yield stream


class _Frames(io.RawIOBase):
    """Decompressed zstandard frames. The library's own reader takes a cut file for a complete one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw = raw
        self._library = zstandard
        self._frame: Any = None
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; 0 at the end of the last frame."""
        while not self._plain:
            self._compressed = self._compressed or self._raw.read(1 << 16)
            if not self._compressed:
                if self._frame is not None:
                    raise OSError("its last zstandard frame is cut")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._plain = memoryview(self._frame.decompress(self._compressed))
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def missing_library(package: str, name: str) -> UserError:
    """The error for an optional library that a file needs."""
    return UserError(f"{name}: reading it needs the {package} package; run: pip install 'jaxpar[data]'")


def _refuse_unread(path: Path) -> None:
    """Refuse a file whose name tells a compression that is not read."""
    command = UNREAD_SUFFIXES.get(path.suffix.lower())
    if command is not None:
        raise UserError(
            f"{path}: {path.suffix} is not read; want the plain file, .gz or .zst:"
            f" {command} {path} | zstd -o {path.with_suffix('.zst')}"
        )
