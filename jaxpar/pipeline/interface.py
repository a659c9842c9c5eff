"""The types that users of the executor and its machine share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.pipeline.schedule import Schedule
from jaxpar.pipeline.split import StageOut

STAGE = "stage"
Array = jax.Array
Row = Mapping[str, Array]  # one tick's entries of the program's columns, for this stage
EmbedFn = Callable[[Any, Any], Array]
HeadFn = Callable[[Any, Array, Any], tuple[Array, Any]]


class Params(NamedTuple):
    """Parameters of a pipeline: what embedding and head use (shared leaves once), and leaves [stages, chunks, ...]."""

    ends: Any
    stages: Any


class Side(NamedTuple):
    """What a stage function gets besides parameters and activation.

    batch: the microbatch's slice of every leaf of the batch. constants: the chunk's slice of `constants`.
    """

    batch: Any
    constants: Any


class Totals(NamedTuple):
    """Sums over all microbatches: the head's loss, the stages' losses, and the further totals of both."""

    loss: Array
    stage_loss: Array
    head: Any
    stages: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Spec:
    """The functions and the static choices of one pipeline."""

    stage_fn: Callable[[Any, Array, Side], StageOut]
    embed_fn: EmbedFn
    head_fn: HeadFn
    schedule: Schedule
    mesh: Mesh
    constants: Any
    ends_specs: Any
    batch_axes: tuple[str, ...]
    constrain: Callable[[Array], Array]
    constrain_grads: Callable[[Params], Params]
