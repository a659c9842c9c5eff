"""Low-rank adapters (LoRA, arXiv:2106.09685) on frozen weights, by logical target names.

A target's weight W becomes W + alpha / rank * A B, one layer at a time, inside the step. The frozen weights are an
argument of the step and never its result: they have no gradient, no optimizer state, and no way to change. They may be
held as int8 or nf4 (`jaxpar.quantised`); a layer then restores its own while it runs.
Dims: L layers, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.build import FIRST_LOSS_SCALE, Built, build, gradients_alone
from jaxpar.config import Config, LoraConfig
from jaxpar.errors import raise_together
from jaxpar.models.loss import Sums
from jaxpar.models.sharder import Sharder
from jaxpar.models.transformer import Block, Transformer
from jaxpar.names import SIDES
from jaxpar.pipeline.model import Frozen
from jaxpar.precision import precision
from jaxpar.quantised import Kind, held, quantised, restored, rounded
from jaxpar.sharding import Layout, Placement, named_parameters
from jaxpar.state import abstract_with_shardings, init_state, state_shardings
from jaxpar.step import StepRules, accumulated, eval_step, train_step
from jaxpar.tree import from_named, named_leaves

log = logging.getLogger(__name__)

TARGETS = {
    "q": ("attention", "q"),
    "k": ("attention", "k"),
    "v": ("attention", "v"),
    "out": ("attention", "out"),
    "gate": ("mlp", "gate"),
    "up": ("mlp", "up"),
    "down": ("mlp", "down"),
}


class Pair(nnx.Module):
    """A [L, input dims, R] and B [L, R, output dims] of one target; B starts at zero, so step 0 is the base exactly."""

    def __init__(self, weight: nnx.Variable, rank: int, rngs: nnx.Rngs) -> None:
        shape, axes = weight.get_value().shape, tuple(weight.axes)
        split = num_input_dims(axes)
        inputs = int(np.prod(shape[1 : 1 + split]))
        noise = jax.random.normal(rngs.params(), (*shape[: 1 + split], rank), jnp.float32)
        self.a = nnx.Param(noise * inputs**-0.5, axes=(*axes[: 1 + split], "rank"))
        self.b = nnx.Param(
            jnp.zeros((shape[0], rank, *shape[1 + split :]), jnp.float32), axes=("layer", "rank", *axes[1 + split :])
        )


class Adapter(nnx.Module):
    """A `Pair` per target; what is trained and saved."""

    def __init__(self, config: LoraConfig, model: Transformer, rngs: nnx.Rngs) -> None:
        check_targets(config, model)
        self.targets, self.rank, self.alpha = tuple(config.targets), config.rank, config.alpha
        for target in self.targets:
            weight = _weight(model.blocks, target)
            assert weight is not None, target
            setattr(self, target, Pair(weight, config.rank, rngs))

    @property
    def scale(self) -> float:
        """What multiplies A B."""
        return self.alpha / self.rank


class Adapted(nnx.Module):
    """Blocks and the adapter of the same layers: scanned together, merged where a layer uses its weights."""

    def __init__(self, block: Block, adapter: Adapter) -> None:
        self.block, self.adapter = block, adapter


class _MergingSharder:
    """`inner`, except that frozen weights are restored, and that a layer with an adapter gets merged ones."""

    def __init__(self, inner: Sharder) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def weights(self, module: Any, *, lookup: bool = False) -> Any:
        """The weights that the layer uses."""
        if isinstance(module, Adapted):
            return self.inner.weights(merged(restored(module.block), module.adapter))
        return self.inner.weights(restored(module), lookup=lookup)


def check_targets(config: LoraConfig, model: Transformer) -> None:
    """Raise `UserError` for targets that match nothing, naming those there are."""
    known = [name for name in TARGETS if _weight(model.blocks, name) is not None]
    problems = [
        f"lora.targets: {target!r} matches no weight of this model; choose from {', '.join(known)}"
        for target in config.targets
        if target not in known
    ]
    if not config.targets:
        problems.append(f"lora.targets is empty, so nothing would be trained; choose from {', '.join(known)}")
    if len(set(config.targets)) < len(config.targets):
        problems.append(f"lora.targets = {config.targets} names a weight twice")
    raise_together(problems)


def num_input_dims(axes: tuple[str, ...]) -> int:
    """How many dims of a stacked weight are its input: those before the first name of the other side."""
    sides = [SIDES.get(name, name) for name in axes[1:]]
    return next(i for i, side in enumerate(sides) if side != sides[0])


def merged(block: Block, adapter: Adapter) -> Block:
    """One layer's block with A B added to its targets, in float32."""
    block = jax.tree.map(lambda a: a, block)  # the caller's own stays as it is
    for target in adapter.targets:
        pair = getattr(adapter, target)
        weight = _weight(block, target)
        assert weight is not None
        a, b = pair.a[...], pair.b[...]
        update = jnp.tensordot(a, b, axes=1, precision="highest") * adapter.scale
        owner, name = TARGETS[target]
        setattr(getattr(block, owner), name, weight.replace(weight[...] + update.astype(weight.dtype)))
    return block


