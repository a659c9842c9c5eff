"""The train state and its creation, sharded from birth: no device ever holds a whole parameter that it should not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.errors import UserError
from jaxpar.models.transformer import Transformer
from jaxpar.sharding import Layout, Placement
from jaxpar.tree import from_named, named_leaves


class LossScale(NamedTuple):
    """Dynamic loss scale of fp16: halved on overflow, doubled after `good` clean steps; 1.0 and idle otherwise."""

    scale: jax.Array
    good: jax.Array


class TrainState(NamedTuple):
    """Everything that a step reads and writes; what a checkpoint holds."""

    step: jax.Array  # int32, batches consumed
    updates: jax.Array  # int32, updates applied; the learning rate follows this one
    skipped: jax.Array  # int32, non-finite steps in a row
    skipped_total: jax.Array  # int32
    loss_scale: LossScale
    params: Transformer
    opt_state: optax.OptState


def init_state(
    key: jax.Array, make_model: Callable[[jax.Array], Transformer], optimizer: optax.GradientTransformation,
    initial_scale: float = 1.0,
) -> TrainState:  # fmt: skip
    """A fresh state from a typed key; the same numbers on every mesh."""
    params: Any = make_model(key)
    # Every counter is its own array: donated buffers must not be shared.
    zeros = [jnp.zeros((), jnp.int32) for _ in range(5)]
    scale = LossScale(jnp.asarray(initial_scale, jnp.float32), zeros[4])
    return TrainState(zeros[0], zeros[1], zeros[2], zeros[3], scale, params, optimizer.init(params))


def state_shardings(abstract: TrainState, layout: Layout) -> tuple[TrainState, Any]:
    """(A tree of `NamedSharding`s shaped like the state, a tree of `Placement`s shaped like the parameters)."""
    placements = layout.placements(abstract.params)
    whole = layout.whole
    params = jax.tree.map(lambda p: layout.sharding(p.parameter), placements, is_leaf=_is_placement)
    owners = named_leaves(abstract.params)
    owners = dict(zip(owners, jax.tree.leaves(placements, is_leaf=_is_placement), strict=True))
    opt_state = from_named(
        abstract.opt_state,
        {
            name: _optimizer_sharding(name, leaf, owners, layout)
            for name, leaf in named_leaves(abstract.opt_state).items()
        },
    )
    scale = LossScale._make([whole, whole])
    return TrainState._make([whole, whole, whole, whole, scale, params, opt_state]), placements


def _is_placement(node: Any) -> bool:
    return isinstance(node, Placement)


def _optimizer_sharding(name: str, leaf: Any, owners: Mapping[str, Placement], layout: Layout) -> NamedSharding:
    """Sharding of one optimizer leaf.

    A leaf belongs to the parameter that its name ends with and lies like it, less the dims that a factored moment has
    summed away; counters and the like are whole.
    """
    owner = max((path for path in owners if name.endswith(f"/{path}")), key=len, default=None)
    if owner is None:
        return layout.whole
    placement = owners[owner]
    spec, shape = placement.optimizer, placement.shape
    if leaf.shape == shape:
        return layout.sharding(spec)
    if leaf.shape in ((), (1,)):
        return layout.sharding(P(*(None for _ in leaf.shape)))
    for dropped in range(len(shape)):
        if leaf.shape == shape[:dropped] + shape[dropped + 1 :]:
            return layout.sharding(P(*spec[:dropped], *spec[dropped + 1 :]))
    raise UserError(f"optimizer state of {placement.path}: shape {leaf.shape} does not follow from {shape}")


def abstract_with_shardings(abstract: Any, shardings: Any) -> Any:
    """`ShapeDtypeStruct`s that carry their sharding: what a compile or a restore needs."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
