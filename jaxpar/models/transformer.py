"""The decoder: embedding, a stack of blocks, head and loss. Every family is a configuration of it.

The plain forward is `embed`, the blocks, `head_loss`, in this order; a pipeline builds its stages from the same
three. A model is a plain pytree: jit, scan, grad and checkpoint apply to it directly.
Dims: B batch, T sequence, D embed, V vocabulary (padded), L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive

from jaxpar.config import LossConfig, ModelConfig, MoeConfig
from jaxpar.models import rope
from jaxpar.models.attention import Attention, Side
from jaxpar.models.latent import LatentAttention
from jaxpar.models.layers import Mlp, Norm, dropout, normal
from jaxpar.models.loss import Sums, cross_entropy
from jaxpar.models.moe import Moe
from jaxpar.models.sharder import UNSHARDED, Sharder
from jaxpar.precision import Precision

Batch = Mapping[str, jax.Array]
Traits = dict[str, jax.Array]  # what differs between layers: index, rope kind, window
SITES = {"embed": 0, "attention": 1, "mlp": 2}  # where dropout acts; salts of its keys


class Block(nnx.Module):
    """One layer, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs, *, remat: str = "none") -> None:
        self.config = config
        width = (config.embed_dim,), ("embed",)
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = Norm(config, *width) if before else None
        attention = LatentAttention if config.latent.kv_rank else Attention
        self.attention = attention(config, precision, rngs, recompute=remat == "attention")
        self.attention_post_norm = Norm(config, *width) if after else None
        self.mlp_norm = Norm(config, *width) if before else None
        self.mlp = None if config.moe.num_experts else Mlp(config, precision, rngs)
        self.moe = Moe(config, precision, rngs) if config.moe.num_experts else None
        self.mlp_post_norm = Norm(config, *width) if after else None

    def __call__(self, x: jax.Array, side: Side, sharder: Sharder, traits: Traits) -> tuple[jax.Array, dict]:
        """x [B, T, D] -> [B, T, D] and auxiliary totals."""
        attended, _ = self._branch("attention", x, side, sharder, traits)
        stream = x + attended
        fed, aux = self._branch("mlp", x if self.config.parallel_residual else stream, side, sharder, traits)
        return sharder.activation(stream + fed, "batch", "residual_seq", "embed"), aux

    def _branch(self, name: str, x: jax.Array, side: Side, sharder: Sharder, traits: Traits) -> tuple[jax.Array, dict]:
        """Norm, sub-layer, norm, dropout, and auxiliary sums; the sub-layer sees all of its context shard."""
        norm, post_norm = getattr(self, f"{name}_norm"), getattr(self, f"{name}_post_norm")
        x = x if norm is None else norm(x)
        x = sharder.activation(x, "batch", "seq", "embed")
        aux: dict = {}
        if name == "attention":
            y = self.attention(x, side, sharder, traits)
        elif self.moe is not None:
            y, aux = self.moe(x, side.segment_ids, sharder)
        else:
            assert self.mlp is not None
            y = self.mlp(x, sharder)
        y = sharder.activation(y, "batch", "residual_seq", "embed")
        y = y if post_norm is None else post_norm(y)
        order = sharder.order(y.shape[1])
        return dropout(y, side.row_keys, self.config.dropout, traits["index"], SITES[name], order=order), aux


