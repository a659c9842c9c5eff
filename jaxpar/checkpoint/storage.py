"""Orbax, narrowed to what a checkpoint needs: write named arrays in the background, read them into shardings.

Arrays go into one OCDBT store, uncompressed: on noise-like float32 compression saves a few percent of the space for
several times the time and memory. Orbax neither checks the bytes nor names a parameter whose shape differs, so
`manifest` does both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.runtime.coordination import Gate
from jaxpar.tree import named_leaves, nested

# What Orbax and TensorStore raise for a disk that is full, read-only or damaged. JaxRuntimeError is a RuntimeError.
STORAGE_ERRORS = (ValueError, OSError, KeyError, TypeError, RuntimeError)
# A process that died cannot reach the barrier at the end of a save; the others stop waiting after this long.
BARRIER_TIMEOUT_S = 300

_MIN_SLICE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class PendingWrite:
    """A write that goes on in the background."""

    checkpointer: Any
    gate: Gate

    def wait(self) -> None:
        """Return once every process has written its shards; raise one of `STORAGE_ERRORS` if any of them failed."""
        try:
            self.checkpointer.wait_until_finished()
        except STORAGE_ERRORS:
            self.gate.fail(1000 * BARRIER_TIMEOUT_S)
            raise
        finally:
            self.checkpointer.close()


def hold(named: Mapping[str, Any]) -> Callable[[], dict[str, Any]] | None:
    """Keep the values that arrays have now, whoever donates them; None where only a copy to host memory keeps them.

    The function returned gives the same arrays over the memory that is held, once and in any thread. Nothing is copied:
    on a CPU a NumPy array is a view of the device's buffer, and XLA gives a step that is to overwrite a buffer with
    views a new one instead. Several processes take the way of the accelerators, since their collectives must start in
    the same order everywhere, which those of a background thread would not.
    """
    import jax
    import numpy as np

    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return None
    arrays = {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.Array)}
    kinds = jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding  # whose checksums need no collective
    # Of 64-bit types there is no telling whether another thread may have them: x64 is a setting of each thread.
    if not all(isinstance(array.sharding, kinds) and array.dtype.itemsize <= 4 for array in arrays.values()):
        return None
    views = {name: _views(array) for name, array in arrays.items()}
    shardings = {name: array.sharding for name, array in arrays.items()}
    numbers = {name: np.array(leaf) for name, leaf in named.items() if name not in arrays}
    names = list(named)

    def again() -> dict[str, Any]:
        return {name: numbers[name] if name in numbers else _over(views.pop(name), shardings[name]) for name in names}

    return again


def _views(array: Any) -> tuple[tuple[int, ...], dict[Any, Any]]:
    """Shape, and a view of the memory of each device; devices with the same values have the same view."""
    import numpy as np

    views: dict[Any, Any] = {}
    of_place: dict[tuple[tuple[Any, Any], ...], Any] = {}
    for shard in array.addressable_shards:
        place = tuple((part.start, part.stop) for part in shard.index)
        if place not in of_place:
            of_place[place] = np.asarray(shard.data)
        views[shard.device] = of_place[place]
    return array.shape, views


def _over(held: tuple[tuple[int, ...], dict[Any, Any]], sharding: Any) -> Any:
    import jax

    shape, views = held
    places = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in views]
    shards = jax.device_put(list(views.values()), places)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def start_write(path: Path, named: Mapping[str, Any], gate: Gate) -> PendingWrite:
    """Copy the arrays to host memory, then write them to the new folder `path` in the background.

    The caller may donate the arrays as soon as this returns. A checkpointer serves one save: after a failure Orbax
    raises the old error once more on the next save, so none is kept.
    """
    import orbax.checkpoint as ocp

    options = ocp.options.AsyncOptions(
        timeout_secs=BARRIER_TIMEOUT_S,
        barrier_sync_fn=lambda *, key, timeout_ms: gate.meet(timeout_ms),
    )
    checkpointer = ocp.AsyncCheckpointer(_handler(), async_options=options)
    try:
        checkpointer.save(path, args=ocp.args.PyTreeSave(nested(named)))
    except STORAGE_ERRORS:
        gate.fail(1000 * BARRIER_TIMEOUT_S)
        raise
    return PendingWrite(checkpointer, gate)


def read(path: Path, named: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arrays that `named` asks for; raise one of `STORAGE_ERRORS` if that fails.

    A value is a `jax.ShapeDtypeStruct` with a sharding, and becomes a jax array that is born sharded, or one without,
    and becomes a NumPy array.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    def restore_args(leaf: Any) -> Any:
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    tree = nested(named)
    args = ocp.args.PyTreeRestore(tree, restore_args=jax.tree.map(restore_args, tree), partial_restore=True)
    # The handler itself, not a Checkpointer: that one waits for all processes, for ever if one cannot read.
    return named_leaves(_handler().restore(path, args=args))


def _handler() -> Any:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    # Replicas share the writing of an array by slicing it on the device, which costs a compile per shape and device.
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, type_handler_registry=registry)


def reason(error: Exception) -> str:
    """One line that says why a read or write failed."""
    text = str(error)
    if "No space left on device" in text or "RESOURCE_EXHAUSTED" in text:
        return "the disk is full (no space left on device)"
    if "Read-only file system" in text:
        return "the file system is read-only"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
