"""Exit codes, and how a process of a run ends.

A process of a larger run must not leave through the interpreter's normal exit after an error: jax would first wait for
peers that wait for it. So it prints what happened and calls `os._exit`, and the others notice within a fraction of a
second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxpar.errors import UserError
from jaxpar.lines import FULL_DISK

DONE = 0
BUG = 1
USER_ERROR = 2
RETRY = 75  # stopped from outside, a peer lost, or a disk that failed: start the same command again
INTERRUPTED = 130
_DISK = (*FULL_DISK, errno.EIO, errno.ESTALE)  # of the surroundings: neither a bug nor a mistake


def code_of(error: BaseException, num_processes: int) -> int:
    """Exit code for an exception that ends a process."""
    from jaxpar.checkpoint import CheckpointError

    if isinstance(error, UserError):
        return USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, CheckpointError) or (isinstance(error, OSError) and error.errno in _DISK):
        return RETRY
    # A lost peer shows up as a runtime error of a collective. Running out of memory would only happen again.
    is_runtime_error = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if num_processes > 1 and is_runtime_error and "RESOURCE_EXHAUSTED" not in str(error):
        return RETRY
    return BUG


def leave(code: int) -> NoReturn:
    """End this process now: no exit handlers, no waiting for peers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may be files on a full disk
            stream.flush()
    os._exit(code)


def run_guarded(train: Callable[[], int]) -> int:
    """Call `train` and return its exit code; in a run of several processes an exception ends this one at once.

    Alone, a process lets the exception through, but for one that is worth a retry.
    """
    import jax

    try:
        return train()
    except BaseException as error:
        num_processes = jax.process_count()
        code = code_of(error, num_processes)
        if num_processes == 1:
            if code != RETRY:
                raise
            with contextlib.suppress(OSError):
                print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            return code
        if code == USER_ERROR:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
            print(f"process {jax.process_index()} of {num_processes} ends with exit code {code}", file=sys.stderr)
        leave(code)
