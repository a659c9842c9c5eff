"""A 32-bit checksum of an array that does not depend on how the array is sharded.

Every element's bits are mixed with the element's position (the finalizer of MurmurHash3) and the results are added
modulo 2**32. Addition commutes, so each device sums its own shard and any mesh gives the same number; a flipped bit,
a lost shard or two swapped blocks change it. It is computed where the array lives, so it covers every copy between the
device and the disk, costs one read of the array at memory speed, and the training loop does not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B9
_BLOCK = 2**16  # elements that are added at a time on a CPU: they stay in its cache
_ROWS = 16  # XLA:CPU shares a block's rows out to its threads: several times slower where they do not divide


def start(named: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """Begin the checksums of arrays by name; the returned function waits for them."""
    import jax

    pending = [
        (names, program(tuple(_host_bits(named[name]) if mesh is None else named[name] for name in names)))
        for mesh, names, program in _programs(named)
    ]
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Across CPU processes two programs with collectives must not overlap: their messages could be swapped.
        jax.block_until_ready([sums for _, sums in pending])

    def finish() -> dict[str, int]:
        return {name: int(value) for names, sums in pending for name, value in zip(names, np.asarray(sums))}

    return finish


def of_part(part: np.ndarray, index: Sequence[slice], shape: Sequence[int]) -> int:
    """What the part `index` of an array [shape] adds to its checksum; those of all parts are added modulo 2**32."""
    first, stride = np.ones(part.shape[:-1], np.uint32), 1
    for dim in reversed(range(part.ndim)):
        numbers = np.arange(part.shape[dim], dtype=np.uint64) if dim < part.ndim - 1 else np.zeros(1, np.uint64)
        places = ((numbers + index[dim].start) * (stride % 2**32) % 2**32).astype(np.uint32)
        first += places.reshape(-1, *[1] * (part.ndim - 2 - dim)) if dim < part.ndim - 1 else places[0]
        stride *= shape[dim]
    return int(_compiled_sum()(part.reshape(-1, part.shape[-1]), first.reshape(-1)))


def _host_bits(array: Any) -> Any:
    # Without x64 a 64-bit host array cannot enter jax as it is; its halves become one number as in `_bits`.
    if getattr(array, "sharding", None) is not None or array.dtype.itemsize != 8:
        return array
    halves = np.atleast_1d(array).view(np.uint32).reshape(*array.shape, 2)
    return halves[..., 0] + halves[..., 1] * np.uint32(0xC2B2AE35)


def _programs(named: Mapping[str, Any]) -> Iterator[tuple[Any, list[str], Callable[[tuple[Any, ...]], Any]]]:
    """(mesh, names, program) for the arrays of each mesh; mesh None for what lives on one device or on the host."""
    import jax

    groups: dict[Any, list[str]] = {}
    for name in sorted(named):
        sharding = getattr(named[name], "sharding", None)
        groups.setdefault(sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None, []).append(name)
    for mesh, names in groups.items():
        yield mesh, names, _whole if mesh is None else _sharded(mesh, tuple(named[n].sharding.spec for n in names))


def _whole(arrays: tuple[Any, ...]) -> Any:
    import jax
    import jax.numpy as jnp

    return jnp.stack([jax.jit(_checksum)(array) for array in arrays])


@functools.lru_cache(maxsize=16)
def _sharded(mesh: Any, specs: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """One program for all arrays of a mesh: every device sums its shards, one collective adds the devices."""
    import jax
    import jax.numpy as jnp

    def local(*shards: Any) -> Any:
        """Sums of all arrays from the shards of one device; of replicas only the first counts."""
        index = {axis: jax.lax.axis_index(axis).astype(jnp.uint32) for axis in mesh.axis_names}
        counts: dict[frozenset[str], Any] = {}  # 1 on the first of the replicas, 0 on the others
        sums = []
        for shard, spec in zip(shards, specs):
            parts = [_part(entry, index, mesh.shape) for entry in spec]
            others = frozenset(index) - {axis for entry in spec if entry is not None for axis in _axes(entry)}
            if others not in counts:
                replica = sum((index[axis] for axis in sorted(others)), jnp.uint32(0))
                counts[others] = (replica == 0).astype(jnp.uint32)
            sums.append(_checksum(shard, parts) * counts[others])
        return jax.lax.psum(jnp.stack(sums), mesh.axis_names)

    def sums(arrays: tuple[Any, ...]) -> Any:
        # Offloaded optimizer state lives in host memory, where nothing can be computed.
        arrays = tuple(jax.device_put(array, jax.memory.Space.Device) for array in arrays)
        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(*arrays)

    return jax.jit(sums)


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _part(entry: Any, index: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Any, int]:
    """Which of how many equal parts of a dim this device holds."""
    part, count = np.uint32(0), 1
    for axis in () if entry is None else _axes(entry):
        part, count = part * np.uint32(sizes[axis]) + index[axis], count * sizes[axis]
    return part, count


def _checksum(shard: Any, parts: Sequence[tuple[Any, int]] = ()) -> Any:
    """uint32 scalar from one shard; `parts` has for its leading dims which of how many equal parts this is."""
    import jax
    import jax.numpy as jnp

    shape = shard.shape
    parts = [*parts, *[(np.uint32(0), 1)] * (len(shape) - len(parts))]
    first: Any = np.uint32(1)  # position of each row's first element in the whole array, counted from 1
    stride = 1
    for dim in reversed(range(len(shape))):
        part, count = parts[dim]
        if count > 1:
            first = first + part * np.uint32(shape[dim] * stride % 2**32)
        if dim < len(shape) - 1 and shape[dim] > 1:
            first = first + jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], dim) * np.uint32(stride % 2**32)
        stride *= shape[dim] * count
    rows = shard.reshape(-1, shape[-1] if shape else 1)
    return _compiled_sum()(rows, jnp.broadcast_to(first, shape[:-1]).reshape(-1))


@functools.cache
def _compiled_sum() -> Callable[[Any, Any], Any]:
    # Parameters and moments have the same shapes: under jit each is traced once.
    import jax

    return jax.jit(_sum)


def _sum(rows: Any, first: Any) -> Any:
    """Sum of the mixed elements of `rows`, whose positions start at `first`."""
    import jax
    import jax.numpy as jnp

    num_rows, length = rows.shape
    block = max(1, _BLOCK // max(length, 1))
    if num_rows >= 2 * _ROWS:
        block = max(_ROWS, block // _ROWS * _ROWS)
    steps = num_rows // block
    if jax.default_backend() != "cpu" or steps < 2:
        return jnp.sum(_mix(rows, first), dtype=jnp.uint32)

    # On a CPU, XLA writes the mixed elements of the whole array to new memory before it adds them; so by blocks.
    def add(sums: Any, step: Any) -> tuple[Any, None]:
        return sums + _mix(*(jax.lax.dynamic_slice_in_dim(x, step * block, block) for x in (rows, first))), None

    sums, _ = jax.lax.scan(add, jnp.zeros((block, length), jnp.uint32), jnp.arange(steps))
    rest = _mix(rows[steps * block :], first[steps * block :])
    return jnp.sum(sums, dtype=jnp.uint32) + jnp.sum(rest, dtype=jnp.uint32)


def _mix(rows: Any, first: Any) -> Any:
    """Bits of every element mixed with its position, as uint32."""
    import jax
    import jax.numpy as jnp

    position = first[:, None] + jax.lax.broadcasted_iota(jnp.uint32, (1, rows.shape[1]), 1)
    x = _bits(rows) + position * np.uint32(_GOLDEN)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bits(array: Any) -> Any:
    """The bit patterns as uint32; of 64-bit types both halves, added up after the upper one was mixed."""
    import jax
    import jax.numpy as jnp

    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize * 8
    if jnp.issubdtype(array.dtype, jnp.integer) and width < 8:
        return array.astype(jnp.uint32)
    if width == 64:
        halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return halves[..., 0] + halves[..., 1] * np.uint32(0xC2B2AE35)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
