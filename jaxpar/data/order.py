"""Which row stands at a global index: a pure function of (seed, index), the same on every mesh and process count.

Nothing is replayed to start in the middle of a run: any index is answered at once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, Protocol

import numpy as np

from jaxpar.data.hashing import mix64
from jaxpar.errors import UserError

MAX_ROWS = 1 << 32  # index_shuffle works on 32 bits


SMALL_ROWS = 1 << 14  # below this index_shuffle gets slow: it walks cycles of 2^16


@functools.lru_cache(maxsize=64)
def _small_permutation(num_rows: int, key: int) -> np.ndarray:
    """Row numbers sorted by a 64-bit mix of key and number."""
    return np.argsort(mix64(np.arange(num_rows, dtype=np.uint64) + np.uint64(key << 32)), kind="stable")


class Order(Protocol):
    """The row numbers of a run."""

    @property
    def length(self) -> int | None:
        """Rows until the data ends; None: never."""
        ...

    def row(self, index: int) -> int:
        """Row number at a global index."""
        ...


@dataclasses.dataclass(frozen=True)
class SourceOrder:
    """One source: every row once per epoch, each epoch in an order of its own when shuffled."""

    num_rows: int
    seed: int
    shuffle: bool
    repeat: bool
    stream: str = ""  # keeps the shuffles of a mixture's sources apart

    def __post_init__(self) -> None:
        if not 0 < self.num_rows < MAX_ROWS:
            raise UserError(f"{self.num_rows} rows; want 1 to 2^32 - 1")

    @property
    def length(self) -> int | None:
        """Rows until the data ends; None: never."""
        return None if self.repeat else self.num_rows

    def row(self, index: int) -> int:
        """Row number at a global index."""
        epoch, place = divmod(index, self.num_rows)
        if not self.shuffle or self.num_rows == 1:
            return place
        key = hashlib.blake2b(f"{self.seed}/{self.stream}/{epoch}".encode(), digest_size=4).digest()
        key_number = int.from_bytes(key, "little")
        if self.num_rows <= SMALL_ROWS:
            return int(_small_permutation(self.num_rows, key_number)[place])
        from grain.experimental import index_shuffle

        return index_shuffle(place, self.num_rows - 1, key_number, 4)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Weights of the sources from a global index on."""

    start: int
    weights: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """Rows of several sources in exact proportions.

    After n draws of a phase every source was drawn its share of n, to within one draw per source; over any run of
    draws in which all shares are whole numbers the counts are exact. Weights may change at given indices (`phases`).
    """

    sizes: tuple[int, ...]
    phases: tuple[Phase, ...]
    seed: int
    shuffle: bool
    exhausted: Literal["repeat", "stop_first", "stop_all"]

    @functools.cached_property
    def _orders(self) -> tuple[SourceOrder | None, ...]:
        return tuple(
            SourceOrder(size, self.seed, self.shuffle, repeat=True, stream=str(number)) if size else None
            for number, size in enumerate(self.sizes)
        )

    @functools.cached_property
    def _drawn(self) -> tuple[tuple[int, ...], ...]:
        """Draws of every source before each phase."""
        drawn = [tuple(0 for _ in self.sizes)]
        for phase, following in zip(self.phases, self.phases[1:]):
            counts = share_counts(phase.weights, following.start - phase.start)
            drawn.append(tuple(before + count for before, count in zip(drawn[-1], counts)))
        return tuple(drawn)

    @functools.cached_property
    def length(self) -> int | None:
        """Rows until the data ends; None: never.

        stop_first: up to the draw that would need a row a second time. stop_all: until every source that can still be
        drawn was used up once; those that run out earlier start again.
        """
        if self.exhausted == "repeat":
            return None
        ends = [self._used_up(source) for source in range(len(self.sizes))]
        known = [end for end in ends if end is not None]
        return min(known) if self.exhausted == "stop_first" else max(known)

    def counts_before(self, index: int) -> tuple[int, ...]:
        """Draws of every source among the first `index`."""
        return self._counts(self._phase(index), index)

    def draw(self, index: int) -> tuple[int, int]:
        """(source, how often it was drawn before) at a global index."""
        number = self._phase(index)
        before, after = self._counts(number, index), self._counts(number, index + 1)
        source = next(source for source, (b, a) in enumerate(zip(before, after)) if a > b)
        return source, before[source]

    def row(self, index: int) -> int:
        """Row number at a global index; rows of the sources are numbered one source after the other."""
        source, place = self.draw(index)
        order = self._orders[source]
        assert order is not None
        return sum(self.sizes[:source]) + order.row(place)

    def _phase(self, index: int) -> int:
        return bisect.bisect_right([phase.start for phase in self.phases], index) - 1

    def _used_up(self, source: int) -> int | None:
        """Draws until a source is used up, or for stop_first until it would start again; None: it never is."""
        wanted = self.sizes[source] + (1 if self.exhausted == "stop_first" else 0)
        for number, phase in enumerate(self.phases):
            last = number + 1 == len(self.phases)
            reached = None if last else self._drawn[number + 1][source]
            if (reached is None and phase.weights[source] > 0) or (reached is not None and reached >= wanted):
                return self._search(source, wanted, number) - (1 if self.exhausted == "stop_first" else 0)
        return None

    def _search(self, source: int, wanted: int, number: int) -> int:
        """The fewest draws of which `wanted` are from `source`; phase `number` is where that happens."""
        low = self.phases[number].start  # fewer than wanted
        step = 1
        while self._counts(number, low + step)[source] < wanted:
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._counts(number, middle)[source] < wanted:
                low = middle
            else:
                high = middle
        return high

    def _counts(self, number: int, draws: int) -> tuple[int, ...]:
        """Draws of every source among the first `draws`, the last of them in phase `number`."""
        phase = self.phases[number]
        return tuple(b + c for b, c in zip(self._drawn[number], share_counts(phase.weights, draws - phase.start)))


def share_counts(weights: Sequence[int], draws: int) -> tuple[int, ...]:
    """How many of `draws` draws each source gets; grows by exactly one source when `draws` grows by one.

    The first source against all others takes its rounded share, then the second against the rest of the rest, and so
    on, all in whole numbers.
    """
    counts: list[int] = []
    left, total = draws, sum(weights)
    for weight in weights:
        count = (2 * left * weight + total) // (2 * total) if weight else 0
        counts.append(count)
        left -= count
        total -= weight
    return tuple(counts)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The exact proportions of the decimal numbers written, as the smallest whole numbers."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)
