"""Decisions that all processes of a run must take alike: process 0 decides, or every process votes.

Both functions are collectives: every process calls them, in the same order.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def from_main(value: Any) -> Any:
    """The JSON value that process 0 passed; what the others pass is ignored."""
    import jax

    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())


def processes_where(flag: bool) -> list[int]:
    """Indices of the processes that passed True."""
    import jax

    if jax.process_count() == 1:
        return [0] if flag else []
    from jax.experimental import multihost_utils

    flags = np.asarray(multihost_utils.process_allgather(np.int32(flag)))
    return [int(index) for index in np.flatnonzero(flags)]
