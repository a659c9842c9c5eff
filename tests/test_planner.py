"""The planner: what it considers, what it drops and why, how it ranks, and the config it writes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar import config_file, validate
from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.compile import missing_plugin
from jaxpar.dryrun.run import Options, dry_run
from jaxpar.dryrun.shape import Layout, layout_of, model_shape, stage_layers
from jaxpar.dryrun.targets import find_target
from jaxpar.errors import UserError
from jaxpar.planner.auto import target_of_device, with_planned_layout
from jaxpar.planner.candidates import ShortList, search
from jaxpar.planner.output import plan_to_dict, settings_that_differ, write_config
from jaxpar.planner.plan import Search, plan
from jaxpar.planner.space import Limits, Space, config_of

ROOT = Path(__file__).resolve().parents[1]
CLOSED = Search(compile=False)


def model(**settings):
    values = {"num_layers": 32, "embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14336}
    return values | {"vocab_size": 128256} | settings


def config_8b(**settings):
    return config_file.from_dict({"global_batch": 128, "seq_len": 4096, "model": model()} | settings)


@pytest.fixture(scope="module")
def found():
    """A closed-form plan of the 8B model on 64 GPUs, shared."""
    return plan(config_8b(), "h100", 64, search_options=CLOSED)


def space_of(config, gpus: int, **limits) -> Space:
    return Space(config, model_shape(config), gpus, 8, Limits(**limits))


def test_every_candidate_uses_all_gpus_and_the_whole_batch():
    config = config_8b()
    space = space_of(config, 64)
    layouts = list(space.layouts())
    assert len(layouts) > 500
    for layout in layouts:
        assert layout.num_gpus == 64
        assert layout.global_batch == 128
        assert layout.tensor <= 8
        assert config.model.num_heads % layout.tensor == 0
    assert len(set(layouts)) == len(layouts)


def test_candidates_survive_the_round_trip_through_a_config():
    """The config made of a layout describes that layout."""
    config = config_8b()
    for layout in list(space_of(config, 16).layouts())[::37]:
        assert layout_of(config_of(config, layout), 16) == layout


def test_best_layouts_pass_the_checks_of_a_run(found):
    for one in found.layouts:
        assert not validate.problems(one.config, 64)
        assert one.report.fits
        assert one.reason


def test_ranks_follow_the_predicted_time(found):
    times = [one.report.step_time_s for one in found.layouts]
    assert times == sorted(times)
    assert [one.rank for one in found.layouts] == list(range(1, len(times) + 1))


def test_winner_is_the_fastest_of_all_that_fit():
    """The closed-form winner equals a plain search over the whole space."""
    config = config_8b()
    gpu, assumed = find_target("h100"), Assumptions()
    limits = Limits(zero=(1, 3), remat=("dots", "full"), max_stage=4)
    every = search(space_of(config, 16, **dataclasses.asdict(limits)), gpu, assumed)
    found = plan(config, gpu, 16, assumed=assumed, search_options=Search(compile=False, limits=limits))
    assert found.considered == every.considered
    assert found.best.layout == every.fitting[0].layout


def picks(chosen: ShortList, *, slowdown: dict[int, float] | None = None, usable_factor: float = 1.0):
    """Everything a short list picks when layouts with this many stages take that much longer than their closed form."""
    out = []
    while (one := chosen.next()) is not None:
        out.append(one)
        if slowdown is not None:
            closed = dry_run(config_of(config_8b(), one.layout), "h100", 32, options=Options(compile=False))
            factor = slowdown.get(one.layout.stage, 1.0)
            peak = closed.peak_bytes * (usable_factor if one.layout.stage > 1 else 1.0)
            chosen.learn(one, dataclasses.replace(closed, step_time_s=factor * one.step_s, peak_bytes=peak))
    return out


@pytest.fixture(scope="module")
def fitting():
    """Candidates of the 8B model on 32 GPUs."""
    space = space_of(config_8b(), 32, remat=("full",), max_stage=4)
    return search(space, find_target("h100"), Assumptions()).fitting


def test_short_list_mixes_families(fitting):
    chosen = picks(ShortList(fitting, 12, 1e12, lambda layout: True))
    assert len(chosen) == 12
    assert len({(one.layout.stage, one.layout.tensor, one.layout.replica) for one in chosen}) >= 3
    assert chosen[0] == fitting[0]
    assert len({one.order for one in chosen}) == 12


def test_short_list_learns_what_is_slow(fitting):
    """Once one pipeline takes twice its closed form, no other is compiled; without that several are."""
    fastest = sorted(fitting, key=lambda one: (one.layout.stage == 1, one.step_s))
    pipelines_first = [dataclasses.replace(one, step_s=1 + i * 1e-3) for i, one in enumerate(fastest)]
    unaware = picks(ShortList(pipelines_first, 6, 1e12, lambda layout: True))
    aware = picks(ShortList(pipelines_first, 6, 1e12, lambda layout: True), slowdown={2: 2.0, 4: 2.0})
    assert sum(one.layout.stage > 1 for one in unaware) == 6
    assert sum(one.layout.stage > 1 for one in aware) == 1


def test_short_list_learns_what_does_not_fit(fitting):
    usable = max(one.peak_bytes for one in fitting)
    fastest = sorted(fitting, key=lambda one: (one.layout.stage == 1, one.step_s))
    pipelines_first = [dataclasses.replace(one, step_s=1 + i * 1e-3) for i, one in enumerate(fastest)]
    chosen = picks(ShortList(pipelines_first, 6, usable, lambda layout: True), slowdown={}, usable_factor=1e3)
    assert sum(one.layout.stage > 1 for one in chosen) == 1


def test_layouts_that_a_run_refuses_are_not_picked(fitting):
    chosen = picks(ShortList(fitting, 5, 1e12, lambda layout: layout.tensor == 1))
    assert len(chosen) == 5
    assert {one.layout.tensor for one in chosen} == {1}


def test_layers_need_not_divide_by_stages():
    """126 layers on 16 stages waste two slots of 128; on 12 of a 31-layer model too many would be empty."""
    space = space_of(config_8b(global_batch=64, model=model(num_layers=126)), 16)
    assert any(layout.stage == 16 for layout in space.layouts())
    shape = dataclasses.replace(model_shape(config_8b()), num_layers=126)
    assert stage_layers(shape, Layout(stage=16)).slots == 8
    small = space_of(config_8b(global_batch=64, model=model(num_layers=9)), 8)
    assert not any(layout.stage == 8 for layout in small.layouts())
    assert small.rejected["stages would hold too unequal numbers of layers"]


def test_experts_are_searched():
    moe = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 14336}
    config = config_8b(model=model(moe=moe))
    assert {layout.expert for layout in space_of(config, 16).layouts()} == {1, 2, 4, 8, 16} & {1, 2, 4, 8}


def test_limits_are_kept():
    layouts = list(space_of(config_8b(), 64, max_stage=1, zero=(3,), remat=("full",)).layouts())
    assert layouts
    assert {layout.stage for layout in layouts} == {1}
    assert {layout.remat for layout in layouts} == {"full"}
    assert {layout.zero for layout in layouts} <= {0, 3}  # 0 where nothing is left to split


def test_rejections_are_counted():
    space = space_of(config_8b(), 16, remat=("full",))
    search(space, find_target("a100-80g"), Assumptions())
    assert space.rejected["does not fit"] > 0
    assert space.rejected["tensor does not fit in a node"] > 0


def test_what_fits_nowhere_says_by_how_much():
    config = config_8b(model=model(num_layers=126, embed_dim=16384, num_heads=128, mlp_dim=53248))
    with pytest.raises(
        UserError, match=r"nothing fits on 8 x h100.*GiB more than.*what helps most: more GPUs with ZeRO-3"
    ):
        plan(config, "h100", 8, search_options=CLOSED)


def test_a_batch_that_nothing_divides():
    config = config_8b(global_batch=7, model=model(num_layers=31))
    with pytest.raises(UserError, match="no layout divides"):
        plan(config, "h100", 512, search_options=CLOSED)


def test_written_config_is_the_winner(found, tmp_path):
    file = tmp_path / "winner.py"
    write_config(found.best, file, command="test")
    assert config_file.load(file) == found.best.config
    assert "global_batch" in settings_that_differ(found.best.config)


def test_json_has_the_keys_other_tools_read(found):
    values = json.loads(json.dumps(plan_to_dict(found)))
    first = values["layouts"][0]
    assert {"rank", "config", "reason", "fits", "peak_bytes", "step_time_s", "mfu"} <= set(first)
    assert first["config"]["parallel"]["data"] >= 1


def test_script_writes_a_plan(tmp_path):
    config = tmp_path / "small.json"
    config.write_text(json.dumps({"global_batch": 64, "seq_len": 1024, "model": {"vocab_size": 1024}}))
    out, winner = tmp_path / "plan.json", tmp_path / "winner.py"
    command = [sys.executable, "scripts/plan.py", f"--config={config}", "--gpus=8", "--compiles=0"]
    command += [f"--json={out}", f"--write={winner}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["layouts"]
    assert config_file.load(winner).global_batch == 64


def test_dry_run_of_a_planned_layout(tmp_path):
    """The config's own layout need not fit: it is replaced, and the layout is printed with its reason."""
    config = tmp_path / "small.json"
    values = {"global_batch": 64, "seq_len": 1024, "model": {"vocab_size": 1024}, "parallel": {"tensor": 3}}
    config.write_text(json.dumps(values))
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/dryrun.py", f"--config={config}", "--gpus=8", "--layout=auto", "--no-compile"]
    done = subprocess.run(
        [*command, f"--json={out}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "layout chosen" in done.stdout
    assert "fastest that fits" in done.stdout
    assert json.loads(out.read_text())["fits"]


@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB200", "b200"),
    ],
)
def test_devices_are_recognised(kind, gpu):
    assert target_of_device(kind).name == gpu


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GH200 480GB", "Tesla T4"])
def test_devices_of_no_known_kind_are_named(kind):
    with pytest.raises(UserError, match=f"{kind}.*--gpu=h100"):
        target_of_device(kind)


