"""Continue prompts: prefill once, then one token at a time from the cache, all rows at once, on any mesh.

What a row becomes depends on its prompt, the seed and its number alone, not on the rows beside it or on the mesh.
Dims: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.build import Built, build
from jaxpar.config import Config
from jaxpar.errors import UserError, raise_together
from jaxpar.kv_cache import Caches, empty_caches, extend
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import Transformer
from jaxpar.precision import precision


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Temperature 0 is greedy; `top_k` and `top_p` keep the likeliest tokens before the draw."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(f"temperature = {self.temperature}; want 0 (greedy) or more, and finite")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed = {self.seed}; want 0 or more, of at most 63 bits")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k = {self.top_k}; want at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p = {self.top_p}; want more than 0 and at most 1")
        raise_together(problems)


class Generator:
    """A model that continues prompts. `params` are in natural order, placed as `built_for_generation` says."""

    def __init__(self, built: Built, params: Transformer) -> None:
        self.built, self.params = built, params
        policy = precision(built.config.precision)
        self._matmul = policy.matmul
        sharder = built.layout
        self._prefill = jax.jit(functools.partial(_prefill, sharder=sharder), static_argnames=("slots", "sampling"))
        self._step = jax.jit(functools.partial(_step, sharder=sharder), static_argnames="sampling", donate_argnums=1)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling = Sampling(),
        *,
        stop: Collection[int] = (),
        on_tokens: Callable[[list[int | None]], None] | None = None,
    ) -> list[list[int]]:
        """Up to `max_new` tokens after each prompt; a row ends before a token of `stop`.

        `on_tokens` is told the new token of every row as it comes, None for rows that have ended.
        """
        self._check(prompts, max_new)
        count, rows = len(prompts), self._rows(len(prompts))
        lengths = np.array([len(prompt) for prompt in prompts] + [1] * (rows - count), np.int32)
        tokens = np.zeros((rows, lengths.max()), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        new: list[list[int]] = [[] for _ in prompts]
        alive = np.ones(count, bool)
        with jax.default_matmul_precision(self._matmul) if self._matmul else contextlib.nullcontext():
            slots = int(lengths.max()) + max_new
            token, caches = self._prefill(self.params, tokens, lengths, slots=slots, sampling=sampling)
            for offset in range(max_new):
                drawn = np.asarray(token)[:count]
                alive &= ~np.isin(drawn, list(stop))
                for row in np.flatnonzero(alive):
                    new[row].append(int(drawn[row]))
                if on_tokens is not None:
                    on_tokens([int(drawn[row]) if alive[row] else None for row in range(count)])
                if not alive.any() or offset == max_new - 1:
                    break
                token, caches = self._step(self.params, caches, token, lengths + offset, sampling=sampling)
        return new

    def _rows(self, count: int) -> int:
        """Rows of the batch: as many as the mesh can split evenly."""
        shards = int(np.prod([self.built.mesh.shape[axis] for axis in ("replica", "data", "expert")]))
        return -(-count // shards) * shards

    def _check(self, prompts: Sequence[Sequence[int]], max_new: int) -> None:
        model = self.built.config.model
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise UserError("a prompt is empty; give at least one token (a start token will do)")
        if (largest := max(max(prompt) for prompt in prompts)) >= model.true_vocab:
            raise UserError(f"a prompt has the id {largest}, but the vocabulary has {model.true_vocab} ids")
        if max_new < 1:
            raise UserError(f"max_new = {max_new}; want at least 1 token")
        longest = max(len(prompt) for prompt in prompts) + max_new
        if model.positions == "learned" and model.max_position is not None and longest > model.max_position:
            raise UserError(
                f"{longest} positions (the longest prompt and {max_new} new tokens) are more than the "
                f"{model.max_position} that the model has learned; ask for fewer"
            )


def built_for_generation(config: Config, devices: Sequence[Any] | None = None) -> Built:
    """The build that a `Generator` needs: rows and tensors split, layers and positions whole."""
    parallel = config.parallel
    raise_together(
        f"parallel.{axis} = {getattr(parallel, axis)}: generation splits rows and tensors only; set it to 1"
        for axis in ("stage", "context")
        if getattr(parallel, axis) > 1
    )
    model = dataclasses.replace(config.model, dropout=0.0)
    parallel = dataclasses.replace(parallel, sequence_parallel=False)
    return build(dataclasses.replace(config, model=model, parallel=parallel, accumulation=1), devices)


def _prefill(
    params: Transformer, tokens: jax.Array, lengths: jax.Array, *, slots: int, sampling: Sampling, sharder: Sharder
) -> tuple[jax.Array, Caches]:
    """Prompts [B, T], padded behind their lengths [B] -> first new token [B] and caches of `slots`."""
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    caches = empty_caches(params, rows, slots, sharder)
    x, caches = extend(params, tokens, positions, positions < lengths[:, None], caches, sharder)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return _draw(params, last, lengths, sampling, sharder), caches


def _step(
    params: Transformer, caches: Caches, token: jax.Array, positions: jax.Array, *, sampling: Sampling, sharder: Sharder
) -> tuple[jax.Array, Caches]:
    """The token [B] at `positions` [B] -> the next one, and the caches with it."""
    at = positions[:, None]
    x, caches = extend(params, token[:, None], at, jnp.ones_like(at, bool), caches, sharder)
    return _draw(params, x, positions + 1, sampling, sharder), caches


def _draw(params: Transformer, x: jax.Array, positions: jax.Array, sampling: Sampling, sharder: Sharder) -> jax.Array:
    """Token for position [B] from the stream before it [B, 1, D]."""
    return draw(params.logits_of(x, sharder)[:, 0], positions, sampling)


def draw(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Tokens int32 [B] from float32 logits [B, V]; the key of a draw follows from seed, row and position [B]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = kept(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    keys = jax.vmap(
        lambda row, position: jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), row), position)
    )(jnp.arange(logits.shape[0]), positions)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def kept(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """Logits [B, V] with -inf for what neither rule keeps.

    top_k: the k largest (more on ties). top_p: the smallest set of likeliest tokens whose probability reaches p.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = jnp.where(logits >= ordered[:, top_k - 1 : top_k], logits, -jnp.inf)
        ordered = jnp.sort(logits, axis=-1, descending=True)
    if top_p is not None and top_p < 1:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, -1) - probabilities  # of all likelier ones
        smallest = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits


def load_generator(config: Config, weights: Any, devices: Sequence[Any] | None = None) -> Generator:
    """A generator from `jaxpar.weights.Weights`, loaded straight into its shards."""
    built = built_for_generation(dataclasses.replace(config, model=weights.model), devices)
    return Generator(built, weights.load(built.abstract_state.params))
