"""A 32-bit checksum of an array that does not depend on how the array is sharded.

Every element's bits are mixed with the element's position (the finalizer of MurmurHash3) and the results are added
modulo 2**32. Addition commutes, so each device sums its own shard and any mesh gives the same number; a flipped bit,
a lost shard or two swapped blocks change it. It is computed where the array lives, so it covers every copy between the
device and the disk, costs one read of the array at memory speed, and the training loop does not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_GOLDEN = 0x9E3779B9


def start(named: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """Begin the checksums of arrays by name; the returned function waits for them."""
    import jax

    groups: dict[tuple[int, ...], list[str]] = {}  # one program needs all its arrays on the same devices
    for name in sorted(named):
        leaf = named[name]
        on_device = isinstance(leaf, jax.Array)
        groups.setdefault(tuple(sorted(d.id for d in leaf.devices())) if on_device else (), []).append(name)
    pending = []
    for devices, names in groups.items():
        arrays = tuple(named[name] if devices else _host_bits(named[name]) for name in names)
        pending.append((names, _program(_replicated(arrays))(arrays)))
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # Across CPU processes two programs with collectives must not overlap: their messages could be swapped.
        jax.block_until_ready([sums for _, sums in pending])

    def finish() -> dict[str, int]:
        return {name: int(value) for names, sums in pending for name, value in zip(names, np.asarray(sums))}

    return finish


def _host_bits(array: Any) -> np.ndarray:
    # Without x64 a 64-bit host array cannot enter jax as it is.
    array = np.asarray(array)
    return np.atleast_1d(array).view(np.uint32) if array.dtype.itemsize == 8 else array


def _replicated(arrays: tuple[Any, ...]) -> Any:
    import jax

    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return None


@functools.lru_cache(maxsize=16)
def _program(out_sharding: Any) -> Callable[[tuple[Any, ...]], Any]:
    import jax
    import jax.numpy as jnp

    def sums(arrays: tuple[Any, ...]) -> Any:
        # Offloaded optimizer state lives in host memory, where nothing can be computed.
        return jnp.stack([_checksum(jax.device_put(array, jax.memory.Space.Device)) for array in arrays])

    return jax.jit(sums, out_shardings=out_sharding) if out_sharding is not None else jax.jit(sums)


def _checksum(array: Any) -> Any:
    """uint32 scalar from an array of any shape and dtype."""
    import jax
    import jax.numpy as jnp

    bits = _bits(array)
    position = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(bits.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * np.uint32(stride % 2**32)
        stride *= bits.shape[dim]
    x = bits + (position + np.uint32(1)) * np.uint32(_GOLDEN)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def _bits(array: Any) -> Any:
    """The bit patterns as uint32, one per element (two for 64-bit types)."""
    import jax
    import jax.numpy as jnp

    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize * 8
    if jnp.issubdtype(array.dtype, jnp.integer) and width < 8:
        return array.astype(jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(width, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
