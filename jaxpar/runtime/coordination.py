"""A few words between processes through jax's coordination service: no device and no collective takes part.

The service is private to jax (`jax._src.distributed`), with the same methods in every version supported here; this
file is the only one that touches it.
"""

from __future__ import annotations

import json
import threading
from typing import Any

_ANSWER_S = 5.0


class Board:
    """Notes that processes pin for each other; in a run of one process there is nobody to read them."""

    def __init__(self, topic: str) -> None:
        from jax._src import distributed

        self._prefix = f"jaxpar/{topic}/"
        self._client: Any = distributed.global_state.client

    def pin(self, rank: int, note: dict[str, Any]) -> None:
        """Replace this process's note."""
        if self._client is not None:
            self._client.key_value_set(f"{self._prefix}{rank}", json.dumps(note), allow_overwrite=True)

    def read(self) -> dict[int, dict[str, Any]] | None:
        """Notes by process; None if the service, which lives in process 0, does not answer in time."""
        if self._client is None:
            return {}
        found: list[list[tuple[str, str]]] = []
        # A frozen service blocks the call for good, so a thread makes it.
        asking = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        if not found:
            return None
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found[0]}

    def _ask(self) -> list[tuple[str, str]]:
        return self._client.key_value_dir_get(self._prefix)
