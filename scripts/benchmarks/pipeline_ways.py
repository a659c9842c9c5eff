"""One small model pipelined in three ways: the executor, vmap + roll, and GPipe by autodiff.

Dims: M microbatches, B rows, T sequence, D embed, F hidden, S stages, V chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import pipeline

Way = tuple[Callable[[Any, Any], Any], Any]  # (params, batch) -> (loss, grads), and placed params


@dataclasses.dataclass(frozen=True)
class Model:
    """MLP blocks with a norm between a tied embedding and head; every layer is rematerialised."""

    dim: int = 128
    hidden: int = 512
    layers: int = 16
    vocab: int = 512
    rows: int = 4
    length: int = 64
    stages: int = 4

    def batch(self, microbatches: int) -> dict[str, np.ndarray]:
        """Random tokens and targets int32 [M, B, T]."""
        shape = (2, microbatches, self.rows, self.length)
        tokens, targets = np.random.default_rng(0).integers(0, self.vocab, shape).astype(np.int32)
        return {"tokens": tokens, "targets": targets}

    def params(self, mesh: Mesh, chunks: int, table_spec: P) -> pipeline.Params:
        """Layers [S, V, L / (S V), ...] over the stages, and the table."""
        rng = np.random.default_rng(1)
        shape = (self.stages, chunks, self.layers // (self.stages * chunks))
        order = rng.standard_normal((self.layers, 2, self.dim, self.hidden)).astype(np.float32) * self.dim**-0.5
        up = order[:, 0].reshape(chunks, self.stages, shape[2], self.dim, self.hidden).swapaxes(0, 1)
        down = order[:, 1].reshape(chunks, self.stages, shape[2], self.dim, self.hidden).swapaxes(0, 1)
        stages = {"up": up, "down": down.swapaxes(-1, -2) * 0.25}
        table = rng.standard_normal((self.vocab, self.dim)).astype(np.float32)
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        return pipeline.Params(
            {"table": place(table, table_spec)}, jax.tree.map(lambda a: place(a, P("stage")), stages)
        )

    def stage(self, params: Any, x: jax.Array) -> jax.Array:
        """The layers of one chunk on x [B, T, D]."""
        one = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(_norm(x) @ w["up"]) @ w["down"], None))
        return lax.scan(one, x, params)[0]

    def loss(self, table: jax.Array, y: jax.Array, targets: jax.Array) -> jax.Array:
        """Summed cross entropy of y [B, T, D] with the whole table."""
        log_p = jax.nn.log_softmax(_norm(y) @ table.T)
        hit = lax.broadcasted_iota(jnp.int32, log_p.shape, log_p.ndim - 1) == targets[..., None]
        return -jnp.where(hit, log_p, 0).sum()

    def executor(self, mesh: Mesh, name: str, microbatches: int, chunks: int = 1) -> Way:
        """jaxpar.pipeline with the table split over the stages."""
        schedule = pipeline.named(name, stages=self.stages, microbatches=microbatches, chunks=chunks)
        function = pipeline.value_and_grad(
            lambda params, x, side: self.stage(params, x), _split_embed, _split_loss, schedule, mesh,
            ends_specs=P("stage"), batch_axes=("data",),
        )  # fmt: skip
        return lambda params, batch: _loss_and_grads(*function(params, batch)), self.params(mesh, chunks, P("stage"))

    def vmap_roll(self, mesh: Mesh, microbatches: int, chunks: int) -> Way:
        """The usual circular pipeline: all stages in one vmap, their outputs rolled by one; idle slots compute too."""
        S, V, M = self.stages, chunks, microbatches
        stage_ids = np.arange(S)

        def tick(carry: Any, t: jax.Array, params: Any, batch: Any) -> tuple[Any, jax.Array]:
            item = t - stage_ids  # place in the circular order of what each stage works on
            chunk = jnp.clip(item // S % V, 0, V - 1)
            fresh = params.ends["table"][batch["tokens"][jnp.clip(t // (S * V) * S + t % S, 0, M - 1)]]
            x = jnp.roll(carry, 1, axis=0)
            x = x.at[0].set(jnp.where(chunk[0] == 0, fresh, x[0]))
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("stage", "data")))
            own = jax.vmap(lambda w, v: jax.tree.map(lambda a: a[v], w))(params.stages, chunk)
            y = lax.with_sharding_constraint(jax.vmap(self.stage)(own, x), NamedSharding(mesh, P("stage", "data")))
            return y, y[-1]

        def objective(params: Any, batch: Any) -> jax.Array:
            x = jnp.zeros((S, *batch["tokens"].shape[1:], self.dim))
            _, outs = lax.scan(lambda c, t: tick(c, t, params, batch), x, jnp.arange(M * V + S - 1))
            left = np.array([(m // S * V + V - 1) * S + m % S + S - 1 for m in range(M)])

            def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                return total + jax.checkpoint(self.loss)(params.ends["table"], *part), None

            return lax.scan(add, jnp.zeros(()), (outs[left], batch["targets"]))[0]

        return jax.value_and_grad(objective), self.params(mesh, chunks, P())

    def gpipe_by_autodiff(self, mesh: Mesh, microbatches: int) -> Way:
        """A scan of forwards under `cond` that skips idle slots, differentiated as a whole."""
        S, M = self.stages, microbatches

        def body(params: Any, batch: Any) -> jax.Array:
            s = lax.axis_index("stage")
            own = jax.tree.map(lambda a: a[0, 0], params.stages)
            pick = lambda name, m: batch[name][jnp.clip(m, 0, M - 1)]  # noqa: E731

            def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
                x, total = carry
                embedded = _split_embed(params.ends, {"tokens": pick("tokens", t)})
                x = jnp.where(s == 0, embedded, x)
                busy = (t >= s) & (t < s + M)
                y = lax.cond(busy, lambda x: self.stage(own, x), lambda x: jnp.zeros_like(x), x)
                m = t - (S - 1)
                out = lax.psum(jnp.where(s == S - 1, y, 0), "stage")
                loss = lambda out: _split_loss(params.ends, out, {"targets": pick("targets", m)})[0]  # noqa: E731
                total += lax.cond(m >= 0, jax.checkpoint(loss), lambda _: jnp.zeros(()), out)
                return (lax.ppermute(y, "stage", [(i, (i + 1) % S) for i in range(S)]), total), None

            rows = batch["tokens"].shape[1:]
            start = (jnp.zeros((*rows, self.dim)), jnp.zeros(()))
            return lax.psum(lax.scan(tick, start, jnp.arange(M + S - 1))[0][1], "data")

        specs = pipeline.Params(P("stage"), P("stage"))
        mapped = jax.shard_map(
            body, mesh=mesh, axis_names={"stage", "data"}, in_specs=(specs, P(None, "data")), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        return jax.value_and_grad(mapped), self.params(mesh, 1, P("stage"))


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _split_embed(ends: Any, batch: Any) -> jax.Array:
    table = ends["table"]
    row = batch["tokens"] - lax.axis_index("stage") * table.shape[0]
    here = (row >= 0) & (row < table.shape[0])
    return lax.psum(jnp.where(here[..., None], table[jnp.where(here, row, 0)], 0), "stage")


def _split_loss(ends: Any, y: jax.Array, batch: Any) -> tuple[jax.Array, tuple[()]]:
    logits = _norm(y) @ ends["table"].T
    column = lax.broadcasted_iota(jnp.int32, logits.shape, 2) + lax.axis_index("stage") * logits.shape[-1]
    largest = lax.pmax(lax.stop_gradient(logits.max(-1)), "stage")
    normalizer = jnp.log(lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "stage")) + largest
    picked = lax.psum(jnp.where(column == batch["targets"][..., None], logits, 0).sum(-1), "stage")
    return (normalizer - picked).sum(), ()


def _loss_and_grads(totals: pipeline.Totals, grads: pipeline.Params) -> tuple[jax.Array, pipeline.Params]:
    return totals.loss, grads
