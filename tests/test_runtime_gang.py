"""Real gangs of the real training script: faults, stop signals, errors in one process. All but one take minutes."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxpar.runtime import campaign

ROOT = Path(__file__).parents[1]


@pytest.fixture
def plan(tmp_path):
    return campaign.Plan(folder=tmp_path / "campaign", steps=60, rounds=len(campaign.FAULTS), seed=1)


@pytest.fixture
def config(plan):
    return campaign.prepare(plan.folder, plan)


@pytest.mark.sweep
def test_every_fault_is_survived(plan):
    lines = []
    score = campaign.run(plan, lines.append)
    assert score.passed, "\n".join(lines)
    assert (score.injected, score.survived, score.lost) == (plan.rounds, plan.rounds, [])


def test_a_gang_restarts_after_a_kill_and_stops_as_one(plan, tmp_path):
    """A killed process: all start again from a checkpoint. A stopped launcher: all save the same step and leave."""
    config = campaign.prepare(plan.folder, dataclasses.replace(plan, steps=10_000))
    workdir = tmp_path / "run"
    with campaign.Training(plan, config, workdir, gang=True, restarts=1) as training:
        training.wait_for(lambda: training.step >= 5, "step 5")
        os.kill(training.ranks()[1], signal.SIGKILL)
        training.wait_for(lambda: training.told("resuming after step"), "the restart")
        resumed = next(line for line in training.lines if line.startswith("resuming after step"))
        assert int(resumed.split()[-1]) >= 4
        at = len(training.lines)
        training.wait_for(lambda: any(line.startswith("step ") for line in training.lines[at:]), "a step after that")
        training.process.send_signal(signal.SIGTERM)
        assert training.wait(60.0) == 75, training.tail()
        assert checkpoints_of(workdir)[-1] == training.step == steps_of(workdir)[-1], training.tail()
    assert steps_of(workdir) == list(range(1, training.step + 1))
    assert steps_of(workdir, "samples.jsonl") == steps_of(workdir)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("samples.jsonl", None),
        ("samples.jsonl", [1, 2]),
        ("samples.jsonl", [1, 2, 2, 3]),
        ("metrics.jsonl", None),
        ("metrics.jsonl", [1, 3]),
    ],
)
def test_the_campaign_misses_no_step(plan, config, name, lines):
    broken = campaign.Broken(plan, config, plan.folder, random.Random(0))
    for folder in (broken.workdir, broken.reference):
        folder.mkdir(exist_ok=True)
        write_steps(folder / "metrics.jsonl", [1, 2, 3])
        write_steps(folder / "samples.jsonl", [1, 2, 3])
    assert broken.compare() == 3
    if lines is None:
        (broken.workdir / name).unlink()
    else:
        write_steps(broken.workdir / name, lines)
    with pytest.raises(campaign.LostError, match=name):
        broken.compare()


def test_a_campaign_that_the_clock_ended_is_not_passed():
    assert campaign.Score(rounds=2, injected=2, survived=2).passed
    short = campaign.Score(rounds=3, injected=2, survived=2)
    assert not short.passed
    assert short.line().endswith("; the time ended it early, 3 rounds were asked for")


def write_steps(path, steps):
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 / step, "samples": [step]}) + "\n" for step in steps))


def steps_of(workdir, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (workdir / name).read_text().splitlines()]


def checkpoints_of(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("frozen", "times"),
    [
        (0, f"step_timeout_s={campaign.STEP_TIMEOUT_S}, heartbeat_s=120"),
        (2, f"step_timeout_s={campaign.STEP_TIMEOUT_S}, heartbeat_s=120"),
        (2, "step_timeout_s=600, heartbeat_s=22"),  # jax's own patience is the shorter one, as with the defaults
    ],
    ids=["the coordinator", "another one", "before jax ends the processes"],
)
def test_a_frozen_process_is_found_in_time_and_every_other_one_tells_its_stacks(plan, tmp_path, frozen, times):
    four = dataclasses.replace(plan, steps=10_000, processes=4)
    config = campaign.prepare(plan.folder, four)
    text = config.read_text()
    config.write_text(text.replace(f"step_timeout_s={campaign.STEP_TIMEOUT_S}, heartbeat_s=120", times))
    assert times in config.read_text()
    with campaign.Training(four, config, tmp_path / "run", gang=True) as training:
        training.wait_for(lambda: training.step >= 5, "step 5")
        os.kill(training.ranks()[frozen], signal.SIGSTOP)
        training.wait_for(lambda: training.told("watchdog:"), "the watchdog", campaign.STEP_TIMEOUT_S)
        assert training.wait(campaign.FREEZE_SLACK_S) == 75, training.tail()
    others = {0, 1, 2, 3} - {frozen}
    assert all(tells(training, rank, f"process {rank} of 4 waited") for rank in others), training.tail()
    assert all(tells(training, rank, "in run_steps") for rank in others), training.tail()
    culprit = "process 0, which coordinates, does not answer" if frozen == 0 else f"process {frozen} is missing"
    assert any(tells(training, rank, culprit) for rank in others), training.tail()


def tells(training, rank, what):
    return any(line.startswith(f"[{rank}] ") and what in line for line in training.lines)


@pytest.mark.sweep
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


MOMENTS = {
    "evaluation": """
        import jaxpar.trainer
        honest = jaxpar.trainer.evaluator
        def evaluator(*args):
            evaluate = honest(*args)
            return lambda state: (dwell("evaluation"), evaluate(state))[1]
        jaxpar.trainer.evaluator = evaluator
    """,
    "save": """
        from jaxpar.checkpoint import storage
        honest = storage.PendingWrite.wait
        def wait(self):
            dwell("save")
            honest(self)
        storage.PendingWrite.wait = wait
    """,
}
DWELL = """
import os, runpy, sys, time
def dwell(what):
    rank = os.environ.get("JAXPAR_PROCESS_ID", "0")
    print(f"process {rank} is now in the {what}, pid {os.getpid()}", file=sys.stderr, flush=True)
    time.sleep(2.0)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_to_the_last_process_in_an_evaluation_or_a_save(plan, config, tmp_path, moment, processes):
    train, workdir = str(ROOT / "scripts" / "train.py"), tmp_path / "run"
    for name in ("even", "odd"):  # many documents, so that some of them are held out
        paragraphs = (plan.folder / f"{name}.txt").read_text().split("\n\n")
        rows = "".join(json.dumps({"text": text}) + "\n" for text in paragraphs)
        (plan.folder / f"{name}.jsonl").write_text(rows)
    config.write_text(config.read_text().replace(".txt", ".jsonl"))
    program = tmp_path / "program.py"
    end = f"sys.argv[0] = {train!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    program.write_text(DWELL + textwrap.dedent(MOMENTS[moment]) + end)
    arguments = [f"--config={config}", f"--workdir={workdir}", "--config.eval_interval=4", "--config.eval_steps=1"]
    arguments += ["--config.data.eval_fraction=0.2", "--config.metrics.progress=False"]
    launch = [str(ROOT / "scripts" / "launch.py"), f"--processes={processes}", "--max-restarts=0", "--"]
    head = [*launch[:2], "--devices-per-process=2", *launch[2:]] if processes > 1 else []
    command = [sys.executable, *head, str(program), *arguments, *([] if head else ["--devices=2"])]
    lines, place = [], re.compile(rf"process {processes - 1} is now in the {moment}, pid (\d+)")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if (found := place.search(line)) and not any(map(place.search, lines)):
                os.kill(int(found[1]), signal.SIGTERM)
            lines.append(line)
    assert child.returncode == 75, "".join(lines)
    steps = steps_of(workdir)
    assert checkpoints_of(workdir)[-1] == steps[-1] < plan.steps, "".join(lines)
    assert not list((workdir / "checkpoints").glob("*.partial"))
    done = subprocess.run([sys.executable, train, *arguments, "--devices=4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {steps[-1]}" in done.stdout
    assert steps_of(workdir) == list(range(1, plan.steps + 1))


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_trains_the_same(plan, config, tmp_path, processes):
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
