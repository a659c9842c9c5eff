"""Documents out of files: text, JSONL and Parquet, plain or compressed, by glob, and the Python standard library.

Owns every rule about the oddities of files (byte-order marks, line ends, blank lines, empty texts, broken rows).
A file that cannot be read as what its name says is an error that names the file and the line, never a shorter corpus.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import gzip
import io
import json
import logging
import os
import re
import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxpar.errors import UserError, raise_together

log = logging.getLogger(__name__)

UTF8_MARK = b"\xef\xbb\xbf"
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED_SUFFIXES = (".gz", ".zst")
BLOCK_BYTES = 1 << 20  # files are read in blocks of this size
PART_BYTES = 16 << 20  # a text file above this size is tokenized in parts
STDIN = "standard input"
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Block:
    """Some documents of one file, as raw bytes of whole lines, or the texts themselves.

    `kind` "lines": JSONL bytes that start at line `first_line`. "text": one document, or a part of it; `opens` and
    `closes` say whether the part is the first and the last. "texts": a list of documents.
    `end` is where the next block starts (bytes of the plain file, rows for Parquet), `read_bytes` how much of the file
    as it lies on disk was read up to here.
    """

    kind: str
    path: str
    data: bytes = b""
    texts: tuple[str, ...] = ()
    first_line: int = 1
    opens: bool = True
    closes: bool = True
    end: int = 0
    read_bytes: int = 0


def expand_files(patterns: Sequence[str], key: str) -> list[Path]:
    """Files of the globs in a fixed order, each once; patterns that match nothing are reported together."""
    if not patterns:
        raise UserError(f"{key}: empty; want one or more file names or globs such as 'corpus/**/*.jsonl'")
    files: dict[str, Path] = {}
    problems: list[str] = []
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        found = [Path(match) for match in matches if os.path.isfile(match)]
        if not found:
            folder = os.path.isdir(os.path.expanduser(pattern))
            hint = f"is a folder; did you mean {pattern.rstrip('/')}/**/*.txt?" if folder else "matches no file"
            problems.append(f"{key}: {pattern!r} {hint}")
        for path in found:
            real = os.path.realpath(path)
            if real in files:
                log.info("%s is matched twice by %s; it is read once", path, key)
            files.setdefault(real, path)
    raise_together(problems)
    return list(files.values())


def stdlib_files() -> tuple[list[Path], int]:
    """The .py files of this interpreter's standard library, sorted, and how many were left out as not UTF-8 text.

    Tests and installed packages are no part of it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    skipped = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for path in sorted(Path(folder) / name for name in names if name.endswith(".py")):
            try:
                files += [path] if path.read_bytes().decode("utf-8").strip() else []
            except (OSError, UnicodeDecodeError):
                skipped += 1
    if not files:
        raise UserError(f'data.source "python_stdlib": no .py file under {root}; use data.source=files')
    return files, skipped


def plain_suffix(path: str) -> str:
    """Suffix that tells the format, below a compression suffix."""
    pure = Path(path)
    return (Path(pure.stem).suffix if pure.suffix in COMPRESSED_SUFFIXES else pure.suffix).lower()


def read_blocks(path: Path, *, text_key: str, start: int = 0, first_line: int = 1) -> Iterator[Block]:
    """Blocks of a file from offset `start` (as a former block's `end` told)."""
    if plain_suffix(str(path)) == ".parquet":
        yield from _parquet_blocks(path, text_key, start)
        return
    with open_plain(path) as (stream, raw):
        _skip(stream, start, path)
        blocks = line_blocks if plain_suffix(str(path)) in JSON_SUFFIXES else text_blocks
        for block in blocks(stream, str(path), start, first_line):
            yield dataclasses.replace(block, read_bytes=raw.tell())


def line_blocks(stream: IO[bytes], name: str, start: int, first_line: int) -> Iterator[Block]:
    """Blocks of whole lines; only a line feed ends a line, so U+2028 inside a text does not."""
    pieces: list[bytes] = []
    offset, line = start, first_line
    for chunk in _chunks(stream, name):
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            pieces.append(chunk)
            continue
        data = b"".join([*pieces, chunk[:cut]])
        pieces = [chunk[cut:]] if cut < len(chunk) else []
        offset += len(data)
        yield Block("lines", name, data, first_line=line, end=offset)
        line += data.count(b"\n")
    if pieces:
        data = b"".join(pieces)
        yield Block("lines", name, data, first_line=line, end=offset + len(data))


def text_blocks(stream: IO[bytes], name: str, start: int, first_line: int = 1) -> Iterator[Block]:
    """One document, a large one in parts that end before a visible character at the start of a line."""
    rest = b""
    offset = start
    opens = start == 0
    for chunk in _chunks(stream, name):
        rest = rest + chunk if rest else chunk
        while cut := _text_cut(rest):
            offset += cut
            yield Block("text", name, rest[:cut], opens=opens, closes=False, end=offset, first_line=first_line)
            rest, opens = rest[cut:], False
    yield Block("text", name, rest, opens=opens, closes=True, end=offset + len(rest), first_line=first_line)


# Places where byte-pair patterns end a piece whatever comes before and after: inside "word word", and after a line.
_WORD_END = re.compile(rb"[A-Za-z](?= [A-Za-z])")
_LINE_END = re.compile(rb"[^\s]\n(?=[A-Za-z\x80-\xff])")


def _text_cut(data: bytes) -> int:
    """Where to cut a text: in its first part, at the last place where a tokenizer ends a piece anyway.

    A part without such a place is cut between characters. 0 while the part is not complete: the cuts depend on the
    text alone, not on how much of it happens to be read.
    """
    if len(data) <= PART_BYTES:
        return 0
    for pattern in (_WORD_END, _LINE_END):
        for low in (max(0, PART_BYTES - (1 << 16)), 0):
            ends = [match.end() for match in pattern.finditer(data, low, PART_BYTES)]
            if ends:
                return ends[-1]
    return next(cut for cut in range(PART_BYTES, 0, -1) if data[cut] & 0xC0 != 0x80)


