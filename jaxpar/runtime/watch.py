"""What the training loop tells its surroundings, and asks them: signals, watchdog and ledger behind one object."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxpar.config import Config
from jaxpar.runtime import goodput
from jaxpar.runtime.coordination import Assembly, Board
from jaxpar.runtime.goodput import Ledger
from jaxpar.runtime.signals import StopSignals
from jaxpar.runtime.watchdog import Watchdog

_START_S = 24 * 3600.0
_REPORT_S = 3.0  # the other processes end at the same step; whoever is later than this is not in the report


class RunWatch:
    """The loop's view of signals, watchdog and ledger."""

    def __init__(self, signals: StopSignals, watchdog: Watchdog, ledger: Ledger) -> None:
        self._signals, self._watchdog, self._ledger = signals, watchdog, ledger
        self._assembly = Assembly("start", timeout_s=_START_S)

    def stop_requested(self, step: int) -> bool:
        """Whether to save after `step` and leave; every process of a run gives the same answer."""
        return self._signals.stop_requested(step)

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        self._watchdog.finished(step)
        self._ledger.finished(step)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Context in which no step is expected to finish: compiling, evaluating, saving."""
        with self._watchdog.busy(what):
            with self._ledger.phase(what):
                yield
            if self._ledger.step is None:
                # Processes compile at different speeds, and the first collective waits only half a minute for the last
                # one. Here the wait has no such limit; the watchdog has an eye on it.
                self._assembly.meet()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Context that is part of a step, with the watchdog's clock running: waiting for the next batch."""
        with self._watchdog.waiting(what), self._ledger.phase(what):
            yield


@contextlib.contextmanager
def make_watch(config: Config, workdir: Path) -> Iterator[RunWatch]:
    """Signals, watchdog and ledger for the length of a run; at any end the main process prints where the time went."""
    rank, num_processes = jax.process_index(), jax.process_count()
    path = workdir / goodput.NAME
    ledger = Ledger(path if rank == 0 else None)
    with (
        StopSignals(num_processes) as signals,
        Watchdog(
            config.runtime.step_timeout_s,
            rank=rank,
            num_processes=num_processes,
            board=Board("watch"),
            heartbeat_s=config.runtime.heartbeat_s,
        ) as watchdog,
    ):
        try:
            yield RunWatch(signals, watchdog, ledger)
        except BaseException:
            ledger.end()
            if ledger.step is not None:
                _sum_up(path, rank)
            raise
        ledger.end()
    sentence = _slowest(ledger, rank, num_processes)  # after an error nobody would answer
    _sum_up(path, rank, sentence)


def _sum_up(path: Path, rank: int, sentence: str | None = None) -> None:
    rows = goodput.read(path) if rank == 0 else []
    if rows:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print("\n".join(filter(None, [sentence, goodput.summarize(rows).line()])), file=sys.stderr)


def _slowest(ledger: Ledger, rank: int, num_processes: int) -> str | None:
    board = Board("seconds")
    board.pin(rank, ledger.seconds)
    if rank != 0 or num_processes == 1:
        return None
    deadline = time.monotonic() + _REPORT_S
    notes = board.read()
    while len(notes) < num_processes and time.monotonic() < deadline:
        time.sleep(0.05)
        notes = board.read()
    return goodput.slowest(notes)
