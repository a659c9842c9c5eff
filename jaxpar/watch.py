"""Stop signals of a run in one process; the loop asks here whether to save and leave."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax

from jaxpar.config import Config


class StopSignals:
    """Remembers SIGTERM until the loop asks; a second one ends the process at once with exit code 75."""

    def __init__(self) -> None:
        self.requested = False

    def stop_requested(self, step: int) -> bool:
        """Whether to save after `step` and leave; every process of a run gives the same answer."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self.requested

    def finished(self, step: int) -> None:
        """Nothing to do."""

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.requested:
            os._exit(75)
        self.requested = True


@contextlib.contextmanager
def make_watch(config: Config, workdir: Path) -> Iterator[StopSignals]:
    """Install the handlers for the length of a run."""
    watch = StopSignals()
    try:
        before = signal.signal(signal.SIGTERM, watch.on_signal)
    except ValueError:  # not the main thread: a notebook's or a test's own thread keeps its handlers
        yield watch
        return
    try:
        yield watch
    finally:
        signal.signal(signal.SIGTERM, before)
