"""Rules and shapes that cannot apply: one error that names the array, the dim and the key to change."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P
from layouts import tiny

from jaxpar.build import build
from jaxpar.config import ParallelConfig
from jaxpar.errors import UserError
from jaxpar.mesh import BATCH_AXES, make_mesh
from jaxpar.names import LOGICAL_AXES
from jaxpar.sharding import Rules, default_rules, resolve

RULES = Rules({"batch": ("data", "tensor"), "embed": None, "mlp": "tensor", "heads": "tensor"})


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "tensor": 4})


@pytest.mark.parametrize(
    ("axes", "shape", "wanted"),
    [
        (("embed", "mlp"), (6, 8), P(None, "tensor")),
        (("batch", "embed"), (16, 3), P(("data", "tensor"), None)),
        ((), (), P()),
    ],
)
def test_rules_that_apply(axes, shape, wanted, mesh):
    assert resolve(axes, shape, RULES, mesh) == wanted


@pytest.mark.parametrize(
    ("axes", "shape", "words"),
    [
        (("embed", "mpl"), (8, 8), ["blocks/up", "'mpl'", "known: batch, embed, mlp, heads"]),
        (("heads", "mlp"), (8, 8), ["blocks/up", "heads, mlp", "mesh axis tensor", "'mlp': ('tensor',)"]),
        (("batch", "mlp"), (8, 8), ["blocks/up", "batch, mlp", "mesh axis tensor", "('data', 'tensor')"]),
        (("embed", "mlp"), (8, 6), ["blocks/up", "dim mlp = 6", "tensor=4", "multiple of 4", "parallel.tensor"]),
        (
            ("batch", "embed"), (12, 8),
            ["blocks/up", "dim batch = 12", "data=2 x tensor=4", "multiple of 8", "parallel.data or parallel.tensor"],
        ),
        (("embed",), (8, 8), ["blocks/up", "1 logical axes", "2 dims (8, 8)"]),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_apply_is_named(axes, shape, words, mesh):
    with pytest.raises(UserError) as error:
        resolve(axes, shape, RULES, mesh, "blocks/up")
    assert len(error.value.problems) == 1
    for word in words:
        assert word in str(error.value)


def test_every_name_of_the_models_has_a_rule():
    for sequence_parallel in (False, True):
        assert set(default_rules(ParallelConfig(sequence_parallel=sequence_parallel)).table) == set(LOGICAL_AXES)
    assert default_rules(ParallelConfig()).axes("batch") == BATCH_AXES


@pytest.mark.parametrize(
    ("parallel", "model", "words"),
    [
        ({"tensor": 8}, {"mlp_dim": 60}, ["blocks/mlp/", "mlp = 60", "tensor=8", "parallel.tensor"]),
        ({"tensor": 8}, {"num_heads": 4, "num_kv_heads": 4}, ["model.num_heads = 4", "parallel.tensor = 8"]),
        (
            {"data": 8, "zero": 1}, {"embed_dim": 36, "mlp_dim": 36, "head_dim": 9, "num_heads": 4, "num_kv_heads": 4,
                                     "positions": "none"},
            ["parallel.zero = 1", "embed = 36", "parallel.data = 8", "parallel.replica"],
        ),
    ],
)  # fmt: skip
def test_a_model_that_a_mesh_does_not_split_is_named(parallel, model, words):
    with pytest.raises(UserError) as error:
        build(tiny(parallel=parallel, model=model))
    for word in words:
        assert word in str(error.value)
