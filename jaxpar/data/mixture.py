"""Several sources in set proportions: weights, phases, and what happens when one runs out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Literal

from jaxpar.config import DataConfig
from jaxpar.data.hashing import content_identity
from jaxpar.data.order import MixtureOrder, Phase, whole_weights
from jaxpar.data.rows import JoinedRows, Row, Rows
from jaxpar.errors import UserError, raise_together

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MixedRows:
    """Rows of several sources, with the weights that decide their order. `phases` are (first step, weights)."""

    joined: JoinedRows
    sizes: tuple[int, ...]
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    exhausted: Literal["repeat", "stop_first", "stop_all"]

    @property
    def seq_len(self) -> int:
        """Positions of a row."""
        return self.joined.seq_len

    @property
    def identity(self) -> str:
        """Hash of what the rows hold; the weights are no part of it."""
        return self.joined.identity

    def __len__(self) -> int:
        return len(self.joined)

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        return self.joined.row(index)

    def sample_id(self, index: int) -> str:
        """A name of the row that does not depend on the run."""
        return self.joined.sample_id(index)

    def order(self, *, seed: int, shuffle: bool, repeat: bool, global_batch: int) -> MixtureOrder:
        """The order of a run with this batch size; `repeat` is the business of `exhausted`."""
        if not repeat and self.exhausted == "repeat":
            raise UserError(
                "data.repeat=false contradicts data.exhausted=repeat; use data.exhausted=stop_first or stop_all"
            )
        phases = tuple(Phase(step * global_batch, weights) for step, weights in self.phases)
        return MixtureOrder(self.sizes, phases, seed, shuffle, self.exhausted)


def mix(settings: DataConfig, parts: Sequence[Rows | None], seq_len: int) -> MixedRows:
    """The mixture of a config; `parts` are the rows of its sources in order, None for one without a row."""
    phases = _phases(settings)
    raise_together(
        f"data.sources: {source.name!r} has a positive weight but not one row; remove it or set its weight to 0"
        for source, part, is_drawn in zip(settings.sources, parts, drawn(settings))
        if part is None and is_drawn
    )
    kept = tuple(part for part in parts if part is not None)
    for step, weights in phases:
        if not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
            shares = ", ".join(f"{s.name} {w / sum(weights):.4f}" for s, w in zip(settings.sources, weights))
            log.info("mixture weights from step %d are scaled to sum to 1: %s", step, shares)
    return MixedRows(
        joined=JoinedRows(kept, seq_len, content_identity([part.identity for part in kept])),
        sizes=tuple(0 if part is None else len(part) for part in parts),
        phases=tuple((step, whole_weights(weights)) for step, weights in phases),
        exhausted=settings.exhausted,
    )


def drawn(settings: DataConfig) -> list[bool]:
    """Whether each source has a weight above 0 at any time."""
    phases = _phases(settings)
    return [any(weights[number] > 0 for _, weights in phases) for number in range(len(settings.sources))]


def problems(settings: DataConfig) -> list[str]:
    """What is wrong with the mixture settings of a config."""
    found: list[str] = []
    names = [source.name for source in settings.sources]
    if not names:
        found.append('data.sources: empty, but data.source is "mixture"; want one entry per source')
    found += [
        f"data.sources: the name {name!r} occurs twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    found += [
        f"data.sources: {source.name!r} has the source {source.source!r}; want files, tokens, megatron, raw or"
        " python_stdlib"
        for source in settings.sources
        if source.source not in ("files", "tokens", "megatron", "raw", "python_stdlib")
    ]
    if any(source.source == "raw" for source in settings.sources) and settings.raw_dtype is None:
        found.append('data.raw_dtype: unset; a headerless file needs "uint16" or "uint32"')
    if not settings.phases:
        found += _weight_problems("data.sources", [source.weight for source in settings.sources])
        return found
    steps = [step for step, _ in settings.phases]
    if steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        found.append(f"data.phases: first steps {steps}; want rising steps that start at 0")
    for step, weights in settings.phases:
        if len(weights) != len(names):
            found.append(f"data.phases: {len(weights)} weights at step {step}; want one for each of {names}")
        found += _weight_problems(f"data.phases at step {step}", weights)
    return found


def _weight_problems(key: str, weights: Sequence[float]) -> list[str]:
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        return [f"{key}: weights {list(weights)}; want numbers of 0 or more"]
    if weights and not any(weights):
        return [f"{key}: all weights are 0; want at least one above 0"]
    return []


def _phases(settings: DataConfig) -> tuple[tuple[int, tuple[float, ...]], ...]:
    if settings.phases:
        return settings.phases
    return ((0, tuple(source.weight for source in settings.sources)),)
