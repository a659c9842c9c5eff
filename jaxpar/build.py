"""config + devices -> the jitted functions of a run and everything known about their arrays.

The trainer runs what this returns, the dry run compiles the very same for absent GPUs, the layout check and the
benchmark run it on simulated devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpar.balance import with_balance
from jaxpar.config import Config
from jaxpar.errors import UserError
from jaxpar.mesh import make_mesh
from jaxpar.models.transformer import Transformer
from jaxpar.optim import make_optimizer, make_schedule
from jaxpar.precision import Precision, precision
from jaxpar.sharding import Layout, make_layout
from jaxpar.state import TrainState, abstract_with_shardings, init_state, state_shardings
from jaxpar.step import Batch, GradFn, StepRules, accumulated, eval_step, train_step, value_and_grad

if TYPE_CHECKING:
    from jaxpar.pipeline.model import Pipeline

FIRST_LOSS_SCALE = 2.0**15
BATCH_DTYPES = {
    "tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32, "positions": jnp.int32, "segment_ids": jnp.int32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Built:
    """One run, ready to be started, compiled or inspected.

    init(key) -> TrainState; step(state, batch) -> (state, metrics), donating the state;
    evaluate(params, batch) -> Sums.
    """

    config: Config
    mesh: Mesh
    layout: Layout
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    grad_fn: GradFn
    gradients: Any  # jitted (params, batch) -> gradients, for a look at where they lie
    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Transformer, Any], Any]
    abstract_state: TrainState  # ShapeDtypeStructs that carry their shardings
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    shardings: TrainState
    placements: Any  # a Placement per parameter, shaped like the parameters
    batch_sharding: NamedSharding
    pipeline: Pipeline | None  # with parallel.stage > 1

    def to_natural(self, tree: Any) -> Any:
        """A state, parameters or gradients in the run's arrangement -> natural [layer, ...] order."""
        return self.pipeline.from_stages(tree) if self.pipeline else tree

    def from_natural(self, tree: Any) -> Any:
        """The inverse of `to_natural`."""
        return self.pipeline.to_stages(tree) if self.pipeline else tree


def build(config: Config, devices: Sequence[Any] | None = None) -> Built:
    """Everything a run needs; traces shapes but computes nothing. `model.vocab_size` must be known.

    Raises `UserError` for a mesh, a rule or a size that does not fit.
    """
    mesh = make_mesh(config.parallel, devices)
    policy = precision(config.precision)
    _check_kernel(config, mesh, policy)
    layout = make_layout(config, mesh, policy.compute)
    schedule = make_schedule(config.optimizer, config.steps)
    optimizer = with_balance(make_optimizer(config.optimizer, schedule), config.model.moe.bias_update_rate)

    make_model = model_maker(config, policy)
    evaluate = functools.partial(eval_step, sharder=layout)
    pipeline = None
    if config.parallel.stage > 1:
        from jaxpar.pipeline.model import make_pipeline  # only pipelines pay for its import

        pipeline = make_pipeline(config, layout, jax.eval_shape(make_model, jax.random.key(0)))
        layout, evaluate = pipeline.layout, pipeline.evaluate
        make_model = _arranged(make_model, pipeline)

    first_scale = FIRST_LOSS_SCALE if policy.loss_scaling else 1.0
    init = functools.partial(init_state, make_model=make_model, optimizer=optimizer, initial_scale=first_scale)
    abstract = jax.eval_shape(init, jax.random.key(config.seed))
    shardings, placements = state_shardings(abstract, layout)
    grad_fn = pipeline.grads if pipeline else make_grad_fn(config, layout, placements)
    rules = StepRules(
        grad_fn=grad_fn,
        place=lambda grads: layout.place(grads, placements, lambda placed: placed.optimizer),
        optimizer=optimizer,
        schedule=schedule,
        clip_norm=config.optimizer.clip_norm,
        dropout=config.model.dropout > 0,
        loss_scaling=policy.loss_scaling,
        seed=config.seed,
    )
    shape = (config.global_batch, config.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, t, sharding=layout.batch) for name, t in BATCH_DTYPES.items()}
    matmul = jax.default_matmul_precision(policy.matmul) if policy.matmul else None
    step = _with_precision(functools.partial(train_step, rules=rules), matmul)
    evaluate = _with_precision(evaluate, matmul)
    return Built(
        config=config,
        mesh=mesh,
        layout=layout,
        optimizer=optimizer,
        schedule=schedule,
        grad_fn=grad_fn,
        gradients=jax.jit(functools.partial(gradients_alone, grad_fn)),
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.whole)),
        evaluate=jax.jit(evaluate, out_shardings=layout.whole),
        abstract_state=abstract_with_shardings(abstract, shardings),
        abstract_batch=batch,
        shardings=shardings,
        placements=placements,
        batch_sharding=layout.batch,
        pipeline=pipeline,
    )


def _check_kernel(config: Config, mesh: Mesh, policy: Precision) -> None:
    platform = mesh.devices.flat[0].platform
    if config.model.attention != "cudnn":
        return
    if platform == "cpu":
        raise UserError(
            'model.attention = "cudnn" needs an NVIDIA GPU, and the devices are CPUs; use "auto", which takes cuDNN '
            'where it can, or "xla"'
        )
    if policy.compute == jnp.float32:
        raise UserError(
            f'model.attention = "cudnn" has no float32, and precision = {config.precision!r}; use '
            'precision = "bf16" or model.attention = "xla"'
        )


def _arranged(make_model: Callable[[jax.Array], Transformer], pipeline: Pipeline) -> Callable[[jax.Array], Transformer]:
    return lambda key: pipeline.to_stages(make_model(key))


def model_maker(config: Config, policy: Precision) -> Callable[[jax.Array], Transformer]:
    """A function from a typed key to a freshly initialised model."""
    model = config.model
    if model.positions == "learned" and model.max_position is None:
        model = dataclasses.replace(model, max_position=config.seq_len)

    def make(key: jax.Array) -> Transformer:
        return Transformer(model, policy, nnx.Rngs(params=key), loss=config.loss, remat=config.remat)

    return make


def make_grad_fn(config: Config, layout: Layout, placements: Any) -> GradFn:
    """The gradient function of the config: one pass or accumulation; its gradients lie where ZeRO wants them."""

    def place(grads: Any) -> Any:
        return layout.place(grads, placements, lambda placed: placed.gradient)

    one_pass = functools.partial(value_and_grad, sharder=layout)
    if config.accumulation > 1:
        return accumulated(one_pass, config.accumulation, place)

    def run(params: Transformer, batch: Any, row_keys: jax.Array | None, scale: jax.Array) -> tuple[Any, Any]:
        sums, grads = one_pass(params, batch, row_keys, scale)
        return sums, place(grads)

    return run


def gradients_alone(grad_fn: GradFn, params: Any, batch: Batch) -> Any:
    """Gradients of a batch, without dropout and with no wish where they should lie."""
    return grad_fn(params, batch, None, jnp.float32(1.0))[1]


def _with_precision(function: Callable, context: Any) -> Callable:
    if context is None:
        return function

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with context:
            return function(*args)

    return run
