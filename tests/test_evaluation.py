"""The held-out loss is one mean over tokens: it depends neither on the size of a batch nor on the mesh."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from layouts import tiny

from jaxpar.build import build
from jaxpar.data import Loader
from jaxpar.layout_check import random_batch
from jaxpar.loop import evaluator

ROWS = 37
CONFIG = tiny(seq_len=16, global_batch=ROWS)


class UnevenRows:
    """Packed rows of random tokens, with uneven numbers of trained tokens."""

    seq_len = CONFIG.seq_len
    identity = "uneven"

    def __init__(self):
        self.batch = random_batch(CONFIG)

    def __len__(self):
        return ROWS

    def row(self, index):
        return {name: values[index] for name, values in self.batch.items()}

    def sample_id(self, index):
        return f"u:{index}"


def evaluated(batch, data):
    """Metrics of all rows in batches of `batch` rows, as the trainer reads them."""
    built = build(tiny(seq_len=CONFIG.seq_len, global_batch=batch, parallel={"data": data}), jax.devices()[:data])

    def batches():
        options = {"seed": 0, "sharding": built.batch_sharding, "shuffle": False, "repeat": False}
        loader = Loader(UnevenRows(), batch, **options)
        try:
            for _ in range(-(-ROWS // batch)):
                yield loader.next_batch()
        finally:
            loader.close()

    return evaluator(built.evaluate, batches, None)(built.init(jax.random.key(0)))


@functools.cache
def row_by_row():
    return evaluated(1, 1)


@pytest.mark.parametrize(
    ("batch", "data"), [(b, d) for b in (1, 8, 37, 64) for d in (1, 4, 8) if b % d == 0 and (b, d) != (1, 1)]
)
def test_evaluation_depends_neither_on_the_batch_nor_on_the_mesh(batch, data):
    weights = UnevenRows().batch["weights"].sum(1)
    assert len(np.unique(weights)) > 5
    found, wanted = evaluated(batch, data), row_by_row()
    assert found["eval_tokens"] == wanted["eval_tokens"] == weights.sum()
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)
