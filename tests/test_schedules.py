"""Schedules as data: every generator obeys the laws, costs what theory says, and survives a CSV file."""

import subprocess
import sys

import numpy as np
import pytest

from jaxpar import pipeline
from jaxpar.errors import UserError
from jaxpar.pipeline.generators import NAMES
from jaxpar.pipeline.slots import RINGS

MULTI_CHUNK = ("fused", "interleaved")
SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 4), (4, 8), (4, 6), (8, 8), (5, 16)]
CASES = [(n, s, m, v) for n in NAMES for s, m in SIZES for v in ((1, 2, 3) if n in MULTI_CHUNK else (1,))]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_every_action_happens_once_and_in_order(name, stages, microbatches, chunks):
    schedule = pipeline.named(name, stages=stages, microbatches=microbatches, chunks=chunks)
    f, b = schedule.times("F"), schedule.times("B")
    assert f.shape == (microbatches, stages * chunks)
    assert (f >= 0).all()
    assert (np.diff(f, axis=1) > 0).all()
    assert (np.diff(b, axis=1) < 0).all()
    assert (b > f).all()
    assert (schedule.times("W") >= b).all() == (name == "zb_h1")
    for kind in ("F", "B"):
        assert (schedule.table(kind) >= 0).sum() == stages * microbatches * chunks


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_slots_never_overlap(name, stages, microbatches, chunks):
    """Replaying the program finds in every slot the value that was put there for that action."""
    schedule = pipeline.named(name, stages=stages, microbatches=microbatches, chunks=chunks)
    program = pipeline.allocate(schedule)
    columns, S = program.columns, stages
    rings = {ring: np.full((S, program.sizes[ring] + 1, 2), -1) for ring in RINGS}
    for tick in range(schedule.ticks):
        at = {name: column[tick] for name, column in columns.items()}
        sent_f, sent_b = {}, {}
        for s in range(S):
            if (m := at["b_microbatch"][s]) >= 0:
                item = (m, at["b_chunk"][s] * S + s)
                assert tuple(rings["g"][s, at["g_get"][s]]) == item
                assert tuple(rings["fb"][s, at["fb_get"][s]]) == item
                if schedule.splits_weights:
                    assert tuple(rings["fw"][s, at["fw_peek"][s]]) == item
                    rings["bw"][s, at["bw_put"][s]] = item
                sent_b[s] = item
            if (m := at["w_microbatch"][s]) >= 0:
                item = (m, at["w_chunk"][s] * S + s)
                assert tuple(rings["fw"][s, at["fw_get"][s]]) == item
                assert tuple(rings["bw"][s, at["bw_get"][s]]) == item
            if (m := at["f_microbatch"][s]) >= 0:
                item = (m, at["f_chunk"][s] * S + s)
                if item[1]:
                    assert tuple(rings["x"][s, at["x_get"][s]]) == item
                else:
                    assert at["x_get"][s] == -1
                    assert at["embed"] == m
                rings["fb"][s, at["fb_put"][s]] = item
                if schedule.splits_weights:
                    rings["fw"][s, at["fw_put"][s]] = item
                sent_f[s] = item
        for s in range(S):
            m, k = sent_f.get((s - 1) % S, (-1, -2))
            rings["x"][s, at["x_put"][s]] = (m, k + 1)
            m, k = sent_b.get((s + 1) % S, (-1, 0))
            rings["g"][s, at["g_put"][s]] = (m, k - 1)
            if s == S - 1 and at["head"] >= 0:
                rings["g"][s, at["head_put"][s]] = (at["head"], schedule.blocks - 1)
            elif s < S - 1:
                assert at["head_put"][s] == program.sizes["g"]
        assert (at["unembed"] >= 0) == (0 in sent_b and sent_b[0][1] == 0)


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(4, 8, 1), (4, 32, 1), (4, 32, 2), (8, 64, 4), (2, 8, 3)]
)
def test_fused_has_the_least_bubble(stages, microbatches, chunks):
    schedule = pipeline.fused(stages, microbatches, chunks)
    result = pipeline.simulate(schedule)
    least = (stages - 1) / (chunks * microbatches + stages - 1)
    assert result.bubble_lockstep == pytest.approx(least)
    assert result.bubble_asynchronous == pytest.approx(least)
    if chunks == 1:
        assert result.in_flight == tuple(min(2 * (stages - s) - 1, microbatches) for s in range(stages))


def test_classic_orders_pay_for_the_lockstep_and_hold_little():
    classic = pipeline.simulate(pipeline.one_f_one_b(4, 32))
    assert classic.in_flight == (4, 3, 2, 1)
    assert classic.bubble_asynchronous == pytest.approx(3 / 35)
    assert classic.bubble_lockstep > 3 * classic.bubble_asynchronous
    assert pipeline.simulate(pipeline.gpipe(4, 32)).in_flight == (32,) * 4
    zero_bubble = pipeline.simulate(pipeline.zb_h1(4, 32))
    assert zero_bubble.in_flight == (4,) * 4
    assert zero_bubble.bubble_lockstep < 0.06


@pytest.mark.parametrize("name", ["fused", "1f1b"])
def test_memory_does_not_grow_with_microbatches(name):
    held = [pipeline.allocate(pipeline.named(name, stages=4, microbatches=m)).sizes for m in (8, 16, 32, 64)]
    assert held[0] == held[1] == held[2] == held[3]


