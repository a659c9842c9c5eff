"""Save, verify and restore the state of a run.

A save copies the state to host memory, or holds it where it is in host memory anyway, and returns; a thread writes it,
checks that all is there, gives it its name and deletes what retention no longer wants. A restore compares names, shapes
and dtypes first, reads every array directly into its sharding, and compares checksums afterwards; a step that fails is
skipped for the one before, and named.

A save that fails is reported at once and the run goes on; the next save starts afresh. `max_failed_saves` failures in a
row, or a failure of the last save, raise `CheckpointError`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import checksum, folders, leaves, manifest, storage
from jaxpar.checkpoint.leaves import Convert
from jaxpar.config import CheckpointConfig
from jaxpar.errors import UserError
from jaxpar.runtime.coordination import Assembly, Gate, GateError
from jaxpar.tree import named_leaves

_instances = itertools.count()  # a process may open checkpoints twice; their questions must not mix


class CheckpointError(RuntimeError):
    """Saving failed and the run should not go on without it: retryable once the disk is in order."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored step, and the newer ones that were skipped with the reason."""

    step: int
    state: Any
    extra: dict[str, Any]
    skipped: list[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A save whose state is in host memory."""

    write: storage.PendingWrite
    targets: Mapping[str, Any]
    checksums: Callable[[], dict[str, tuple[int, ...]]]


class Checkpoints:
    """The checkpoints of one run in one directory. Every process of the run makes the same calls.

    `to_disk` and `from_disk` convert a state between the layout of the run and the natural one ([layer, ...]), which
    alone is stored; both are pure functions of arrays. `report` receives one line per event worth telling.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        is_main: bool = True,
        *,
        to_disk: Convert | None = None,
        from_disk: Convert | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if config.keep < 1:
            raise UserError(f"checkpoint.keep is {config.keep}; at least 1 finished checkpoint must stay")
        self.directory = Path(directory).absolute()
        self.config = config
        self._is_main = is_main
        self._to_disk, self._from_disk = _function(to_disk), _function(from_disk)
        self._convert: Convert | None = None  # `to_disk`, compiled
        self._report = report or _to_stderr
        self._agree = Assembly(f"checkpoints{next(_instances)}", timeout_s=storage.BARRIER_TIMEOUT_S)
        self._running: tuple[int, threading.Thread] | None = None  # the step being saved
        self._error: str | None = None  # why it failed on this process
        self._failed_saves = 0  # in a row
        self._last_error = ""
        self._tidied = False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._running is not None:
            self._running[1].join()  # a save that began may finish; its own failure does not hide the exception

    def steps(self) -> list[int]:
        """Finished steps, ascending; needs no devices."""
        return folders.steps(self.directory)

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start saving `state` (a pytree of arrays) and `extra` (JSON) as `step`.

        Returns when the state is copied or held; it may then be donated. Waits for the save before, if that still runs.
        `extra["metrics"]["eval_loss"]`, if present, ranks the step for `keep_best`.
        """
        self._join()
        text = json.dumps(extra)
        named = leaves.to_save(self._as_stored(state))
        problem = self._agree.from_main(self._prepare(step, text, named) if self._is_main else None)
        if problem is not None:
            self._count(step, problem, said=False)
            return
        self._error = "it ended before it was done"  # until it is done
        begin = functools.partial(self._begin, step, self._agree.gate())
        held = storage.hold(named)
        if held is None:
            begun = begin(named)
            self._run(step, lambda: begun)
        else:
            self._run(step, lambda: begin(held()))
        if not self.config.asynchronous:
            self._join()

    def wait(self) -> None:
        """Return when the running save is finished; raise `CheckpointError` if the last one failed."""
        self._join()
        if self._failed_saves:
            raise CheckpointError(f"the last checkpoint was not saved; {self._last_error}")

    def close(self) -> None:
        """As `wait`."""
        self.wait()

    def restore_latest(self, abstract_state: Any) -> Restored | None:
        """Restore the newest step that verifies; None when there is none to restore.

        Raises `UserError` when the newest whole step does not fit `abstract_state`, when steps exist but every one is
        damaged, and with `checkpoint.strict` when the newest is damaged.
        """
        self._join()
        self._forecast(abstract_state)
        if self._is_main:
            folders.recover(self.directory)
            for step in folders.strays(self.directory):
                self._say(f"checkpoint {step} is skipped: {self.directory / str(step)} is no folder")
        found, unfinished = self._agree.from_main(
            [self.steps(), folders.unfinished(self.directory)] if self._is_main else 0
        )
        newest = max(found, default=-1)
        skipped = [(step, "its save was cut short") for step in sorted(unfinished, reverse=True) if step > newest]
        for step, reason in skipped:
            self._say(f"checkpoint {step} is skipped: {reason}")
        for step in sorted(found, reverse=True):
            try:
                state, extra = self._read(step, abstract_state, subset=False)
            except manifest.DamagedError as error:
                skipped.append((step, str(error)))
                if self.config.strict:
                    raise UserError(
                        f"checkpoint {self.directory / str(step)} is damaged: {error}; "
                        f"set checkpoint.strict=false to go on from an older one"
                    ) from None
                self._say(f"checkpoint {step} is skipped: {error}")
            else:
                return Restored(step, state, extra, skipped)
        if found:
            reasons = "\n".join(f"  {step}: {reason}" for step, reason in skipped)
            raise UserError(
                f"no checkpoint in {self.directory} can be restored:\n{reasons}\n"
                f"move the directory away to start from the beginning"
            )
        return None

    def restore(self, step: int, abstract_state: Any, *, subset: bool = False) -> Restored:
        """Restore one step; `subset` allows the checkpoint to hold more than `abstract_state` asks for."""
        self._join()
        present = self._agree.from_main(self.steps() if self._is_main else None)
        if step not in present:
            have = ", ".join(map(str, present)) or "none"
            raise UserError(f"no checkpoint of step {step} in {self.directory}; there are: {have}")
        try:
            state, extra = self._read(step, abstract_state, subset=subset)
        except manifest.DamagedError as error:
            raise UserError(f"checkpoint {self.directory / str(step)} is damaged: {error}") from None
        return Restored(step, state, extra, [])

    # -- saving ------------------------------------------------------------------------------------------------------

    def _prepare(self, step: int, extra_text: str, named: Mapping[str, Any]) -> str | None:
        """Make room on the main process; the problem, if there is one."""
        needed = sum(leaf.nbytes for leaf in named.values())
        try:
            if not self._tidied:
                folders.tidy(self.directory)
                self._tidied = True
            free = folders.free_bytes(self.directory)
            if free < needed:
                return f"{self.directory} has {_size(free)} free, the checkpoint needs {_size(needed)}"
            (folders.begin(self.directory, step) / folders.EXTRA).write_text(extra_text)
        except OSError as error:
            return storage.reason(error)
        return None

    def _as_stored(self, state: Any) -> Any:
        if self._to_disk is None:
            return state
        if self._convert is None:
            import jax

            self._convert = jax.jit(self._to_disk)
        return self._convert(state)

    def _run(self, step: int, begin: Callable[[], _Begun | None]) -> None:
        """Finish a save in a thread."""
        go = threading.Event()

        def run() -> None:
            go.wait(1.0)
            self._finish(step, begin)

        thread = threading.Thread(target=run, name=f"checkpoint-{step}")
        thread.start()
        self._running = step, thread
        # Only now, else `start` would return when the thread first gives the interpreter back, after milliseconds.
        go.set()

    def _begin(self, step: int, gate: Gate, named: Mapping[str, Any]) -> _Begun | None:
        """Copy to host memory and start to write; None if that failed."""
        write = None
        try:
            write = storage.start_write(folders.partial(self.directory, step) / folders.STATE, named, gate)
        except storage.STORAGE_ERRORS as error:
            self._fail(step, error)
        # After the copy to host memory, which training may wait for; and on every process, since it is a collective.
        checksums = checksum.start(named)
        if write is None:
            return None
        return _Begun(write, {name: leaves.target(leaf) for name, leaf in named.items()}, checksums)

    def _finish(self, step: int, begin: Callable[[], _Begun | None]) -> None:
        """The background thread of one save."""
        try:
            begun = begin()
            if begun is None:
                return
            begun.write.wait()
            if self._is_main:
                partial = folders.partial(self.directory, step)
                manifest.write(manifest.describe(step, partial, begun.targets, begun.checksums()), partial)
                folders.commit(self.directory, step)
                self._retire(step)
            self._error = None
        except storage.STORAGE_ERRORS as error:
            self._fail(step, error)

    def _retire(self, newest: int) -> None:
        saved = [step for step in self.steps() if step == newest or self._is_whole(step)]
        for step in folders.superfluous(
            saved,
            keep=self.config.keep,
            keep_every=self.config.keep_every,
            best=self._best(saved),
            newest=newest,
        ):
            folders.remove(self.directory, step)

    def _best(self, saved: list[int]) -> list[int]:
        if not self.config.keep_best:
            return []
        losses = {step: folders.read_extra(self.directory, step).get("metrics", {}).get("eval_loss") for step in saved}
        ranked = sorted((loss, step) for step, loss in losses.items() if loss is not None and loss == loss)
        return [step for _, step in ranked[: self.config.keep_best]]

    def _is_whole(self, step: int) -> bool:
        folder = folders.path(self.directory, step)
        try:
            manifest.check_files(manifest.read(folder), folder)
        except manifest.DamagedError:
            return False
        return True

    def _fail(self, step: int, error: Exception) -> None:
        self._error = storage.reason(error)
        line = f"checkpoint {step} was NOT saved: {self._error}"
        if self._is_main:
            self._say(line)
            folders.discard_partial(self.directory, step)
        elif not isinstance(error, GateError):  # that one tells of another process; this reason only this one knows
            import jax

            _to_stderr(f"process {jax.process_index()}: {line}")

    def _join(self) -> None:
        """Wait for the running save and agree with the other processes on how it went."""
        if self._running is None:
            return
        step, thread = self._running
        thread.join()
        error, self._running, self._error = self._error, None, None
        failed = self._agree.processes_where(error is not None)
        if failed:
            self._count(step, error or f"it failed on process {failed[0]}", said=error is not None)
        else:
            self._failed_saves = 0

    def _count(self, step: int, error: str, *, said: bool) -> None:
        self._failed_saves += 1
        self._last_error = f"step {step}: {error}"
        if not said:
            self._say(f"checkpoint {step} was NOT saved: {error}")
        if self._failed_saves >= self.config.max_failed_saves:
            raise CheckpointError(f"{self._failed_saves} saves in a row failed; the last one, {self._last_error}")

    # -- restoring ---------------------------------------------------------------------------------------------------

    def _read(self, step: int, abstract_state: Any, *, subset: bool) -> tuple[Any, dict[str, Any]]:
        folder = folders.path(self.directory, step)
        found, extra = self._inspect(folder, step)
        asked = leaves.disk_abstract(self._to_disk, abstract_state) if self._to_disk else abstract_state
        wanted = {name: leaves.target(leaf) for name, leaf in named_leaves(asked).items()}
        rows = manifest.differences(found, wanted, subset=subset, cast=self.config.cast)
        if rows:
            raise UserError(
                f"checkpoint {folder} does not fit this run:\n{manifest.table(rows)}\n"
                f"train with the model and optimizer that wrote it, or in another workdir"
                + ("; checkpoint.cast=true converts between float types" if not self.config.cast else "")
            )
        as_stored = {name: leaves.target(leaf, found.arrays[name].dtype) for name, leaf in wanted.items()}
        named, problem = {}, None
        try:
            named = storage.read(folder / folders.STATE, as_stored)
        except storage.STORAGE_ERRORS as error:
            problem = storage.reason(error)
        if failed := self._agree.processes_where(problem is not None):
            raise manifest.DamagedError(problem or f"process {failed[0]} cannot read it")
        manifest.check_arrays(found, checksum.start(named, {name: found.arrays[name].grid for name in named})())
        for name, leaf in named.items():
            if leaf.dtype != wanted[name].dtype:
                named[name] = leaves.cast(leaf, wanted[name])
        if self._from_disk is None or self._to_disk is None:
            return leaves.assemble(named, abstract_state), extra
        return leaves.from_disk_layout(self._from_disk, self._to_disk, named, abstract_state), extra

    def _inspect(self, folder: Path, step: int) -> tuple[manifest.Manifest, dict[str, Any]]:
        """Check the files of a step on the main process and give its manifest and extra to all."""
        problem: str | None = None
        extra: dict[str, Any] = {}
        if self._is_main:
            try:
                manifest.check_files(manifest.read(folder), folder)
                extra = folders.read_extra(self.directory, step)
            except manifest.DamagedError as error:
                problem = str(error)
        problem, extra = self._agree.from_main([problem, extra])
        if problem is not None:
            raise manifest.DamagedError(problem)
        return manifest.read(folder), extra

    def _forecast(self, abstract_state: Any) -> None:
        """Warn when the disk cannot hold what retention keeps and the one being written."""
        if not self._is_main:
            return
        one = sum(leaves.size_bytes(leaf) for leaf in named_leaves(abstract_state).values())
        copies = self.config.keep + (self.config.keep_best or 0) + 1
        room = folders.free_bytes(self.directory) + folders.size_bytes(self.directory)
        if copies * one > room:
            self._say(
                f"warning: {copies} checkpoints of {_size(one)} must fit in {self.directory} "
                f"(checkpoint.keep={self.config.keep} and the one being written), which has room for {_size(room)}"
            )

    def _say(self, line: str) -> None:
        if self._is_main:
            self._report(line)


def _function(convert: Convert | None) -> Convert | None:
    # jax hashes what it compiles, and a method of an object with arrays inside has no hash.
    return None if convert is None else lambda tree: convert(tree)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
