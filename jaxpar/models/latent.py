"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from one small vector per token.

Every head has features without position, made from the compressed vector, and rotary ones; the rotary key is one for
all heads. Values are padded to the width of the keys for the kernels, which want one width, and cut again.

The same scores come from queries that are led back to the compressed space: then the compressed vector with the rotary
key is the one key, and the compressed vector the one value, of all heads. That costs more per pair of tokens and
nothing per token, and a cache holds C + R numbers of a token: the form for generation (`Side.compressed`).
Dims: B batch, T sequence, D embed, H heads, K head_dim (no position), R rotary features, V value features, C latent.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models import rope
from jaxpar.models.attention import Mask, ScoreRules, Side, attend_by_rules, chosen_kernel
from jaxpar.models.layers import Norm, add_bias, constant, normal, residual_std
from jaxpar.models.projection import project
from jaxpar.models.sharder import Sharder
from jaxpar.precision import Precision


class LatentAttention(nnx.Module):
    """Self-attention of one layer; (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs, *, recompute: bool = False) -> None:
        D, H, K, std, latent = config.embed_dim, config.num_heads, config.head_size, config.init_std, config.latent
        R, V = latent.rope_dim, config.value_size
        self.config, self.precision, self.recompute = config, precision, recompute
        into, width = ("embed", "latent"), ("latent", "heads", "head_dim")
        normed = dataclasses.replace(config, norm_eps=config.norm_eps if latent.norm_eps is None else latent.norm_eps)
        if latent.query_rank is None:
            self.q_down, self.q_down_bias, self.q_norm = None, None, None
            self.q = normal(rngs, (D, H, K + R), ("embed", "heads", "head_dim"), std)
        else:
            self.q_down = normal(rngs, (D, latent.query_rank), into, std)
            self.q_down_bias = constant(0.0, (latent.query_rank,), ("latent",)) if config.qkv_bias else None
            self.q_norm = Norm(normed, (latent.query_rank,), ("latent",))
            self.q = normal(rngs, (latent.query_rank, H, K + R), width, std)
        self.kv_down = normal(rngs, (D, latent.kv_rank + R), into, std)
        self.kv_down_bias = constant(0.0, (latent.kv_rank + R,), ("latent",)) if config.qkv_bias else None
        self.kv_norm = Norm(normed, (latent.kv_rank,), ("latent",))
        self.kv_up = normal(rngs, (latent.kv_rank, H, K + V), width, std)
        self.out = normal(rngs, (H, V, D), ("heads", "head_dim", "embed"), residual_std(config))
        self.out_bias = constant(0.0, (D,), ("embed",)) if config.out_bias else None

    def __call__(self, x: jax.Array, side: Side, sharder: Sharder, traits: dict[str, jax.Array]) -> jax.Array:
        """`side` and `traits` as in `Attention`."""
        q, compressed, rotary = self.project(x, side, traits)
        attended = self._by_vectors if side.compressed else self._by_heads
        mask = Mask(side.segment_ids, traits.get("window", self.config.window))
        y = attended(q, compressed, rotary, mask, sharder)
        y = sharder.activation(y, "batch", "seq", "heads", "head_dim")
        return add_bias(project(y, self.out[...], self.precision, dims=2), self.out_bias)

    def project(self, x: jax.Array, side: Side, traits: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of x [B, T, D]: queries [B, T, H, K + R], compressed vectors [B, T, C], rotary keys [B, T, R]."""
        K, C = self.config.head_size, self.config.latent.kv_rank
        assert side.cos is not None
        assert side.sin is not None
        kind = traits.get("rope", 0)
        turn = functools.partial(
            rope.rotate, cos=side.cos[kind], sin=side.sin[kind], interleaved=self.config.rope.interleaved
        )
        queries = x
        if self.q_down is not None and self.q_norm is not None:
            queries = self.q_norm(add_bias(project(x, self.q_down[...], self.precision), self.q_down_bias))
        q = project(queries, self.q[...], self.precision)
        q = jnp.concatenate([q[..., :K], turn(q[..., K:])], -1)
        small = add_bias(project(x, self.kv_down[...], self.precision), self.kv_down_bias)
        return q, self.kv_norm(small[..., :C]), turn(small[..., None, C:])[..., 0, :]

    def _by_heads(
        self, q: jax.Array, compressed: jax.Array, rotary: jax.Array, mask: Mask, sharder: Sharder
    ) -> jax.Array:
        """Attention [B, T, H, V] over keys and values that are made for every head."""
        K = self.config.head_size
        kv = project(compressed, self.kv_up[...], self.precision)
        shared = jnp.broadcast_to(rotary[:, :, None], (*kv.shape[:3], rotary.shape[-1]))
        k = jnp.concatenate([kv[..., :K], shared], -1)
        v = kv[..., K:]
        width = max(k.shape[-1], v.shape[-1])
        widened = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, width - a.shape[-1]))) for a in (q, k, v))
        q, k, v = (sharder.activation(a, "batch", "seq", "heads", "head_dim") for a in widened)
        kernel = functools.partial(sharder.attend, attend_by_rules, rules=self._rules(q))
        if self.recompute:
            kernel = jax.checkpoint(kernel, prevent_cse=False)
        return kernel(q, k, v, mask)[..., : self.config.value_size]

    def _by_vectors(
        self, q: jax.Array, compressed: jax.Array, rotary: jax.Array, mask: Mask, sharder: Sharder
    ) -> jax.Array:
        """The same, over compressed vectors: one key of C + R and one value of C features for all heads."""
        K, up = self.config.head_size, self.kv_up[...].astype(self.precision.compute)
        led_back = jnp.einsum("BTHK,CHK->BTHC", q[..., :K], up[..., :K])
        q = sharder.activation(jnp.concatenate([led_back, q[..., K:]], -1), "batch", "seq", "heads", "head_dim")
        k = jnp.concatenate([compressed, rotary], -1)[:, :, None]
        y = sharder.attend(attend_by_rules, q, k, compressed[:, :, None], mask, self._rules(q))
        return jnp.einsum("BTHC,CHV->BTHV", y, up[..., K:])

    def _rules(self, q: jax.Array) -> ScoreRules:
        cap = self.config.attention_soft_cap
        kernel = self.config.attention
        return ScoreRules(self.config.score_scale, cap, chosen_kernel(q, cap, kernel), asked=kernel != "auto")
