"""What a process knows of the others: the notes they pin, and how long each has been silent.

The calls to the coordination service have no deadline, and a service whose process is stopped answers none of them. So
a thread makes them, one exchange at a time, and an exchange that does not come back is how that silence shows.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from jaxpar.runtime.coordination import Board

Note = dict[str, Any]


class Peers:
    """The notes of the other processes of a run; none of the methods waits for an answer."""

    def __init__(self, board: Board | None, rank: int, num_processes: int) -> None:
        self._board = board if num_processes > 1 else None
        self._rank = rank
        self._lock = threading.Lock()
        self._notes: dict[int, Note] = {}
        self._changed: dict[int, float] = {}  # when this process first saw the note that stands there now
        self._asked: float | None = None  # when the exchange began that is still under way

    @property
    def notes(self) -> dict[int, Note]:
        """The last notes that were read, by process; this one's is among them."""
        with self._lock:
            return dict(self._notes)

    @property
    def unanswered_s(self) -> float:
        """How long the service, which lives in process 0, has been owing an answer."""
        with self._lock:
            return 0.0 if self._asked is None else time.monotonic() - self._asked

    def exchange(self, note: Note, *, read: bool) -> None:
        """Pin `note` for the others and, if `read`, fetch theirs; nothing happens while an exchange is under way.

        Without `read`, what was read before is forgotten: it would count as old when it is looked at again.
        """
        with self._lock:
            if not read:
                self._notes, self._changed = {}, {}
            if self._board is None or self._asked is not None:
                return
            self._asked = time.monotonic()
        threading.Thread(target=self._exchange, args=(self._board, note, read), daemon=True).start()

    def lost(self, *, patience_s: float, beat_s: float) -> list[int]:
        """Other processes whose note is older than `patience_s`, by their own clock or since it was first seen.

        A host's clock may be wrong, so a note that is old by it must have stood unchanged here for two beats as well.
        """
        now, wall = time.monotonic(), time.time()
        with self._lock:
            still_s = {rank: now - since for rank, since in self._changed.items() if rank != self._rank}
            return [
                rank
                for rank, unchanged_s in still_s.items()
                if unchanged_s > patience_s
                or (unchanged_s > 2 * beat_s and wall - self._notes[rank]["time"] > patience_s)
            ]

    def forgive(self, pause_s: float) -> None:
        """Do not count the last `pause_s`, during which this process was itself stopped."""
        with self._lock:
            self._changed = {rank: since + pause_s for rank, since in self._changed.items()}
            self._asked = None if self._asked is None else self._asked + pause_s

    def _exchange(self, board: Board, note: Note, read: bool) -> None:
        try:
            board.pin(self._rank, note)
            found = board.read() if read else {}
        except RuntimeError:  # the service is going away; the process will hear of that elsewhere
            found = {}
        with self._lock:
            now = time.monotonic()
            self._changed.update({rank: now for rank, note in found.items() if self._notes.get(rank) != note})
            self._notes.update(found)
            self._asked = None
