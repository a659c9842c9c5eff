"""Mixture of experts: the router, its losses, and the layer that takes the place of the MLP.

The router works in float32 and for every token alone; its losses are sums over the tokens of each row, so they are the
same under any split of the batch, of the row or of the layers. Padding (document 0) chooses nothing and counts nowhere.
Dims: B batch, T sequence, D embed, E experts, k choices of a token, F expert hidden.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.config import ModelConfig, MoeConfig
from jaxpar.models.experts import Across, Experts, feed
from jaxpar.models.layers import Activation, Mlp, constant, normal, residual_std
from jaxpar.models.sharder import Sharder
from jaxpar.precision import Precision

# The gradient of the balance bias is the excess of an expert's tokens; only its sign is used, and scaled down it does
# not disturb the norm of the other gradients.
EXCESS_SCALE = 1e-3


class Routing(NamedTuple):
    """Experts of every token int32 [B, T, k] (E: none), their weights float32 [B, T, k], auxiliary sums."""

    chosen: jax.Array
    weights: jax.Array
    aux: dict[str, jax.Array]


class Moe(nnx.Module):
    """Experts in place of an MLP; (B, T, D) -> (B, T, D) and auxiliary sums."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs) -> None:
        moe, D = config.moe, config.embed_dim
        E, F, std = moe.num_experts, moe.expert_dim or config.mlp_dim, config.init_std
        self.config, self.dtype = config, precision.compute
        self.router = normal(rngs, (D, E), ("embed", "choice"), std)
        self.router_bias = constant(0.0, (E,), ("choice",)) if moe.router_bias else None
        self.balance = constant(0.0, (E,), ("balance",)) if moe.choice_bias or moe.bias_update_rate > 0 else None
        self.gate = normal(rngs, (E, D, F), ("expert", "embed", "mlp"), std) if config.gated else None
        self.up = normal(rngs, (E, D, F), ("expert", "embed", "mlp"), std)
        self.down = normal(rngs, (E, F, D), ("expert", "mlp", "embed"), residual_std(config))
        bias = config.mlp_bias
        self.gate_bias = constant(0.0, (E, F), ("expert", "mlp")) if bias and config.gated else None
        self.up_bias = constant(0.0, (E, F), ("expert", "mlp")) if bias else None
        self.down_bias = constant(0.0, (E, D), ("expert", "embed")) if bias else None
        shared = dataclasses.replace(config, mlp_dim=F * moe.num_shared)
        self.shared = Mlp(shared, precision, rngs) if moe.num_shared else None

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, sharder: Sharder
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`segment_ids` int32 [B, T]: 0 is padding; None: there is none."""
        valid = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids > 0
        bias = None if self.balance is None else self.balance[...].astype(jnp.float32)
        logits = jnp.einsum(
            "BTD,DE->BTE", x.astype(jnp.float32), self.router[...].astype(jnp.float32), precision="highest"
        )
        if self.router_bias is not None:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        logits = sharder.activation(logits, "batch", "seq", "choice")
        moe, order = self.config.moe, sharder.order(x.shape[1])
        routing = route(logits, valid, bias, moe, num_layers=self.config.num_layers, order=order)
        weights = (self.gate, self.up, self.down, self.gate_bias, self.up_bias)
        experts = Experts(*(None if w is None else w[...].astype(self.dtype) for w in weights))  # pyright: ignore
        y = sharder.experts(self._kernel, x, routing.chosen, routing.weights, experts)
        if self.down_bias is not None:
            y = y + self._output_bias(routing, sharder).astype(y.dtype)
        if self.shared is not None:
            y = y + self.shared(x, sharder)
        return y, routing.aux

    def _kernel(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, across: tuple[str | None, int]
    ) -> jax.Array:
        """One device's tokens through the experts; x [b, t, D]."""
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        moe = self.config.moe
        act = Activation.of(self.config)
        y = feed(flat(x), flat(chosen), flat(weights), experts, moe.num_experts, act, Across(*across))
        return y.reshape(x.shape)

    def _output_bias(self, routing: Routing, sharder: Sharder) -> jax.Array:
        """Weighted sum of the chosen experts' output biases, float32 [B, T, D].

        Not part of the kernel, whose output is a partial sum on every tensor shard: there it would be added several
        times.
        """
        assert self.down_bias is not None
        is_chosen = routing.chosen[..., None] == jnp.arange(self.config.moe.num_experts)
        share = sharder.activation((is_chosen * routing.weights[..., None]).sum(-2), "batch", "seq", "choice")
        y = jnp.einsum("BTE,ED->BTD", share, self.down_bias[...].astype(jnp.float32))
        return sharder.activation(y, "batch", "residual_seq", "embed")


def route(
    logits: jax.Array, valid: jax.Array, bias: jax.Array | None, moe: MoeConfig, *, num_layers: int,
    order: np.ndarray | None = None,
) -> Routing:  # fmt: skip
    """Choices from float32 logits [B, T, E]; valid bool [B, T]; bias float32 [E] shifts the choice, not the weights.

    `order` int32 [T]: index in the row of every position, None when they are the same; it settles equal scores.
    """
    scores = jax.nn.softmax(logits) if moe.router == "softmax" else jax.nn.sigmoid(logits)
    preference = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if moe.num_groups > 1:
        preference = _only_best_groups(preference, moe)
    chosen = largest(preference, moe.experts_per_token)
    is_chosen = chosen[..., None] == jnp.arange(moe.num_experts)  # [B, T, k, E]
    chosen_scores = weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), -1)
    if moe.normalize_weights:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * moe.weight_scale

    kept = jnp.broadcast_to(valid[..., None], chosen.shape)
    if moe.dispatch == "capacity":
        kept = kept & _within_capacity(jnp.where(kept, chosen, moe.num_experts), chosen_scores, valid, moe, order)
    aux = _sums(logits, scores, is_chosen.any(-2), kept, valid, bias, moe, num_layers)
    return Routing(jnp.where(kept, chosen, moe.num_experts), jnp.where(kept, weights, 0.0), aux)


