"""Products of activations with weights, in the compute dtype or in 8-bit floats.

In fp8 both operands are scaled by their largest entry, rounded to e4m3 (gradients to e5m2, which trades a bit of
precision for range, arXiv:2209.05433) and multiplied by the GPU's 8-bit matrix units. The scales are of the current
tensors, whole ones whatever the mesh, so there is no history to save or to restore. Dims: I contracted, O output.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.precision import Precision

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def project(x: jax.Array, weight: jax.Array, precision: Precision, dims: int = 1) -> jax.Array:
    """Sum over the last `dims` dims of `x` [..., I] and the first of `weight` [I, O...] -> [..., O...]."""
    weight = weight.astype(precision.compute)
    return _project_fp8(x, weight, dims) if precision.fp8 else jnp.tensordot(x, weight, dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project_fp8(x: jax.Array, weight: jax.Array, dims: int) -> jax.Array:
    return _forward(x, weight, dims)[0]


def _forward(x: jax.Array, weight: jax.Array, dims: int) -> tuple[jax.Array, tuple]:
    x8, w8 = _rounded(x, FORWARD), _rounded(weight, FORWARD)
    lead = x.ndim - dims
    y = _product(x8, w8, range(lead, x.ndim), range(dims), x.dtype)
    # As bytes: jax.checkpoint rounds the floats that it stores, and would take e4m3fn for a type with infinities.
    return y, tuple((jax.lax.bitcast_convert_type(values, jnp.uint8), scale) for values, scale in (x8, w8))


def _backward(dims: int, kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8 = ((jax.lax.bitcast_convert_type(values, FORWARD), scale) for values, scale in kept)
    dy8 = _rounded(dy, BACKWARD)
    lead = x8[0].ndim - dims
    dx = _product(dy8, w8, range(lead, dy.ndim), range(dims, w8[0].ndim), dy.dtype)
    dw = _product(x8, dy8, range(lead), range(lead), dy.dtype)
    return dx, dw


_project_fp8.defvjp(_forward, _backward)

_Scaled = tuple[jax.Array, jax.Array]  # 8-bit values, and the float32 scalar that they are to be multiplied by


def _rounded(x: jax.Array, to: DTypeLike) -> _Scaled:
    """`x` with its largest entry at the edge of the 8-bit range; a NaN or infinity stays visible as NaN."""
    largest = jnp.max(jnp.abs(x).astype(jnp.float32))
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(to).max), 1.0)
    limit = float(jnp.finfo(to).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(to), scale


def _product(a: _Scaled, b: _Scaled, over_a: range, over_b: range, dtype: DTypeLike) -> jax.Array:
    dims = ((tuple(over_a), tuple(over_b)), ((), ()))
    # Partial sums of a split dim are added across devices in the dtype asked for, as those of wider products are.
    product = jax.lax.dot_general(a[0], b[0], dims, preferred_element_type=dtype)
    return (product.astype(jnp.float32) * (a[1] * b[1])).astype(dtype)
