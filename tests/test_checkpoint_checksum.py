"""The checksums of the blocks of an array: the same in every sharding, others after any change."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import checksum

MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
SPECS = [P(), P("a"), P(("a", "b")), P(None, "c"), P("b", ("c", "a")), P("a", None, "b")]
MASK = 0xFFFFFFFF


THREE = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("a",), axis_types=(AxisType.Auto,))


def of(array, grid=None):
    return checksum.start({"x": array}, None if grid is None else {"x": grid})()["x"]


def by_definition(array, grid):
    """The same in NumPy, one element after the other, in 64-bit numbers."""
    bits = array.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]).astype(np.uint64)
    position = np.arange(bits.size, dtype=np.uint64)
    x = (bits + (position + 1) * 0x9E3779B9) & MASK
    x = ((x ^ (x >> np.uint64(16))) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> np.uint64(13))) * 0xC2B2AE35) & MASK
    mixed = (x ^ (x >> np.uint64(16))).reshape(array.shape)
    cut = [[slice(i * size // n, (i + 1) * size // n) for i in range(n)] for size, n in zip(array.shape, grid)]
    return tuple(int(mixed[index].sum()) & MASK for index in itertools.product(*cut))


@pytest.mark.parametrize(
    ("shape", "grid", "dtype"),
    [
        ((), (), np.float32),
        ((), (), jnp.bfloat16),
        ((24,), (12,), np.float32),
        ((48, 24), (1, 1), np.int32),
        ((48, 24), (2, 1), jnp.bfloat16),
        ((48, 24), (4, 3), np.uint8),
        ((48, 24), (16, 8), jnp.float8_e4m3fn),
        ((12, 8, 300), (1, 1, 1), np.float32),
        ((12, 8, 300), (3, 4, 5), np.float32),
        ((1536, 1026), (1, 2), np.float32),
        ((1536, 1026), (8, 1), jnp.bfloat16),
        ((1536, 1026), (3, 9), np.float32),
    ],
)
def test_every_sharding_gives_the_numbers_of_the_definition(shape, grid, dtype):
    array = (np.random.default_rng(0).standard_normal(shape) * 100).astype(dtype)
    expected = by_definition(np.asarray(array), grid)
    found = {"one device": of(jnp.asarray(array), grid), "host": of(np.asarray(array), grid)}
    for mesh, spec in [*((MESH, spec) for spec in SPECS), (THREE, P("a")), (THREE, P(None, "a"))]:
        parts = [np.prod([mesh.shape[axis] for axis in np.atleast_1d(entry)]) if entry else 1 for entry in spec]
        if len(spec) <= len(shape) and not any(size % count for size, count in zip(shape, parts)):
            sharding = NamedSharding(mesh, spec)
            found[str(sharding)] = of(jax.device_put(array, sharding), grid)
    assert found == dict.fromkeys(found, expected)
    assert len(found) >= 3 + 2 * len(shape)


def test_the_blocks_are_the_shards_of_the_save():
    def grid_of(shape, spec, mesh=MESH):
        return checksum.grid_of(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)))

    assert grid_of((), P()) == ()
    assert grid_of((4, 8), P()) == (1, 1)  # replicas are one block
    assert grid_of((4, 8, 3), P("b", ("c", "a"))) == (2, 4, 1)
    assert checksum.grid_of(np.zeros((3, 2))) == checksum.grid_of(jnp.zeros((3, 2))) == (1, 1)
    many = jax.sharding.AbstractMesh((4096, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    assert grid_of((8192, 12), P("a"), many) == (256, 1)  # neighbours are merged
    assert grid_of((8192, 12), P("a", "b"), many) == (64, 3)
    array = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(MESH, P("a", "b")))
    assert of(array) == by_definition(np.asarray(array), (2, 2))


def test_more_shards_than_blocks(monkeypatch):
    monkeypatch.setattr(checksum, "MAX_BLOCKS", 4)
    values = np.arange(96.0, dtype=np.float32).reshape(8, 12)
    array = jax.device_put(values, NamedSharding(MESH, P("a", ("b", "c"))))
    assert checksum.grid_of(array) == (2, 2)
    assert of(array) == by_definition(values, (2, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(np.uint32).__setitem__((3, 7), x.view(np.uint32)[3, 7] ^ 1),
        lambda x: x.view(np.uint32).__setitem__((3, 7), x.view(np.uint32)[3, 7] ^ 2**31),
        lambda x: x.__setitem__(([0, 1], slice(None)), x[[1, 0]]),  # two rows swapped
        lambda x: x.__setitem__(slice(None), np.concatenate([x[4:], x[:4]])),  # two rows of blocks
        lambda x: x.__setitem__((slice(None), 0), -x[:, 0]),  # an even number of signs
        lambda x: x.__setitem__((slice(0, 4), slice(None)), 0.0),  # a lost shard
        lambda x: x.__setitem__((5, 5), -0.0),
    ],
    ids=["lowest bit", "sign", "rows swapped", "blocks swapped", "many signs", "zeros", "minus zero"],
)
def test_any_change_is_seen(change):
    array = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    array[5, 5] = 0.0
    changed = array.copy()
    change(changed)
    sharding = NamedSharding(MESH, P("a", "b"))
    assert of(jax.device_put(array, sharding)) != of(jax.device_put(changed, sharding))


def test_types_of_other_widths():
    values = {
        "bool": jnp.array([True, False, True, True]),
        "int8": jnp.array([-1, 2, 3, 4], jnp.int8),
        "int4": jnp.array([-1, 2, 3, 5], jnp.int4),
        "uint4": jnp.array([15, 2, 3, 5], jnp.uint4),
        "float8": jnp.array([1.0, -2.0, 3.0, 4.0], jnp.float8_e5m2),
        "int64 on the host": np.array([2**40, -1, 3, 4]),
        "float64 on the host": np.array([0.1, 0.2, 0.3, 0.4]),
    }
    sums = checksum.start(values)()
    assert len(set(sums.values())) == len(values)
    split = NamedSharding(MESH, P(("a", "b")))
    for name, value in values.items():
        halves = of(value, (2,))
        assert sum(halves) % 2**32 == sums[name][0]
        if isinstance(value, jax.Array):
            assert of(jax.device_put(value, split), (2,)) == halves
    assert of(np.array([2**40, -1])) != of(np.array([2**41, -1]))
    assert of(np.array([2**40 + 1, -1])) != of(np.array([2**40, -1]))
