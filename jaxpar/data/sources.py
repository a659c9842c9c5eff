"""Documents out of files: text, JSONL and Parquet, plain or compressed, by glob, and the Python standard library.

Owns every rule about the oddities of files (byte-order marks, line ends, blank lines, empty texts, broken rows).
A file that cannot be read as what its name says is an error that names the file and the line, never a shorter corpus.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
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

from jaxpar.data import compression
from jaxpar.errors import UserError, raise_together

log = logging.getLogger(__name__)

UTF8_MARK = b"\xef\xbb\xbf"
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
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
    return (Path(pure.stem) if compression.suffix_of(pure) else pure).suffix.lower()


def read_blocks(path: Path, *, text_key: str, start: int = 0, first_line: int = 1) -> Iterator[Block]:
    """Blocks of a file from offset `start` (as a former block's `end` told)."""
    if plain_suffix(str(path)) == ".parquet":
        yield from _parquet_blocks(path, text_key, start)
        return
    with compression.open_plain(path) as (stream, raw):
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
    if not compression.suffix_of(path):
        stream.seek(start)
        return
    left = start
    while left:
        chunk = stream.read(min(left, BLOCK_BYTES))
        if not chunk:
            raise UserError(f"{path}: shorter than when it was read before")
        left -= len(chunk)


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
    decoded = decode_utf8(line, where)
    try:
        row: Any = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting as deep
        raise UserError(f"{where}: JSON that cannot be read ({str(error).split(';')[0]})") from error
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
        kind = (
            "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else compression.kind_of(data[: compression.MAGIC_BYTES])
        )
        hint = f"; it looks like {kind}" if kind else ""
        raise UserError(f"{where}: not UTF-8 (byte {error.start}: 0x{data[error.start]:02x}{hint})") from error


def _parquet_blocks(path: Path, text_key: str, start: int) -> Iterator[Block]:
    """Blocks of texts of a Parquet file, from row `start` on."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise compression.missing_library("pyarrow", str(path)) from error
    with _parquet_path(path) as plain:
        try:
            # Read ahead, the file would come to lie in memory whole, and without a buffer each of its row groups.
            table = pyarrow.parquet.ParquetFile(
                plain, pre_buffer=False, buffer_size=BLOCK_BYTES, page_checksum_verification=True
            )
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path}: not a Parquet file ({error})") from error
        with table:
            _check_column(table.schema_arrow.names, path, text_key)
            row, num_rows, size_bytes = 0, max(table.metadata.num_rows, 1), path.stat().st_size
            for batch in _batches(table, path, text_key):
                first, row = row, row + len(batch)
                if row > start:
                    values = _values(batch.column(0), path, first, text_key)
                    _check_strings(values, path, first, text_key)
                    texts = tuple(values[max(0, start - first) :])
                    read_bytes = size_bytes * row // num_rows
                    yield Block("texts", str(path), texts=texts, end=row, read_bytes=read_bytes)


def _check_column(names: list[str], path: Path, text_key: str) -> None:
    if text_key not in names:
        raise UserError(f"{path}: no column {text_key!r}; it has {names[:8]} (set data.text_key)")
    if names.count(text_key) > 1:
        raise UserError(f"{path}: {names.count(text_key)} columns have the name {text_key!r}; want one")


def _batches(table: Any, path: Path, text_key: str) -> Iterator[Any]:
    """The column in record batches; a page that is damaged names its file."""
    import pyarrow

    batches = table.iter_batches(batch_size=1024, columns=[text_key])
    while True:
        try:
            batch = next(batches, None)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: cannot be read to its end ({' '.join(str(error).split())})") from error
        if batch is None:
            return
        yield batch


def _values(column: Any, path: Path, first: int, text_key: str) -> list[Any]:
    """The values of a column; Parquet's own type of a text does not make its bytes UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for number, value in enumerate(column, first):
            if value.is_valid:
                decode_utf8(value.as_buffer().to_pybytes(), f"{path}, row {number}: {text_key!r}")
        raise


def _check_strings(values: list[Any], path: Path, first: int, text_key: str) -> None:
    for number, value in enumerate(values, first):
        if not isinstance(value, str):
            found = "null" if value is None else type(value).__name__
            raise UserError(f"{path}, row {number}: {text_key!r} is {found}; want a string")


@contextlib.contextmanager
def _parquet_path(path: Path) -> Iterator[Path]:
    """The Parquet file, decompressed to a temporary one where its name ends in .gz or .zst (it needs seeking)."""
    if not compression.suffix_of(path):
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty (0 bytes)")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".parquet") as copy:
        with compression.open_plain(path) as (stream, _):
            try:
                shutil.copyfileobj(stream, copy, BLOCK_BYTES)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path}: cannot be read to its end ({error})") from error
        copy.flush()
        yield Path(copy.name)


def stream_blocks(stream: IO[bytes]) -> Iterator[Block]:
    """Blocks of standard input: JSONL when it starts with an opening brace, else one text."""
    reader = io.BufferedReader(stream, BLOCK_BYTES) if isinstance(stream, io.RawIOBase) else stream
    with compression.open_stream(reader, STDIN) as plain:
        head = next(_chunks(plain, STDIN), b"")
        if not head.strip():
            raise UserError(f"{STDIN}: is empty")
        joined = compression.joined(head, plain)
        if head.removeprefix(UTF8_MARK).lstrip().startswith(b"{"):
            yield from line_blocks(joined, STDIN, 0, 1)
        else:
            yield from text_blocks(joined, STDIN, 0)
