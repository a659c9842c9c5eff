"""The global order is a pure function of seed and index, and mixtures keep their proportions exactly."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from jaxpar.data.order import MixtureOrder, Phase, SourceOrder, share_counts, whole_weights
from jaxpar.errors import UserError


def mixture(sizes, weights, exhausted="repeat", shuffle=True, phases=None):
    phases = phases or [(0, weights)]
    return MixtureOrder(tuple(sizes), tuple(Phase(s, whole_weights(w)) for s, w in phases), 0, shuffle, exhausted)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 20_000])
def test_every_epoch_is_a_permutation_of_its_own(size):
    order = SourceOrder(size, seed=3, shuffle=True, repeat=True)
    epochs = [[order.row(e * size + i) for i in range(size)] for e in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size >= 100:
        assert epochs[0] != epochs[1] != epochs[2]
        other = SourceOrder(size, seed=4, shuffle=True, repeat=True)
        assert epochs[0] != [other.row(i) for i in range(size)]
        # The next seed's first epoch is not this seed's second.
        assert epochs[1] != [other.row(i) for i in range(size)]


def test_order_is_fixed_for_ever():
    """A run that goes on with a newer version must see the order that it began with."""
    small = SourceOrder(10, seed=0, shuffle=True, repeat=True)
    large = SourceOrder(100_000, seed=0, shuffle=True, repeat=True)
    assert [small.row(i) for i in range(20)] == SMALL_ORDER
    assert [large.row(i) for i in (0, 1, 2, 99_999, 100_000, 10**9)] == LARGE_ORDER


SMALL_ORDER = [7, 0, 2, 6, 3, 5, 9, 1, 8, 4, 4, 1, 2, 6, 0, 8, 5, 9, 3, 7]
LARGE_ORDER = [15983, 44920, 81740, 44074, 83374, 1912]


def test_order_without_shuffle():
    order = SourceOrder(5, seed=3, shuffle=False, repeat=True)
    assert [order.row(i) for i in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_any_index_is_answered_at_once():
    order = SourceOrder(50_000_000, seed=3, shuffle=True, repeat=True)
    order.row(0)  # the import is not what is measured
    started = time.process_time()
    for i in range(1024):
        order.row(1_000_000 * 1024 + i)
    assert time.process_time() - started < 0.5


def test_too_many_rows_are_refused():
    with pytest.raises(UserError, match=r"2\^32"):
        SourceOrder(1 << 32, seed=0, shuffle=True, repeat=True)


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (0.5, 0.4, 0.1), (0.9, 0.0, 0.05, 0.05), (1e-4, 1)])
def test_shares_grow_by_one_source_and_stay_close(weights):
    whole = whole_weights(weights)
    total = sum(weights)
    counts = [share_counts(whole, n) for n in range(5001)]
    for n, (before, after) in enumerate(itertools.pairwise(counts), 1):
        steps = [a - b for b, a in zip(before, after)]
        assert sorted(steps) == [0] * (len(weights) - 1) + [1]
        assert all(abs(count - n * weight / total) <= 1 for count, weight in zip(after, weights))
    assert all(weight or not count for weight, count in zip(weights, counts[-1]))


def test_proportions_are_exact():
    drawn = Counter(mixture([3, 400, 50], (0.5, 0.4, 0.1)).draw(i)[0] for i in range(10_000))
    assert drawn == {0: 5000, 1: 4000, 2: 1000}


def test_a_source_of_weight_zero_is_never_drawn():
    order = mixture([3, 400, 0], (0.5, 0.5, 0.0))
    rows = [order.row(i) for i in range(2000)]
    assert max(rows) < 403
    assert sum(row < 3 for row in rows) == 1000


@pytest.mark.parametrize(
    ("exhausted", "weights", "length"),
    [
        ("stop_first", (0.5, 0.5, 0.0), 6),
        ("stop_all", (0.5, 0.5, 0.0), 800),
        ("repeat", (0.5, 0.5, 0.0), None),
        ("stop_first", (0.5, 0.4, 0.1), 6),
        ("stop_all", (0.5, 0.4, 0.1), 1000),
    ],
)
def test_exhausted_sources(exhausted, weights, length):
    """3, 400 and 0 (or 9) rows: stop before a row comes again, or when all have been used up."""
    sizes = [3, 400, 9 if weights[2] else 0]
    order = mixture(sizes, weights, exhausted)
    assert order.length == length
    if length is None:
        return
    rows = [order.row(i) for i in range(length)]
    counts = Counter(rows)
    drawn = [sum(counts[r] for r in range(sum(sizes[:k]), sum(sizes[: k + 1]))) for k in range(3)]
    if exhausted == "stop_first":
        assert max(counts.values()) == 1
        assert drawn[0] == 3
    else:
        assert all(
            counts[row] for k, w in enumerate(weights) if w for row in range(sum(sizes[:k]), sum(sizes[: k + 1]))
        )
        assert sum(counts[row] == 1 for row in range(3, 403)) == 400


def test_weights_change_at_a_step():
    order = mixture([50, 50], None, phases=[(0, (1.0, 0.0)), (100, (0.0, 1.0)), (200, (0.5, 0.5))])
    sources = [order.draw(i)[0] for i in range(400)]
    assert sources[:100] == [0] * 100
    assert sources[100:200] == [1] * 100
    assert sum(sources[200:]) == 100
    # Every source goes on where the phase before left it.
    seen = {0: [], 1: []}
    for i in range(400):
        source, place = order.draw(i)
        seen[source].append(place)
    assert seen == {0: list(range(200)), 1: list(range(200))}


def test_a_source_that_later_phases_drop():
    order = mixture([10, 10], None, "stop_all", phases=[(0, (1.0, 1.0)), (10, (1.0, 0.0))])
    assert order.length == 15  # the second source is never used up: only the first counts
    order = mixture([10, 10], None, "stop_first", phases=[(0, (1.0, 1.0)), (40, (1.0, 0.0))])
    assert order.length == 20
