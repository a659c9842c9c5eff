"""Files to a token set: reads blocks in order, encodes them here or in worker processes, writes them in order.

The result does not depend on the number of processes. Work that was on disk when a build was killed is not done again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxpar.data import sources
from jaxpar.data.encode import Encoded, Encoder, chain_hash
from jaxpar.data.sources import Block
from jaxpar.data.store import TokenWriter, content_identity, id_dtype, read_json, write_json
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer, require_special
from jaxpar.errors import UserError

PROGRESS_FILE = "progress.json"
COMMIT_INTERVAL_S = 5.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How texts become ids; together with the texts it decides every stored token."""

    tokenizer: str = "bytes"
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    add_eos: bool = True
    text_key: str = "text"

    def load(self, threads: int | None = None) -> Tokenizer:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer, bos_token=self.bos_token, eos_token=self.eos_token, threads=threads)

    def encoder(self, tokenizer: Tokenizer | None = None) -> Encoder:
        """The encoder, with the width that the largest possible id needs."""
        tokenizer = tokenizer or self.load()
        bos, eos = require_special(tokenizer, add_bos=self.add_bos, add_eos=self.add_eos)
        return Encoder(tokenizer, bos, eos, id_dtype(tokenizer.vocab_size), self.text_key)

    def identity(self, tokenizer: Tokenizer) -> list[Any]:
        """JSON-able facts that change when any id could change."""
        return [tokenizer.sha256, tokenizer.vocab_size, self.add_bos, self.add_eos, self.text_key]


@dataclasses.dataclass
class Counts:
    """What was read so far; `file` and `offset` say where the next block starts."""

    file: int = 0
    offset: int = 0
    line: int = 1
    empty: int = 0
    text_bytes: int = 0
    file_documents: int = 0  # of the current file
    read_bytes: int = 0  # of the plain text, for the progress bar
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)


OnProgress = Callable[[Counts, int], None]


