"""Files to a token set: reads blocks in order, encodes them here or in worker processes, writes them in order.

The result does not depend on the number of processes. Work that was on disk when a build was killed is not done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxpar.data import sources
from jaxpar.data.encode import Encoded, Encoder, Recipe
from jaxpar.data.hashing import chain_hash
from jaxpar.data.json_files import read_json, write_json
from jaxpar.data.sources import Block
from jaxpar.data.store import SHARD_TOKENS, TokenWriter
from jaxpar.data.workers import encode_in_order
from jaxpar.errors import UserError

PROGRESS_FILE = "progress.json"
COMMIT_INTERVAL_S = 5.0


@dataclasses.dataclass
class Counts:
    """What was read so far; `file`, `offset` and `line` say where the next block starts."""

    file: int = 0
    offset: int = 0
    line: int = 1
    empty: int = 0
    text_bytes: int = 0
    file_documents: int = 0  # of the current file
    file_read_bytes: int = 0  # of the current file as it lies on disk
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is read: files, or a stream; `key` stands for them and the recipe when a killed build goes on."""

    files: tuple[Path, ...] = ()
    stdin: IO[bytes] | None = None
    key: str = ""

    def name(self, number: int) -> str:
        """Name of a file for messages."""
        return str(self.files[number]) if self.files else sources.STDIN


def build_token_set(
    folder: Path,
    inputs: Inputs,
    recipe: Recipe,
    *,
    processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Callable[[Counts, TokenWriter], None] | None = None,
) -> dict[str, Any]:
    """Write the token set of `inputs` into `folder` and return its counts.

    With a key, progress that `folder` holds for the same key is continued.
    """
    encoder = recipe.encoder()
    counts, writer = _start(folder, encoder, inputs.key, shard_tokens)
    committed = time.monotonic()
    try:
        blocks = _blocks(inputs, counts, recipe.text_key)
        # Closed explicitly, so that an error here does not leave workers waiting for more.
        with contextlib.closing(encode_in_order(blocks, encoder, recipe, processes)) as encoded_blocks:
            for number, block, encoded in encoded_blocks:
                _write(writer, encoded)
                _count(counts, number, block, encoded, inputs)
                if inputs.key and time.monotonic() - committed > COMMIT_INTERVAL_S:
                    _commit(folder, inputs.key, counts, writer)
                    committed = time.monotonic()
                if on_progress is not None:
                    on_progress(counts, writer)
        _finish_files(counts, inputs, max(1, len(inputs.files)))
        writer.finish(_facts(recipe, encoder, counts))
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: {error.strerror or error}; what is on disk stays, start again to go on") from error
    finally:
        writer.close()
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    return {"documents": writer.num_documents, "tokens": writer.num_tokens, "empty_documents": counts.empty}


def stored_progress(folder: Path, key: str) -> dict[str, Any] | None:
    """What a killed build of the same inputs and recipe left in `folder`."""
    path = folder / PROGRESS_FILE
    if not key or not path.is_file():
        return None
    with _as_written(path):
        stored = read_json(path)
        return stored if stored["key"] == key else None


def finished_work(folder: Path, key: str) -> bool:
    """Whether a later build of the same key finds blocks in `folder` that it need not read again."""
    stored = stored_progress(folder, key)
    if stored is None:
        return False
    with _as_written(folder / PROGRESS_FILE):
        return bool(stored["counts"]["file"] or stored["counts"]["offset"])


@contextlib.contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """Say what to delete where the progress file is not as a build writes it."""
    try:
        yield
    except (UserError, LookupError, TypeError, AttributeError, ValueError) as error:
        found = str(error) if isinstance(error, UserError) else f"{path}: not what an unfinished build leaves"
        hint = f"delete {path.parent} and start again"
        raise UserError(found if hint in found else f"{found}; {hint}") from error


def _start(folder: Path, encoder: Encoder, key: str, shard_tokens: int) -> tuple[Counts, TokenWriter]:
    """Fresh counts and writer, or those of the build that was killed."""
    stored = stored_progress(folder, key)
    if stored is None:
        counts, writer = Counts(), TokenWriter(folder, encoder.dtype, shard_tokens=shard_tokens)
        if key:
            _commit(folder, key, counts, writer)
        return counts, writer
    with _as_written(folder / PROGRESS_FILE):
        counts = Counts(**stored["counts"])
        return counts, TokenWriter(folder, encoder.dtype, shard_tokens=shard_tokens, progress=stored["writer"])


def _commit(folder: Path, key: str, counts: Counts, writer: TokenWriter) -> None:
    stored = {"key": key, "counts": dataclasses.asdict(counts), "writer": writer.progress()}
    write_json(folder / PROGRESS_FILE, stored)


def _blocks(inputs: Inputs, counts: Counts, text_key: str) -> Iterator[tuple[int, Block]]:
    """(number of the file, block) from where `counts` stands now."""
    if inputs.stdin is not None:
        yield from ((0, block) for block in sources.stream_blocks(inputs.stdin))
        return
    offset, line = counts.offset, counts.line
    for number in range(counts.file, len(inputs.files)):
        for block in sources.read_blocks(inputs.files[number], text_key=text_key, start=offset, first_line=line):
            yield number, block
        offset, line = 0, 1


def _write(writer: TokenWriter, encoded: Encoded) -> None:
    if not encoded.is_part:
        writer.add(encoded.tokens, encoded.lengths, encoded.hashes, encoded.sizes)
    elif not encoded.is_empty_document:
        digest = chain_hash(writer.open_hash, int(encoded.hashes[0]))
        writer.add_part(encoded.tokens, digest, int(encoded.sizes[0]), closes=encoded.closes)


def _count(counts: Counts, number: int, block: Block, encoded: Encoded, inputs: Inputs) -> None:
    """Note what a block held and where the next one starts."""
    _finish_files(counts, inputs, number)
    counts.offset = block.end
    counts.line = block.first_line + block.data.count(b"\n") if block.kind == "lines" else 1
    counts.empty += encoded.num_empty
    counts.text_bytes += int(encoded.sizes.sum())
    counts.file_read_bytes = block.read_bytes
    if not encoded.is_part:
        counts.file_documents += len(encoded.lengths)
    elif encoded.closes:
        counts.file_documents += int(not encoded.is_empty_document)
        # Nothing comes after a text's last part, and a build that goes on must not end it twice.
        _finish_files(counts, inputs, number + 1)


def _finish_files(counts: Counts, inputs: Inputs, number: int) -> None:
    """Close the books of the files before `number`; a file without a document is an error."""
    while counts.file < number:
        name = inputs.name(counts.file)
        if not counts.file_documents:
            raise UserError(f"{name}: holds no document (only empty or blank lines)")
        counts.sources.append({"path": name, "documents": counts.file_documents})
        counts.file, counts.offset, counts.line = counts.file + 1, 0, 1
        counts.file_documents, counts.file_read_bytes = 0, 0


def _facts(recipe: Recipe, encoder: Encoder, counts: Counts) -> dict[str, Any]:
    """The manifest's account of where the tokens come from."""
    tokenizer = encoder.tokenizer
    return {
        "tokenizer": {
            "kind": tokenizer.kind,
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "pad_id": tokenizer.pad_id,
            "bos_token": recipe.bos_token,
            "eos_token": recipe.eos_token,
        },
        "add_bos": recipe.add_bos,
        "add_eos": recipe.add_eos,
        "text_bytes": counts.text_bytes,
        "empty_documents": counts.empty,
        "sources": counts.sources,
    }
