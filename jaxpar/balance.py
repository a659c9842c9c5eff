"""Balance of experts without a loss: the bias of an overloaded expert falls by a fixed step, of an idle one it rises.

The gradient of that bias is the excess of the expert's tokens (see `jaxpar.models.moe`), summed like any other
gradient; only its sign counts (arXiv:2408.15664). No optimizer rule, decay or learning rate applies to it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def with_balance(optimizer: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """`optimizer`, with updates of -rate x sign(gradient) for the balance biases of routers."""
    if rate == 0:
        return optimizer

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(choose, updates, grads, is_leaf=_is_variable), state

    def choose(ordinary: Any, gradient: Any) -> Any:
        if not isinstance(gradient, nnx.Variable) or gradient.axes[-1:] != ("balance",):
            return ordinary
        return ordinary.replace(-rate * jnp.sign(gradient[...]))

    rule: Any = update
    return optax.GradientTransformation(optimizer.init, rule)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