def largest(values: jax.Array, count: int) -> jax.Array:
    """Places int32 [..., count] of the largest of `values` [..., E], in falling order, of equal ones the first first.

    As `lax.top_k`, which XLA does not partition: every device would gather and sort the scores of all tokens.
    """
    places = jnp.arange(values.shape[-1], dtype=jnp.int32)
    found = []
    for _ in range(count):
        is_largest = values == values.max(-1, keepdims=True)
        place = jnp.where(is_largest, places, values.shape[-1]).min(-1)
        values = jnp.where(places == place[..., None], -jnp.inf, values)
        found.append(place)
    return jnp.stack(found, -1)


def _only_best_groups(preference: jax.Array, moe: MoeConfig) -> jax.Array:
    """Experts outside the best groups become impossible; a group counts by the sum of its two best (DeepSeek-V3)."""
    grouped = preference.reshape(*preference.shape[:-1], moe.num_groups, -1)
    two = largest(grouped, min(2, grouped.shape[-1]))
    is_of_two = (two[..., None] == jnp.arange(grouped.shape[-1])).any(-2)
    best = largest(jnp.where(is_of_two, grouped, 0.0).sum(-1), moe.groups_per_token)
    allowed = (best[..., None] == jnp.arange(moe.num_groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(preference.shape)


def _within_capacity(
    chosen: jax.Array, scores: jax.Array, valid: jax.Array, moe: MoeConfig, order: np.ndarray | None
) -> jax.Array:
    """Which choices their experts have room for, bool [B, T, k].

    Room is counted per row, from its real tokens, and goes to the largest scores first, of equal ones to the earliest
    in the row: so it depends neither on the layout nor on the order in which the row is held.
    """
    B, T, k = chosen.shape
    expert, urgency = chosen.reshape(B, -1), -scores.reshape(B, -1)
    place = jax.lax.broadcasted_iota(jnp.int32, expert.shape, 1)
    in_row = jnp.arange(T, dtype=jnp.int32) if order is None else jnp.asarray(order, jnp.int32)
    in_row = jnp.broadcast_to(in_row[:, None], chosen.shape).reshape(B, -1)
    sorted_expert, _, _, places = jax.lax.sort((expert, urgency, in_row, place), dimension=1, num_keys=3)
    counts = jnp.sum(expert[..., None] == jnp.arange(moe.num_experts + 1), 1)
    starts = jnp.cumsum(counts, -1) - counts
    rank = place - jnp.take_along_axis(starts, sorted_expert, 1)
    rank = jax.lax.sort((places, rank), dimension=1, num_keys=1)[1].reshape(B, T, k)
    tokens = valid.sum(-1)
    room = jnp.ceil(moe.capacity_factor * tokens * moe.experts_per_token / moe.num_experts)
    return rank < room[:, None, None]


def _sums(
    logits: jax.Array, scores: jax.Array, is_chosen: jax.Array, kept: jax.Array, valid: jax.Array,
    bias: jax.Array | None, moe: MoeConfig, num_layers: int,
) -> dict[str, jax.Array]:  # fmt: skip
    """Sums over tokens. "loss" is differentiated; the others are logged, as means over the layers with experts.

    "routed" counts the tokens of these sums; there are more of them than trained ones where a loss mask has gaps.

    Balance of one row: E x sum over experts of (share of the choices) x (mean probability), 1 when even; times the
    row's tokens, so that rows weigh by what is in them.
    """
    real = valid[..., None].astype(jnp.float32)
    share = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    tokens = jnp.maximum(real.sum((1, 2)), 1.0)
    counts = (is_chosen * real).sum(1)  # [B, E]
    balance = (moe.num_experts / moe.experts_per_token) * ((counts * (share * real).sum(1)).sum(-1) / tokens).sum()
    z_loss = (jax.nn.logsumexp(logits, -1, keepdims=True) ** 2 * real).sum()
    loss = moe.balance_loss * balance + moe.router_z_loss * z_loss
    load = counts.sum(0)
    if bias is not None and moe.bias_update_rate > 0:
        excess = jax.lax.stop_gradient(load - load.mean()) * EXCESS_SCALE
        loss = loss + jnp.sum((bias - jax.lax.stop_gradient(bias)) * excess)  # zero, with the excess as gradient
    entropy = -(share * jnp.log(share + 1e-20) * real).sum()
    dropped = (valid[..., None] & ~kept).sum().astype(jnp.float32)
    layers = num_layers - moe.first_dense
    logged = {
        "router_balance": balance,
        "router_z_loss": z_loss,
        "router_entropy": entropy,
        "dropped_share": dropped / moe.experts_per_token,
        "expert_tokens": load,
        "fullest_expert": load.max() * (moe.num_experts / moe.experts_per_token),
        "routed": real.sum(),
    }
    return {"loss": loss} | jax.tree.map(lambda a: jax.lax.stop_gradient(a) / layers, logged)
