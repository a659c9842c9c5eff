"""A thread that ends the process when no step finishes for too long.

A collective has no deadline: one process that is stopped, or stuck in its data, blocks all others for ever while every
heartbeat goes on. The watchdog of each process notes when the last step finished, and barks when

- no step has finished for `timeout_s`, unless a process is alive and compiling, saving or evaluating, or
- another process, whose watchdog would report in any state, has been silent for three quarters of `silence_s` and no
  step has finished here for half of that, busy or not: so a frozen process is found before `silence_s` is over, or
- another process barks, and no step has finished here for half of `silence_s`.

`silence_s` is `timeout_s`, or two thirds of jax's own heartbeat where that is shorter: at its end jax would end the
process without a word.

To bark is to print all Python stacks, name the processes that fell silent, behind or wait for their data, give the
others time to do the same, and end the process with exit code 75, so that a supervisor starts all of them again. Time
in which the whole process was stopped, as by a scheduler that suspends a job, does not count.
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
from jaxpar.runtime.peers import Heard, Note, Peers

_LOOKS_PER_BEAT = 4
_BEATS_TO_HEAR = 4.0  # a bark reaches process 0, and from there all others, within two beats each
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
        heartbeat_s: float | None = None,
        end: Callable[[int], Any] = leave,
    ) -> None:
        self.timeout_s = timeout_s
        self._rank, self._num_processes, self._end = rank, num_processes, end
        self._silence_s = timeout_s if heartbeat_s is None else min(timeout_s, heartbeat_s * 2 / 3)
        self._beat_s = min(max(self._silence_s / 8, 0.05), 30.0)
        self._stale_s = 3 * self._beat_s + 1.0  # whose note has stood for longer fell silent
        self._patience_s = max(0.75 * self._silence_s, self._stale_s)
        self._peers = Peers(board, rank, num_processes)
        self._lock = threading.Lock()
        self._busy: list[str] = []
        self._waiting: str | None = None
        self._step: int | None = None
        self._last = time.monotonic()  # when a step finished, or when what keeps the process busy began or ended
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:  # after an error the others should miss this process
            self._peers.exchange(self._note() | {"left": True})

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

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Part of a step, with the clock running, that a bark should name: waiting for data."""
        self._waiting = what
        try:
            yield
        finally:
            self._waiting = None

    def _watch(self) -> None:
        look_s = self._beat_s / _LOOKS_PER_BEAT
        looked, exchanged = time.monotonic(), -float("inf")
        while not self._stop.wait(look_s):
            now = time.monotonic()
            self._forgive(now - looked - look_s)
            looked = now
            if now - exchanged >= self._beat_s:
                exchanged = now
                self._peers.exchange(self._note())
            with self._lock:
                busy, step, silent_s = bool(self._busy), self._step, now - self._last
            if self._is_stuck(silent_s, busy) and not self._stop.is_set():
                self._bark(step, silent_s)
                return

    def _forgive(self, pause_s: float) -> None:
        """Leave out a pause of this thread that only a stop of the whole process explains."""
        if pause_s > 2 * self._beat_s + 1.0:
            with self._lock:
                self._last = min(self._last + pause_s, time.monotonic())
            self._peers.forgive(pause_s)

    def _is_stuck(self, silent_s: float, is_busy: bool) -> bool:
        heard = self._peers.heard().values()
        if silent_s > self._silence_s / 2:
            longest_s = max([self._peers.unanswered_s, *(other.silent_s for other in heard)])
            if longest_s > self._patience_s or any(other.note.get("barks") for other in heard):
                return True
        # A slower compile elsewhere: this process waits for its peer, not for nothing.
        return silent_s > self.timeout_s and not is_busy and not self._is_somebody_busy()

    def _is_somebody_busy(self) -> bool:
        return any(
            (note["busy"] or note.get("others_busy")) and silent_s <= self._stale_s
            for note, silent_s in self._peers.heard().values()
        )

    def _note(self) -> Note:
        """What the others may want to know; from process 0, who alone hears of all, also what it knows of them."""
        with self._lock:
            busy, step, silent_s = list(self._busy), self._step, time.monotonic() - self._last
        note: Note = {"step": step, "busy": busy[-1] if busy else None, "waiting": self._waiting}
        if self._rank == 0 and self._num_processes > 1:
            note["others_busy"] = self._is_somebody_busy()
            if silent_s > self._silence_s / 4:
                note["suspects"] = self._suspects(step)
        return note

    def _bark(self, step: int | None, silent_s: float) -> None:
        where = f"process {self._rank} of {self._num_processes}"
        after = "the first step" if step is None else f"the step after {step}"
        own = [f"process {self._rank} itself waits for its {self._waiting}"] if self._waiting else []
        lines = [
            f"{where} waited {silent_s:.1f} s for {after} (runtime.step_timeout_s = {self.timeout_s:g})",
            *(own or self._suspects(step)),
        ]
        self._peers.exchange(self._note() | {"barks": True})
        try:
            print("\n".join(f"watchdog: {line}" for line in lines), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"watchdog: {where} ends with exit code {RETRY}", file=sys.stderr, flush=True)
        except (OSError, ValueError, AttributeError):  # a full disk; a stderr that is closed, or none
            pass
        finally:
            self._let_others_bark()
            if not self._stop.is_set():
                self._end(RETRY)

    def _let_others_bark(self) -> None:
        """Stay for a while: the end of this process ends the others, who could then not tell what they know."""
        until = time.monotonic() + _BEATS_TO_HEAR * self._beat_s
        while self._num_processes > 1 and time.monotonic() < until and not self._stop.wait(self._beat_s / 2):
            self._peers.exchange(self._note() | {"barks": True})

    def _suspects(self, step: int | None) -> list[str]:
        if self._num_processes == 1:
            return []
        if self._peers.unanswered_s > 2 * self._beat_s:
            return [_COORDINATOR_SILENT]
        heard = self._peers.heard()
        known = range(1, self._num_processes) if self._rank == 0 else [0]
        lines = suspects(heard, known, step=step, stale_s=self._stale_s)
        return lines or ([_NOBODY] if self._rank == 0 else heard[0].note.get("suspects", []))


def suspects(heard: Mapping[int, Heard], ranks: Iterable[int], *, step: int | None, stale_s: float) -> list[str]:
    """Sentences on the processes among `ranks` that hold up the rest."""
    lines = []
    for rank in ranks:
        if rank not in heard:
            lines.append(f"process {rank} never reported: it did not reach the training loop")
            continue
        note, silent_s = heard[rank]
        if silent_s > stale_s:
            lines.append(f"process {rank} is missing: silent for {silent_s:.1f} s, last at step {note['step']}")
        elif note["waiting"]:
            lines.append(f"process {rank} waits for its {note['waiting']} after step {note['step']}")
        elif (note["step"] or 0) < (step or 0):
            lines.append(f"process {rank} is behind: at step {note['step']}" + _doing(note))
    return lines


def _doing(note: Note) -> str:
    return f", {note['busy']}" if note["busy"] else ""
