"""Which rows of a global batch each process gets; pure arithmetic on what its devices hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process gets of a global batch: the rows at `places`, of which it reads those in `needed`.

    `groups` split the places of a batch evenly; processes whose devices hold the same rows have the same group.
    """

    groups: tuple[tuple[int, ...], ...]
    group: int
    needed: frozenset[int]

    @property
    def places(self) -> tuple[int, ...]:
        """Places in the global batch of this process's rows, rising."""
        return self.groups[self.group]

    @property
    def global_batch(self) -> int:
        """Rows of all groups."""
        return len(self.groups) * len(self.places)

    def dealt(self) -> list[int]:
        """The places in the order in which they are dealt out, one to each group in turn: [global batch]."""
        return [place for turn in zip(*self.groups) for place in turn]


def share_of(process: int, held: Mapping[int, Iterable[range]], global_batch: int) -> Share:
    """The share of `process`, where `held` tells for every process which places its devices hold.

    Most meshes give groups that split the batch evenly. Where they overlap or differ in size (three devices per process
    under a tensor degree of two), there is one group of all rows, and those that a process does not hold are padding.
    """
    places = {blocks: _places(blocks) for blocks in map(frozenset, held.values())}
    groups = tuple(sorted(set(places.values())))
    mine = places[frozenset(held[process])]
    even = len({len(group) for group in groups}) == 1
    if not even or sorted(place for group in groups for place in group) != list(range(global_batch)):
        groups = (tuple(range(global_batch)),)
    return Share(groups, groups.index(mine) if len(groups) > 1 else 0, frozenset(mine))


def _places(blocks: Iterable[range]) -> tuple[int, ...]:
    return tuple(sorted({place for block in blocks for place in block}))
