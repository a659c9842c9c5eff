"""The project's own Transformer on the pipeline executor: from a config to a gradient function of sums.

A pipelined run keeps its parameters arranged as `[stage, chunk, layer, ...]` (see `arrange`) and its vocabulary split
over `stage`; everything else, from the optimizer to ZeRO, sees an ordinary tree of named, sharded arrays.

A model whose leading layers have no experts has two stacks of layers, and every chunk has slots for both. Slots of the
other kind are skipped, not computed for nothing (see `optional`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.config import Config
from jaxpar.errors import UserError, raise_together
from jaxpar.models.loss import Sums
from jaxpar.models.transformer import Transformer, num_leading
from jaxpar.names import is_multiplied
from jaxpar.pipeline import vocabulary
from jaxpar.pipeline.arrange import from_stages, to_stages
from jaxpar.pipeline.assign import Assignment, assign_layers, layer_costs
from jaxpar.pipeline.executor import evaluate, value_and_grad
from jaxpar.pipeline.generators import named
from jaxpar.pipeline.inside import InsideLayout, inside
from jaxpar.pipeline.interface import STAGE, Params, Side, Totals
from jaxpar.pipeline.optional import optional
from jaxpar.pipeline.schedule import Schedule
from jaxpar.pipeline.simulate import Costs, choose
from jaxpar.pipeline.split import StageOut
from jaxpar.sharding import Layout, Rules, map_parameters
from jaxpar.tree import from_named, named_leaves
from jaxpar.validate import mixed_stages

Batch = Mapping[str, jax.Array]
log = logging.getLogger(__name__)
# zb_h1 is left out: it needs unrolled layers and stored residuals, which is for the user to decide
STACKS = {"leading": "leading", "blocks": "layer"}  # a model's stacks in its order, and the axis that counts the layers
AUTO_ONE_CHUNK, AUTO_CHUNKS = ("gpipe", "1f1b", "fused"), ("fused", "interleaved")


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    """A model without gradients, arranged, and how a stack of its blocks and trained parameters make one to run.

    `pair(blocks, params)` is scanned with `sharder(layout)`; `merge(blocks, params)` are ordinary blocks at once;
    `restore` gives float weights.
    """

    model: Transformer
    pair: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    sharder: Callable[[Any], Any]
    restore: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipelined model.

    grads(params, batch, row_keys, scale) -> (Sums, float32 gradients), evaluate(params, batch) -> Sums: `params` are
    arranged, batches are [B, T] as everywhere. to_stages and from_stages turn any tree of parameters, gradients or
    optimizer state; `layout` is the run's layout with the vocabulary split over the stages as well.
    """

    schedule: Schedule
    assignment: Assignment
    stacks: Mapping[str, Assignment]  # the assignment of each stack, by the axis that counts its layers
    layout: Layout
    grads: Callable[[Transformer, Batch, jax.Array | None, jax.Array], tuple[Sums, Transformer]]
    evaluate: Callable[[Transformer, Batch], Sums]
    parts: _Parts

    def on(self, frozen: Frozen) -> tuple[Callable[..., tuple[Sums, Any]], Callable[[Any, Batch], Sums]]:
        """`grads` and `evaluate` of parameters that work on a frozen model."""
        parts = dataclasses.replace(self.parts, frozen=frozen)
        return parts.grads(), parts.evaluate()

    def to_stages(self, tree: Any) -> Any:
        """Natural -> arranged."""
        return to_stages(tree, self.stacks)

    def from_stages(self, tree: Any) -> Any:
        """Arranged -> natural."""
        return from_stages(tree, self.stacks)


def make_pipeline(config: Config, layout: Layout, model: Transformer) -> Pipeline:
    """The pipeline of a config. `model` has natural leaves and may be abstract (`jax.eval_shape`).

    Raises `UserError` for a schedule or sizes that do not fit. The layers of every stage are logged.
    """
    stages = layout.mesh.shape[STAGE]
    schedule = pick_schedule(config, stages)
    if model.leading is not None:
        raise_together(mixed_stages(config, splits_weights=schedule.splits_weights))
    assignment = assign_layers(layer_costs(config.model, config.seq_len), stages=stages, chunks=schedule.chunks)
    log.info("pipeline: %s, %d microbatches\n%s", schedule.name, schedule.microbatches, assignment.table())
    stored = _with_rules(layout, {"vocab": (STAGE, *layout.rules.axes("vocab"))})
    leading = num_leading(config.model)
    stacks = {"layer": assignment.part(leading, config.model.num_layers)}
    if leading:
        stacks = {"leading": assignment.part(0, leading), **stacks}
    parts = _Parts.make(config, stored, layout, model, schedule, stacks)
    return Pipeline(schedule, assignment, stacks, stored, parts.grads(), parts.evaluate(), parts)


