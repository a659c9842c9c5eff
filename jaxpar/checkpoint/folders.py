"""Folders of a checkpoint directory: which steps are there, how one appears, which ones go.

    checkpoints/1000/           a step: state/ (Orbax), extra.json, manifest.json
    checkpoints/2000.partial/   being written, or left by a process that died; never taken for a step
    checkpoints/1000.replaced/  the old step 1000, while a new one takes its place
    checkpoints/500.removed/    being deleted

A step appears by one rename when everything in it is on the disk, and the rename away is the first act of deleting
one; so whatever moment a process is killed at, a folder with a plain number is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STATE = "state"
EXTRA = "extra.json"
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


def steps(directory: Path) -> list[int]:
    """Steps with a finished folder, ascending."""
    return _numbers(directory, "")


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
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def commit(directory: Path, step: int) -> None:
    """Give the finished partial folder its name; an older folder of the same step gives way."""
    final, replaced = path(directory, step), directory / f"{step}{_REPLACED}"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial(directory, step).rename(final)
    _flush(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def discard_partial(directory: Path, step: int) -> None:
    """Delete what a failed save left, so that it does not keep the space."""
    shutil.rmtree(partial(directory, step), ignore_errors=True)


def remove(directory: Path, step: int) -> None:
    """Delete a finished step."""
    removed = directory / f"{step}{_REMOVED}"
    path(directory, step).rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def recover(directory: Path) -> None:
    """Finish what a process left that was killed between the two renames; only the directory's writer may call this."""
    for step in _numbers(directory, _REPLACED):
        replaced = directory / f"{step}{_REPLACED}"
        if path(directory, step).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(path(directory, step))


def tidy(directory: Path) -> None:
    """`recover`, and delete what killed processes left half written or half deleted."""
    recover(directory)
    for suffix in (_PARTIAL, _REMOVED):
        for step in _numbers(directory, suffix):
            shutil.rmtree(directory / f"{step}{suffix}", ignore_errors=True)


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
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
