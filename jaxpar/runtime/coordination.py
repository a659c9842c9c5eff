"""A few words between processes through jax's coordination service: no device and no collective takes part.

The service is private to jax (`jax._src.distributed`), with the same methods in every version supported here; this
file is the only one that touches it.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any


class Assembly:
    """Questions on which all processes need one answer. Every process asks the same questions in the same order."""

    def __init__(self, name: str, *, timeout_s: float) -> None:
        import jax

        self._client = _client()
        self._rank, self._count = jax.process_index(), jax.process_count()
        self._prefix, self._timeout_ms = f"jaxpar/{name}", int(timeout_s * 1000)
        self._number = 0

    def from_main(self, value: Any) -> Any:
        """The JSON value that process 0 passed; what the others pass is ignored."""
        if self._count == 1:
            return value
        key = self._next_key()
        if self._rank == 0:
            self._client.key_value_set(key, json.dumps(value))
            return value
        return json.loads(self._client.blocking_key_value_get(key, self._timeout_ms))

    def processes_where(self, flag: bool) -> list[int]:
        """Indices of the processes that passed True."""
        if self._count == 1:
            return [0] if flag else []
        key = self._next_key()
        self._client.key_value_set(f"{key}/{self._rank}", "1" if flag else "")
        self._client.wait_at_barrier(key, self._timeout_ms)
        votes = dict(self._client.key_value_dir_get(f"{key}/"))
        return sorted(int(name.rsplit("/", 1)[1]) for name, vote in votes.items() if vote)

    def meet(self) -> None:
        """Return when every process has come here."""
        if self._count > 1:
            self._client.wait_at_barrier(self._next_key(), self._timeout_ms)

    def gate(self) -> Gate:
        """A `Gate` for one piece of work that all processes begin now and may carry on in a thread."""
        return Gate(self._next_key(), self._client, self._rank, self._count)

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._prefix}/{self._number}"


class GateError(OSError):
    """Another process failed at its part of the work."""


class Gate:
    """Where the processes that work at one thing meet, as often as the work wants; who failed tells it there.

    Without this, the others would wait for a process that met an error until their patience ends.
    """

    def __init__(self, prefix: str, client: Any, rank: int, count: int) -> None:
        self._prefix, self._client, self._rank, self._count = prefix, client, rank, count
        self._met = 0
        self._closed = False  # this process waits for nobody any more

    def meet(self, timeout_ms: int) -> None:
        """Return when every process is here; raise `GateError` if one of them failed."""
        if self._count == 1:
            return
        self._met += 1
        try:
            self._client.wait_at_barrier(f"{self._prefix}/{self._met}", timeout_ms)
        except RuntimeError:  # a process is dead or too late: there is nobody to tell
            self._closed = True
            raise
        failed = sorted(int(key.rsplit("/", 1)[1]) for key, _ in self._client.key_value_dir_get(self._failures))
        if failed:
            self._closed = True
            raise GateError(f"it failed on process {failed[0]}")

    def fail(self, timeout_ms: int) -> None:
        """Tell the others, at the next meeting, that this process failed. Does nothing after a failed meeting."""
        if self._count == 1 or self._closed:
            return
        self._client.key_value_set(f"{self._failures}{self._rank}", "1")
        with contextlib.suppress(GateError, RuntimeError):  # the failure that led here is the one to report
            self.meet(timeout_ms)

    @property
    def _failures(self) -> str:
        return f"{self._prefix}/failed/"


class Board:
    """Notes that processes pin for each other; in a run of one process there is nobody to read them."""

    def __init__(self, topic: str) -> None:
        self._prefix = f"jaxpar/{topic}/"
        self._client = _client()

    def pin(self, rank: int, note: dict[str, Any]) -> None:
        """Replace this process's note."""
        if self._client is not None:
            self._client.key_value_set(f"{self._prefix}{rank}", json.dumps(note), allow_overwrite=True)

    def read(self, rank: int | None = None) -> dict[int, dict[str, Any]]:
        """Notes by process, of all or of one; waits for good if process 0, where the service lives, is stopped."""
        if self._client is None:
            return {}
        if rank is None:
            found = self._client.key_value_dir_get(self._prefix)
            return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}
        try:
            return {rank: json.loads(self._client.key_value_try_get(f"{self._prefix}{rank}"))}
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise


def _client() -> Any:
    from jax._src import distributed

    return distributed.global_state.client
