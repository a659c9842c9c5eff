"""Attention over split rows against plain attention on one device: inputs and the cases of the sweep."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import context
from jaxpar.config import Config, ModelConfig, ParallelConfig
from jaxpar.models.attention import Mask
from jaxpar.models.attention import attend as plain_attend

ROWS, LENGTH, HEAD_DIM = 2, 64, 8
SPEC = P(None, "context", None, None)


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange: mode, axis size, heads, what hides keys besides causality, and the stages of a pipeline."""

    mode: str
    size: int
    heads: int = 8
    kv_heads: int = 8
    packed: bool = False
    window: int | None = None
    soft_cap: float | None = None
    tile: int = 1024
    stage: int = 1

    def __str__(self) -> str:
        extras = [name for name in ("packed", "window", "soft_cap") if getattr(self, name)]
        stages = ["stages"] if self.stage > 1 else []
        return "-".join([self.mode, str(self.size), f"{self.heads}q{self.kv_heads}kv", *extras, *stages])

    def plan(self) -> context.ContextPlan:
        """The plan that a config with these numbers gets."""
        plan = context.choose(self.config(), context=self.size, tensor=1, stage=self.stage)
        assert plan is not None
        return plan

    def config(self) -> Config:
        """A config with these numbers."""
        return Config(
            seq_len=LENGTH,
            model=ModelConfig(num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=HEAD_DIM, vocab_size=97),
            parallel=ParallelConfig(data=1, context=self.size, context_mode=self.mode),  # pyright: ignore
        )


def cases() -> list[Case]:
    """Every mode on 2, 4 and 8 devices, causal, packed, windowed, capped, with grouped KV heads."""
    found = []
    variants: list[dict[str, Any]] = [
        {}, {"packed": True}, {"window": 10}, {"packed": True, "tile": 4},
        {"packed": True, "window": 24, "soft_cap": 2.0}, {"packed": True, "window": 10, "tile": 2},
    ]  # fmt: skip
    for mode, size in itertools.product(("ring", "all_to_all", "all_gather", "ring_all_to_all"), (2, 4, 8)):
        if mode == "ring_all_to_all" and size == 2:
            continue
        heads = [(8, 8), (8, 2)] if mode != "ring_all_to_all" else [(2, 1)] if size == 4 else [(4, 2), (2, 1)]
        stages = (1, 2) if "ring" in mode else (1,)
        found += [
            Case(mode, size, *count, stage=stage, **variant)
            for count, variant, stage in itertools.product(heads, variants, stages)
        ]
    return found


def inputs(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries, keys, values in float32 and document numbers whose borders lie inside and on those of the shards."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(ROWS, LENGTH, heads, HEAD_DIM) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
    if not case.packed:
        return q, k, v, None
    borders = np.array([[16, 37, 60], [8, 32, 64]])  # the first row ends in padding, document 0
    documents = 1 + (np.arange(LENGTH) >= borders[:, :2, None]).sum(1)
    return q, k, v, jnp.asarray(np.where(np.arange(LENGTH) < borders[:, 2:], documents, 0), jnp.int32)


def exchange(case: Case, mesh: Mesh):
    """(q, k, v, segments) in the order of the row -> attention in the order of the row."""
    plan = case.plan()
    order = plan.order(LENGTH)
    order = np.arange(LENGTH) if order is None else order

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        q, k, v = (a[:, order] for a in (q, k, v))
        out = context.attend(
            q, k, v, None if segments is None else segments[:, order], case.window,
            scores=context.Scores(HEAD_DIM**-0.5, case.soft_cap, case.tile),
            plan=plan, mesh=mesh, q_spec=SPEC, kv_spec=SPEC,
        )  # fmt: skip
        return out[:, np.argsort(order)]

    return run


def plain(case: Case):
    """The same on one device."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return plain_attend(q, k, v, Mask(segments, case.window), scale=HEAD_DIM**-0.5, soft_cap=case.soft_cap)

    return run


def mesh_of(size: int) -> Mesh:
    """`size` devices on the context axis."""
    return jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def value_and_gradients(attention, case: Case) -> list[np.ndarray]:
    """Output and the gradients of a random linear function of it."""
    q, k, v, segments = inputs(case)
    weights = jax.random.normal(jax.random.key(1), q.shape)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, segments)
        return jnp.sum(out * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(a) for a in (out, *grads)]
