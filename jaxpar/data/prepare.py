"""The work of scripts/prepare_data.py: texts to a token set, with a progress bar, resumable after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpar.data.build import Counts, Inputs, build_token_set, finished_work, stored_progress
from jaxpar.data.cache import missing_folders
from jaxpar.data.encode import Recipe
from jaxpar.data.hashing import content_identity
from jaxpar.data.json_files import write_json
from jaxpar.data.manifest import open_manifest
from jaxpar.data.sources import expand_files
from jaxpar.data.store import SHARD_TOKENS, TokenWriter, open_store, verify_store
from jaxpar.data.tokenizers import Tokenizer, copy_tokenizer
from jaxpar.errors import UserError
from jaxpar.runtime import lock

REFRESH_S = 0.2
LINE_INTERVAL_S = 10.0
# Not inside a path, which may be named like one.
_SETTING = re.compile(r"(?<![\w./-])data\.(text_key|tokenizer|bos_token|eos_token|add_bos|add_eos)(=false)?(?![\w./-])")


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """What is asked for. `inputs` are globs, or ("-",) for standard input."""

    inputs: Sequence[str]
    output: Path
    recipe: Recipe
    processes: int = 1
    shard_tokens: int = SHARD_TOKENS


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Write the token set `options.output` and return its manifest.

    The work is done in a hidden folder beside it, which a later call with the same inputs goes on with, and which is
    renamed when complete. An output that is there already and was made of the same inputs is left as it is.
    """
    tokenizer = options.recipe.load()
    inputs = _inputs(options, tokenizer.sha256)
    done = _finished(options.output, inputs.key)
    if done is None:
        with _alone(options.output):
            # The run that held the output until now may have finished it.
            done = _finished(options.output, inputs.key)
            if done is None:
                return _write(options, inputs, tokenizer)
    _say(f"{options.output} is complete already: {_describe(done)}")
    return done


def _write(options: PrepareOptions, inputs: Inputs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the token set in the hidden folder and publish it; a refusal leaves nothing that nobody can go on with."""
    folder = _unfinished(options.output)
    if stored_progress(folder, inputs.key) is not None:
        _say(f"going on with the unfinished work in {folder}")
    elif folder.exists():
        _say(f"starting again: {folder} is of other inputs or settings")
        shutil.rmtree(folder)
    started = time.monotonic()
    try:
        folder.mkdir(exist_ok=True)
        with _Progress(inputs) as progress:
            build_token_set(
                folder,
                inputs,
                options.recipe,
                processes=options.processes,
                shard_tokens=options.shard_tokens,
                on_progress=progress,
            )
    except UserError:
        if not finished_work(folder, inputs.key):
            shutil.rmtree(folder)
        raise
    manifest = open_manifest(folder)
    manifest["tokenizer"]["files"] = copy_tokenizer(tokenizer, folder / "tokenizer")
    write_json(folder / "manifest.json", manifest)
    (folder / "inputs.key").write_text(inputs.key)
    folder.rename(options.output)
    _say(f"{options.output}: {_describe(manifest)} in {time.monotonic() - started:.1f} s")
    return manifest


def _unfinished(output: Path) -> Path:
    return output.with_name(f".{output.name}.unfinished")


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Hold the output: two runs at once would write into the same unfinished folder.

    The lock lies beside it and goes at the end, and so do the folders that were made for it when nothing is in them.
    """
    created = missing_folders(output.parent)
    path = output.with_name(f".{output.name}.lock")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with lock.exclusive(path, output, "--output", _say):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}; nothing was published") from error
    finally:
        with contextlib.suppress(OSError):
            for folder in created:
                folder.rmdir()


def verify(folder: Path) -> None:
    """Check every checksum of a token set; raises with the files that are damaged."""
    wrong = verify_store(folder)
    if wrong:
        raise UserError(f"damaged or missing: {', '.join(wrong)} (the checksum is not the manifest's)")
    _say(f"{folder}: all checksums are right; {_describe(open_manifest(folder))}")


def in_flags(message: str) -> str:
    """A message that names settings of a config, with the flags of the script that stand for them."""
    return _SETTING.sub(lambda found: f"--{'no-' if found[2] else ''}{found[1].replace('_', '-')}", message)


def _inputs(options: PrepareOptions, tokenizer_sha256: str) -> Inputs:
    """The files, and the key under which a killed run goes on: their names, sizes and times, and the recipe."""
    if list(options.inputs) == ["-"]:
        return Inputs(stdin=sys.stdin.buffer)  # no key: what was read is gone
    if "-" in options.inputs:
        raise UserError("INPUT: '-' (standard input) stands alone, without other files")
    files = expand_files(options.inputs, "INPUT")
    facts: list[Any] = [dataclasses.asdict(options.recipe), tokenizer_sha256, options.shard_tokens]
    for path in files:
        stat = path.stat()
        facts.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return Inputs(files=tuple(files), key=content_identity(facts))


def _finished(output: Path, key: str) -> dict[str, Any] | None:
    """The manifest of an output that was made of the same inputs; refuses another one in its place."""
    if not output.exists():
        return None
    marker = output / "inputs.key"
    if key and marker.is_file() and marker.read_text() == key:
        open_store(output)
        return open_manifest(output)
    raise UserError(f"{output}: exists and was made of other inputs or settings; delete it or choose another --output")


def _describe(manifest: dict[str, Any]) -> str:
    line = (
        f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens ({manifest['dtype'][1:]}),"
        f" {manifest['text_bytes']:,} bytes of text"
    )
    if manifest["empty_documents"]:
        line += f", {manifest['empty_documents']:,} empty documents left out"
    return line


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class _Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, inputs: Inputs) -> None:
        self._sizes = [path.stat().st_size for path in inputs.files]
        self._total = sum(self._sizes)
        self._shown = time.monotonic()
        self._tokens = 0
        self._bar: Any = None
        self._show: Callable[[int, int], None] = self._line

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich import console, progress

            columns = (
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )
            # Refreshed by hand: a refreshing thread would forbid forking the workers.
            self._bar = progress.Progress(*columns, console=console.Console(stderr=True), auto_refresh=False)
            self._task = self._bar.add_task("", total=self._total or None)
            self._show = self._draw
            self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is None:
            return
        if kind is None:
            self._draw(self._total, self._tokens)
        self._bar.stop()

    def __call__(self, counts: Counts, writer: TokenWriter) -> None:
        """Show where the work stands, not too often."""
        now = time.monotonic()
        self._tokens = writer.num_tokens
        if now - self._shown >= (LINE_INTERVAL_S if self._bar is None else REFRESH_S):
            self._shown = now
            self._show(sum(self._sizes[: counts.file]) + counts.file_read_bytes, writer.num_tokens)

    def _draw(self, done_bytes: int, tokens: int) -> None:
        self._bar.update(self._task, completed=done_bytes, description=f"{tokens:,} tokens", refresh=True)

    def _line(self, done_bytes: int, tokens: int) -> None:
        share = f"{done_bytes / self._total:.1%}, " if self._total else ""
        _say(f"{share}{tokens:,} tokens")