def _chunks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The stream in chunks; a broken compressed stream names its file."""
    while True:
        try:
            chunk = stream.read(BLOCK_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{name}: cannot be read to its end ({error})") from error
        if not chunk:
            return
        yield chunk


def _skip(stream: IO[bytes], start: int, path: Path) -> None:
    """Move a plain or decompressed stream to byte `start`."""
    if not start:
        return
    if path.suffix not in COMPRESSED_SUFFIXES:
        stream.seek(start)
        return
    left = start
    while left:
        chunk = stream.read(min(left, BLOCK_BYTES))
        if not chunk:
            raise UserError(f"{path}: shorter than when it was read before")
        left -= len(chunk)


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(the bytes of a file, decompressed by its suffix; the file itself)."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    with raw:
        if os.fstat(raw.fileno()).st_size == 0:
            raise UserError(f"{path}: is empty (0 bytes)")
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream, raw  # type: ignore[misc]
        elif path.suffix == ".zst":
            with open_zstandard(raw, str(path)) as stream:
                yield stream, raw
        else:
            yield raw, raw


@contextlib.contextmanager
def open_zstandard(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """A zstandard stream, all its frames."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_library("zstandard", name) from error
    with io.BufferedReader(_Frames(raw, zstandard), BLOCK_BYTES) as stream:
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


def block_texts(block: Block, text_key: str) -> list[str]:
    """The documents of a block in order (a part of one for "text"); empty ones are kept as empty strings."""
    if block.kind == "texts":
        return list(block.texts)
    if block.kind == "text":
        data = block.data.removeprefix(UTF8_MARK) if block.opens else block.data
        return [decode_utf8(data, block.path)]
    texts: list[str] = []
    data = block.data.removeprefix(UTF8_MARK) if block.first_line == 1 else block.data
    for number, line in enumerate(data.split(b"\n"), block.first_line):
        if line.strip():
            texts.append(_json_text(line, f"{block.path}, line {number}", text_key))
    return texts


def _json_text(line: bytes, where: str, text_key: str) -> str:
    """The text of one JSONL row."""
    try:
        row: Any = json.loads(decode_utf8(line, where))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON {type(row).__name__}; want an object with the key {text_key!r}")
    if text_key not in row:
        raise UserError(f"{where}: no key {text_key!r}; the row has {sorted(row)[:8]} (set data.text_key)")
    text = row[text_key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_key!r} is {type(text).__name__}; want a string")
    if b"\\u" in line and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where}: {text_key!r} holds a lone surrogate (half of a character), which has no UTF-8 form")
    return text


def decode_utf8(data: bytes, where: str) -> str:
    """The text of UTF-8 bytes, or an error that tells where they stop being UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "; it looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise UserError(f"{where}: not UTF-8 (byte {error.start}: 0x{data[error.start]:02x}{hint})") from error


def _parquet_blocks(path: Path, text_key: str, start: int) -> Iterator[Block]:
    """Blocks of texts of a Parquet file, from row `start` on."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_library("pyarrow", str(path)) from error
    with _parquet_path(path) as plain:
        try:
            table = pyarrow.parquet.ParquetFile(plain)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path}: not a Parquet file ({error})") from error
        with table:
            names = table.schema_arrow.names
            if text_key not in names:
                raise UserError(f"{path}: no column {text_key!r}; it has {names[:8]} (set data.text_key)")
            row, num_rows, size_bytes = 0, max(table.metadata.num_rows, 1), path.stat().st_size
            for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
                first, row = row, row + len(batch)
                if row > start:
                    values = batch.column(0).to_pylist()
                    _check_strings(values, path, first, text_key)
                    texts = tuple(values[max(0, start - first) :])
                    read_bytes = size_bytes * row // num_rows
                    yield Block("texts", str(path), texts=texts, end=row, read_bytes=read_bytes)


def _check_strings(values: list[Any], path: Path, first: int, text_key: str) -> None:
    for number, value in enumerate(values, first):
        if not isinstance(value, str):
            found = "null" if value is None else type(value).__name__
            raise UserError(f"{path}, row {number}: {text_key!r} is {found}; want a string")


@contextlib.contextmanager
def _parquet_path(path: Path) -> Iterator[Path]:
    """The Parquet file, decompressed to a temporary one where its name ends in .gz or .zst (it needs seeking)."""
    if path.suffix not in COMPRESSED_SUFFIXES:
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty (0 bytes)")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".parquet") as copy:
        with open_plain(path) as (stream, _):
            try:
                shutil.copyfileobj(stream, copy, BLOCK_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path}: cannot be read to its end ({error})") from error
        copy.flush()
        yield Path(copy.name)


def stream_blocks(stream: IO[bytes]) -> Iterator[Block]:
    """Blocks of standard input: JSONL when it starts with an opening brace, else one text."""
    reader = io.BufferedReader(stream, BLOCK_BYTES) if isinstance(stream, io.RawIOBase) else stream
    head = reader.read(BLOCK_BYTES)
    if not head.strip():
        raise UserError(f"{STDIN}: is empty")
    joined = _Joined(head, reader)
    if head.removeprefix(UTF8_MARK).lstrip().startswith(b"{"):
        yield from line_blocks(joined, STDIN, 0, 1)  # type: ignore[arg-type]
    else:
        yield from text_blocks(joined, STDIN, 0)  # type: ignore[arg-type]


class _Joined:
    """A stream whose head was read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        """The head first, then the rest."""
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._rest.read(size)
