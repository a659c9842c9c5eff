"""Batches do not depend on the mesh or the number of processes, and a state continues them exactly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.config import Config, DataConfig, MixtureSource
from jaxpar.data import Loader, open_data
from jaxpar.errors import UserError

SEQ = 8


class NumberedRows:
    """Rows that hold their own number."""

    seq_len = SEQ

    def __init__(self, count, identity="numbered"):
        self.count = count
        self.identity = identity
        self.read = []

    def __len__(self):
        return self.count

    def row(self, index):
        self.read.append(index)
        values = np.full((SEQ,), index, np.int32)
        weights = np.ones((SEQ,), np.float32)
        return {
            "tokens": values,
            "targets": values,
            "weights": weights,
            "positions": np.arange(SEQ, dtype=np.int32),
            "segment_ids": np.ones((SEQ,), np.int32),
        }

    def sample_id(self, index):
        return f"n:{index}"


def sharding(shape, spec, names=("data", "context", "tensor")):
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    return NamedSharding(mesh, PartitionSpec(*spec))


def flatten(lists):
    return [one for many in lists for one in many]


def all_ids(loader, steps=10_000):
    """Sample ids of every batch until the data ends."""
    ids = []
    for _ in range(steps):
        try:
            batch = loader.next_batch()
        except StopIteration:
            break
        tokens = np.asarray(batch["tokens"])[:, 0].tolist()
        ids.append(loader.sample_ids())
        assert ids[-1] == [f"n:{t}" for t in tokens[: len(ids[-1])]]
    return ids


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 1, 1), ("data",)),
        ((2, 2, 2), ("data", "context")),
        ((1, 8, 1), (None, "context")),
        ((4, 1, 2), (("data",), None)),
        ((2, 1, 4), (("data", "tensor"),)),
    ],
)
def test_every_mesh_sees_the_same_batches(shape, spec):
    plain = Loader(NumberedRows(100), 16, seed=1)
    split = Loader(NumberedRows(100), 16, seed=1, sharding=sharding(shape, spec))
    for _ in range(8):
        a, b = plain.next_batch(), split.next_batch()
        assert b["tokens"].sharding.is_equivalent_to(split._sharding, 2)
        for key in a:
            assert np.array_equal(a[key], b[key])


def test_each_row_once_per_epoch_and_a_resumed_run_repeats_nothing():
    unbroken = all_ids(Loader(NumberedRows(100), 8, seed=2), steps=38)
    flat = flatten(unbroken)
    for epoch in range(3):
        assert len(set(flat[100 * epoch : 100 * (epoch + 1)])) == 100
    for stop in (1, 12, 13, 20, 30):
        first = Loader(NumberedRows(100), 8, seed=2)
        before = all_ids(first, steps=stop)
        state = json.loads(json.dumps(first.state()))
        after = all_ids(Loader(NumberedRows(100), 8, seed=2, state=state), steps=38 - stop)
        assert before + after == unbroken


def test_reading_ahead_does_not_enter_the_state():
    loader = Loader(NumberedRows(100), 8, seed=2)
    assert loader.state()["next_index"] == 0
    loader.next_batch()
    time.sleep(0.2)
    assert loader.state()["next_index"] == 8
    assert len(json.dumps(loader.state())) < 300


def test_start_in_the_middle_takes_no_replay():
    rows = NumberedRows(1000)
    loader = Loader(rows, 64, seed=2)
    loader.next_batch()
    rows.read.clear()
    started = time.process_time()
    loader.skip_to(1_000_000 * 64)
    ids = np.asarray(loader.next_batch()["tokens"])[:, 0].tolist()
    assert time.process_time() - started < 1.0
    assert len(rows.read) <= 6 * 64
    assert loader.sample_ids() == [f"n:{i}" for i in ids]
    assert loader.state()["next_index"] == 1_000_001 * 64


def test_skip_to_meets_the_unbroken_run():
    unbroken = all_ids(Loader(NumberedRows(100), 8, seed=2), steps=9)
    loader = Loader(NumberedRows(100), 8, seed=2)
    loader.next_batch()
    loader.skip_to(5 * 8)
    assert all_ids(loader, steps=4) == unbroken[5:]
    loader.skip_to(0)
    assert all_ids(loader, steps=9) == unbroken


def test_the_batch_size_may_change_on_resume():
    first = Loader(NumberedRows(100), 8, seed=2)
    ids = all_ids(first, steps=3)
    ids += all_ids(Loader(NumberedRows(100), 4, seed=2, state=first.state()), steps=6)
    assert flatten(ids) == flatten(all_ids(Loader(NumberedRows(100), 8, seed=2), steps=6))


@pytest.mark.parametrize("batch", [1, 8, 37, 64])
@pytest.mark.parametrize("degree", [1, 8])
def test_one_pass_holds_every_row_once_with_its_weight(batch, degree):
    where = sharding((degree, 1, 8 // degree), ("data",)) if batch % degree == 0 else None
    loader = Loader(NumberedRows(37), batch, seed=0, sharding=where, shuffle=False, repeat=False)
    counts, weight, batches = Counter(), 0.0, 0
    while True:
        try:
            values = loader.next_batch()
        except StopIteration:
            break
        assert values["tokens"].shape == (batch, SEQ)
        weights = np.asarray(values["weights"])
        weight += float(weights.sum())
        counts.update(np.asarray(values["tokens"])[weights[:, 0] > 0, 0].tolist())
        padding = np.asarray(values["segment_ids"])[weights[:, 0] == 0]
        assert not padding.any()
        batches += 1
    assert counts == dict.fromkeys(range(37), 1)
    assert weight == 37 * SEQ
    assert batches == -(-37 // batch)
    with pytest.raises(StopIteration):
        loader.next_batch()


def test_evaluating_does_not_move_training():
    rows = NumberedRows(100)
    alone = all_ids(Loader(rows, 8, seed=2), steps=6)
    loader = Loader(rows, 8, seed=2)
    ids = all_ids(loader, steps=3)
    all_ids(Loader(NumberedRows(37), 8, seed=0, shuffle=False, repeat=False))
    assert ids + all_ids(loader, steps=3) == alone


def test_states_of_other_data_are_refused():
    state = Loader(NumberedRows(100), 8, seed=2).state()
    with pytest.raises(UserError, match=r"training data changed since the checkpoint"):
        Loader(NumberedRows(90, "other"), 8, seed=2, state=state)
    with pytest.raises(UserError, match=r"seed: 3; the checkpoint was made with 2"):
        Loader(NumberedRows(100), 8, seed=3, state=state)


def test_a_changed_order_is_said(caplog):
    state = Loader(NumberedRows(100), 8, seed=2).state()
    Loader(NumberedRows(100), 8, seed=2, shuffle=False, state=state)
    assert "order of the data changed" in caplog.text


def test_an_indivisible_batch_is_refused():
    with pytest.raises(UserError, match=r"batch of 12 rows"):
        Loader(NumberedRows(100), 12, seed=2, sharding=sharding((8, 1, 1), ("data",)))


def test_an_error_while_reading_ahead_reaches_the_caller():
    class Broken(NumberedRows):
        def row(self, index):
            if index == 20:
                raise OSError(f"row {index} is gone")
            return super().row(index)

    loader = Loader(Broken(100), 8, seed=2, shuffle=False)
    loader.next_batch()
    loader.next_batch()
    with pytest.raises(OSError, match=r"row 20 is gone"):
        loader.next_batch()


def test_mixture_from_a_config(tmp_path):
    for name, count in (("a", 3), ("b", 60)):
        texts = (json.dumps({"text": f"{name}{i:06d}"}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(texts))
    sources = tuple(MixtureSource(n, "files", (f"{tmp_path}/{n}.jsonl",), w) for n, w in (("a", 1.0), ("b", 3.0)))
    settings = DataConfig(
        source="mixture", sources=sources, packing="none", eval_fraction=0.0, phases=((0, (1.0, 3.0)), (5, (1.0, 1.0)))
    )
    data = open_data(Config(seq_len=SEQ, data=settings), tmp_path)
    assert len(data.train) == 63
    loader = Loader(data.train, 8, seed=0)
    shares = []
    for _ in range(10):
        loader.next_batch()
        shares.append(sum(i.startswith("a:") for i in loader.sample_ids()))
    assert shares == [2] * 5 + [4] * 5
    resumed = Loader(data.train, 8, seed=0, state={**loader.state()})
    resumed.skip_to(40)
    resumed.next_batch()
    assert sum(i.startswith("a:") for i in resumed.sample_ids()) == 4


def test_a_source_of_weight_zero_may_be_empty(tmp_path):
    (tmp_path / "a.txt").write_text("some text of the only source")
    (tmp_path / "empty.txt").write_text("")
    sources = (
        MixtureSource("empty", "files", (f"{tmp_path}/empty.txt",), 0.0),
        MixtureSource("a", "files", (f"{tmp_path}/a.txt",), 1.0),
    )
    settings = DataConfig(source="mixture", sources=sources, eval_fraction=0.0)
    data = open_data(Config(seq_len=SEQ, data=settings), tmp_path)
    loader = Loader(data.train, 4, seed=0)
    loader.next_batch()
    assert {i.split(":")[0] for i in loader.sample_ids()} == {"a"}


def test_mixture_mistakes(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    good = MixtureSource("a", "files", (f"{tmp_path}/a.txt",), 1.0)

    def message(**settings):
        config = Config(seq_len=SEQ, data=DataConfig(source="mixture", eval_fraction=0.0, **settings))
        try:
            Loader(open_data(config, tmp_path).train, 8, seed=0, repeat=config.data.repeat)
        except UserError as error:
            return str(error)
        return "no error"

    assert "data.sources: empty" in message()
    assert "occurs twice" in message(sources=(good, good))
    assert "all weights are 0" in message(sources=(MixtureSource("a", "files", good.files, 0.0),))
    assert "weights [-1.0]" in message(sources=(MixtureSource("a", "files", good.files, -1.0),))
    assert "2 weights at step 0" in message(sources=(good,), phases=((0, (1.0, 1.0)),))
    assert "rising steps that start at 0" in message(sources=(good,), phases=((5, (1.0,)),))
    assert "contradicts data.exhausted=repeat" in message(sources=(good,), repeat=False)
    text = message(sources=(good,), long_documents="drop")
    assert "'a' has a positive weight but not one row" in text


WORKER = """
    import json, sys
    import jax
    process, count, port, start, state = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    sys.path.insert(0, "tests")
    from test_data_loader import NumberedRows
    from jaxpar.data import Loader
    from jaxpar.errors import UserError
    tensor = 2 if state == "tensor" else 1
    mesh = jax.make_mesh((jax.device_count() // tensor, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = NumberedRows(64)
    loader = Loader(rows, 16, seed=5, sharding=NamedSharding(mesh, PartitionSpec("data")), repeat=False)
    loader.skip_to(start)
    steps = []
    while True:
        try:
            batch = loader.next_batch()
        except StopIteration:
            break
        mine = sorted({int(i) for s in batch["tokens"].addressable_shards for i in np.asarray(s.data)[:, 0]})
        steps.append({"ids": loader.sample_ids(), "mine": mine})
    print("RESULT " + json.dumps({"steps": steps, "read": sorted(rows.read)}))
    try:
        Loader(NumberedRows(64, f"differs on {process}"), 16, seed=5)
    except UserError as error:
        print("REFUSED " + str(error))
"""


def run_processes(count, devices, *, start=0, layout="data"):
    """Results of `count` real processes with `devices` simulated devices each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(root),
        "NPROC": "8",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(i), str(count), str(port), str(start), layout],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )
        for i in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=180) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs):
        assert worker.returncode == 0, errors
    for output, _ in outputs:
        assert "REFUSED processes" in output
    lines = [next(line for line in output.splitlines() if line.startswith("RESULT ")) for output, _ in outputs]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def check_processes(count, devices, start=0):
    expected = all_ids(Loader(NumberedRows(64), 16, seed=5, repeat=False))[start // 16 :]
    results = run_processes(count, devices, start=start)
    for result in results:
        assert [step["ids"] for step in result["steps"]] == expected
    for step, ids in enumerate(expected):
        parts = [set(result["steps"][step]["mine"]) for result in results]
        assert sum(len(part) for part in parts) == 16  # disjoint
        assert {f"n:{i}" for part in parts for i in part} == set(ids)
    assert sorted(i for result in results for i in result["read"]) == sorted(
        int(i.removeprefix("n:")) for ids in expected for i in ids
    )


def test_two_processes_share_the_batches_of_one():
    check_processes(2, 2)


@pytest.mark.sweep
def test_four_processes_share_the_batches_of_one():
    check_processes(4, 1)
    check_processes(4, 1, start=32)


@pytest.mark.sweep
def test_processes_of_one_tensor_group_read_the_same_rows():
    results = run_processes(2, 1, layout="tensor")
    assert results[0]["steps"] == results[1]["steps"]
    assert len(results[0]["steps"]) == 4