class Transformer(nnx.Module):
    """Decoder-only language model."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        rngs: nnx.Rngs,
        *,
        loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
        remat: str = "none",
    ) -> None:
        D, V = config.embed_dim, config.padded_vocab
        self.config, self.precision, self.loss, self.remat = config, precision, loss, remat
        self.embedding = _without_padding(normal(rngs, (V, D), ("vocab", "embed"), config.init_std), config, 0)
        rows = config.max_position or 0
        self.positions = (
            normal(rngs, (rows, D), ("position", "embed"), config.init_std / 2)  # half, as GPT-2 does
            if config.positions == "learned"
            else None
        )
        leading = num_leading(config)
        self.blocks = _stack("layer", config, config.num_layers - leading, precision, rngs, remat)
        # Leading layers of a model with experts that have an ordinary MLP: other leaves, so a stack of their own.
        plain = dataclasses.replace(config, moe=MoeConfig())
        self.leading = _stack("leading", plain, leading, precision, rngs, remat) if leading else None
        self.final_norm = Norm(config, (D,), ("embed",))
        self.head = (
            None
            if config.tied
            else _without_padding(normal(rngs, (D, V), ("embed", "vocab"), config.init_std), config, 1)
        )

    def embed(self, batch: Batch, sharder: Sharder = UNSHARDED, row_keys: jax.Array | None = None) -> jax.Array:
        """Tokens int32 [B, T] -> residual stream [B, T, D] in the compute dtype."""
        tokens = sharder.activation(batch["tokens"], "batch", "seq")
        parts = sharder.weights({"table": self.embedding, "positions": self.positions}, lookup=True)
        x = parts["table"][...].astype(self.precision.compute)[tokens]
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        if parts["positions"] is not None:
            x = x + parts["positions"][...].astype(self.precision.compute)[batch["positions"]]
        x = sharder.activation(x, "batch", "seq", "embed")  # else XLA gathers the table to look up its own positions
        x = sharder.activation(x, "batch", "residual_seq", "embed")
        order = sharder.order(x.shape[1])
        return dropout(x, row_keys, self.config.dropout, self.config.num_layers, SITES["embed"], order=order)

    def side(self, batch: Batch, row_keys: jax.Array | None = None) -> Side:
        """What the blocks need of the batch besides the stream."""
        cos = sin = None
        if self.config.positions == "rope":
            width = self.config.latent.rope_dim if self.config.latent.kv_rank else self.config.head_size
            cos, sin = rope.tables(self.config, width, batch["positions"])
        return Side(cos, sin, batch.get("segment_ids"), row_keys)

    def layer_traits(self) -> dict[str, np.ndarray]:
        """What differs between layers, as arrays [L] to scan along with the blocks; the leading layers first."""
        L = self.config.num_layers
        traits = {"index": np.arange(L, dtype=np.int32)}
        kinds = rope.layer_kinds(self.config)
        if self.config.positions == "rope" and kinds.any():
            traits["rope"] = kinds
        if self.config.window is not None and not all(self.config.window_pattern):
            local = np.resize(np.array(self.config.window_pattern), L)
            traits["window"] = np.where(local, self.config.window, np.iinfo(np.int32).max).astype(np.int32)
        return traits

    def run_blocks(
        self, blocks: Block, traits: Mapping[str, np.ndarray | jax.Array], x: jax.Array, side: Side, sharder: Sharder
    ) -> tuple[jax.Array, dict]:
        """Run a stack of blocks (all, or one pipeline chunk) over x [B, T, D]; auxiliary sums are added up."""

        def layer(x: jax.Array, block: Block, traits: Traits) -> tuple[jax.Array, dict]:
            return sharder.weights(block)(x, side, sharder, traits)

        layer = checkpointed(layer, self.remat)
        if self.config.scan_layers:
            body = lambda x, xs: layer(x, *xs)  # noqa: E731
            x, aux = jax.lax.scan(body, x, (blocks, dict(traits)))
            return x, jax.tree.map(lambda a: a.sum(0), aux)
        total: dict = {}
        for i in range(len(traits["index"])):
            block, own = jax.tree.map(lambda a, i=i: a[i], (blocks, dict(traits)))
            x, aux = layer(x, block, own)
            total = jax.tree.map(jnp.add, total, aux) if total else aux
        return x, total

    def hidden(
        self, batch: Batch, sharder: Sharder = UNSHARDED, row_keys: jax.Array | None = None
    ) -> tuple[jax.Array, dict]:
        """Tokens [B, T] -> stream after the last block [B, T, D], auxiliary sums; both in the order of the stream."""
        x, side, aux = self.embed(batch, sharder, row_keys), self.side(batch, row_keys), {}
        for blocks, traits in self.stacks():
            x, aux = self.run_blocks(blocks, traits, x, side, sharder)  # leading layers have no sums
        return x, aux

    def stacks(self) -> list[tuple[Block, dict[str, np.ndarray]]]:
        """Stacks of equal layers in the order of the model, each with its traits."""
        traits, leading = self.layer_traits(), num_leading(self.config)
        parts = [] if self.leading is None else [(self.leading, {name: a[:leading] for name, a in traits.items()})]
        return [*parts, (self.blocks, {name: a[leading:] for name, a in traits.items()})]

    def logits_of(self, x: jax.Array, sharder: Sharder = UNSHARDED) -> jax.Array:
        """X [B, T, D] -> float32 logits [B, T, V]; padded vocabulary rows are hugely negative."""
        parts = sharder.weights({"norm": self.final_norm, "table": self.embedding if self.config.tied else self.head})
        x = sharder.activation(parts["norm"](x), "batch", "seq", "embed")
        table = parts["table"][...].astype(self.precision.compute)
        spec = "BTD,VD->BTV" if self.config.tied else "BTD,DV->BTV"
        logits = jnp.einsum(spec, x, table, preferred_element_type=jnp.float32)
        logits = sharder.activation(logits, "batch", "seq", "vocab")
        if (cap := self.config.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return _mask_padding(logits, self.config)

    def head_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array, sharder: Sharder = UNSHARDED) -> Sums:
        """Sums over tokens of x [B, T, D]: weighted cross entropy, weights, auxiliary losses."""
        return cross_entropy(
            lambda part: self.logits_of(part, sharder), x, targets, weights, self.loss, self.config.true_vocab
        )

    def logits(self, batch: Batch, sharder: Sharder = UNSHARDED) -> jax.Array:
        """float32 logits [B, T, V] of a batch, without dropout."""
        logits = self.logits_of(self.hidden(sharder.ordered(batch), sharder)[0], sharder)
        order = sharder.order(logits.shape[1])
        return logits if order is None else logits[:, np.argsort(order)]

    def __call__(self, batch: Batch, sharder: Sharder = UNSHARDED, row_keys: jax.Array | None = None) -> Sums:
        """Loss sums of a batch."""
        batch = sharder.ordered(batch)
        x, aux = self.hidden(batch, sharder, row_keys)
        sums = self.head_loss(x, batch["targets"], batch["weights"], sharder)
        return sums.with_aux(aux)


def _keep_all_but_weights(primitive: Primitive, *_: Any, **__: Any) -> bool:
    return primitive.name != "linear_call"  # that of `Sharder.weights`


def num_leading(config: ModelConfig) -> int:
    """Layers before the first one with experts, in a model that has any."""
    return config.moe.first_dense if config.moe.num_experts else 0


def _stack(axis: str, config: ModelConfig, layers: int, precision: Precision, rngs: nnx.Rngs, remat: str) -> Block:
    """Blocks whose leaves have a leading dim named `axis`."""
    make = nnx.vmap(
        lambda layer_rngs: Block(config, precision, layer_rngs, remat=remat),
        transform_metadata={nnx.PARTITION_NAME: axis, "axes": axis},
    )
    return make(rngs.split(layers))


def checkpointed(layer: Callable, policy: str) -> Callable:
    """`layer` with recomputation in the backward pass by a named policy.

    none: store everything but the placed weights, of which a scan would stack a second copy (under ZeRO-3 a gathered
    one). dots: store the outputs of matmuls with weights. attention: as none, but `Attention` recomputes its scores.
    full: store only the layer's input.
    """
    if policy in ("none", "attention"):
        return jax.checkpoint(layer, prevent_cse=False, policy=_keep_all_but_weights)
    if policy == "full":
        return jax.checkpoint(layer, prevent_cse=False)
    assert policy == "dots", policy
    return jax.checkpoint(layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def _without_padding(table: nnx.Param, config: ModelConfig, dim: int) -> nnx.Variable:
    """The table with zeros in the rows that only pad the vocabulary."""
    rows = jax.lax.broadcasted_iota(jnp.int32, table.shape, dim)
    return table.replace(jnp.where(rows < config.true_vocab, table[...], 0.0))


def _mask_padding(logits: jax.Array, config: ModelConfig) -> jax.Array:
    if config.padded_vocab == config.true_vocab:
        return logits
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(columns < config.true_vocab, logits, -1e30)  # finite: inf - inf is nan in a gradient
