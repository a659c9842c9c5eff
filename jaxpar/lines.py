"""Files of one JSON object a line, such as metrics.jsonl: appended whole, mended when a run starts again, never fatal.

A disk may fill up in the middle of a run. A line that cannot be written is then left out, with one warning per file,
and the run goes on; what was written of it is cut off again. A line that a crash cut short is dropped before the next
one is written. So a file holds whole lines only, and of a step one or none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_BLOCK_BYTES = 1 << 16


class Lines:
    """Appends to one file; a failure is told once and costs the line, not the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row as a whole line, or nothing of it."""
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                _append(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            f"a line of {self.path} was NOT written ({error.strerror}); the run goes on, and leaves out "
            "lines there for as long as this lasts"
        )


def warn(text: str) -> None:
    """A warning on stderr, which may itself be a file on a full disk."""
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def truncate_after(path: Path, step: int) -> int:
    """Keep the whole lines of steps up to `step`, each step once and rising; returns the last one kept, or -1.

    The file is cut in place where that does, which needs no space, and else replaced in one move; so a crash leaves the
    old or the new one.
    """
    if not path.exists():
        return -1
    data = path.read_bytes()
    kept: list[bytes] = []
    last = -1
    for line in data.split(b"\n")[:-1]:  # what follows the last newline was cut short
        row = _object(line)
        found = row.get("step") if row is not None else None
        if isinstance(found, int) and last < found <= step:
            kept.append(line + b"\n")
            last = found
    new = b"".join(kept)
    if data.startswith(new):
        os.truncate(path, len(new))
    else:
        _replace(path, new)
    return last


def read_objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, in order; lines that a crash or a disk damaged are left out."""
    if not path.exists():
        return []
    return [row for line in path.read_bytes().split(b"\n") if (row := _object(line)) is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # bytes that are no text are a ValueError too
        return None
    return row if isinstance(row, dict) else None


def _append(descriptor: int, data: bytes) -> None:
    end = _end_of_lines(descriptor)
    # One write call of a whole line: a crash can cut it short, but never mix two.
    written = 0
    try:
        written = os.write(descriptor, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):  # then the next line finds it
            os.ftruncate(descriptor, end)
        raise


def _end_of_lines(descriptor: int) -> int:
    """Size of the file, after what follows its last newline is cut off."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(end - _BLOCK_BYTES, 0) if end < size else end - 1  # one byte tells of a file that is in order
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        end = begin + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
