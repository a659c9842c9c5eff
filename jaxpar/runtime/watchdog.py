"""A thread that ends the process when no step finishes for too long.

A collective has no deadline: one process that is stopped, or stuck in its data, blocks all others for ever while every
heartbeat goes on. The watchdog of each process notes when the last step finished. After `timeout_s` it prints all
Python stacks, names the processes that fell silent or behind, and ends the process with exit code 75, so that a
supervisor starts all of them again. A process that waits for one that is alive and compiling, saving or evaluating
goes on waiting. One that is busy itself may be waiting for others all the same, such as at the end of a save; after
`timeout_s` of that it ends if another process, whose watchdog would report in any state, has been silent as long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxpar.runtime.coordination import Board
from jaxpar.runtime.exits import RETRY, leave

_UNANSWERED = 3  # questions in a row after which the coordinator counts as lost


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
        self._rank, self._num_processes, self._board, self._end = rank, num_processes, board, end
        self._beat_s = min(max(timeout_s / 8, 0.05), 30.0)
        self._stale_s = 3 * self._beat_s + 1.0  # a note older than this comes from a process that fell silent
        self._lock = threading.Lock()
        self._busy: list[str] = []
        self._step: int | None = None
        self._last = time.monotonic()  # when a step finished, or when what keeps the process busy began or ended
        self._unanswered = 0
        self._stop = threading.Event()
        self._pinning: threading.Thread | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

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
        while not self._stop.wait(self._beat_s):
            with self._lock:
                busy, step, silent_s = list(self._busy), self._step, time.monotonic() - self._last
            self._pin(step, busy)
            if silent_s > self.timeout_s and not self._stop.is_set():
                notes = self._read()
                # A slower compile elsewhere: this process waits for its peer, not for nothing.
                waits_well = not self._somebody_is_lost(notes) if busy else self._somebody_is_busy(notes)
                if not waits_well:
                    self._bark(step, silent_s, notes)
                    return

    def _pin(self, step: int | None, busy: list[str]) -> None:
        if self._board is None or self._num_processes == 1:
            return
        if self._pinning is not None and self._pinning.is_alive():
            return
        note = {"time": time.time(), "step": step, "busy": busy[-1] if busy else None}
        # Without an answer from the service this waits; then the clock must not wait with it.
        self._pinning = threading.Thread(target=_quietly, args=(self._board.pin, self._rank, note), daemon=True)
        self._pinning.start()

    def _read(self) -> dict[int, dict[str, Any]] | None:
        return self._board.read() if self._board is not None and self._num_processes > 1 else {}

    def _somebody_is_busy(self, notes: dict[int, dict[str, Any]] | None) -> bool:
        now = time.time()
        return any(
            note["busy"] and now - note["time"] <= self._stale_s
            for rank, note in (notes or {}).items()
            if rank != self._rank
        )

    def _somebody_is_lost(self, notes: dict[int, dict[str, Any]] | None) -> bool:
        """Whether another process, or the service in process 0, has been silent for `timeout_s` or several beats."""
        self._unanswered = self._unanswered + 1 if notes is None else 0
        patience_s, now = max(self.timeout_s, self._stale_s), time.time()
        return self._unanswered >= _UNANSWERED or any(
            now - note["time"] > patience_s for rank, note in (notes or {}).items() if rank != self._rank
        )

    def _bark(self, step: int | None, silent_s: float, notes: dict[int, dict[str, Any]] | None) -> None:
        where = f"process {self._rank} of {self._num_processes}"
        after = "the first step" if step is None else f"the step after {step}"
        lines = [
            f"watchdog: {where} waited {silent_s:.1f} s for {after} (runtime.step_timeout_s = {self.timeout_s:g})",
            *(f"watchdog: {line}" for line in self._suspects(step, notes)),
        ]
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print("\n".join(lines), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"watchdog: {where} ends with exit code {RETRY}", file=sys.stderr, flush=True)
        self._end(RETRY)

    def _suspects(self, step: int | None, notes: dict[int, dict[str, Any]] | None) -> list[str]:
        if self._num_processes == 1:
            return []
        if notes is None:
            return ["process 0, which coordinates, does not answer: it is stopped or its host is lost"]
        return suspects(notes, self._num_processes, now=time.time(), step=step, stale_s=self._stale_s)


def suspects(
    notes: dict[int, dict[str, Any]], num_processes: int, *, now: float, step: int | None, stale_s: float
) -> list[str]:
    """Sentences on the processes that hold up the rest; clocks of all hosts should agree within a second or so."""
    lines = []
    for rank in range(num_processes):
        note = notes.get(rank)
        if note is None:
            lines.append(f"process {rank} never reported: it did not reach the training loop")
        elif now - note["time"] > stale_s:
            lines.append(
                f"process {rank} is missing: silent for {now - note['time']:.1f} s, last at step {note['step']}"
            )
        elif (note["step"] or 0) < (step or 0):
            lines.append(f"process {rank} is behind: at step {note['step']}" + _doing(note))
    return lines or [
        "every process answers and none is behind or busy: a collective does not return (network or driver)"
    ]


def _doing(note: dict[str, Any]) -> str:
    return f", {note['busy']}" if note["busy"] else ""


def _quietly(call: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the service is going away; the process will hear of that elsewhere
        call(*args)
