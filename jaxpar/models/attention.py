"""Grouped-query attention: projections, rotary positions, masks, and the kernels behind one signature.

Dims: B batch, T query positions, S key positions, D embed, H query heads, G KV heads, K head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError
from jaxpar.models import rope
from jaxpar.models.layers import Norm, add_bias, constant, normal, residual_std
from jaxpar.models.projection import project
from jaxpar.models.sharder import Sharder
from jaxpar.precision import Precision


class Mask(NamedTuple):
    """Who may see whom, besides causality by position in the row.

    `segments` int32 [B, T]: only equal numbers see each other; None: one document. `window` int32 scalar: a token
    sees itself and window - 1 before it; None: all. `sinks` float32 [H]: the score of one more place that every query
    of a head sees, and that has no value; None: there is none.
    """

    segments: jax.Array | None = None
    window: jax.Array | int | None = None
    sinks: jax.Array | None = None

    def dense(self, length: int) -> jax.Array | None:
        """Bool [B or 1, 1, T, S] without causality, or None when nothing else is hidden."""
        allowed = None
        if self.segments is not None:
            allowed = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        if self.window is not None:
            distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
            near = (distance < self.window)[None, None]
            allowed = near if allowed is None else allowed & near
        return allowed

    def dense_bytes(self, length: int) -> int:
        """What `dense` costs a row in cuDNN, which wants it as a bias too: bool and 16-bit [T, S]."""
        return 0 if self.segments is None and self.window is None else 3 * length**2


class ScoreRules(NamedTuple):
    """How scores are made of products, and by which library: "xla" or "cudnn"; `asked`: the config names it."""

    scale: float
    soft_cap: float | None = None
    kernel: str = "xla"
    asked: bool = False


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    soft_cap: float | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Causal attention of q [B, T, H, K] over k, v [B, T, G, K] -> [B, T, H, K]; softmax in float32.

    `kernel`: "xla", "cudnn" or "auto" (cuDNN on a GPU where it can, else XLA).
    """
    library = chosen_kernel(q, soft_cap, kernel, sinks=mask.sinks is not None)
    dense = mask.dense(q.shape[1])
    if soft_cap is not None or mask.sinks is not None:
        if library == "cudnn":
            lacks = "attention sinks" if soft_cap is None else "attention soft cap"
            raise UserError(f'model.attention = "cudnn" has no {lacks}; set model.attention="xla"')
        return _written_out(q, k, v, dense, mask.sinks, scale, soft_cap)
    dtype = q.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":  # CPUs have no float16 product with float32 sums
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, mask=dense, scale=scale, is_causal=True, implementation=library)
    return out.astype(dtype)


def chosen_kernel(q: jax.Array, soft_cap: float | None, kernel: str, *, sinks: bool = False) -> Literal["xla", "cudnn"]:
    """The library that "auto" means for these queries."""
    if kernel == "xla" or kernel == "cudnn":
        return kernel
    return "cudnn" if not sinks and _cudnn_can(q, soft_cap) else "xla"


def _cudnn_can(q: jax.Array, soft_cap: float | None) -> bool:
    head_dim = q.shape[-1]
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return jax.default_backend() == "gpu" and half and soft_cap is None and head_dim % 8 == 0 and head_dim <= 128


