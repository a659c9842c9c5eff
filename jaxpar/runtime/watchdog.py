"""A thread that ends the process when no step finishes for too long.

A collective has no deadline: one process that is stopped, or stuck in its data, blocks all others for ever while every
heartbeat goes on. The watchdog of each process notes when the last step finished, and barks when

- no step has finished for `timeout_s`, unless a process is alive and compiling, saving or evaluating, or
- for half of that no step has finished here, busy or not, and another process, whose watchdog would report in any
  state, has been silent for three quarters of it: so a frozen process is found before `timeout_s` is over, or
- for half of that no step has finished here, and another process barks.

To bark is to print all Python stacks, name the processes that fell silent or behind, give the others time to do the
same, and end the process with exit code 75, so that a supervisor starts all of them again. Time in which the whole
process was stopped, as by a scheduler that suspends a job, does not count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxpar.runtime.coordination import Board
from jaxpar.runtime.exits import RETRY, leave
from jaxpar.runtime.peers import Note, Peers

_LOOKS_PER_BEAT = 4
_BEATS_TO_HEAR = 2.5  # a bark reaches process 0 within a beat, and from there all others within the next
_NOBODY = "every process answers and none is behind or busy: a collective does not return (network or driver)"
_COORDINATOR_SILENT = "process 0, which coordinates, does not answer: it is stopped or its host is lost"


class Watchdog:
    """Bounds the time since the last finished step; the time inside `busy` counts only while a peer is silent."""

    def __init__(
        self,
        timeout_s: float,
        *,
        rank: int = 0,
        num_processes: int = 1,
        board: Board | None = None,
        end: Callable[[int], Any] = leave,
    ) -> None:
        self.timeout_s = timeout_s
        self._rank, self._num_processes, self._end = rank, num_processes, end
        self._beat_s = min(max(timeout_s / 8, 0.05), 30.0)
        self._stale_s = 3 * self._beat_s + 1.0  # whose note has stood for longer fell silent
        self._patience_s = max(0.75 * timeout_s, self._stale_s)
        self._peers = Peers(board, rank, num_processes)
        self._lock = threading.Lock()
        self._busy: list[str] = []
        self._step: int | None = None
        self._last = time.monotonic()  # when a step finished, or when what keeps the process busy began or ended
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peers.exchange({"step": self._step, "busy": None, "left": True})

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        with self._lock:
            self._step, self._last = step, time.monotonic()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Stop the clock: compiling, restoring, evaluating, saving."""
        with self._lock:
            self._busy.append(what)
            self._last = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(what)
                self._last = time.monotonic()

    def _watch(self) -> None:
        look_s = self._beat_s / _LOOKS_PER_BEAT
        looked, exchanged = time.monotonic(), -float("inf")
        while not self._stop.wait(look_s):
            now = time.monotonic()
            self._forgive(now - looked - look_s)
            looked = now
            with self._lock:
                busy, step, silent_s = list(self._busy), self._step, now - self._last
            if now - exchanged >= self._beat_s:
                exchanged = now
                self._peers.exchange(self._note(step, busy, silent_s))
            if self._is_stuck(silent_s, bool(busy)) and not self._stop.is_set():
                self._bark(step, silent_s)
                return

    def _forgive(self, pause_s: float) -> None:
        """Leave out a pause of this thread that only a stop of the whole process explains."""
        if pause_s > 2 * self._beat_s + 1.0:
            with self._lock:
                self._last = min(self._last + pause_s, time.monotonic())
            self._peers.forgive(pause_s)

    def _is_stuck(self, silent_s: float, is_busy: bool) -> bool:
        if silent_s > self.timeout_s / 2 and (self._somebody_is_lost() or self._somebody_barks()):
            return True
        # A slower compile elsewhere: this process waits for its peer, not for nothing.
        return silent_s > self.timeout_s and not is_busy and not self._somebody_is_busy()

    def _somebody_is_lost(self) -> bool:
        return max([self._peers.unanswered_s, *self._peers.silent_s.values()]) > self._patience_s

    def _somebody_barks(self) -> bool:
        return any(note.get("barks") for note in self._peers.notes.values())

    def _somebody_is_busy(self) -> bool:
        silent_s = self._peers.silent_s
        return any(
            (note["busy"] or note.get("others_busy")) and silent_s[rank] <= self._stale_s
            for rank, note in self._peers.notes.items()
        )

    def _note(self, step: int | None, busy: list[str], silent_s: float) -> Note:
        """What the others may want to know; from process 0, who alone hears of all, also what it knows of them."""
        note: Note = {"step": step, "busy": busy[-1] if busy else None}
        if self._rank == 0 and self._num_processes > 1:
            note["others_busy"] = self._somebody_is_busy()
            if silent_s > self.timeout_s / 4:
                note["suspects"] = self._suspects(step)
        return note

    def _bark(self, step: int | None, silent_s: float) -> None:
        where = f"process {self._rank} of {self._num_processes}"
        after = "the first step" if step is None else f"the step after {step}"
        lines = [
            f"watchdog: {where} waited {silent_s:.1f} s for {after} (runtime.step_timeout_s = {self.timeout_s:g})",
            *(f"watchdog: {line}" for line in self._suspects(step)),
        ]
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print("\n".join(lines), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"watchdog: {where} ends with exit code {RETRY}", file=sys.stderr, flush=True)
        self._let_others_bark(step, silent_s)
        self._end(RETRY)

    def _let_others_bark(self, step: int | None, silent_s: float) -> None:
        """Stay for a while: the end of this process ends the others, who could then not tell what they know."""
        until = time.monotonic() + _BEATS_TO_HEAR * self._beat_s
        while self._num_processes > 1 and time.monotonic() < until and not self._stop.wait(self._beat_s / 2):
            self._peers.exchange(self._note(step, [], silent_s) | {"barks": True})

    def _suspects(self, step: int | None) -> list[str]:
        if self._num_processes == 1:
            return []
        if self._peers.unanswered_s > 2 * self._beat_s:
            return [_COORDINATOR_SILENT]
        notes = self._peers.notes
        known = range(1, self._num_processes) if self._rank == 0 else [0]
        lines = suspects(notes, self._peers.silent_s, known, step=step, stale_s=self._stale_s)
        return lines or ([_NOBODY] if self._rank == 0 else notes[0].get("suspects", []))


def suspects(
    notes: Mapping[int, Note],
    silent_s: Mapping[int, float],
    ranks: Iterable[int],
    *,
    step: int | None,
    stale_s: float,
) -> list[str]:
    """Sentences on the processes among `ranks` that hold up the rest."""
    lines = []
    for rank in ranks:
        note = notes.get(rank)
        if note is None:
            lines.append(f"process {rank} never reported: it did not reach the training loop")
        elif silent_s[rank] > stale_s:
            lines.append(f"process {rank} is missing: silent for {silent_s[rank]:.1f} s, last at step {note['step']}")
        elif (note["step"] or 0) < (step or 0):
            lines.append(f"process {rank} is behind: at step {note['step']}" + _doing(note))
    return lines


def _doing(note: Note) -> str:
    return f", {note['busy']}" if note["busy"] else ""
