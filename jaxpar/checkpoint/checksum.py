"""32-bit checksums of the blocks of an array that do not depend on how the array is sharded when they are computed.

Every element's bits are mixed with the element's position in the whole array (the finalizer of MurmurHash3) and the
results are added modulo 2**32, block by block. The blocks are the shards of the sharding that the array is saved in.
Addition commutes, so under any other sharding each device sums what it holds of each block, and the totals are the
same numbers; a flipped bit, a lost shard or two swapped blocks change them. They are computed where the array lives, so
they cover every copy between the device and the disk, cost one read of the array at memory speed, and the training loop
does not wait for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MAX_BLOCKS = 256
_GOLDEN = 0x9E3779B9
_BLOCK = 2**16  # elements that are added at a time on a CPU: they stay in its cache
_ROWS = 16  # XLA:CPU shares a block's rows out to its threads: several times slower where they do not divide


def grid_of(array: Any) -> tuple[int, ...]:
    """How many blocks an array has along each dim: its shards, neighbours merged to at most `MAX_BLOCKS` blocks.

    Replicas are one block, and what has no `NamedSharding` is one block. Without the bound thousands of devices would
    make the manifest, which every process reads, and the sums that the devices add up grow with the number of devices
    times that of the arrays; a block of 1/256 says where the damage is just as well.
    """
    import jax

    sharding = getattr(array, "sharding", None)
    grid = [1] * len(array.shape)
    if isinstance(sharding, jax.sharding.NamedSharding):
        for dim, entry in enumerate(sharding.spec):
            grid[dim] = math.prod(sharding.mesh.shape[axis] for axis in _axes(entry))
    while math.prod(grid) > MAX_BLOCKS:
        dim = grid.index(max(grid))
        grid[dim] //= next(factor for factor in range(2, grid[dim] + 1) if grid[dim] % factor == 0)
    return tuple(grid)


def start(
    named: Mapping[str, Any], grids: Mapping[str, Sequence[int]] | None = None
) -> Callable[[], dict[str, tuple[int, ...]]]:
    """Begin the checksums of arrays by name; the returned function waits for them.

    `grids` has the blocks along each dim of each array, by default `grid_of` it. Each must divide its dim. The sums of
    an array are in the row-major order of its blocks.
    """
    import jax

    cut = {name: tuple(grids[name]) if grids is not None else grid_of(array) for name, array in named.items()}
    pending = [
        (names, program(tuple(_host_bits(named[name]) if mesh is None else named[name] for name in names)))
        for mesh, names, program in _programs(named, cut)
    ]
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Across CPU processes two programs with collectives must not overlap: their messages could be swapped.
        jax.block_until_ready([sums for _, sums in pending])

    def finish() -> dict[str, tuple[int, ...]]:
        found = {}
        for names, sums in pending:
            totals = np.asarray(sums).sum(axis=0, dtype=np.uint32).tolist()
            ends = np.cumsum([math.prod(cut[name]) for name in names]).tolist()
            found |= {name: tuple(totals[end - math.prod(cut[name]) : end]) for name, end in zip(names, ends)}
        return found

    return finish


def of_part(part: np.ndarray, index: Sequence[slice], shape: Sequence[int]) -> int:
    """What the part `index` of an array [shape] adds to the checksum of the array as one block, modulo 2**32."""
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


def _programs(
    named: Mapping[str, Any], grids: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Any, list[str], Callable[[tuple[Any, ...]], Any]]]:
    """(mesh, names, program) for the arrays of each mesh; mesh None for what lives on one device or on the host."""
    import jax

    groups: dict[Any, list[str]] = {}
    for name in sorted(named):
        sharding = getattr(named[name], "sharding", None)
        groups.setdefault(sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None, []).append(name)
    for mesh, names in groups.items():
        cut = tuple(grids[name] for name in names)
        if mesh is None:
            yield mesh, names, functools.partial(_whole, cut)
        else:
            yield mesh, names, _sharded(mesh, tuple(named[name].sharding.spec for name in names), cut)


def _whole(grids: tuple[tuple[int, ...], ...], arrays: tuple[Any, ...]) -> Any:
    """uint32 [1, blocks of all arrays]."""
    import jax.numpy as jnp

    return jnp.concatenate([_compiled_pieces()(array, grid) for array, grid in zip(arrays, grids)])[None]


@functools.lru_cache(maxsize=16)
def _sharded(mesh: Any, specs: tuple[Any, ...], grids: tuple[tuple[int, ...], ...]) -> Callable[[tuple[Any, ...]], Any]:
    """One program for all arrays of a mesh: uint32 [device, blocks of all arrays], to be added over the devices.

    Where there are several processes one collective adds the devices, and the result is [1, blocks of all arrays].
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def local(*shards: Any) -> Any:
        """Sums of all arrays from the shards of one device; of replicas only the first counts."""
        index = {axis: jax.lax.axis_index(axis).astype(jnp.uint32) for axis in mesh.axis_names}
        counts: dict[frozenset[str], Any] = {}  # 1 on the first of the replicas, 0 on the others
        sums = []
        for shard, spec, grid in zip(shards, specs, grids):
            parts = [_part(entry, index, mesh.shape) for entry in spec]
            others = frozenset(index) - {axis for entry in spec for axis in _axes(entry)}
            if others not in counts:
                replica = sum((index[axis] for axis in sorted(others)), jnp.uint32(0))
                counts[others] = (replica == 0).astype(jnp.uint32)
            sums.append(_blocks(shard, parts, grid) * counts[others])
        return jnp.concatenate(sums)[None]

    collective = jax.process_count() > 1

    def totals(*shards: Any) -> Any:
        return jax.lax.psum(local(*shards), mesh.axis_names) if collective else local(*shards)

    def sums(arrays: tuple[Any, ...]) -> Any:
        # Offloaded optimizer state lives in host memory, where nothing can be computed.
        arrays = tuple(jax.device_put(array, jax.memory.Space.Device) for array in arrays)
        out = P() if collective else P(mesh.axis_names)
        return jax.shard_map(totals, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(*arrays)

    return jax.jit(sums)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _part(entry: Any, index: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Any, int]:
    """Which of how many equal parts of a dim this device holds."""
    part, count = np.uint32(0), 1
    for axis in _axes(entry):
        part, count = part * np.uint32(sizes[axis]) + index[axis], count * sizes[axis]
    return part, count


def _blocks(shard: Any, parts: Sequence[tuple[Any, int]], grid: tuple[int, ...]) -> Any:
    """uint32 [number of blocks]: what this shard adds to the sum of each block of `grid`.

    `parts` has for the leading dims of the shard which of how many equal parts of the array it is.
    """
    import jax.numpy as jnp

    parts = [*parts, *[(np.uint32(0), 1)] * (len(grid) - len(parts))]
    # Cut into the least common multiple of shards and blocks, every piece lies in one shard and in one block.
    common = [math.lcm(count, blocks) for (_, count), blocks in zip(parts, grid)]
    cuts = tuple(pieces // count for pieces, (_, count) in zip(common, parts))
    sums = _pieces(shard, cuts, parts)
    number = jnp.zeros((), jnp.uint32)  # of the block that a piece lies in
    for pieces, cut, (part, _), blocks in zip(common, cuts, parts, grid):
        along = (part * np.uint32(cut) + jnp.arange(cut, dtype=jnp.uint32)) // np.uint32(pieces // blocks)
        number = number[..., None] * np.uint32(blocks) + along
    inside = number.reshape(-1, 1) == jnp.arange(math.prod(grid), dtype=jnp.uint32)
    return jnp.sum(jnp.where(inside, sums[:, None], np.uint32(0)), axis=0, dtype=jnp.uint32)


@functools.cache
def _compiled_pieces() -> Callable[[Any, tuple[int, ...]], Any]:
    import jax

    return jax.jit(_pieces, static_argnums=1)


def _pieces(shard: Any, cuts: tuple[int, ...], parts: Sequence[tuple[Any, int]] = ()) -> Any:
    """uint32 [number of pieces]: sums of the equal pieces of a shard, `cuts` along each dim, in row-major order.

    `parts` as in `_blocks`.
    """
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
    first = jnp.broadcast_to(first, shape[:-1])
    if math.prod(cuts) == 1:
        return _compiled_sum()(shard.reshape(-1, shape[-1] if shape else 1), first.reshape(-1)).reshape(1)
    columns, length = cuts[-1], shape[-1] // cuts[-1]
    first = first[..., None] + jnp.arange(columns, dtype=jnp.uint32) * np.uint32(length)
    sums = _compiled_sum(by_row=True)(shard.reshape(-1, length), first.reshape(-1))
    halves = [size for whole, cut in zip(shape[:-1], cuts) for size in (cut, whole // cut)]
    sums = sums.reshape(*halves, columns)
    return jnp.sum(sums, axis=tuple(range(1, len(halves), 2)), dtype=jnp.uint32).reshape(-1)


@functools.cache
def _compiled_sum(*, by_row: bool = False) -> Callable[[Any, Any], Any]:
    # Parameters and moments have the same shapes: under jit each is traced once.
    import jax

    return jax.jit(functools.partial(_sum, by_row=by_row))


def _sum(rows: Any, first: Any, *, by_row: bool) -> Any:
    """Sum of the mixed elements of `rows`, whose positions start at `first`; of each row, if `by_row`."""
    import jax
    import jax.numpy as jnp

    num_rows, length = rows.shape
    block = max(1, _BLOCK // max(length, 1))
    if num_rows >= 2 * _ROWS:
        block = max(_ROWS, block // _ROWS * _ROWS)
    steps = num_rows // block
    axis = 1 if by_row else None
    if jax.default_backend() != "cpu" or steps < 2:
        return jnp.sum(_mix(rows, first), axis=axis, dtype=jnp.uint32)
    if rows.dtype.itemsize < 4 and jnp.issubdtype(rows.dtype, jnp.floating):
        rows = _unsigned(rows)  # a loop on a CPU widens the elements of narrow floats one by one

    # On a CPU, XLA writes the mixed elements of the whole array to new memory before it adds them; so by blocks.
    def add(sums: Any, step: Any) -> tuple[Any, Any]:
        mixed = _mix(*(jax.lax.dynamic_slice_in_dim(x, step * block, block) for x in (rows, first)))
        return (sums, jnp.sum(mixed, axis=1, dtype=jnp.uint32)) if by_row else (sums + mixed, None)

    zeros = jnp.zeros(() if by_row else (block, length), jnp.uint32)
    sums, sums_of_rows = jax.lax.scan(add, zeros, jnp.arange(steps))
    rest = jnp.sum(_mix(rows[steps * block :], first[steps * block :]), axis=axis, dtype=jnp.uint32)
    if by_row:
        return jnp.concatenate([sums_of_rows.reshape(-1), rest])
    return jnp.sum(sums, dtype=jnp.uint32) + rest


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
    if jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 8:
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return halves[..., 0] + halves[..., 1] * np.uint32(0xC2B2AE35)
    return _unsigned(array).astype(jnp.uint32)


def _unsigned(array: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
