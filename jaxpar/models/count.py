"""Parameters and FLOPs of a model by arithmetic on its config: no arrays, no jax, true vocabulary rows.

The tests compare `parameter_count` with the real model and with the published numbers.
"""

from __future__ import annotations

import dataclasses

from jaxpar.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class LayerCount:
    """Parameters of one layer. `matmul` counts the weights one token meets: of the experts, those it is sent to."""

    total: int
    matmul: int


def parameter_count(model: ModelConfig) -> int:
    """All trainable numbers; a tied head counts once, rows that pad the vocabulary not at all."""
    layers = sum(layer_count(model, index).total for index in range(model.num_layers))
    outside = model.true_vocab * model.embed_dim * (1 if model.tied else 2) + _norm(model, model.embed_dim)
    if model.positions == "learned":
        assert model.max_position is not None, "model.max_position is filled in from seq_len before a model is made"
        outside += model.max_position * model.embed_dim
    return layers + outside


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that multiply each token: projections, MLP or active experts, router, and the head, tied or not."""
    layers = sum(layer_count(model, index).matmul for index in range(model.num_layers))
    return layers + model.true_vocab * model.embed_dim


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of one trained token, forward and backward; the numerator of MFU.

    6 x matmul parameters (2 for a multiply and add, forward, and twice that backward), plus attention: scores and
    weighted sum are 12 x heads x head_dim x (tokens seen) per layer. A causal token sees seq_len / 2 others on average,
    with a window w < seq_len it sees w - w^2 / (2 seq_len). Recomputation, norms, the embedding look-up and padded
    rows count nothing, so that MFU compares systems and not their waste. Packed documents count as full rows.
    """
    width = model.num_heads * model.head_size
    if model.latent.kv_rank:  # scores over more features than the weighted sum
        width = model.num_heads * (model.head_size + model.latent.rope_dim + model.value_size) / 2
    attention = sum(12 * width * _tokens_seen(model, index, seq_len) for index in range(model.num_layers))
    return 6.0 * matmul_parameters(model) + attention


def layer_count(model: ModelConfig, index: int) -> LayerCount:
    """Parameters of the layer with this index."""
    D, K = model.embed_dim, model.head_size
    queries, keys = model.num_heads * K, model.kv_heads * K
    projections = _latent(model) if model.latent.kv_rank else D * queries * 2 + D * keys * 2
    norms = {"pre": 2, "post": 2, "both": 4}[model.norm_placement] * _norm(model, D)
    if model.qk_norm == "head":
        norms += 2 * _norm(model, K)
    elif model.qk_norm == "full":
        norms += _norm(model, queries) + _norm(model, keys)
    if model.latent.kv_rank:
        norms += _norm(model, model.latent.kv_rank) + _norm(model, model.latent.query_rank or 0)
    compressed = model.latent.kv_rank + model.latent.rope_dim + (model.latent.query_rank or 0)
    inputs = compressed if model.latent.kv_rank else queries + 2 * keys
    biases = inputs * model.qkv_bias + D * model.out_bias + model.num_heads * model.attention_sinks
    feed = _feed_forward(model, index)
    return LayerCount(total=projections + norms + biases + feed.total, matmul=projections + feed.matmul)


def _latent(model: ModelConfig) -> int:
    """Projections of multi-head latent attention."""
    D, H, K, latent = model.embed_dim, model.num_heads, model.head_size, model.latent
    rank = latent.query_rank
    queries = D * H * (K + latent.rope_dim) if rank is None else rank * (D + H * (K + latent.rope_dim))
    keys_values = D * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * H * (K + model.value_size)
    return queries + keys_values + H * model.value_size * D


def _feed_forward(model: ModelConfig, index: int) -> LayerCount:
    moe = model.moe
    if moe.num_experts == 0 or index < moe.first_dense:
        weights, biases = _mlp(model, model.mlp_dim)
        return LayerCount(total=weights + biases, matmul=weights)
    width = moe.expert_dim or model.mlp_dim
    weights, biases = _mlp(model, width)
    shared = sum(_mlp(model, width * moe.num_shared)) if moe.num_shared else 0
    router = model.embed_dim * moe.num_experts
    vectors = moe.router_bias + (moe.choice_bias or moe.bias_update_rate > 0)
    return LayerCount(
        total=(weights + biases + vectors) * moe.num_experts + shared + router,
        matmul=weights * (moe.experts_per_token + moe.num_shared) + router,
    )


def _mlp(model: ModelConfig, width: int) -> tuple[int, int]:
    """Weights and biases of a feed-forward block."""
    into = 2 if model.gated else 1
    return (into + 1) * model.embed_dim * width, (into * width + model.embed_dim) * model.mlp_bias


def _norm(model: ModelConfig, width: int) -> int:
    return width * (2 if model.norm == "layer" else 1)


def _tokens_seen(model: ModelConfig, index: int, seq_len: int) -> float:
    windowed = model.window is not None and model.window_pattern[index % len(model.window_pattern)]
    if windowed and model.window is not None and model.window < seq_len:
        return model.window - model.window**2 / (2 * seq_len)
    return seq_len / 2