def build_token_set(
    folder: Path,
    files: list[Path],
    recipe: Recipe,
    *,
    identity: str,
    processes: int = 1,
    resume: bool = False,
    stdin: IO[bytes] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Write the token set of `files` (or of the stream `stdin`, JSONL or text by `recipe.text_key`) into `folder`.

    With `resume`, progress that `folder` holds for the same `identity` is continued. Returns the counts.
    """
    encoder = recipe.encoder()
    counts, writer = _start(folder, encoder, identity, resume)
    committed = time.monotonic()
    for number, block, encoded in _encoded(files, counts, encoder, recipe, processes, stdin):
        _write(writer, encoded)
        _count(counts, number, block, encoded, files, writer)
        if resume and time.monotonic() - committed > COMMIT_INTERVAL_S:
            _commit(folder, identity, counts, writer)
            committed = time.monotonic()
        if on_progress is not None:
            on_progress(counts, writer.num_tokens)
    _finish_files(counts, files, max(1, len(files)))
    writer.finish(_facts(recipe, encoder, identity, counts))
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    return {"documents": writer.num_documents, "tokens": writer.num_tokens, "empty_documents": counts.empty}


def _start(folder: Path, encoder: Encoder, identity: str, resume: bool) -> tuple[Counts, TokenWriter]:
    """Fresh counts and writer, or those of the build that was killed."""
    path = folder / PROGRESS_FILE
    if resume and path.is_file():
        stored = read_json(path)
        if stored["identity"] == identity:
            return Counts(**stored["counts"]), TokenWriter(folder, encoder.dtype, progress=stored["writer"])
    return Counts(), TokenWriter(folder, encoder.dtype)


def _commit(folder: Path, identity: str, counts: Counts, writer: TokenWriter) -> None:
    stored = {"identity": identity, "counts": dataclasses.asdict(counts), "writer": writer.progress()}
    write_json(folder / PROGRESS_FILE, stored)


def _blocks(files: list[Path], counts: Counts, text_key: str, stdin: IO[bytes] | None) -> Iterator[tuple[int, Block]]:
    """(number of the file, block) from where `counts` stands."""
    if stdin is not None:
        # A stream has no name that tells its format: an opening brace means JSONL.
        yield from ((0, block) for block in sources.stream_blocks(stdin))
        return
    offset, line = counts.offset, counts.line
    for number in range(counts.file, len(files)):
        for block in sources.read_blocks(files[number], text_key=text_key, start=offset, first_line=line):
            yield number, block
        offset, line = 0, 1


def _encoded(
    files: list[Path],
    counts: Counts,
    encoder: Encoder,
    recipe: Recipe,
    processes: int,
    stdin: IO[bytes] | None,
) -> Iterator[tuple[int, Block, Encoded]]:
    """Every block with its ids, in order."""
    blocks = _blocks(files, counts, recipe.text_key, stdin)
    if processes == 1:
        for number, block in blocks:
            yield number, block, encoder.encode(block)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, _set_encoder, (recipe,)) as pool:
        waiting: collections.deque[Any] = collections.deque()
        try:
            for number, block in blocks:
                waiting.append((number, block, pool.submit(_encode, block)))
                if len(waiting) > 2 * processes:
                    yield _take(waiting)
            while waiting:
                yield _take(waiting)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _take(waiting: collections.deque[Any]) -> tuple[int, Block, Encoded]:
    number, block, future = waiting.popleft()
    try:
        return number, block, future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError(
            f"{block.path}: a worker process was killed (out of memory?); what is on disk stays, start again to go on"
        ) from error


_worker: dict[str, Encoder] = {}


def _set_encoder(recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker: the workers are the parallelism
    _worker["encoder"] = recipe.encoder(recipe.load(threads=1))


def _encode(block: Block) -> Encoded:
    return _worker["encoder"].encode(block)


def _write(writer: TokenWriter, encoded: Encoded) -> None:
    if not encoded.is_part:
        writer.add(encoded.tokens, encoded.lengths, encoded.hashes, encoded.sizes)
        return
    size = int(encoded.sizes[0])
    if encoded.opens and encoded.closes and not size:
        return  # an empty text: counted, not written
    digest = chain_hash(writer.open_hash, int(encoded.hashes[0]))
    writer.add_part(encoded.tokens, digest, size, closes=encoded.closes)


def _count(counts: Counts, number: int, block: Block, encoded: Encoded, files: list[Path], writer: TokenWriter) -> None:
    """Note what a block held and where the next one starts."""
    _finish_files(counts, files, number)
    size = int(encoded.sizes.sum())
    empty = encoded.num_empty
    documents = len(encoded.lengths)
    if encoded.is_part:
        documents = int(encoded.closes)
        if encoded.opens and encoded.closes and not size:
            documents, empty = 0, 1
    counts.offset = block.end
    counts.line = block.first_line + block.data.count(b"\n") if block.kind == "lines" else 1
    counts.empty += empty
    counts.text_bytes += size
    counts.read_bytes += len(block.data) or size
    counts.file_documents += documents


def _finish_files(counts: Counts, files: list[Path], number: int) -> None:
    """Close the books of the files before `number`; a file without a document is an error."""
    while counts.file < number:
        name = str(files[counts.file]) if files else sources.STDIN
        if not counts.file_documents:
            raise UserError(f"{name}: holds no document (only empty or blank lines)")
        counts.sources.append({"path": name, "documents": counts.file_documents})
        counts.file, counts.offset, counts.line, counts.file_documents = counts.file + 1, 0, 1, 0


def _facts(recipe: Recipe, encoder: Encoder, identity: str, counts: Counts) -> dict[str, Any]:
    """The manifest's account of where the tokens come from."""
    tokenizer = encoder.tokenizer
    return {
        "identity": identity,
        "tokenizer": {
            "kind": tokenizer.kind,
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "pad_id": tokenizer.pad_id,
        },
        "add_bos": recipe.add_bos,
        "add_eos": recipe.add_eos,
        "text_bytes": counts.text_bytes,
        "empty_documents": counts.empty,
        "sources": counts.sources,
    }


def files_identity(files: Iterable[Path], recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Hash of the content of `files` in order, their formats, and of everything that decides the ids."""
    from jaxpar.data.tokenizers import hash_files

    parts: list[Any] = [1, recipe.identity(tokenizer)]
    for path in files:
        try:
            parts.append([sources.plain_suffix(str(path)), path.suffix, hash_files([path])])
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return content_identity(parts)
