"""Batches of a run: the rows of this process, put on its devices, and a state that fits in one line of JSON.

Every process asks the same order for the same global batch and reads only the rows that its devices hold, so the
batches depend neither on the mesh nor on the number of processes, and the data ends at the same step everywhere.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpar.data.order import Order, SourceOrder
from jaxpar.data.rows import KEYS, Rows
from jaxpar.data.share import share_of
from jaxpar.errors import UserError

if TYPE_CHECKING:
    import jax
    from grain import DatasetIterator

log = logging.getLogger(__name__)

AHEAD = 2  # batches read and put on the devices before they are asked for


class Loader:
    """Global batches of `rows` in the order of (seed, index).

    With `repeat=False` every row comes once and the last batch is filled up with rows of weight 0, so one pass over a
    held-out split is `Loader(rows, batch, seed=0, sharding=s, shuffle=False, repeat=False)`.
    `sharding` is that of [B, T]; None puts whole batches on the default device.
    """

    def __init__(
        self,
        rows: Rows,
        global_batch: int,
        *,
        seed: int,
        sharding: jax.sharding.Sharding | None = None,
        shuffle: bool = True,
        repeat: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if global_batch < 1:
            raise UserError(f"global_batch: {global_batch}; want at least 1")
        self._rows = rows
        self._batch = global_batch
        self._seed = seed
        self._sharding = sharding
        make_order = getattr(rows, "order", None)
        self._order: Order = (
            make_order(seed=seed, shuffle=shuffle, repeat=repeat, global_batch=global_batch)
            if make_order is not None
            else SourceOrder(len(rows), seed, shuffle, repeat)
        )
        self._local = _LocalRows(sharding, (global_batch, rows.seq_len))
        self._next_index = 0
        self._last_index: int | None = None
        self._batches: DatasetIterator[dict[str, np.ndarray]] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jaxpar-data")
        self._ahead: collections.deque[concurrent.futures.Future[dict[str, jax.Array]]] = collections.deque()
        self._check_processes()
        if state is not None:
            self._restore(state)

    def next_batch(self) -> dict[str, jax.Array]:
        """The next global batch: arrays [B, T]. Raises StopIteration at the end of the data, on all processes alike."""
        start = self._next_index
        if self._ended(start):
            raise StopIteration(f"the data ended after {self._order.length} rows")
        if self._batches is None:
            from jaxpar.data.reading import read_batches

            self._batches = read_batches(self._rows, self._order, self._local.share, start)
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._thread.submit(self._read, self._batches))
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self._forget()  # what was read ahead may have moved on; a caller who tries again gets this very batch
            raise
        self._last_index, self._next_index = start, start + self._batch
        return batch

    def state(self) -> dict[str, Any]:
        """What a later loader needs to go on with the batch that comes next; small and JSON-able."""
        return {
            "seed": self._seed,
            "next_index": self._next_index,
            "global_batch": self._batch,
            "rows": len(self._rows),
            "data": self._rows.identity,
            "order": self._order_identity(),
        }

    def sample_ids(self) -> list[str]:
        """Ids of the rows of the last batch, in order; rows of padding are left out."""
        if self._last_index is None:
            return []
        indices = range(self._last_index, self._last_index + self._batch)
        return [self._rows.sample_id(self._order.row(i)) for i in indices if not self._ended(i)]

    def skip_to(self, index: int) -> None:
        """Go on with the batch whose first row stands at global row index `index`."""
        if index < 0:
            raise UserError(f"skip_to: {index}; want a row index of 0 or more")
        self._forget()
        self._next_index = index
        self._last_index = None

    def close(self) -> None:
        """Stop reading ahead."""
        self._forget()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ended(self, index: int) -> bool:
        length = self._order.length
        return length is not None and index >= length

    def _read(self, batches: DatasetIterator[dict[str, np.ndarray]]) -> dict[str, jax.Array]:
        """The next of `batches`, put on the devices; runs in the thread."""
        batch = next(batches)
        return {key: self._local.put(batch[key]) for key in KEYS}

    def _forget(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._batches = None  # not closed: the thread may be in the middle of it

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; refuses a state of other data."""
        if state["data"] != self._rows.identity:
            raise UserError(
                f"the training data changed since the checkpoint ({state['rows']} rows then, {len(self._rows)} now, or"
                " other tokens or packing): restore the data and its settings, or start a new workdir with init_from"
            )
        if state["seed"] != self._seed:
            raise UserError(
                f"seed: {self._seed}; the checkpoint was made with {state['seed']}, another seed is another order"
            )
        if state["order"] != self._order_identity():
            log.warning(
                "the order of the data changed since the checkpoint (shuffle, repeat or mixture settings):"
                " some rows may come again and others later"
            )
        self._next_index = int(state["next_index"])

    def _order_identity(self) -> str:
        return hashlib.sha256(repr(self._order).encode()).hexdigest()[:16]

    def _check_processes(self) -> None:
        """All processes must see the same data, or their batches would not be parts of one."""
        import jax

        if jax.process_count() == 1:
            return
        from jax.experimental import multihost_utils

        text = f"{self._rows.identity}/{self._order_identity()}/{self._batch}"
        mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
        everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), -1)
        others = [process for process, one in enumerate(everyone) if not np.array_equal(one, everyone[0])]
        if others:
            raise UserError(
                f"processes {others} see other data or data settings than process 0: every process must read the"
                " same files with the same config"
            )


class _LocalRows:
    """Which rows of a global batch live on this process, and how their arrays become global ones."""

    def __init__(self, sharding: jax.sharding.Sharding | None, shape: tuple[int, int]) -> None:
        import jax

        self._jax = jax
        self._sharding = sharding
        self._shape = shape
        process = jax.process_index()
        if sharding is None:
            self.share = share_of(process, {process: {range(shape[0])}}, shape[0])
            return
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise UserError(
                f"a batch of {shape[0]} rows of {shape[1]} tokens cannot be split by {sharding}: {error}"
            ) from error
        held: dict[int, set[range]] = {}
        for device, block in sharding.devices_indices_map(shape).items():
            held.setdefault(device.process_index, set()).add(range(*_slice(block).indices(shape[0])))
        self.share = share_of(process, held, shape[0])
        self._position = {place: position for position, place in enumerate(self.share.places)}

    def put(self, array: np.ndarray) -> jax.Array:
        """Arrays [places of the share, T] as a global array [B, T]."""
        if self._sharding is None:
            return self._jax.device_put(array)

        def block(index: Any) -> np.ndarray:
            first, stop, _ = index[0].indices(self._shape[0])
            low = self._position[first]
            return array[low : low + stop - first, index[1]]

        return self._jax.make_array_from_callback(self._shape, self._sharding, block)


def _slice(block: Any) -> slice:
    """The rows of a device's block."""
    return block[0]
