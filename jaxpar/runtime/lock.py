"""One run at a time in a directory: two that save checkpoints and logs to one place would damage each other's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.errors import UserError

NAME = "run.lock"


@contextlib.contextmanager
def held(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `directory` for this process; the lock ends with the process, however that ends.

    Raises `UserError` when another process holds it, with the process and host that it wrote into the file. A file
    system without locks is told with `say` and used all the same.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--workdir={directory} is in use by {file.read().strip() or 'another process'}; "
                f"wait for that run to end, stop it, or choose another --workdir"
            ) from None
        except OSError as error:
            say(f"warning: {directory} cannot be locked ({error.strerror}); do not start a second run there")
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