def _written_out(
    q: jax.Array, k: jax.Array, v: jax.Array, dense: jax.Array | None, sinks: jax.Array | None, scale: float,
    cap: float | None,
) -> jax.Array:  # fmt: skip
    """Attention with what no library kernel offers: scores bent by cap * tanh(score / cap), and sinks."""
    B, T, H, K = q.shape
    G = k.shape[2]
    q_BTGRK = q.reshape(B, T, G, H // G, K)
    scores = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK, k, preferred_element_type=jnp.float32) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    causal = jnp.tril(jnp.ones((T, T), bool))[None, None]
    allowed = causal if dense is None else causal & dense
    scores = jnp.where(allowed[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = softmax_with_sinks(scores, sinks).astype(v.dtype)
    return jnp.einsum("BGRTS,BSGK->BTGRK", weights, v).reshape(B, T, H, K)


def softmax_with_sinks(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Weights of float32 scores [B, G, R, T, S]; with sinks [G R] they sum to less than one."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    parts = jnp.exp(scores - largest)
    return parts / (parts.sum(-1, keepdims=True) + jnp.exp(sink - largest))


def attend_by_rules(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: ScoreRules) -> jax.Array:
    """`attend` with its settings in one tuple, as a `Sharder` passes them on."""
    return attend(q, k, v, mask, scale=rules.scale, soft_cap=rules.soft_cap, kernel=rules.kernel)


class Attention(nnx.Module):
    """Self-attention of one layer; (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs, *, recompute: bool = False) -> None:
        D, H, G, K = config.embed_dim, config.num_heads, config.kv_heads, config.head_size
        std, self.config, self.precision, self.recompute = config.init_std, config, precision, recompute
        self.q = normal(rngs, (D, H, K), ("embed", "heads", "head_dim"), std)
        self.k = normal(rngs, (D, G, K), ("embed", "kv_heads", "head_dim"), std)
        self.v = normal(rngs, (D, G, K), ("embed", "kv_heads", "head_dim"), std)
        self.out = normal(rngs, (H, K, D), ("heads", "head_dim", "embed"), residual_std(config))
        bias = config.qkv_bias
        self.q_bias = constant(0.0, (H, K), ("heads", "head_dim")) if bias else None
        self.k_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.v_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.out_bias = constant(0.0, (D,), ("embed",)) if config.out_bias else None
        self.sinks = normal(rngs, (H,), ("heads",), std) if config.attention_sinks else None
        self.q_norm = self._norm(H, "heads")
        self.k_norm = self._norm(G, "kv_heads")

    def _norm(self, heads: int, name: str) -> Norm | None:
        K = self.config.head_size
        if self.config.qk_norm == "head":
            return Norm(self.config, (K,), ("head_dim",))
        return Norm(self.config, (heads, K), (name, "head_dim")) if self.config.qk_norm == "full" else None

    def __call__(self, x: jax.Array, side: Side, sharder: Sharder, traits: dict[str, jax.Array]) -> jax.Array:
        """x [B, T, D] -> [B, T, D]; `traits` say what is special about this layer."""
        q_BTHK, k_BTGK, v_BTGK = self.project(x, side, sharder, traits)
        sinks = None if self.sinks is None else self.sinks[...]
        mask = Mask(side.segment_ids, traits.get("window", self.config.window), sinks)
        soft_cap = self.config.attention_soft_cap
        rules = ScoreRules(
            scale=self.config.score_scale,
            soft_cap=soft_cap,
            kernel=chosen_kernel(q_BTHK, soft_cap, self.config.attention, sinks=sinks is not None),
            asked=self.config.attention != "auto",
        )
        kernel = functools.partial(sharder.attend, attend_by_rules, rules=rules)
        if self.recompute:
            kernel = jax.checkpoint(kernel, prevent_cse=False)
        y_BTHK = kernel(q_BTHK, k_BTGK, v_BTGK, mask)
        y_BTHK = sharder.activation(y_BTHK, "batch", "seq", "heads", "head_dim")
        return add_bias(project(y_BTHK, self.out[...], self.precision, dims=2), self.out_bias)

    def project(
        self, x: jax.Array, side: Side, sharder: Sharder, traits: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of x [B, T, D], normed, rotated and placed."""
        q = add_bias(project(x, self.q[...], self.precision), self.q_bias)
        k = add_bias(project(x, self.k[...], self.precision), self.k_bias)
        v = add_bias(project(x, self.v[...], self.precision), self.v_bias)
        q = self.q_norm(q) if self.q_norm is not None else q
        k = self.k_norm(k) if self.k_norm is not None else k
        if side.cos is not None and side.sin is not None:
            kind = traits.get("rope", 0)
            turn = functools.partial(rope.rotate, interleaved=self.config.rope.interleaved)
            q, k = (turn(a, side.cos[kind], side.sin[kind]) for a in (q, k))
        kv_name = "kv_heads"
        if sharder.kv_repeat > 1:  # fewer KV heads than tensor shards: each shard keeps the one its queries use
            k, v = (jnp.repeat(a, sharder.kv_repeat, axis=2) for a in (k, v))
            kv_name = "heads"
        q = sharder.activation(q, "batch", "seq", "heads", "head_dim")
        k, v = (sharder.activation(a, "batch", "seq", kv_name, "head_dim") for a in (k, v))
        return q, k, v


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """What every layer needs besides the residual stream; rows as in the batch.

    cos, sin float32 [kind, B, T, R] (None without rotary positions); segment_ids int32 [B, T] or None;
    row_keys typed keys [B] for dropout, None in evaluation. `compressed`: latent attention is to work on the compressed
    vectors themselves, which is what a cache of earlier tokens holds.
    """

    cos: jax.Array | None = None
    sin: jax.Array | None = None
    segment_ids: jax.Array | None = None
    row_keys: jax.Array | None = None
    compressed: bool = dataclasses.field(default=False, metadata={"static": True})