def test_layout_for_the_devices_there_are():
    """On simulated devices the kind of GPU must be named; the rest of the config stays as it was."""
    import jax

    config = config_file.from_dict({"global_batch": 32, "seq_len": 512, "parallel": {"tensor": 3}, "seed": 7})
    said: list[str] = []
    with pytest.raises(UserError, match="kind 'cpu'"):
        with_planned_layout(config, None, said.append)
    chosen = with_planned_layout(config, "h100", said.append)
    assert not validate.problems(chosen, len(jax.devices()))
    assert chosen.seed == 7
    assert chosen.model.vocab_size is None
    (line,) = said
    assert "fastest that fits" in line
    assert "closed form" in line


# Small spaces of which every layout is compiled: GPUs, width, bounds.
SMALL_SPACES = {
    "pipelines on 8": (8, 1024, Limits(max_stage=2, zero=(3,), remat=("full",), max_microbatches=2)),
    "tensor and replicas on 16": (16, 1024, Limits(max_stage=1, zero=(1, 3), remat=("full",), max_microbatches=1)),
    "wider, pipelines on 16": (16, 2048, Limits(max_stage=2, zero=(1,), remat=("dots",), max_microbatches=2)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SMALL_SPACES)
def test_winner_is_near_the_best_of_an_exhaustive_compile(name):
    """At most 3 % behind the fastest of every layout of a small space, all compiled."""
    if missing_plugin():
        pytest.skip("the compiler plugin is not installed")
    gpus, embed, limits = SMALL_SPACES[name]
    settings = {"num_layers": 4, "embed_dim": embed, "num_heads": 16, "mlp_dim": 4 * embed, "vocab_size": 32000}
    config = config_file.from_dict({"global_batch": 32, "seq_len": 2048, "model": settings})
    found = plan(config, "h100", gpus, search_options=Search(max_compiles=12, limits=limits))
    assert found.compiled <= 12
    reports = {one.layout: one.report for one in found.layouts}
    for layout in space_of(config, gpus, **dataclasses.asdict(limits)).layouts():
        if layout not in reports:
            reports[layout] = dry_run(config_of(config, layout), "h100", gpus)
    best_s = min(report.step_time_s for report in reports.values() if report.fits)
    behind = found.best.report.step_time_s / best_s - 1
    print(f"{name}: {found.compiled} of {len(reports)} layouts compiled by the planner, winner {behind:.2%} behind")
    assert len(reports) > found.compiled
    assert behind <= 0.03
