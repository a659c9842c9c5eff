"""Rows read through Grain: each process gets exactly the rows of a global batch that its devices hold.

Importing this imports Grain, which takes a while; `Loader` does so at the first batch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from grain import DatasetIterator, MapDataset, ReadOptions
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions

from jaxpar.data.order import Order
from jaxpar.data.rows import Row, Rows, empty_row
from jaxpar.data.share import Share


class DealtRows(MapDataset[Row]):
    """Rows in global order, each batch rearranged so that every group of the share is dealt the rows at its places.

    Batches count from `start`, which is no multiple of the batch when a run goes on with another batch size. Rows past
    the end of the data have weight 0. This is a dataset of its own, since `MapDataset.source` measures every row that
    it reads, which takes as long as reading it.
    """

    def __init__(self, rows: Rows, order: Order, share: Share, start: int) -> None:
        super().__init__()
        self._rows = rows
        self._order = order
        self._places = share.dealt()
        self._needed = share.needed
        self._start = start
        self._batch = share.global_batch

    def __len__(self) -> int:
        if self._order.length is None:
            return sys.maxsize  # Grain's way to say endless
        batches = -((self._start - self._order.length) // self._batch)
        return self._start + batches * self._batch

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, position = divmod(index - self._start, self._batch)
        place = self._places[position]
        at = self._start + batch * self._batch + place
        ended = self._order.length is not None and at >= self._order.length
        if ended or place not in self._needed:
            return empty_row(self._rows.seq_len)
        return self._rows.row(self._order.row(at))


def read_batches(rows: Rows, order: Order, share: Share, start: int) -> DatasetIterator[dict[str, np.ndarray]]:
    """Batches of arrays [places of the share, T] from global index `start` on, read by the thread that asks for them.

    An error while a row is read comes out of `next` as it was raised, and the same batch can be asked for again.
    """
    reading = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dealing = ShardOptions(shard_index=share.group, shard_count=len(share.groups))
    batches = iter(
        ElasticIterator(DealtRows(rows, order, share, start), share.global_batch, dealing, read_options=reading)
    )
    batches.set_state({"global_next_index": start})
    return batches
