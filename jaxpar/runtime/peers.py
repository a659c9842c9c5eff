"""What a process knows of the others: the notes they pin, and how long each has been silent.

Process 0 reads the notes of all; the others read its note alone, in which it says what it knows. So a beat costs the
coordination service two small calls per process, however many there are. Silence is measured by the reader's clock,
from the moment a note last changed; the clocks of hosts need not agree.

The calls have no deadline, and a service whose process is stopped answers none of them. So a thread makes them, one
exchange at a time, and an exchange that does not come back is how that silence shows.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from jaxpar.runtime.coordination import Board

Note = dict[str, Any]


class Heard(NamedTuple):
    """The last note of another process, and for how long it has not changed."""

    note: Note
    silent_s: float  # 0 after it left in good order


class Peers:
    """The notes of the other processes of a run; none of the methods waits for an answer."""

    def __init__(self, board: Board | None, rank: int, num_processes: int) -> None:
        self._board = board if num_processes > 1 else None
        self._rank = rank
        self._lock = threading.Lock()
        self._count = 0  # makes every note differ from the one before
        self._notes: dict[int, tuple[Note, float]] = {}  # and when this process first saw the note
        self._asked: float | None = None  # when the exchange began that is still under way

    def heard(self) -> dict[int, Heard]:
        """What was read last, by process."""
        now = time.monotonic()
        with self._lock:
            return {
                rank: Heard(note, 0.0 if note.get("left") else now - since)
                for rank, (note, since) in self._notes.items()
            }

    @property
    def unanswered_s(self) -> float:
        """How long the service, which lives in process 0, has been owing an answer."""
        with self._lock:
            return 0.0 if self._asked is None else time.monotonic() - self._asked

    def exchange(self, note: Note) -> None:
        """Pin `note` and fetch what others pinned; nothing happens while an exchange is under way."""
        with self._lock:
            if self._board is None or self._asked is not None:
                return
            self._asked = time.monotonic()
            self._count += 1
            numbered = note | {"number": self._count}
        threading.Thread(target=self._exchange, args=(self._board, numbered), daemon=True).start()

    def forgive(self, pause_s: float) -> None:
        """Do not count the last `pause_s`, during which this process was itself stopped."""
        with self._lock:
            self._notes = {rank: (note, since + pause_s) for rank, (note, since) in self._notes.items()}
            self._asked = None if self._asked is None else self._asked + pause_s

    def _exchange(self, board: Board, note: Note) -> None:
        found: dict[int, Note] = {}
        try:
            board.pin(self._rank, note)
            found = board.read(None if self._rank == 0 else 0)
        except RuntimeError:  # the service is going away; the process will hear of that elsewhere
            pass
        with self._lock:
            now = time.monotonic()
            for rank, read in found.items():
                if rank != self._rank and (rank not in self._notes or self._notes[rank][0] != read):
                    self._notes[rank] = (read, now)
            self._asked = None
