"""A layer that only some stages have: computed where it is, passed by where it is not, in the backward pass too.

Differentiating a conditional would hand the weights of the branch that was taken from the forward to the backward
pass, once per microbatch in flight. So the backward pass is a conditional of its own that computes the layer again:
all that is kept of a layer is its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# (params, x, rest) -> (y, totals): y of the type of x, totals a tree of float arrays
Layer = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]


def optional(layer: Layer) -> Callable[[jax.Array, Any, jax.Array, Any], tuple[jax.Array, Any]]:
    """`(is_live, params, x, rest) -> layer(params, x, rest)`, or `(x, zeros)` where `is_live` is false.

    Gradients flow to `params` and `x`; `rest` has none.
    """

    def run(is_live: jax.Array, params: Any, x: jax.Array, rest: Any) -> tuple[jax.Array, Any]:
        totals = jax.eval_shape(layer, params, x, rest)[1]
        skip = lambda params, x, rest: (x, _zeros(totals))  # noqa: E731
        return lax.cond(is_live, layer, skip, params, x, rest)

    def forward(is_live: jax.Array, params: Any, x: jax.Array, rest: Any) -> tuple[tuple[jax.Array, Any], Any]:
        return run(is_live, params, x, rest), (is_live, params, x, rest)

    def backward(saved: Any, grads: tuple[jax.Array, Any]) -> tuple[None, Any, jax.Array, None]:
        """The gradients of the branch that `is_live` chose."""
        is_live, params, x, rest = saved

        def again(params: Any, x: jax.Array, grads: Any) -> tuple[Any, jax.Array]:
            return jax.vjp(lambda params, x: layer(params, x, rest), params, x)[1](grads)

        skip = lambda params, x, grads: (_zeros(params), grads[0])  # noqa: E731
        return None, *lax.cond(is_live, again, skip, params, x, grads), None

    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
