"""The train step: gradients, one division by the global token count, clipping, update.

Start reading here. `train_step` is a pure function; it does not know whether its gradients come from one pass, from
accumulation or from a pipeline, because every gradient function returns sums. `build.py` jits it with shardings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.models.loss import Sums
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import Transformer
from jaxpar.state import LossScale, TrainState

Batch = Mapping[str, jax.Array]
# (params, batch, row keys or None, loss scale) -> sums and gradients of the objective, both summed over tokens
GradFn = Callable[[Transformer, Batch, jax.Array | None, jax.Array], tuple[Sums, Transformer]]


class StepRules(NamedTuple):
    """What stays the same over a run."""

    grad_fn: GradFn
    place: Callable[[Any], Any]  # gradients to where the optimizer's state lies
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    clip_norm: float | None
    dropout: bool
    loss_scaling: bool
    seed: int


def train_step(state: TrainState, batch: Batch, rules: StepRules) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on a global batch of [B, T] arrays.

    A step whose loss, gradient norm or auxiliary sums are not finite, or that has no trained token, changes nothing but
    the counters.
    """
    row_keys = row_keys_of(rules.seed, state.step, batch["tokens"].shape[0]) if rules.dropout else None
    scale = state.loss_scale.scale
    if rules.loss_scaling:  # float16 cannot hold a gradient summed over tokens: scale that of the mean
        scale = scale / jnp.maximum(batch["weights"].sum(), 1.0)
    sums, grads = rules.grad_fn(state.params, batch, row_keys, scale)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), rules.place(grads))
    tokens = jnp.maximum(sums.tokens, 1.0)
    factor = 1.0 / (tokens * scale)
    loss, grad_norm = sums.loss / tokens, factor * optax.tree.norm(grads)
    auxiliary = _auxiliary(sums.aux)
    finite = jnp.isfinite(jnp.hstack([loss, grad_norm, *auxiliary.values()])).all()
    applied = finite & (sums.tokens > 0)

    if (limit := rules.clip_norm) is not None:
        factor = factor * jnp.minimum(1.0, limit / jnp.maximum(grad_norm, 1e-30))

    mean = jax.tree.map(lambda g: g * factor, grads)
    update = functools.partial(_updated, rules.optimizer, mean)
    params, opt_state = _only_if(applied, update, (state.params, state.opt_state))
    new_state = TrainState(
        step=state.step + 1,
        updates=state.updates + applied,
        skipped=jnp.where(finite, 0, state.skipped + 1),
        skipped_total=state.skipped_total + ~finite,
        loss_scale=_next_scale(state.loss_scale, finite) if rules.loss_scaling else state.loss_scale,
        params=params,
        opt_state=opt_state,
    )
    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": jnp.asarray(rules.schedule(state.updates), jnp.float32),
        "tokens": sums.tokens,
        "skipped": new_state.skipped,
        "skipped_total": new_state.skipped_total,
        "loss_scale": new_state.loss_scale.scale,
        **auxiliary,
    }
    return new_state, metrics


def _updated(optimizer: optax.GradientTransformation, grads: Any, old: tuple[Any, Any]) -> tuple[Any, Any]:
    """Parameters and optimizer state after one update."""
    params, opt_state = old
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _only_if(applied: jax.Array, update: Callable[[Any], Any], old: Any) -> Any:
    """`update(old)` where `applied`, else `old`, bit for bit.

    By selects, as XLA:GPU copies the whole state around a conditional; on CPUs it is the selects that copy it.
    """
    select, branch = (functools.partial(way, update=update) for way in (_select, _branch))
    return jax.lax.platform_dependent(applied, old, cpu=branch, default=select)


def _select(applied: jax.Array, old: Any, update: Callable[[Any], Any]) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(applied, new, old), update(old), old)


def _branch(applied: jax.Array, old: Any, update: Callable[[Any], Any]) -> Any:
    return jax.lax.cond(applied, update, lambda old: old, old)


def value_and_grad(params: Transformer, batch: Batch, row_keys: jax.Array | None, scale: jax.Array, sharder: Sharder) \
        -> tuple[Sums, Transformer]:  # fmt: skip
    """Sums of a batch and the gradient of `scale` times their objective, in one pass."""

    def objective(params: Transformer) -> tuple[jax.Array, Sums]:
        sums = params(batch, sharder, row_keys)
        return sums.objective * scale, sums

    (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params)
    return sums, grads


def accumulated(grad_fn: GradFn, parts: int, place_grads: Callable[[Any], Any]) -> GradFn:
    """`grad_fn` run over `parts` microbatches one after the other; sums and float32 gradients are added up.

    Every microbatch takes each parts-th row, so that the rows of a device stay on it.
    """

    def run(params: Transformer, batch: Batch, row_keys: jax.Array | None, scale: jax.Array) -> tuple[Sums, Any]:
        """Add up sums and gradients of all microbatches."""

        def split(a: jax.Array) -> jax.Array:
            return jnp.moveaxis(a.reshape(a.shape[0] // parts, parts, *a.shape[1:]), 1, 0)

        def one(part: tuple[Batch, jax.Array | None]) -> tuple[Sums, Any]:
            rows, keys = part
            return grad_fn(params, rows, keys, scale)

        def body(total: tuple[Sums, Any], part: tuple[Batch, jax.Array | None]) -> tuple[tuple[Sums, Any], None]:
            sums, grads = one(part)
            grads = place_grads(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            return jax.tree.map(jnp.add, total, (sums, grads)), None

        parts_of = jax.tree.map(split, (dict(batch), row_keys))
        shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], parts_of))
        sums, grads = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes)
        return jax.lax.scan(body, (sums, place_grads(grads)), parts_of)[0]

    return run


def eval_step(params: Transformer, batch: Batch, sharder: Sharder) -> Sums:
    """Loss sums of a batch without dropout and without gradients."""
    return params(batch, sharder)


def row_keys_of(seed: int, step: jax.Array, rows: int) -> jax.Array:
    """One typed key per row of the global batch: a function of seed, step and row alone."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(step_key, row))(jnp.arange(rows))


def _auxiliary(aux: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Scalar sums as means over the routed tokens; a vector (tokens per expert), and its ends over its mean."""
    found = {}
    for name, value in aux.items():
        if value.ndim:
            even = jnp.maximum(value.mean(), 1e-30)
            found |= {
                f"aux_{name}": value,
                f"aux_{name}_max": value.max() / even,
                f"aux_{name}_min": value.min() / even,
            }
        elif name not in ("loss", "routed"):
            found[f"aux_{name}"] = value / jnp.maximum(aux["routed"], 1.0)
    return found


def _next_scale(state: LossScale, finite: jax.Array, growth_interval: int = 1000) -> LossScale:
    """Halve on overflow (never below 1), double after `growth_interval` clean steps."""
    grown = finite & (state.good + 1 >= growth_interval)
    scale = jnp.where(finite, jnp.where(grown, state.scale * 2, state.scale), jnp.maximum(state.scale / 2, 1.0))
    return LossScale(scale, jnp.where(finite & ~grown, state.good + 1, 0))
