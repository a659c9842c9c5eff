"""Parameters, norms, activations, dropout and the MLP.

Dims: B batch, T sequence, D embed, F mlp hidden.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models.projection import project
from jaxpar.models.sharder import Sharder
from jaxpar.precision import Precision

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """What comes between the projections of a feed-forward block, gated or not; hashable."""

    name: str
    alpha: float = 1.702  # of clamped_swiglu, as `limit`
    limit: float = 7.0

    @staticmethod
    def of(config: ModelConfig) -> Activation:
        """The activation of a model."""
        return Activation(config.activation, config.swiglu_alpha, config.swiglu_limit)

    def __call__(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        """Hidden features from the outputs of the projections."""
        if self.name == "clamped_swiglu":  # gpt-oss
            assert gate is not None
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
        act = ACTIVATIONS[self.name]
        return act(up) if gate is None else act(gate) * up


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
    """A float32 parameter drawn from a normal distribution; one logical name per dim."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A float32 parameter that starts at one value: a norm scale or a bias."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def residual_std(config: ModelConfig) -> float:
    """Initial std of projections into the residual stream; GPT-2 divides by the root of the number of branches."""
    return config.init_std * ((2 * config.num_layers) ** -0.5 if config.init_scaled_residual else 1.0)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dims that `shape` names; float32 inside, input dtype outside."""

    def __init__(self, config: ModelConfig, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        self.kind, self.eps, self.plus_one = config.norm, config.norm_eps, config.norm_plus_one
        self.num_dims = len(shape)
        self.scale = constant(0.0 if self.plus_one else 1.0, shape, axes)
        self.bias = constant(0.0, shape, axes) if self.kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` normalised over its last dims."""
        over = tuple(range(-self.num_dims, 0))
        x32 = x.astype(jnp.float32)  # the mean of squares underflows in bfloat16
        if self.kind == "layer":
            x32 = x32 - jnp.mean(x32, over, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, over, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        normed = normed * (1 + scale if self.plus_one else scale)
        if self.bias is not None:
            normed = normed + self.bias[...].astype(jnp.float32)
        return normed.astype(x.dtype)


def dropout(
    x: jax.Array, row_keys: jax.Array | None, rate: float, *salt: int | jax.Array, order: np.ndarray | None = None
) -> jax.Array:
    """Zero elements of `x` [B, ...] with probability `rate`; no change without keys (evaluation) or at rate 0.

    The mask of a row comes from the row's own key [B] and the salts (layer, site), so it is the same on every
    layout, in every accumulation window and when the layer is recomputed. `order` [T] is the row's index of every
    position of `x`, where they differ.
    """
    if row_keys is None or rate == 0.0:
        return x

    def keep_row(key: jax.Array) -> jax.Array:
        for number in salt:
            key = jax.random.fold_in(key, number)
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])
        return keep if order is None else keep[order]

    return jnp.where(jax.vmap(keep_row)(row_keys), x / (1.0 - rate), 0).astype(x.dtype)


class Mlp(nnx.Module):
    """Feed-forward block, gated or not; (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs) -> None:
        D, F, std = config.embed_dim, config.mlp_dim, config.init_std
        self.activation, self.precision = Activation.of(config), precision
        self.gate = normal(rngs, (D, F), ("embed", "mlp"), std) if config.gated else None
        self.up = normal(rngs, (D, F), ("embed", "mlp"), std)
        self.down = normal(rngs, (F, D), ("mlp", "embed"), residual_std(config))
        self.gate_bias = constant(0.0, (F,), ("mlp",)) if config.mlp_bias and config.gated else None
        self.up_bias = constant(0.0, (F,), ("mlp",)) if config.mlp_bias else None
        self.down_bias = constant(0.0, (D,), ("embed",)) if config.mlp_bias else None

    def __call__(self, x: jax.Array, sharder: Sharder) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        up = add_bias(project(x, self.up[...], self.precision), self.up_bias)
        gate = None if self.gate is None else add_bias(project(x, self.gate[...], self.precision), self.gate_bias)
        hidden = self.activation(gate, up)
        hidden = sharder.activation(hidden, "batch", "seq", "mlp")
        return add_bias(project(hidden, self.down[...], self.precision), self.down_bias)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """`x` plus the bias where there is one."""
    return x if bias is None else x + bias[...].astype(x.dtype)
