"""A checkpoint written from arrays that are read by parts, so that the host never holds one of them whole.

What comes out is what `Checkpoints` writes: the same store, manifest and checksums. For one process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint import checksum, folders, manifest, storage
from jaxpar.errors import UserError
from jaxpar.tree import nested

PART_BYTES = 32 * 2**20  # of a write, and of a chunk in the store


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """An array by its parts: `read(index)` gives the values at a tuple of slices."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.size * self.dtype.itemsize


def write(directory: Path, step: int, named: Mapping[str, Parts], extra: dict[str, Any]) -> None:
    """Write `named` as a finished step of a checkpoint directory; raises `UserError` when the disk does not take it."""
    import jax
    import orbax.checkpoint as ocp

    directory = Path(directory).absolute()
    sums: dict[int, int] = {}
    try:
        partial = folders.begin(directory, step)
        (partial / folders.EXTRA).write_text(json.dumps(extra))
        arrays = ocp.type_handlers.ArrayHandler()  # there are none, but Orbax warns without it
        registry = ocp.type_handlers.create_type_handler_registry((Parts, _handler(sums)), (jax.Array, arrays))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, type_handler_registry=registry)
        tree = nested(named)
        chunks = ocp.SaveArgs(chunk_byte_size=PART_BYTES)
        args = ocp.args.PyTreeSave(tree, save_args=_like(tree, chunks))
        ocp.Checkpointer(handler).save(partial / folders.STATE, args=args)
        found = {name: (sums[id(parts)],) for name, parts in named.items()}  # each is one block
        manifest.write(manifest.describe(step, partial, named, found), partial)
        folders.commit(directory, step)
    except storage.STORAGE_ERRORS as error:
        folders.discard_partial(directory, step)
        raise UserError(f"{directory}: cannot be written: {storage.reason(error)}") from error


def _like(tree: Any, value: Any) -> Any:
    return {key: _like(node, value) for key, node in tree.items()} if isinstance(tree, dict) else value


def _handler(sums: dict[int, int]) -> Any:
    """Orbax's handler of host arrays, except that an array is read and written chunk by chunk, one after the other."""
    import orbax.checkpoint as ocp
    import tensorstore

    class Handler(ocp.type_handlers.NumpyHandler):
        def __init__(self) -> None:
            super().__init__(deepcopy_host_arrays=False)
            self._one_at_a_time = asyncio.Lock()

        async def _open_and_write(self, value: Parts, tspec: dict[str, Any], ts_context: Any) -> None:
            async with self._one_at_a_time:
                store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
                lengths: Any = store.chunk_layout.write_chunk.shape
                counts = [-(-size // length) for size, length in zip(value.shape, lengths)]
                total = 0
                for numbers in itertools.product(*map(range, counts)):
                    index = tuple(
                        slice(n * length, min((n + 1) * length, size))
                        for n, length, size in zip(numbers, lengths, value.shape)
                    )
                    part = value.read(index)
                    total += checksum.of_part(part, index, value.shape)
                    await store[index].write(part, can_reference_source_data_indefinitely=True)
                sums[id(value)] = total % 2**32

    return Handler()
