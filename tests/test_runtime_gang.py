"""Real gangs of the real training script: faults, stop signals, errors in one process. Minutes on two cores."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxpar.runtime import campaign

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).parents[1]


@pytest.fixture
def plan(tmp_path):
    return campaign.Plan(folder=tmp_path / "campaign", steps=60, rounds=5, seed=1)


@pytest.fixture
def config(plan):
    return campaign.prepare(plan.folder, plan)


def test_five_faults_are_survived(plan):
    lines = []
    score = campaign.run(plan, lines.append)
    assert (score.injected, score.survived, score.lost) == (5, 5, []), "\n".join(lines)


def steps_of(workdir):
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


@pytest.mark.parametrize("moment", ["mesh:", "step 6/"], ids=["first compile", "a step"])
def test_sigterm_to_one_process_saves_one_step_and_ends_all_with_75(plan, config, tmp_path, moment):
    workdir = tmp_path / "run"
    with campaign.Training(plan, config, workdir, gang=True) as training:
        training.wait_for(lambda: any(line.startswith(moment) for line in training.lines), moment)
        os.kill(training.ranks()[1], signal.SIGTERM)
        assert training.wait(120.0) == 75, training.tail()
        assert checkpoints_of(workdir)[-1] == training.step == steps_of(workdir)[-1]
    with campaign.Training(plan, config, workdir, gang=False) as training:
        assert training.wait(300.0) == 0, training.tail()
    assert steps_of(workdir) == list(range(1, plan.steps + 1))


def test_a_second_sigterm_ends_the_gang_at_once(plan, config, tmp_path):
    with campaign.Training(plan, config, tmp_path / "run", gang=True) as training:
        training.wait_for(lambda: training.told("mesh:"), "the compile")
        everyone = list(training.ranks().values())
        began = time.monotonic()
        for _ in range(2):
            for pid in everyone:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.5)
        assert training.wait(30.0) == 75, training.tail()
        assert time.monotonic() - began < 15


def test_an_error_in_one_process_ends_all_and_is_the_last_thing_shown(plan, config, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import os, runpy, sys
        from jaxpar.data.loader import Loader
        honest = Loader.next_batch
        def next_batch(self, count=[0]):
            count[0] += 1
            if os.environ["JAXPAR_PROCESS_ID"] == "1" and count[0] == 5:
                raise RuntimeError("the fifth batch is rotten")
            return honest(self)
        Loader.next_batch = next_batch
        sys.argv[0] = {str(ROOT / "scripts" / "train.py")!r}
        runpy.run_path(sys.argv[0], run_name="__main__")
        """)
    )
    launch = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--processes=2", "--devices-per-process=2", "--"]
    done = subprocess.run(
        [*launch, str(program), f"--config={config}", f"--workdir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("restart") == 0
    lines = done.stderr.strip().splitlines()
    assert lines[-2:] == ["RuntimeError: the fifth batch is rotten", "process 1 of 2 ends with exit code 1"]


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_trains_the_same(plan, config, tmp_path, processes):
    import dataclasses

    reference, workdir = tmp_path / "reference", tmp_path / "run"
    for folder, count in ((reference, 1), (workdir, processes)):
        with campaign.Training(dataclasses.replace(plan, processes=count), config, folder, gang=count > 1) as training:
            assert training.wait(300.0) == 0, training.tail()
    for name in ("samples.jsonl", "metrics.jsonl"):
        rows, wanted = (
            [json.loads(line) for line in (folder / name).read_text().splitlines()] for folder in (workdir, reference)
        )
        if name == "samples.jsonl":
            assert rows == wanted
        else:
            assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in wanted], rel=1e-5)
