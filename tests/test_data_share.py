"""Every process reads exactly the rows that its devices hold, and all together the rows of the global order."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from test_data_loader import NumberedRows, all_ids, sharding

from jaxpar.data import Loader
from jaxpar.data.order import SourceOrder
from jaxpar.data.reading import read_batches
from jaxpar.data.share import share_of

ROOT = Path(__file__).resolve().parents[1]
MESHES = [
    ((8, 1, 1), ("data",)),
    ((4, 1, 2), ("data",)),
    ((2, 2, 2), ("data", "context")),
    ((1, 4, 2), (None, "context")),
    ((2, 1, 4), (("data", "tensor"),)),
    ((4, 1, 2), ("tensor",)),  # the outer axis repeats the rows, as pipeline stages do
]


def held_by(where, batch, processes):
    """Places of a batch that each process would hold if the simulated devices were spread over `processes`."""
    held = {}
    for device, block in where.devices_indices_map((batch, 8)).items():
        held.setdefault(device.id * processes // 8, set()).add(range(*block[0].indices(batch)))
    return held


def tokens(batch):
    return batch["tokens"][:, 0].tolist()


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize(("shape", "spec"), MESHES)
def test_any_number_of_processes_reads_the_global_batches(shape, spec, processes):
    batch, order = 16, SourceOrder(100, seed=1, shuffle=True, repeat=True)
    held = held_by(sharding(shape, spec), batch, processes)
    for start in (0, 8, 1_000_000 * batch):
        expected = [[order.row(start + step * batch + place) for place in range(batch)] for step in range(8)]
        for process in range(processes):
            rows, share = NumberedRows(100), share_of(process, held, batch)
            wanted = sorted({place for block in held[process] for place in block})
            assert list(share.places) == wanted
            batches = read_batches(rows, order, share, start)
            for step in range(8):
                assert tokens(next(batches)) == [expected[step][place] for place in wanted]
            assert len(rows.read) == 8 * len(wanted)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_data_ends_at_the_same_batch_for_all_processes(processes):
    order = SourceOrder(37, seed=0, shuffle=False, repeat=False)
    held = held_by(sharding((8, 1, 1), ("data",)), 8, processes)
    counts, read = [], []
    for process in range(processes):
        rows = NumberedRows(37)
        batches = list(read_batches(rows, order, share_of(process, held, 8), 3))
        counts.append(len(batches))
        read += rows.read
        assert sum(int(batch["weights"][:, 0].sum()) for batch in batches) == len(rows.read)
    assert counts == [5] * processes  # 34 rows are left
    assert sorted(read) == list(range(3, 37))


def test_processes_that_hold_the_same_rows_have_the_same_share():
    held = held_by(sharding((4, 1, 2), ("data",)), 16, 8)
    shares = [share_of(process, held, 16) for process in range(8)]
    assert [share.group for share in shares] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert shares[2].places == (4, 5, 6, 7)


def test_overlapping_processes_read_only_what_they_hold():
    held = {0: {range(2), range(2, 4)}, 1: {range(2, 4), range(4, 6)}}  # data 3 x tensor 2, three devices per process
    order = SourceOrder(60, seed=1, shuffle=True, repeat=True)
    for process, wanted in ((0, [0, 1, 2, 3]), (1, [2, 3, 4, 5])):
        rows, share = NumberedRows(60), share_of(process, held, 6)
        batch = next(read_batches(rows, order, share, 12))
        assert list(share.places) == list(range(6))
        assert rows.read == [order.row(12 + place) for place in wanted]
        assert np.array_equal(batch["tokens"][wanted, 0], rows.read)
        assert np.flatnonzero(batch["weights"][:, 0]).tolist() == wanted


def test_shares_of_different_size_read_only_what_they_hold():
    held = {0: {range(4)}, 1: {range(4, 6)}}
    rows = NumberedRows(60)
    batch = next(read_batches(rows, SourceOrder(60, 0, False, True), share_of(1, held, 6), 0))
    assert rows.read == [4, 5]
    assert batch["tokens"].shape == (6, 8)


def test_a_loader_of_overlapping_processes_puts_its_own_rows(monkeypatch):
    where = sharding((8, 1, 1), ("data",))
    expected = Loader(NumberedRows(100), 16, seed=2, sharding=where).next_batch()
    monkeypatch.setattr("jaxpar.data.loader.share_of", lambda *_: share_of(0, {0: {range(16)}, 1: {range(2)}}, 16))
    batch = Loader(NumberedRows(100), 16, seed=2, sharding=where).next_batch()
    assert np.array_equal(batch["tokens"], expected["tokens"])


class Flaky(NumberedRows):
    """Row 20 cannot be read at first."""

    fails = 1

    def row(self, index):
        if index == 20 and self.fails:
            self.fails -= 1
            raise OSError(f"row {index} is gone")
        return super().row(index)


def test_after_an_error_the_same_batch_comes_again():
    expected = all_ids(Loader(NumberedRows(100), 8, seed=2, shuffle=False), steps=6)
    loader = Loader(Flaky(100), 8, seed=2, shuffle=False)
    ids = all_ids(loader, steps=2)
    state = loader.state()
    with pytest.raises(OSError) as raised:  # noqa: PT011  (the whole message is compared below)
        loader.next_batch()
    assert str(raised.value) == "row 20 is gone"
    assert loader.state() == state
    assert ids + all_ids(loader, steps=4) == expected


def test_close_ends_the_thread():
    before = set(threading.enumerate())
    loader = Loader(NumberedRows(100), 8, seed=2)
    loader.next_batch()
    assert set(threading.enumerate()) - before
    loader.close()
    assert not set(threading.enumerate()) - before
    loader.close()


def test_the_interpreter_ends_while_batches_are_read_ahead():
    code = """
        import sys
        sys.path.insert(0, "tests")
        from test_data_loader import NumberedRows
        from jaxpar.data import Loader
        loader = Loader(NumberedRows(100), 8, seed=2)
        print("grain" in sys.modules)
        loader.next_batch()
        print("grain" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_what_is_read_ahead_is_bounded():
    rows = NumberedRows(10_000)
    loader = Loader(rows, 8, seed=2)
    for step in range(1, 20):
        jax.block_until_ready(loader.next_batch())
        assert len(rows.read) <= 8 * (step + 2)
    loader.close()
    assert len(rows.read) <= 8 * (19 + 2)