def test_costs_of_chunks_exchange_and_overhead_add_up():
    schedule = pipeline.fused(2, 4, 2)
    costs = pipeline.Costs(forward=np.array([[1.0, 3.0], [1.0, 1.0]]), backward=0.0, weight=0.0, exchange=0.5)
    result = pipeline.simulate(schedule, costs)
    dearest = np.where(schedule.f[:, 0] >= 0, np.where(schedule.f[:, 0] % 2, 3.0, 1.0), schedule.f[:, 1] >= 0)
    assert result.lockstep_s == pytest.approx(dearest.sum() + 0.5 * schedule.ticks)
    more = pipeline.simulate(schedule, pipeline.Costs(tick_overhead=0.25, head=1.0))
    plain = pipeline.simulate(schedule)
    assert more.lockstep_s - plain.lockstep_s == pytest.approx(0.25 * schedule.ticks + 4)


def test_choice_weighs_time_memory_and_tick_overhead():
    cheap_ticks = pipeline.choose(4, 32, chunks=(1, 2, 4))
    assert (cheap_ticks.schedule.name, cheap_ticks.schedule.chunks) == ("fused", 4)
    dear_ticks = pipeline.choose(4, 32, chunks=(1, 2, 4), costs=pipeline.Costs(tick_overhead=0.5))
    assert (dear_ticks.schedule.name, dear_ticks.schedule.chunks) == ("fused", 1)
    tight = pipeline.choose(4, 32, costs=pipeline.Costs(recompute=1.0), stage_activation_bytes=1.0, budget_bytes=4.0)
    assert max(tight.simulation.in_flight) <= 4
    assert "<-" in tight.table()
    with pytest.raises(UserError, match="smallest needs 4"):
        pipeline.choose(4, 32, stage_activation_bytes=1.0, budget_bytes=3.0)


@pytest.mark.parametrize("name", NAMES)
def test_csv_round_trip(name, tmp_path):
    chunks = 2 if name in MULTI_CHUNK else 1
    schedule = pipeline.named(name, stages=2, microbatches=4, chunks=chunks)
    pipeline.write_csv(schedule, tmp_path / f"{name}.csv")
    again = pipeline.named(str(tmp_path / f"{name}.csv"), stages=2, microbatches=4, chunks=chunks)
    assert again.name == name
    for kind in ("F", "B", "W"):
        np.testing.assert_array_equal(schedule.table(kind), again.table(kind))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,0,F,0,0\n1,0,B,0,0\n1,0,B,0,0", "a second B on stage 0 in tick 1"),
        ("0,0,F,0,0\n1,0,X,0,0", "line 2"),
        ("0,0,F,0,0\n0,0,B,0,0", "its own F is in tick 0"),
        ("0,0,F,0,0\n2,0,B,0,0\n1,0,F,1,0", "B of microbatch 1 on stage 0, chunk 0 is missing"),
        ("", "no action"),
    ],
)
def test_bad_tables_are_refused_with_the_reason(lines, message, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        pipeline.read_csv(path)


def test_table_of_another_size_is_refused(tmp_path):
    pipeline.write_csv(pipeline.gpipe(2, 4), tmp_path / "own.csv")
    with pytest.raises(UserError, match=r"pipeline\.microbatches=8"):
        pipeline.named(str(tmp_path / "own.csv"), stages=2, microbatches=8)


def test_unknown_and_impossible_names_are_refused():
    with pytest.raises(UserError, match="gpipe, 1f1b, fused"):
        pipeline.named("zigzag", stages=2, microbatches=2)
    with pytest.raises(UserError, match=r"pipeline\.chunks=2"):
        pipeline.named("gpipe", stages=2, microbatches=2, chunks=2)
    with pytest.raises(UserError, match=r"pipeline\.microbatches=0"):
        pipeline.named("gpipe", stages=2, microbatches=0)


@pytest.mark.parametrize(("num_layers", "stages", "chunks"), [(30, 4, 1), (10, 3, 1), (30, 4, 2), (9, 2, 3), (7, 7, 1)])
def test_every_layer_sits_in_exactly_one_slot(num_layers, stages, chunks):
    cut = pipeline.assign_layers([1.0] * num_layers, stages=stages, chunks=chunks)
    layers = cut.layers()
    assert sorted(layers[layers >= 0].tolist()) == list(range(num_layers))
    assert layers.reshape(-1)[cut.positions()].tolist() == list(range(num_layers))
    in_order = layers.swapaxes(0, 1).reshape(-1)
    assert (np.diff(in_order[in_order >= 0]) == 1).all()
    assert max(cut.sizes) - min(cut.sizes) <= 1
    assert cut.table().count("stage") == stages


def test_assignment_balances_unequal_layers():
    costs = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    cut = pipeline.assign_layers(costs, stages=3)
    assert cut.sizes == (4, 1, 1)
    assert cut.chunk_costs(costs).ravel().tolist() == [7.0, 4.0, 4.0]
    assert pipeline.assign_layers([1.0] * 8, stages=2, last=4.0).sizes == (6, 2)
    with pytest.raises(UserError, match=r"model\.num_layers=3"):
        pipeline.assign_layers([1.0] * 3, stages=2, chunks=2)


def test_pictures_show_every_action():
    schedule = pipeline.zb_h1(2, 3)
    picture = pipeline.text(schedule)
    assert picture.count("stage") == 3  # the title and two stages
    assert sum(picture.count(f" {m}") >= 6 for m in range(3)) == 3
    bars = [p for p in pipeline.gantt(schedule).patches if p.get_width() > 0]
    assert len(bars) == 3 * 2 * 3


def test_schedules_do_not_import_jax():
    code = "import sys, jaxpar.pipeline as p; p.simulate(p.fused(2, 4)); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
