"""Optimizers and learning-rate schedules from optax, with weight decay decided by logical axes.

Clipping and the skipping of non-finite steps belong to the step, which already has the global norm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax import contrib

from jaxpar.config import OptimizerConfig
from jaxpar.names import STACKED, is_matrix
from jaxpar.sharding import map_parameters


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of updates applied so far.

    Warm-up rises linearly from 0 over `warmup_steps`; then cosine or linear falls to `final_fraction` of the peak at
    `steps`, wsd stays at the peak and falls over the last `decay_steps`, constant stays.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    after_warmup = max(steps - config.warmup_steps, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, after_warmup, alpha=config.final_fraction)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, final, after_warmup)
    elif config.schedule == "wsd":
        decay = min(config.decay_steps or max(steps // 5, 1), after_warmup)
        main = optax.linear_schedule(peak, final, decay, transition_begin=after_warmup - decay)
    else:
        main = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, peak, config.warmup_steps), main], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """True on the leaves that weight decay applies to: matrices, by their logical axes; never norms or biases."""
    return map_parameters(lambda variable: variable.replace(is_matrix(variable.axes)), params)


def decay_counts(params: Any) -> tuple[int, int]:
    """Numbers of parameters that are decayed and that are not."""
    decayed = undecayed = 0
    for variable in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        if is_matrix(variable.axes):
            decayed += variable.get_value().size
        else:
            undecayed += variable.get_value().size
    return decayed, undecayed


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The update rule that `config.name` names; it sees averaged, clipped float32 gradients."""
    decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask) if config.weight_decay else None
    if config.name == "muon":
        return contrib.muon(
            schedule,
            beta=0.95 if config.momentum is None else config.momentum,
            eps=config.eps,
            adam_b1=config.b1,
            adam_b2=config.b2,
            weight_decay=config.weight_decay,
            weight_decay_mask=decay_mask,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=muon_dimensions,
            consistent_rms=0.2,  # updates as large as Adam's, so that learning rates carry over (arXiv:2502.16982)
        )
    rules = {
        "adamw": lambda: optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        "lion": lambda: optax.scale_by_lion(b1=config.b1, b2=config.b2),
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), clip_by_layer_rms(1.0)),
        "sgd": lambda: optax.trace(config.momentum) if config.momentum else optax.identity(),
    }
    parts = [rules[config.name](), decay, optax.scale_by_learning_rate(schedule)]
    return optax.chain(*(part for part in parts if part is not None))


def clip_by_layer_rms(limit: float) -> optax.GradientTransformation:
    """Scale updates down to a root mean square of at most `limit`, each layer and each expert by itself.

    Over a whole stack of layers, the empty slots of uneven pipeline stages would count too.
    """

    def clip(variable: nnx.Variable) -> nnx.Variable:
        update = variable[...]
        inside = tuple(i for i, name in enumerate(variable.axes) if name not in STACKED)
        rms = jnp.sqrt(jnp.mean(jnp.square(update), inside, keepdims=True))
        return variable.replace(update / jnp.maximum(1.0, rms / limit))

    return optax.stateless(lambda updates, _: map_parameters(clip, updates))


def muon_dimensions(params: Any) -> Any:
    """Which dims of each leaf Muon orthogonalises: those of a hidden matrix; None (Adam) for everything else.

    Stacked dims are batch dims; heads x head_dim is one side of the matrix. Embedding and head stay with Adam, as
    Muon's author does.
    """

    def dimensions(variable: nnx.Variable) -> contrib.MuonDimensionNumbers | None:
        axes = tuple(variable.axes)
        if not is_matrix(axes) or {"vocab", "position"} & set(axes):
            return None
        inside = [i for i, name in enumerate(axes) if name not in STACKED]
        first = axes.index("embed") if "embed" in axes else inside[0]
        others = tuple(i for i in inside if i != first)
        return contrib.MuonDimensionNumbers(reduction_axis=(first,), output_axis=others)

    return map_parameters(lambda variable: variable.replace(dimensions(variable)), params)
