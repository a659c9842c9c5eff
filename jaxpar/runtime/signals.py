"""SIGTERM: every process saves the same step and leaves with exit code 75; a second one ends a process at once.

Python runs a signal handler only between two bytecodes, and the main thread spends minutes inside a compile or a
collective. The signal number therefore goes through a pipe (`signal.set_wakeup_fd`) to a thread, which also runs then.
In a run of several processes jax's own handler, installed when the run was joined, tells the coordination service, and
`reached_preemption_sync_point` picks one step for all; the thread passes the signal on to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxpar.runtime.exits import RETRY, leave


class StopSignals:
    """Remembers SIGTERM while it is entered; outside the main thread it changes nothing."""

    def __init__(self, num_processes: int = 1, *, end: Callable[[int], Any] = leave) -> None:
        self._num_processes, self._end = num_processes, end
        self._count = 0
        self._restore: list[Callable[[], Any]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        foreign = _c_handler()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_python = signal.signal(signal.SIGTERM, lambda *_: None)
        if foreign == _c_handler():
            foreign = None  # it is Python's own
        old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader, foreign), name="signals", daemon=True).start()
        self._restore = [
            lambda: signal.signal(signal.SIGTERM, old_python if old_python is not None else signal.SIG_DFL),
            lambda: ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(foreign)) if foreign else None,
            lambda: signal.set_wakeup_fd(old_fd),
            lambda: os.close(writer),  # ends the thread
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._restore:
            undo()
        self._restore = []

    def stop_requested(self, step: int) -> bool:
        """Whether to save after `step` and leave; the same answer in every process, each of which must ask."""
        if self._num_processes > 1:
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self._count > 0

    def _listen(self, reader: int, foreign: int | None) -> None:
        # Called as a function: to raise the signal again would only end here once more.
        tell_jax = ctypes.CFUNCTYPE(None, ctypes.c_int)(foreign) if foreign else None
        while number := os.read(reader, 1):
            if number[0] != signal.SIGTERM:
                continue
            self._count += 1
            if self._count > 1:
                _say("second SIGTERM: leaving at once, without saving")
                self._end(RETRY)
                break
            _say("SIGTERM: saving after the running step, then leaving")
            if tell_jax is not None:
                tell_jax(signal.SIGTERM)
        os.close(reader)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk
        print(line, file=sys.stderr, flush=True)


def _c_handler() -> int | None:
    """Address of the function that handles SIGTERM; None for the default and for ignoring it."""
    get = ctypes.pythonapi.PyOS_getsig
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_int]
    address = get(signal.SIGTERM)
    return None if address in (None, int(signal.SIG_IGN)) else address
