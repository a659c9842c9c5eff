"""One run at a time in a directory: two that save checkpoints and logs to one place would damage each other's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

from jaxpar.errors import UserError
from jaxpar.lines import FULL_DISK

NAME = "run.lock"


@contextlib.contextmanager
def held(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `directory` for this process; the lock ends with the process, however that ends.

    Raises `UserError` when another process holds it, with the process and host that it wrote into the file, and when
    the directory cannot be made or written. A file system without locks is told with `say` and used all the same.
    """
    with exclusive(directory / NAME, directory, "--workdir", say):
        yield


@contextlib.contextmanager
def exclusive(path: Path, place: Path, option: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `place`, which the user named with `option`, by a lock on the file `path`."""
    with _locked(path, f"{option}={place}", option, say) as file:
        if file is not None:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


@contextlib.contextmanager
def _locked(path: Path, place: str, option: str, say: Callable[[str], None]) -> Iterator[IO[str] | None]:
    """The locked file; None where the file system has no locks."""
    while True:
        with _open(path, place) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{place} is in use by {file.read().strip() or 'another process'}; "
                    f"wait for that run to end, stop it, or choose another {option}"
                ) from None
            except OSError as error:
                say(f"warning: {path.parent} cannot be locked ({error.strerror}); do not start a second run there")
                yield None
                return
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether the file still has its name: one that is removed by its holder may be opened before and locked after."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _open(path: Path, place: str) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        if error.errno in FULL_DISK:  # no mistake, and worth another try
            raise
        raise UserError(
            f"{place} cannot be used: {error.filename or path.parent}: {error.strerror}; "
            "give a folder that can be made and written"
        ) from None
