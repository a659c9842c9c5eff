"""Next-token cross entropy as sums over tokens, with the vocabulary dim split or not.

Sums, never means: the step divides once by the tokens of the global batch, so accumulation, uneven rows and any
split of the batch give the same loss. Nothing here gathers logits: the target's logit is picked by a masked sum.
Dims: B batch, T sequence, D embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.config import LossConfig


class Sums(NamedTuple):
    """Totals over the trained tokens of a batch or of a part of one; they add up.

    loss: weighted cross entropy in nats. tokens: sum of the weights. aux: named totals; aux["loss"] is
    differentiated along with the cross entropy (z-loss, router losses) but not reported as the loss.
    """

    loss: jax.Array
    tokens: jax.Array
    aux: dict[str, jax.Array]

    @property
    def objective(self) -> jax.Array:
        """What is differentiated."""
        return self.loss + self.aux["loss"]

    def with_aux(self, more: dict[str, jax.Array]) -> Sums:
        """These sums with further auxiliary totals added."""
        aux = dict(self.aux)
        for name, value in more.items():
            aux[name] = aux[name] + value if name in aux else value
        return Sums(self.loss, self.tokens, aux)


class Split(NamedTuple):
    """How the columns of the logits are held: all of them here, or a part, with the others on other stages."""

    first: jax.Array | int = 0  # vocabulary row of the first column
    total: Callable[[jax.Array], jax.Array] = lambda x: x  # adds the sums of all parts
    largest: Callable[[jax.Array], jax.Array] = lambda x: x  # takes the largest of all parts


WHOLE = Split()


def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    config: LossConfig,
    true_vocab: int,
    split: Split = WHOLE,
) -> Sums:
    """Sums of x [B, T, D] under targets int32 and weights float32 [B, T].

    With `config.chunk_tokens` only that many positions have logits at one time; they are recomputed in the
    backward pass.
    """

    def part(x: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
        return _sums(logits_of(x), targets, weights, config, true_vocab, split)

    length, chunk = x.shape[1], config.chunk_tokens
    if chunk is None or chunk >= length:
        return part(x, targets, weights)
    num_chunks = -(-length // chunk)
    pad = num_chunks * chunk - length
    chunks = [_in_chunks(a, num_chunks, pad) for a in (x, targets, weights)]
    step = jax.checkpoint(lambda total, xs: (jax.tree.map(jnp.add, total, part(*xs)), None))
    zero = Sums(jnp.zeros(()), jnp.zeros(()), {"loss": jnp.zeros(())})
    return jax.lax.scan(step, zero, tuple(chunks))[0]


def _in_chunks(a: jax.Array, num_chunks: int, pad: int) -> jax.Array:
    """[B, T, ...] -> [chunks, B, T / chunks, ...], padded with zeros (weight 0)."""
    a = jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2))
    a = a.reshape(a.shape[0], num_chunks, -1, *a.shape[2:])
    return jnp.moveaxis(a, 1, 0)


def _sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, config: LossConfig, true_vocab: int, split: Split
) -> Sums:
    """Sums of float32 logits [B, T, V]."""
    largest = split.largest(jax.lax.stop_gradient(logits.max(-1)))
    log_normalizer = jnp.log(split.total(jnp.exp(logits - largest[..., None]).sum(-1))) + largest
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + split.first
    picked = split.total(jnp.where(columns == targets[..., None], logits, 0.0).sum(-1))
    if config.label_smoothing:
        uniform = split.total(jnp.where(columns < true_vocab, logits, 0.0).sum(-1)) / true_vocab
        picked = (1 - config.label_smoothing) * picked + config.label_smoothing * uniform
    loss = jnp.where(weights > 0, (log_normalizer - picked) * weights, 0.0).sum()
    z_loss = jnp.zeros(())
    if config.z_loss:
        z_loss = config.z_loss * jnp.where(weights > 0, log_normalizer**2 * weights, 0.0).sum()
    return Sums(loss, weights.sum(), {"loss": z_loss})
