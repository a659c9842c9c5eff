"""Products in 8-bit floats: close to the wide ones, the same on every mesh, visible when they break."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import tiny

from jaxpar import validate
from jaxpar.build import build
from jaxpar.config import MoeConfig, OptimizerConfig
from jaxpar.layout_check import put, random_batch
from jaxpar.mesh import make_mesh
from jaxpar.models.projection import project
from jaxpar.precision import precision

FP8 = dataclasses.replace(precision("fp8"), compute=jnp.float32)  # the rounding of 8 bits alone
WIDE = precision("float32")
ADAM = OptimizerConfig(schedule="constant", learning_rate=3e-3)


def operands():
    x, w, g = (jax.random.normal(key, shape) for key, shape in zip(
        jax.random.split(jax.random.key(0), 3), [(4, 16, 8, 32), (8, 32, 64), (4, 16, 64)]
    ))  # fmt: skip
    return x, 0.05 * w, 1e-6 * g  # gradients are small: without a scale, 8 bits would lose them


def value_and_grads(policy, x, w, g):
    y, pull = jax.vjp(lambda x, w: project(x, w, policy, dims=2), x, w)
    return y, *pull(g)


def error(got, wanted):
    return float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))


def test_close_to_the_wide_product_and_its_gradients():
    pairs = list(zip(value_and_grads(FP8, *operands()), value_and_grads(WIDE, *operands()), strict=True))
    # Rounding errors of e4m3 are uniform within 2^-4 of a value, those of e5m2 within 2^-3: 3 and 5 % of the norm.
    assert 0.001 < error(*pairs[0]) < 0.05
    assert all(0.001 < error(*pair) < 0.08 for pair in pairs[1:])


def test_exact_for_values_that_eight_bits_hold():
    x = jnp.array([[1.0, -0.5, 0.25, 0.0]]) * 448
    w = jnp.array([[1.0], [2.0], [-4.0], [7.0]]) * 64
    np.testing.assert_array_equal(project(x, w, FP8), x @ w)


def test_the_scale_is_that_of_the_whole_tensor_on_every_mesh():
    x, w, g = operands()
    x = x.at[3, 15, 7, 31].set(40.0)  # the largest entry lies on the last device
    wanted = jax.jit(lambda *args: value_and_grads(FP8, *args))(x, w, g)
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    placed = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, w, g), (P("data", None, "tensor"), P("tensor"), P("data")))
    )
    found = jax.jit(lambda *args: value_and_grads(FP8, *args))(*placed)
    assert all(error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))


def test_what_is_not_finite_stays_visible():
    x, w, _ = operands()
    assert not np.isfinite(project(x.at[0, 0, 0, 0].set(jnp.inf), w, FP8, dims=2)).all()
    assert not np.isfinite(project(x.at[0, 0, 0, 0].set(jnp.nan), w, FP8, dims=2)).all()
    assert np.isfinite(project(0 * x, w, FP8, dims=2)).all()


@pytest.mark.parametrize("parallel", [{}, {"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 3}])
def test_training_follows_bfloat16(parallel):
    losses = {}
    for name in ("bf16", "fp8"):
        built = build(tiny(parallel=parallel, precision=name, optimizer=ADAM), jax.devices()[: 4 if parallel else 1])
        state, batch, seen = built.init(jax.random.key(0)), put(built, random_batch(built.config)), []
        for _ in range(12):
            state, metrics = built.step(state, batch)
            seen.append(float(metrics["loss"]))
        losses[name] = np.array(seen)
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.01
    assert np.abs(losses["fp8"] / losses["bf16"] - 1).max() < 0.01
    assert (losses["fp8"] != losses["bf16"]).any()


def test_experts_in_eight_bits_are_refused():
    config = tiny(precision="fp8", model={"moe": MoeConfig(num_experts=4)})
    assert any("fp8" in problem and "bf16" in problem for problem in validate.problems(config, 1))
