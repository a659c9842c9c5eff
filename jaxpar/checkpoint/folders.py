"""Folders of a checkpoint directory: which steps are there, how one appears, which ones go.

    checkpoints/1000/           a step: state/ (Orbax), extra.json, manifest.json
    checkpoints/2000.partial/   being written, or left by a process that died; never taken for a step
    checkpoints/1000.replaced/  the old step 1000, while a new one takes its place
    checkpoints/500.removed/    being deleted

What else lies there is left alone; a file with the name of a step is told by `strays`, and gives way to that step.

A step appears by one rename when everything in it is on the disk, and the rename away is the first act of deleting
one; so whatever moment a process is killed at, a folder with a plain number is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STATE = "state"
EXTRA = "extra.json"
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"
_STEP = re.compile(r"0|[1-9][0-9]*")


def steps(directory: Path) -> list[int]:
    """Steps with a finished folder, ascending."""
    return [step for step in _numbers(directory, "") if path(directory, step).is_dir()]


def strays(directory: Path) -> list[int]:
    """Steps whose name is taken by something that is no folder, ascending."""
    return [step for step in _numbers(directory, "") if not path(directory, step).is_dir()]


def unfinished(directory: Path) -> list[int]:
    """Steps whose save was cut short, ascending."""
    return _numbers(directory, _PARTIAL)


def path(directory: Path, step: int) -> Path:
    """Folder of a finished step."""
    return directory / str(step)


def partial(directory: Path, step: int) -> Path:
    """Folder of a step that is being written."""
    return directory / f"{step}{_PARTIAL}"


def begin(directory: Path, step: int) -> Path:
    """A new, empty folder to write `step` into."""
    folder = partial(directory, step)
    _delete(folder)
    folder.mkdir(parents=True)
    return folder


def commit(directory: Path, step: int) -> None:
    """Give the finished partial folder its name; an older folder of the same step gives way."""
    final, replaced = path(directory, step), directory / f"{step}{_REPLACED}"
    if os.path.lexists(final):
        _delete(replaced)
        final.rename(replaced)
    partial(directory, step).rename(final)
    _flush(directory)
    _delete(replaced)


def discard_partial(directory: Path, step: int) -> None:
    """Delete what a failed save left, so that it does not keep the space."""
    _delete(partial(directory, step))


def remove(directory: Path, step: int) -> None:
    """Delete a finished step."""
    removed = directory / f"{step}{_REMOVED}"
    path(directory, step).rename(removed)
    _delete(removed)


def recover(directory: Path) -> None:
    """Finish what a process left that was killed between the two renames; only the directory's writer may call this."""
    for step in _numbers(directory, _REPLACED):
        replaced = directory / f"{step}{_REPLACED}"
        if path(directory, step).exists():
            _delete(replaced)
        else:
            replaced.rename(path(directory, step))


def tidy(directory: Path) -> None:
    """`recover`, and delete what killed processes left half written or half deleted."""
    recover(directory)
    for suffix in (_PARTIAL, _REMOVED):
        for step in _numbers(directory, suffix):
            _delete(directory / f"{step}{suffix}")


def read_extra(directory: Path, step: int) -> dict[str, Any]:
    """What the caller stored beside the arrays."""
    return json.loads((path(directory, step) / EXTRA).read_text())


def superfluous(
    saved: Iterable[int], *, keep: int, keep_every: int | None, best: Iterable[int] = (), newest: int
) -> list[int]:
    """Steps to delete: neither among the `keep` last ones, nor a multiple of `keep_every`, nor among the best.

    `newest` is the step just written; it stays even when a run that went back meets higher numbers.
    """
    ordered = sorted(set(saved))
    wanted = {newest, *ordered[-keep:], *best}
    return [step for step in ordered if step not in wanted and not (keep_every and step % keep_every == 0)]


def size_bytes(directory: Path) -> int:
    """Bytes of all files below `directory`."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def free_bytes(directory: Path) -> int:
    """Free space on the disk that holds, or will hold, `directory`."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _numbers(directory: Path, suffix: str) -> list[int]:
    if not directory.is_dir():
        return []
    names = [entry.name.removesuffix(suffix) for entry in directory.iterdir() if entry.name.endswith(suffix)]
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def _delete(entry: Path) -> None:
    """Remove a folder, or what else goes by its name; what cannot be removed stays."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
