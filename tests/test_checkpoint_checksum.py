"""The checksum of an array: the same in every sharding, another one after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import checksum

MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
MASK = 0xFFFFFFFF


def of(array):
    return checksum.start({"x": array})()["x"]


def by_definition(array):
    """The same in NumPy, one element after the other, in 64-bit numbers."""
    bits = array.reshape(-1).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize]).astype(np.uint64)
    position = np.arange(bits.size, dtype=np.uint64)
    x = (bits + (position + 1) * 0x9E3779B9) & MASK
    x = ((x ^ (x >> np.uint64(16))) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> np.uint64(13))) * 0xC2B2AE35) & MASK
    return int((x ^ (x >> np.uint64(16))).sum()) & MASK


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("shape", [(), (8,), (16, 24), (4, 8, 300), (512, 1024)])
def test_every_sharding_gives_the_number_of_the_definition(shape, dtype):
    array = (np.random.default_rng(0).standard_normal(shape) * 100).astype(dtype)
    expected = by_definition(np.asarray(array))
    specs = [P(), P("a"), P(("a", "b")), P(None, "c"), P("b", ("c", "a")), P("a", None, "b")]
    fitting = [spec for spec in specs if len(spec) <= len(shape) and (len(spec) < 3 or shape[2] % 2 == 0)]
    found = {str(spec): of(jax.device_put(array, NamedSharding(MESH, spec))) for spec in fitting}
    found |= {"one device": of(jnp.asarray(array)), "host": of(np.asarray(array))}
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(np.uint32).__setitem__((3, 7), x.view(np.uint32)[3, 7] ^ 1),
        lambda x: x.view(np.uint32).__setitem__((3, 7), x.view(np.uint32)[3, 7] ^ 2**31),
        lambda x: x.__setitem__(([0, 1], slice(None)), x[[1, 0]]),  # two rows swapped
        lambda x: x.__setitem__((slice(None), 0), -x[:, 0]),  # an even number of signs
        lambda x: x.__setitem__((slice(0, 4), slice(None)), 0.0),  # a lost shard
        lambda x: x.__setitem__((5, 5), -0.0),
    ],
    ids=["lowest bit", "sign", "rows swapped", "many signs", "zeros", "minus zero"],
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
        "bool": jnp.array([True, False, True]),
        "int8": jnp.array([-1, 2, 3], jnp.int8),
        "float8": jnp.array([1.0, -2.0], jnp.float8_e4m3fn),
        "int64 on the host": np.array([2**40, -1]),
        "float64 on the host": np.array(0.1),
    }
    sums = checksum.start(values)()
    assert len(set(sums.values())) == len(values)
    assert of(np.array([2**40, -1])) != of(np.array([2**41, -1]))
    assert of(np.array([2**40 + 1, -1])) != of(np.array([2**40, -1]))
