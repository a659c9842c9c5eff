"""Embedding, head and loss with the vocabulary split over the stages.

Every stage holds `vocab / stages` rows of the tables and works on its part of every microbatch, so no stage is
dearer than the others and the tables' memory is divided too. Runs inside the executor's `shard_map`: `stage` is a
manual axis here, and `tensor` splits a stage's part further by itself.
Dims: B batch, T sequence, D embed, V vocabulary rows of one stage.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.manual import sum_over
from jaxpar.models.layers import dropout
from jaxpar.models.loss import Split, Sums, cross_entropy
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import SITES
from jaxpar.pipeline.inside import InsideLayout
from jaxpar.pipeline.interface import STAGE

HIDDEN = -1e30  # logit of a padded vocabulary row; finite, because inf - inf is nan in a gradient


def embed(ends: Any, batch: Any, layout: InsideLayout, row_keys: jax.Array | None) -> jax.Array:
    """`Transformer.embed` for a split table: tokens int32 [B, T] -> residual stream [B, T, D], on all stages."""
    config, dtype = ends.config, ends.precision.compute
    parts = layout.weights({"table": ends.embedding, "positions": ends.positions}, lookup=True)
    table_VD = parts["table"][...].astype(dtype)
    tokens = layout.activation(batch["tokens"], "batch", "seq")
    x = sum_over(layout.lookup(table_VD, tokens - _first_row(table_VD.shape[0])), STAGE)  # exact, as one stage has it
    if config.embed_scale is not None:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    if parts["positions"] is not None:
        x = x + parts["positions"][...].astype(dtype)[batch["positions"]]
    x = layout.activation(x, "batch", "seq", "embed")
    x = layout.activation(x, "batch", "residual_seq", "embed")
    order = layout.order(x.shape[1])
    return dropout(x, row_keys, config.dropout, config.num_layers, SITES["embed"], order=order)


def head_loss(ends: Any, x: jax.Array, targets: jax.Array, weights: jax.Array, sharder: Sharder) -> Sums:
    """`Transformer.head_loss` for a split table; the same sums on all stages."""
    parts = sharder.weights({"norm": ends.final_norm, "table": ends.embedding if ends.config.tied else ends.head})
    table = parts["table"][...].astype(ends.precision.compute)

    split = Split(
        first=_first_row(table.shape[0 if ends.config.tied else 1]),
        total=lambda x: lax.psum(x, STAGE),
        largest=lambda x: lax.pmax(x, STAGE),
    )

    def logits_of(x: jax.Array) -> jax.Array:
        return _logits(ends.config, parts["norm"], table, x, split, sharder)

    return cross_entropy(logits_of, x, targets, weights, ends.loss, ends.config.true_vocab, split)


def _first_row(num_rows: int) -> jax.Array:
    """The first vocabulary row that this stage holds."""
    return lax.axis_index(STAGE) * num_rows


def _logits(config: Any, norm: Any, table: jax.Array, x: jax.Array, split: Split, sharder: Sharder) -> jax.Array:
    """This stage's float32 logits [B, T, V] of x [B, T, D]."""
    x = sharder.activation(norm(x), "batch", "seq", "embed")
    spec = "BTD,VD->BTV" if config.tied else "BTD,DV->BTV"
    logits = jnp.einsum(spec, x, table, preferred_element_type=jnp.float32)
    logits = sharder.activation(logits, "batch", "seq", "vocab")
    if (cap := config.logit_soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + split.first
    return jnp.where(column < config.true_vocab, logits, HIDDEN)
