"""Log-likelihoods of continuations: what benchmarks with answers to choose from ask of a model, on any mesh.

Requests are sorted by length, padded to few lengths, and run a batch at a time; rows are split over the devices and
weights as the layout says. Dims: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.build import Built
from jaxpar.errors import UserError, raise_together
from jaxpar.mesh import BATCH_AXES
from jaxpar.models.transformer import Transformer
from jaxpar.precision import precision

SHORTEST = 32  # positions of the shortest padded batch
PART = 256  # positions whose logits are alive at once


class Score(NamedTuple):
    """Sum of log-probabilities of a continuation, and whether each of its tokens was the likeliest one."""

    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """Ids: `continuation` is scored, `context` (at least one id) goes before it."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def length(self) -> int:
        """Positions that the model runs over."""
        return len(self.context) + len(self.continuation) - 1


class Scorer:
    """A model that scores continuations. `params` are placed as `built_for_generation` says; rows of `batch`."""

    def __init__(self, built: Built, params: Transformer, *, max_length: int, batch: int = 8) -> None:
        self.built, self.params, self.max_length = built, params, max_length
        shards = int(np.prod([built.mesh.shape[axis] for axis in BATCH_AXES]))
        self.batch = -(-batch // shards) * shards
        policy = precision(built.config.precision)

        def run(params: Transformer, batch: Any) -> tuple[jax.Array, jax.Array]:
            with jax.default_matmul_precision(policy.matmul or "default"):
                return _scores(params, batch, built.layout)

        self._run = jax.jit(run, out_shardings=built.layout.whole)

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        """A score for every request; a context that is too long loses its beginning."""
        self._check(requests)
        order = sorted(range(len(requests)), key=lambda i: -min(requests[i].length, self.max_length))
        found: dict[int, Score] = {}
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            arrays = self._arrays([requests[i] for i in numbers])
            logprobs, greedy = map(np.asarray, self._run(self.params, arrays))
            found |= {i: Score(float(logprobs[row]), bool(greedy[row])) for row, i in enumerate(numbers)}
        return [found[i] for i in range(len(requests))]

    def _arrays(self, requests: Sequence[Request]) -> dict[str, jax.Array]:
        """A batch [B, T] of the seam's arrays, placed; T is a power of two or the longest that the model takes."""
        width = padded_length(max(min(r.length, self.max_length) for r in requests), self.max_length)
        names = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "segment_ids": np.int32}
        batch: dict[str, np.ndarray] = {k: np.zeros((self.batch, width), t) for k, t in names.items()}
        batch["weights"] = np.zeros((self.batch, width), np.float32)
        for row, request in enumerate(requests):
            ids = [*request.context, *request.continuation][-(self.max_length + 1) :]
            length = len(ids) - 1
            batch["tokens"][row, :length], batch["targets"][row, :length] = ids[:-1], ids[1:]
            batch["positions"][row, :length] = np.arange(length)
            batch["segment_ids"][row, :length] = 1
            batch["weights"][row, length - len(request.continuation) : length] = 1.0
        sharding = self.built.batch_sharding
        return {
            name: jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index])
            for name, a in batch.items()
        }

    def _check(self, requests: Sequence[Request]) -> None:
        vocabulary = self.built.config.model.true_vocab
        raise_together(_problems(requests, vocabulary, self.max_length))


def _problems(requests: Sequence[Request], vocabulary: int, max_length: int) -> Iterator[str]:
    for number, request in enumerate(requests, 1):
        if not request.context or not request.continuation:
            yield f"request {number}: the context and the continuation need at least one token each"
        elif len(request.continuation) > max_length:
            yield (
                f"request {number}: a continuation of {len(request.continuation)} tokens is longer than the "
                f"{max_length} positions of the model; raise --seq-len or shorten it"
            )
        elif (largest := max(*request.context, *request.continuation)) >= vocabulary:
            yield f"request {number} has the id {largest}, but the vocabulary has {vocabulary} ids"


def padded_length(length: int, most: int) -> int:
    """The next power of two, so that few lengths are compiled; at most `most`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), most)


def rolling(ids: Sequence[int], first: int, max_length: int) -> list[Request]:
    """Windows in which every id is predicted once; the last one sees as much before it as fits.

    `first` stands before the first id.
    """
    whole = [first, *ids]
    requests = []
    for start in range(0, len(ids), max_length):
        stop = min(start + max_length, len(ids))
        before = min(start + 1, max_length - (stop - start) + 1)
        requests.append(Request(whole[start + 1 - before : start + 1], whole[start + 1 : stop + 1]))
    return requests


def check_length(model: Any, max_length: int) -> None:
    """Raise `UserError` for more positions than a model has learned."""
    if model.positions == "learned" and model.max_position is not None and max_length > model.max_position:
        raise UserError(
            f"--seq-len={max_length} is more than the {model.max_position} positions that the model has learned"
        )


def _scores(model: Transformer, batch: Any, sharder: Any) -> tuple[jax.Array, jax.Array]:
    """Batch of [B, T] -> float32 sums of log-probabilities [B] of weighted targets, and whether all are likeliest."""
    x = model.hidden(batch, sharder)[0]
    length = x.shape[1]
    part = PART if length % PART == 0 else length

    def one(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Summed log-probability and greediness of one part of the positions."""
        x_part, targets, weights = (
            jax.lax.dynamic_slice_in_dim(a, start, part, 1) for a in (x, batch["targets"], batch["weights"])
        )
        logits = model.logits_of(x_part, sharder)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        missed = (logits.argmax(-1) != targets) & (weights > 0)
        return (picked * weights).sum(1), missed.any(1)

    sums, missed = jax.lax.map(one, jnp.arange(0, length, part))
    return sums.sum(0), ~missed.any(0)
