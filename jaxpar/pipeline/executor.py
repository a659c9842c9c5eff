"""One SPMD program that runs any schedule: forward, backward and gradient accumulation in a scan over ticks.

Only the mesh axis `stage` is manual (and, if asked, axes that split the batch); every other axis stays automatic
inside the stage function. In one tick a stage runs its B, W and F, each under `lax.cond`, so that idle slots cost
nothing; then all stages exchange once. The schedule is data: its tables are what the scan reads.

Three rules keep it correct on every schedule.
- All stages take part in the embedding and in the head, under predicates that are the same everywhere; collectives
  over `stage` appear nowhere else. A stage-dependent branch may hold collectives inside one stage, never a permute.
- The objective is the sum over devices of what each contributes: the head's loss counts on the last stage only. So a
  plain `lax.psum` in `embed_fn` or `head_fn` has the right gradient, and one sum at the end completes the gradients
  of parameters that every stage holds.
- Nothing is sent before the tick's actions are done, or a tick costs more than its dearest stage. The order is held by
  data dependencies, because barriers are gone before XLA schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.errors import UserError, raise_together
from jaxpar.pipeline.generators import forward_only
from jaxpar.pipeline.interface import STAGE, Array, EmbedFn, HeadFn, Params, Side, Spec, Totals
from jaxpar.pipeline.machine import Machine
from jaxpar.pipeline.schedule import Schedule
from jaxpar.pipeline.slots import allocate
from jaxpar.pipeline.split import StageOut

EVERYWHERE = P()  # the spec of what every stage holds


def value_and_grad(
    stage_fn: Callable[[Any, Array, Side], StageOut | Array],
    embed_fn: EmbedFn,
    head_fn: HeadFn,
    schedule: Schedule,
    mesh: Mesh,
    *,
    constants: Any = (),
    ends_specs: Any = EVERYWHERE,
    batch_axes: Sequence[str] = (),
    constrain: Callable[[Array], Array] = lambda x: x,
    constrain_grads: Callable[[Params], Params] = lambda grads: grads,
) -> Callable[[Params, Any], tuple[Totals, Params]]:
    """`(params, batch) -> (totals, float32 gradients)` of the summed loss, run by `schedule` over the axis `stage`.

    Args:
        stage_fn: `(params, x, side) -> y` or `StageOut`, for one chunk: leaves of `params` are `[...]` of
            `[stages, chunks, ...]`, y has the type of x. No collective over `stage`, no collective-permute.
        embed_fn: `(ends, batch) -> x`, on all stages at once. It may use the axis `stage` (a split vocabulary); the
            result must be the same on all stages.
        head_fn: `(ends, y, batch) -> (loss, totals)`: the microbatch's summed loss, float32, and a tree of further
            sums that are not differentiated. As `embed_fn`.
        schedule: from `jaxpar.pipeline.named`, or a table of your own.
        mesh: has an axis `stage` of `schedule.stages`.
        constants: tree of `[stages, chunks, ...]` arrays without gradient, handed to `stage_fn` in `side`.
        ends_specs: `PartitionSpec`s (a prefix tree) of `params.ends` over `stage` alone.
        batch_axes: mesh axes over which the rows of a microbatch are split by hand. Inside the functions they do not
            exist; gradients are summed over them once per step instead of once per microbatch. For parameters that
            are not split over them.
        constrain: places an activation on the automatic axes.
        constrain_grads: places the gradient accumulators; the leaves of `stages` are `[chunks, ...]` there.

    Leaves of `batch` are `[microbatches, rows, ...]`, or `[microbatches]` for a number per microbatch. Call it in
    `jit`. Raises `UserError` for sizes that do not fit.

    Example::

        schedule = jaxpar.pipeline.fused(stages=4, microbatches=8)
        step = jax.jit(jaxpar.pipeline.value_and_grad(
            lambda w, x, side: x + jnp.tanh(x @ w),                              # w [D, D]: one layer per stage
            lambda ends, batch: ends["table"][batch["tokens"]],
            lambda ends, y, batch: (cross_entropy(y @ ends["head"], batch["targets"]).sum(), ()),
            schedule, mesh))
        totals, grads = step(Params({"table": table, "head": head}, w), batch)   # w [4, 1, D, D], tokens [8, 2, T]
    """
    if not schedule.has_backward:
        raise UserError(f"schedule {schedule.name!r} has no backward; use jaxpar.pipeline.evaluate")
    spec = _make_spec(stage_fn, embed_fn, head_fn, schedule, mesh, constants, ends_specs, batch_axes)
    return _bind(dataclasses.replace(spec, constrain=constrain, constrain_grads=constrain_grads))


def evaluate(
    stage_fn: Callable[[Any, Array, Side], StageOut | Array],
    embed_fn: EmbedFn,
    head_fn: HeadFn,
    mesh: Mesh,
    *,
    microbatches: int,
    chunks: int = 1,
    constants: Any = (),
    ends_specs: Any = EVERYWHERE,
    batch_axes: Sequence[str] = (),
    constrain: Callable[[Array], Array] = lambda x: x,
) -> Callable[[Params, Any], Totals]:
    """`(params, batch) -> totals`: the forward alone, with the functions that `value_and_grad` takes."""
    schedule = forward_only(mesh.shape[STAGE], microbatches, chunks)
    spec = _make_spec(stage_fn, embed_fn, head_fn, schedule, mesh, constants, ends_specs, batch_axes)
    both = _bind(dataclasses.replace(spec, constrain=constrain))
    return lambda params, batch: both(params, batch)[0]


def _make_spec(
    stage_fn: Callable[[Any, Array, Side], StageOut | Array],
    embed_fn: EmbedFn,
    head_fn: HeadFn,
    schedule: Schedule,
    mesh: Mesh,
    constants: Any,
    ends_specs: Any,
    batch_axes: Sequence[str],
) -> Spec:
    if mesh.shape.get(STAGE) != schedule.stages:
        raise UserError(
            f"schedule {schedule.name!r} has {schedule.stages} stages, but the mesh has {STAGE}={mesh.shape.get(STAGE)}"
        )

    def full_stage_fn(params: Any, x: Array, side: Side) -> StageOut:
        out = stage_fn(params, x, side)
        return out if isinstance(out, StageOut) else StageOut(out, jnp.zeros((), jnp.float32))

    same = lambda tree: tree  # noqa: E731
    return Spec(full_stage_fn, embed_fn, head_fn, schedule, mesh, constants, ends_specs, tuple(batch_axes), same, same)


def _bind(spec: Spec) -> Callable[[Params, Any], tuple[Totals, Params]]:
    program = allocate(spec.schedule)
    params_specs = Params(spec.ends_specs, P(STAGE))

    def rows_spec(leaf: Array) -> P:
        return P(None, spec.batch_axes or None) if leaf.ndim > 1 else P()

    def body(params: Params, constants: Any, batch: Any) -> tuple[Totals, Params]:
        local = Params(params.ends, jax.tree.map(lambda a: a[0], params.stages))
        machine = Machine(spec, program, local, jax.tree.map(lambda a: a[0], constants), batch)
        return machine.run()

    grads_specs = params_specs if spec.schedule.has_backward else P()

    def call(params: Params, batch: Any) -> tuple[Totals, Params]:
        """Totals and gradients of one global batch."""
        _check_sizes(spec.schedule, params, spec.constants, batch)
        mapped = jax.shard_map(
            body,
            mesh=spec.mesh,
            axis_names={STAGE, *spec.batch_axes},
            in_specs=(params_specs, P(STAGE), jax.tree.map(rows_spec, batch)),
            out_specs=(P(), grads_specs),
            check_vma=False,  # the types of what varies over stages would have to reach into every model's scans
        )
        return mapped(params, spec.constants, batch)

    return call


def _check_sizes(schedule: Schedule, params: Params, constants: Any, batch: Any) -> None:
    """Leading dims as the schedule wants them, floating parameters."""
    problems = []
    layout = (schedule.stages, schedule.chunks)
    for what, tree, lead in (
        ("params.stages", params.stages, layout),
        ("constants", constants, layout),
        ("batch", batch, (schedule.microbatches,)),
    ):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if tuple(leaf.shape[: len(lead)]) != lead:
                name = what + jax.tree_util.keystr(path)
                problems.append(
                    f"{name} has shape {list(leaf.shape)}; schedule {schedule.name!r} wants {list(lead)} first"
                )
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = "params" + jax.tree_util.keystr(path)
            problems.append(f"{name} is {leaf.dtype}; parameters are floating, other arrays belong in `constants`")
    raise_together(problems)