def merge(model: Transformer, adapter: Adapter, base: Kind = "float32") -> Transformer:
    """The whole model with the adapter in its weights, float32; for generation, evaluation and export.

    `base` is what the adapter was trained on: a model that was held as codes is rounded to them first.
    """
    whole = rounded(jax.tree.map(lambda a: a, model), base)
    whole.blocks = jax.vmap(merged)(whole.blocks, adapter)
    return whole


def with_adapter(model: Transformer, adapter: Adapter) -> Transformer:
    """The model whose layers carry the adapter; run it with `merging`."""
    whole = jax.tree.map(lambda a: a, model)
    whole.blocks = Adapted(model.blocks, adapter)  # type: ignore[assignment]
    return whole


def merging(sharder: Sharder) -> Any:
    """The sharder for a model `with_adapter`."""
    return _MergingSharder(sharder)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A run that trains an adapter. `built.step(state, batch, base)` and `built.evaluate(adapter, batch, base)`."""

    built: Built
    abstract_base: Any  # the frozen weights as the step takes them: ShapeDtypeStructs with shardings
    frozen: Built  # of the same run without an adapter

    def load(self, weights: Any) -> Transformer:
        """The frozen weights of `jaxpar.weights.Weights`, placed and arranged; codes where `lora.base` asks for them.

        A parameter is held as codes before the next one is read, where the weights are a Hugging Face folder.
        """
        from jaxpar.weights import load_arranged

        kind, read = self.built.config.lora.base, self.frozen.abstract_state.params
        if kind == "float32":
            return load_arranged(self.frozen, weights)
        if self.frozen.pipeline is None:
            arrays = weights.each(read)
        else:
            arrays = iter(named_leaves(load_arranged(self.frozen, weights)).items())
        goals, variables, found = named_leaves(self.abstract_base), dict(named_parameters(read)), {}
        for name, array in arrays:
            if name in goals:
                found[name] = array
                continue
            parts = {part: goals[f"{name}/{part}"].sharding for part in ("codes", "scales")}

            def hold(value: jax.Array, variable: nnx.Variable = variables[name]) -> dict[str, jax.Array]:
                return named_leaves(held(variable.replace(value), kind))

            codes = jax.jit(hold, out_shardings=parts)(array)
            found |= {f"{name}/{part}": value for part, value in jax.block_until_ready(codes).items()}
        return from_named(self.abstract_base, found)

    def bind(self, base: Transformer, step: Callable[..., Any]) -> tuple[Callable[..., Any], Built]:
        """The compiled step without its last argument, and the build whose evaluation lacks it too."""
        evaluate: Any = self.built.evaluate
        bound = dataclasses.replace(self.built, evaluate=lambda *args: evaluate(*args, base))
        return lambda state, batch: step(state, batch, base), bound


def make_tuning(config: Config, devices: Sequence[Any] | None = None) -> Tuning:
    """The build of a run that trains an adapter. Raises `UserError` for targets and meshes that do not fit."""
    frozen = build(dataclasses.replace(config, lora=LoraConfig()), devices)
    layout, abstract_read = frozen.layout, frozen.abstract_state.params
    natural = jax.eval_shape(frozen.to_natural, abstract_read)

    def make(key: jax.Array) -> Any:
        return frozen.from_natural(make_adapter(key, config.lora, natural))

    scale = FIRST_LOSS_SCALE if precision(config.precision).loss_scaling else 1.0
    init = functools.partial(init_state, make_model=make, optimizer=frozen.optimizer, initial_scale=scale)
    abstract = jax.eval_shape(init, jax.random.key(config.seed))
    shardings, placements = state_shardings(abstract, layout)
    policy = precision(config.precision)

    def step(state: Any, batch: Any, base: Transformer) -> Any:
        """`train_step` of the adapter alone; the base is an argument that is never changed."""
        rules = StepRules(
            grad_fn=_grad_fn(config, base, frozen, placements),
            place=lambda grads: layout.place(grads, placements, lambda placed: placed.optimizer),
            optimizer=frozen.optimizer,
            schedule=frozen.schedule,
            clip_norm=config.optimizer.clip_norm,
            dropout=config.model.dropout > 0,
            loss_scaling=policy.loss_scaling,
            seed=config.seed,
        )
        with jax.default_matmul_precision(policy.matmul or "default"):
            return train_step(state, batch, rules)

    def gradients(adapter: Adapter, batch: Any, base: Transformer) -> Any:
        return gradients_alone(_grad_fn(config, base, frozen, placements), adapter, batch)

    def evaluate(adapter: Adapter, batch: Any, base: Transformer) -> Sums:
        with jax.default_matmul_precision(policy.matmul or "default"):
            if frozen.pipeline is not None:
                return frozen.pipeline.on(_frozen(base))[1](adapter, batch)
            return eval_step(with_adapter(base, adapter), batch, merging(layout))

    built = dataclasses.replace(
        frozen,
        config=config,
        gradients=jax.jit(gradients),
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.whole)),
        evaluate=jax.jit(evaluate, out_shardings=layout.whole),
        abstract_state=abstract_with_shardings(abstract, shardings),
        shardings=shardings,
        placements=placements,
    )
    return Tuning(built, _abstract_base(abstract_read, config, layout), frozen)


def _abstract_base(read: Transformer, config: Config, layout: Layout) -> Any:
    """The frozen weights as `lora.base` holds them."""
    kind = config.lora.base
    if kind == "float32":
        return read
    if config.remat != "full":
        log.warning(
            "lora.base = %r with remat = %r: every layer's float weights are kept for the backward pass, which costs "
            "more memory than the codes save; set remat to 'full'",
            kind,
            config.remat,
        )
    abstract = jax.eval_shape(functools.partial(quantised, kind=kind), read)
    placements = layout.placements(abstract)
    shardings = jax.tree.map(
        lambda p: layout.sharding(p.parameter), placements, is_leaf=lambda node: isinstance(node, Placement)
    )
    return abstract_with_shardings(abstract, shardings)


def make_adapter(key: jax.Array, config: LoraConfig, model: Transformer) -> Adapter:
    """A fresh adapter for a model, which may be abstract."""
    return Adapter(config, model, nnx.Rngs(params=key))


def _frozen(base: Transformer) -> Frozen:
    """How the stages of a pipeline put an adapter on the blocks that they hold."""
    return Frozen(
        base, pair=Adapted, merge=lambda blocks, adapter: jax.vmap(merged)(restored(blocks), adapter), sharder=merging,
        restore=restored,
    )  # fmt: skip


def _grad_fn(config: Config, base: Transformer, frozen: Built, placements: Any) -> Any:
    """Gradients of the adapter alone; sums, as every gradient function gives."""
    layout = frozen.layout
    if frozen.pipeline is not None:
        return frozen.pipeline.on(_frozen(base))[0]

    def place(grads: Any) -> Any:
        return layout.place(grads, placements, lambda placed: placed.gradient)

    def one_pass(params: Any, batch: Any, row_keys: jax.Array | None, scale: jax.Array) -> tuple[Sums, Any]:
        def objective(adapter: Adapter) -> tuple[jax.Array, Sums]:
            sums = with_adapter(base, adapter)(batch, merging(layout), row_keys)
            return sums.objective * scale, sums

        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return sums, place(grads)

    return accumulated(one_pass, config.accumulation, place) if config.accumulation > 1 else one_pass


def _weight(blocks: Any, target: str) -> nnx.Variable | None:
    owner, name = TARGETS.get(target, ("", ""))
    return getattr(getattr(blocks, owner, None), name, None)
