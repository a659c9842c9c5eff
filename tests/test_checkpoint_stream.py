"""A checkpoint written by parts is the checkpoint of the whole arrays, and no part is larger than was asked for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint import Checkpoints, checksum, folders, manifest, stream
from jaxpar.config import CheckpointConfig
from jaxpar.errors import UserError

SHAPES = {"a/wide": (6, 40, 33), "a/flat": (7,), "tall": (1000, 8), "b/c/cube": (5, 4, 3, 2)}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def parts_of(values, seen: list[int]):
    def read(name):
        def run(index):
            part = np.ascontiguousarray(values[name][index])
            seen.append(part.nbytes)
            return part

        return run

    return {name: stream.Parts(value.shape, value.dtype, read(name)) for name, value in values.items()}


def test_parts_make_the_checkpoint_of_the_whole_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PART_BYTES", 4096)
    values, seen = arrays(), []
    stream.write(tmp_path / "parts", 3, parts_of(values, seen), {"from": "here"})
    assert max(seen) <= 4096
    assert len(seen) > 10
    whole = Checkpoints(tmp_path / "whole", CheckpointConfig(asynchronous=False))
    nested = {"a": {"wide": values["a/wide"], "flat": values["a/flat"]}, "tall": values["tall"]}
    nested["b"] = {"c": {"cube": values["b/c/cube"]}}
    whole.save(3, nested, {"from": "here"})
    whole.close()
    written, wanted = (manifest.read(folders.path(tmp_path / kind, 3)) for kind in ("parts", "whole"))
    assert written.arrays == wanted.arrays  # names, shapes, dtypes and checksums
    restored = Checkpoints(tmp_path / "parts", CheckpointConfig()).restore(3, nested)
    assert restored.extra == {"from": "here"}
    assert np.array_equal(restored.state["a"]["wide"], values["a/wide"])
    assert np.array_equal(restored.state["b"]["c"]["cube"], values["b/c/cube"])


@pytest.mark.parametrize("shape", [(12,), (6, 8), (3, 4, 5)])
def test_checksums_of_parts_add_up(shape):
    value = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    cut = shape[0] // 2
    total = 0
    for first in (slice(0, cut), slice(cut, shape[0])):
        index = (first, *(slice(0, size) for size in shape[1:]))
        total += checksum.of_part(value[index], index, shape)
    assert (total % 2**32,) == checksum.start({"x": jnp.asarray(value)})()["x"]


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def broken(index):
        raise OSError("No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        stream.write(tmp_path / "run", 0, {"x": stream.Parts((4, 4), np.dtype(np.float32), broken)}, {})
    assert not list((tmp_path / "run").iterdir())