def pick_schedule(config: Config, stages: int) -> Schedule:
    """The schedule that `config.pipeline` names; "auto" is the cheapest by the simulator."""
    settings = config.pipeline
    microbatches = settings.microbatches or 2 * stages
    if config.global_batch % microbatches:
        raise UserError(
            f"global_batch={config.global_batch} does not divide into pipeline.microbatches={microbatches}; "
            "set one to a multiple of the other"
        )
    if settings.schedule != "auto":
        return named(settings.schedule, stages=stages, microbatches=microbatches, chunks=settings.chunks)
    costs = Costs(recompute=1.0 if config.remat == "full" else 0.0)
    names = AUTO_ONE_CHUNK if settings.chunks == 1 else AUTO_CHUNKS
    choice = choose(stages, microbatches, costs=costs, chunks=(settings.chunks,), names=names)
    log.info("pipeline.schedule='auto':\n%s", choice.table())
    return choice.schedule


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """The three functions of the model, cut for the executor."""

    template: Transformer  # only for its methods: its leaves are never read
    schedule: Schedule
    stacks: Mapping[str, Assignment]
    stored: Layout
    inside: InsideLayout  # what the functions see: without `stage`, and without axes that split rows by hand
    batch_axes: tuple[str, ...]
    casts_first: bool
    microbatches: int
    frozen: Frozen | None = None

    @staticmethod
    def make(
        config: Config,
        stored: Layout,
        layout: Layout,
        model: Transformer,
        schedule: Schedule,
        stacks: Mapping[str, Assignment],
    ) -> _Parts:
        """Choose the batch axes and cut one chunk into its pieces."""
        # Over axes that hold whole gradients one sum per step does.
        whole = ("replica", "data") if layout.zero <= 1 else ("replica",)
        batch_axes = tuple(axis for axis in whole if layout.mesh.shape[axis] > 1)
        template = jax.tree.map(lambda a: a, model)
        if schedule.splits_weights:  # a scan's equation gives dx and dparams together
            template.config = dataclasses.replace(model.config, scan_layers=False)
        if len(stacks) > 1:
            template.remat = "none"  # the slots are what recomputes
        return _Parts(
            template=template,
            schedule=schedule,
            stacks=stacks,
            stored=stored,
            inside=inside(layout, by_hand=batch_axes),
            batch_axes=batch_axes,
            # Without recomputation the cast weights of every microbatch in flight would be kept; cast outside the
            # scan over layers they depend on parameters alone, and are computed again.
            casts_first=config.remat in ("none", "attention"),
            microbatches=schedule.microbatches,
        )

    def grads(self) -> Callable[[Transformer, Batch, jax.Array | None, jax.Array], tuple[Sums, Transformer]]:
        """The gradient function of the run, as `step.GradFn`."""

        def run(
            params: Transformer, batch: Batch, row_keys: jax.Array | None, scale: jax.Array
        ) -> tuple[Sums, Transformer]:
            """Split, run the schedule, put the gradients where ZeRO wants them."""
            ends, blocks = self.split_ends(params)
            function = value_and_grad(
                self.stage, self.embed, self.head, self.schedule, self.stored.mesh,
                constants=self.constants(), ends_specs=_stage_specs(ends), batch_axes=self.batch_axes,
                constrain=self.constrain, constrain_grads=self.constrain_grads,
            )  # fmt: skip
            totals, grads = function(Params(ends, blocks), self.split(batch, row_keys, scale))
            if self.frozen is None:
                leaves = named_leaves(grads.ends) | named_leaves(grads.stages)
            else:
                leaves = named_leaves(grads.stages["blocks"])
            grads = from_named(params, leaves)
            return _sums(totals), self.stored.place(grads, self.stored.placements(params), lambda p: p.gradient)

        return run

    def evaluate(self) -> Callable[[Transformer, Batch], Sums]:
        """The forward alone, as loss sums."""

        def run(params: Transformer, batch: Batch) -> Sums:
            ends, blocks = self.split_ends(params)
            function = evaluate(
                self.stage, self.embed, self.head, self.stored.mesh,
                microbatches=self.microbatches, chunks=self.schedule.chunks, constants=self.constants(),
                ends_specs=_stage_specs(ends), batch_axes=self.batch_axes, constrain=self.constrain,
            )  # fmt: skip
            return _sums(function(Params(ends, blocks), self.split(batch, None, jnp.float32(1.0))))

        return run

    def split_ends(self, params: Any) -> tuple[Transformer, dict[str, Any]]:
        """What embedding and head use, and what the stages are trained in, by stack."""
        if self.frozen is None:
            return _without_stacks(params), {name: getattr(params, name) for name in self.names}
        return self.frozen.restore(_without_stacks(self.frozen.model)), {"blocks": params}

    @property
    def names(self) -> list[str]:
        """The model's stacks in its order."""
        return [name for name, axis in STACKS.items() if axis in self.stacks]

    def embed(self, ends: Transformer, batch: Batch) -> jax.Array:
        ends = ends if self.frozen is None else jax.lax.stop_gradient(ends)
        return vocabulary.embed(ends, batch, self.inside, batch.get("row_keys"))

    def head(self, ends: Transformer, y: jax.Array, batch: Batch) -> tuple[jax.Array, Sums]:
        ends = ends if self.frozen is None else jax.lax.stop_gradient(ends)
        sums = vocabulary.head_loss(ends, y, batch["targets"], batch["weights"], self.inside)
        return sums.objective * batch["scale"], sums

    def stage(self, stacks: dict[str, Any], x: jax.Array, side: Side) -> StageOut:
        """One chunk of layers."""
        shared = self.template.side(side.batch, side.batch.get("row_keys"))
        aux: dict = {}
        for name in self.names:
            x, aux = self._run(name, stacks.get(name), side.constants[name], x, shared)  # leading layers have no sums
        loss = aux.get("loss", jnp.zeros(())) * side.batch["scale"]
        return StageOut(x, loss.astype(jnp.float32), aux)

    def _run(self, name: str, params: Any, constants: Any, x: jax.Array, shared: Any) -> tuple[jax.Array, dict]:
        """The chunk's slots of one stack; those without a layer pass x on."""
        if len(self.stacks) > 1:
            return self._run_optional(params, constants, x, shared)
        traits, live, frozen = constants
        blocks = self._paired(params, frozen)
        if self.casts_first:
            blocks = map_parameters(self._cast, blocks)
        if self.stacks[STACKS[name]].is_even:
            return self.template.run_blocks(blocks, traits, x, shared, self._sharder)
        return self._run_live(blocks, traits, live, x, shared)

    def _paired(self, params: Any, frozen: Any) -> Any:
        """Blocks to run: the trained ones, or frozen ones with what is trained in them."""
        if self.frozen is None:
            return params
        if params is None:
            return frozen
        return (self.frozen.merge if self.casts_first else self.frozen.pair)(frozen, params)

    @property
    def _sharder(self) -> Any:
        return self.inside if self.frozen is None else self.frozen.sharder(self.inside)

    def _run_live(self, blocks: Any, traits: Any, live: jax.Array, x: jax.Array, shared: Any) -> tuple[jax.Array, dict]:
        """`run_blocks` over slots of which some are padding.

        Padding is computed and thrown away: in lock-step the other stages' layers take that time anyway, and a
        conditional would keep a copy of the weights for the backward pass.
        """

        def slot(x: jax.Array, xs: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, dict]:
            block, own, is_live = xs
            y, aux = self.template.run_blocks(block, own, x, shared, self._sharder)
            return jnp.where(is_live, y, x), jax.tree.map(lambda a: jnp.where(is_live, a, jnp.zeros_like(a)), aux)

        # Stacks of one layer made out here: made in the scan, the weights would be kept for every microbatch in flight.
        blocks, traits = jax.tree.map(lambda a: a[:, None], (blocks, traits))
        if self.template.config.scan_layers:
            x, aux = jax.lax.scan(slot, x, (blocks, traits, live))
            return x, jax.tree.map(lambda a: a.sum(0), aux)
        total: dict = {}
        for i in range(len(live)):
            x, aux = slot(x, jax.tree.map(lambda a, i=i: a[i], (blocks, traits, live)))
            total = jax.tree.map(jnp.add, total, aux) if total else aux
        return x, total

    def _run_optional(self, params: Any, constants: Any, x: jax.Array, shared: Any) -> tuple[jax.Array, dict]:
        """`run_blocks` over slots of which some stages skip many."""
        traits, live, frozen = constants

        def layer(params: Any, x: jax.Array, rest: Any) -> tuple[jax.Array, dict]:
            frozen, own, shared = rest
            return self.template.run_blocks(self._paired(params, frozen), own, x, shared, self._sharder)

        def slot(x: jax.Array, xs: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, dict]:
            params, (frozen, own), is_live = xs
            return optional(layer)(is_live, params, x, (frozen, own, shared))

        params, rest = jax.tree.map(lambda a: a[:, None], (params, (frozen, traits)))  # as in _run_live
        x, aux = jax.lax.scan(slot, x, (params, rest, live))
        return x, jax.tree.map(lambda a: a.sum(0), aux)

    def constants(self) -> dict[str, tuple[dict[str, np.ndarray], np.ndarray, Any]]:
        """By stack: traits of the layer in every slot, which slots hold one, frozen blocks; [stages, chunks, slots]."""
        out, first = {}, 0
        for name in self.names:
            assignment = self.stacks[STACKS[name]]
            layers = assignment.layers()
            traits = {
                trait: values[first + np.maximum(layers, 0)] for trait, values in self.template.layer_traits().items()
            }
            out[name] = traits, layers >= 0, () if self.frozen is None else getattr(self.frozen.model, name)
            first += assignment.num_layers
        return out

    def split(self, batch: Batch, row_keys: jax.Array | None, scale: jax.Array) -> dict[str, jax.Array]:
        """[B, T] -> [microbatches, rows, T]: each takes every M-th row, so that the rows of a device stay on it."""
        num = self.microbatches
        parts = {}
        for name, a in self.stored.ordered(batch).items():
            a = jnp.moveaxis(a.reshape(a.shape[0] // num, num, *a.shape[1:]), 1, 0)
            spec = self.stored.rules.spec(("batch", "seq"))
            parts[name] = jax.lax.with_sharding_constraint(a, self.stored.sharding(P(None, *spec)))
        if row_keys is not None:
            parts["row_keys"] = jnp.moveaxis(row_keys.reshape(-1, num), 1, 0)
        return parts | {"scale": jnp.broadcast_to(scale.astype(jnp.float32), (num,))}

    def constrain(self, x: jax.Array) -> jax.Array:
        return self.inside.activation(x, "batch", "residual_seq", "embed")

    def constrain_grads(self, grads: Params) -> Params:
        """Accumulators where ZeRO wants the gradients; the leaves of stages are `[chunks, slots, ...]` here."""

        def place(variable: nnx.Variable) -> nnx.Variable:
            value = variable[...]
            axes = variable.axes[len(variable.axes) - value.ndim :]
            spec = self.inside.placement(axes, value.shape, "gradient").gradient
            context = jax.sharding.get_abstract_mesh()
            sharding = jax.sharding.NamedSharding(context, spec)
            return variable.replace(jax.lax.with_sharding_constraint(value, sharding))

        return map_parameters(place, grads)

    def _cast(self, variable: nnx.Variable) -> nnx.Variable:
        if not is_multiplied(variable.axes):
            return variable
        return variable.replace(variable[...].astype(self.inside.compute_dtype))


def _with_rules(layout: Layout, changed: Mapping[str, tuple[str, ...]]) -> Layout:
    return dataclasses.replace(layout, rules=Rules({**layout.rules.table, **changed}))


def _without_stacks(params: Transformer) -> Transformer:
    ends = jax.tree.map(lambda a: a, params)
    for name in STACKS:
        delattr(ends, name)
    return ends


def _stage_specs(ends: Transformer) -> Transformer:
    """How the executor splits embedding and head by hand: the vocabulary over the stages, nothing else."""

    def spec(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(P(*(STAGE if name == "vocab" else None for name in variable.axes)))

    return map_parameters(spec, ends)


def _sums(totals: Totals) -> Sums:
    return totals.head.with_aux(totals.stages)
