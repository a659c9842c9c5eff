"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from one small vector per token.

Every head has features without position, made from the compressed vector, and rotary ones; the rotary key is one for
all heads. Values are padded to the width of the keys for the kernels, which want one width, and cut again.
Dims: B batch, T sequence, D embed, H heads, K head_dim (no position), R rotary features, V value features, C latent.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpar.config import ModelConfig
from jaxpar.models import rope
from jaxpar.models.attention import Mask, Rules, Side, attend_by_rules, chosen_kernel
from jaxpar.models.layers import Norm, normal, residual_std
from jaxpar.models.sharder import Sharder


class LatentAttention(nnx.Module):
    """Self-attention of one layer; (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, *, recompute: bool = False) -> None:
        D, H, K, std, latent = config.embed_dim, config.num_heads, config.head_size, config.init_std, config.latent
        R, V = latent.rope_dim, config.value_size
        self.config, self.dtype, self.recompute = config, dtype, recompute
        into, width = ("embed", "latent"), ("latent", "heads", "head_dim")
        if latent.query_rank is None:
            self.q_down, self.q_norm = None, None
            self.q = normal(rngs, (D, H, K + R), ("embed", "heads", "head_dim"), std)
        else:
            self.q_down = normal(rngs, (D, latent.query_rank), into, std)
            self.q_norm = Norm(config, (latent.query_rank,), ("latent",))
            self.q = normal(rngs, (latent.query_rank, H, K + R), width, std)
        self.kv_down = normal(rngs, (D, latent.kv_rank + R), into, std)
        self.kv_norm = Norm(config, (latent.kv_rank,), ("latent",))
        self.kv_up = normal(rngs, (latent.kv_rank, H, K + V), width, std)
        self.out = normal(rngs, (H, V, D), ("heads", "head_dim", "embed"), residual_std(config))

    def __call__(self, x: jax.Array, side: Side, sharder: Sharder, traits: dict[str, jax.Array]) -> jax.Array:
        """`side` and `traits` as in `Attention`."""
        q, k, v = self.project(x, side, sharder, traits)
        rules = Rules(
            scale=self.config.query_scale or q.shape[-1] ** -0.5,
            soft_cap=self.config.attention_soft_cap,
            kernel=chosen_kernel(q, self.config.attention_soft_cap, self.config.attention),
        )
        kernel = functools.partial(sharder.attend, attend_by_rules, rules=rules)
        if self.recompute:
            kernel = jax.checkpoint(kernel, prevent_cse=False)
        y = kernel(q, k, v, Mask(side.segment_ids, traits.get("window", self.config.window)))
        y = sharder.activation(y[..., : self.config.value_size], "batch", "seq", "heads", "head_dim")
        return jnp.einsum("BTHV,HVD->BTD", y, self.out[...].astype(self.dtype))

    def project(
        self, x: jax.Array, side: Side, sharder: Sharder, traits: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and padded values [B, T, H, K + R] of x [B, T, D]."""
        K, C, R = self.config.head_size, self.config.latent.kv_rank, self.config.latent.rope_dim
        weight = lambda w: w[...].astype(self.dtype)  # noqa: E731
        assert side.cos is not None
        assert side.sin is not None
        kind = traits.get("rope", 0)
        cos, sin = side.cos[kind], side.sin[kind]
        queries = x
        if self.q_down is not None and self.q_norm is not None:
            queries = self.q_norm(x @ weight(self.q_down))
        q = jnp.einsum("BTC,CHK->BTHK", queries, weight(self.q))
        q = jnp.concatenate([q[..., :K], rope.rotate(q[..., K:], cos, sin)], -1)

        compressed = x @ weight(self.kv_down)
        kv = jnp.einsum("BTC,CHK->BTHK", self.kv_norm(compressed[..., :C]), weight(self.kv_up))
        rotary = rope.rotate(compressed[..., None, C:], cos, sin)
        k = jnp.concatenate([kv[..., :K], jnp.broadcast_to(rotary, (*kv.shape[:3], R))], -1)
        v = kv[..., K:]
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, K + R - v.shape[-1])))
        placed = [sharder.activation(a, "batch", "seq", "heads", "head_dim") for a in (q, k, v)]
        return placed[0], placed[1], placed[2]
