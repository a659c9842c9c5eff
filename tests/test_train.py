"""The training script as a user runs it: it learns, resumes exactly, and refuses mistakes in one message."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
def get_config():
    return {
        "steps": 6, "global_batch": 8, "seq_len": 32, "log_interval": 2, "eval_interval": 3, "eval_steps": 2,
        "accumulation": 2, "precision": "float32",
        "model": {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 64, "dropout": 0.1},
        "parallel": {"data": 2, "tensor": 2, "zero": 3, "sequence_parallel": True},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "data": {"source": "files", "files": ("TEXT",), "eval_fraction": 0.2, "log_samples": True},
        "checkpoint": {"interval": 3},
        "metrics": {"tensorboard": False},
    }
"""


ONE_DEVICE = ("--devices=1", "--config.parallel.data=1", "--config.parallel.tensor=1", "--config.accumulation=1",
              "--config.eval_interval=None", "--config.parallel.zero=0")  # fmt: skip


@pytest.fixture
def config(tmp_path):
    rows = [{"text": f"{word} " * (5 + 3 * i)} for i, word in enumerate(["one", "two", "three", "four"] * 40)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace("TEXT", str(text)))
    return path


def script(name: str, *args: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | variables)


def train(config, workdir, *args):
    return script("train", f"--config={config}", f"--workdir={workdir}", "--devices=4", *args)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arrays_of(workdir: Path, step: int) -> dict[str, np.ndarray]:
    from jaxpar.checkpoint import load_arrays

    return load_arrays(workdir / "checkpoints", step)[1]


def test_run_and_resume_are_bit_identical(config, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = train(config, whole)
    assert done.returncode == 0, done.stderr
    first = train(config, broken, "--config.steps=3", "--config.optimizer.schedule=constant")
    assert first.returncode == 0, first.stderr
    # the same schedule for both: constant after the warm-up
    again = train(config, tmp_path / "constant", "--config.optimizer.schedule=constant")
    second = train(config, broken, "--config.optimizer.schedule=constant")
    assert second.returncode == 0, second.stderr
    assert "resuming after step 3" in second.stdout
    assert again.returncode == 0

    wanted, found = rows_of(tmp_path / "constant" / "metrics.jsonl"), rows_of(broken / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 6]
    timed = {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "interval_tokens"}
    for ours, theirs in zip(found, wanted, strict=True):
        assert {k: v for k, v in ours.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}
    samples = rows_of(broken / "samples.jsonl")
    assert samples == rows_of(tmp_path / "constant" / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 2, 3, 4, 5, 6]
    left, right = arrays_of(broken, 6), arrays_of(tmp_path / "constant", 6)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert np.array_equal(value, right[name]), name

    rows = rows_of(whole / "metrics.jsonl")
    assert rows[-1]["eval_bits_per_byte"] > 0
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((whole / "config.json").read_text())["steps"] == 6
    settings = (whole / "config.json").read_text()
    refused = train(config, whole, "--config.steps=8", "--config.seq_len=16")
    assert refused.returncode == 2
    assert "the training data changed" in refused.stderr
    assert (whole / "config.json").read_text() == settings
    (whole / "config.json").write_text("{")
    finished = train(config, whole)
    assert finished.returncode == 0
    assert "all 6 steps are done" in finished.stdout
    assert "config.json is damaged" in finished.stdout
    assert (whole / "config.json").read_text() == settings
    assert rows_of(whole / "metrics.jsonl") == rows


def test_step_and_evaluation_compile_once_a_run(config, tmp_path, caplog, monkeypatch):
    """Three evaluations, a save in between, batches of uneven fill: nothing is compiled after the first of each."""
    from jaxpar import config_file, trainer

    monkeypatch.setattr(trainer, "_use_compile_cache", lambda config, workdir: None)  # jax keeps it for other tests
    settings = config_file.load(
        str(config),
        ["steps=6", "eval_interval=2", "eval_steps=none", "accumulation=1", "parallel.data=4", "model.num_layers=1",
         "checkpoint.interval=4"],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
        result = trainer.train(settings, tmp_path / "run")
    assert [row["step"] for row in result.outcome.history if "eval_loss" in row] == [2, 4, 6]
    found = [re.match(r"Finished XLA compilation of (?:jit\()?(\w+)", record.getMessage()) for record in caplog.records]
    names = [match[1] for match in found if match]
    # After the step come the first state and the evaluation, and then no program at all.
    assert [name for name in names if name in ("run", "init_state")] == ["run", "init_state", "run"]
    assert names[-1] == "run"


MISTAKES = {
    "typo": (["--config.optimizer.learningrate=1e-3"], ["learningrate", "did you mean", "learning_rate"]),
    "several": (
        ["--config.global_batch=7", "--config.model.num_heads=3", "--config.optimizer.warmup_steps=99"],
        ["global_batch", "num_heads", "warmup_steps"],
    ),
    "mesh too large": (["--config.parallel.data=16"], ["parallel.data", "4"]),
    "heads": (["--config.model.num_heads=5", "--config.model.head_dim=8"], ["num_heads", "tensor"]),
    "missing file": (["--config.data.files=/nowhere/*.txt"], ["/nowhere/*.txt"]),
    "vocabulary too small": (["--config.model.vocab_size=100"], ["vocab_size", "100"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gives_one_message_and_writes_nothing(name, config, tmp_path):
    arguments, words = MISTAKES[name]
    workdir = tmp_path / "run"
    done = train(config, workdir, *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not workdir.exists()


def test_empty_corpus_is_named(config, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    done = train(config, tmp_path / "run", f"--config.data.files={tmp_path / 'empty.txt'}")
    assert done.returncode == 2
    assert "empty.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_layout_script(config):
    done = script("check_layout", f"--config={config}", "--config.parallel.data=-1")
    assert done.returncode == 0, done.stderr
    assert "mesh: data 4 x tensor 2" in done.stdout
    assert "PASSED" in done.stdout
    assert "blocks/attention/q" in done.stdout
    alone = script("check_layout", f"--config={config}", "--config.parallel.data=1", "--config.parallel.tensor=1")
    assert alone.returncode == 2
    assert "one device with itself" in alone.stderr
    assert "--config.parallel.data=4" in alone.stderr
    heads = ("--config.model.num_heads=7", "--config.model.num_kv_heads=3", "--config.model.num_layers=-1")
    wrong = script("check_layout", f"--config={config}", "--config.parallel.data=2", *heads)
    assert wrong.returncode == 2, "what training would refuse is not shrunk out of sight"
    assert "model.num_layers = -1" in wrong.stderr


def test_what_the_library_picks_is_told(config, tmp_path):
    """A mode and its reason, and KV heads that several shards compute, on stderr."""
    mesh = ("--config.parallel.data=1", "--config.parallel.context=2", "--config.parallel.tensor=2")
    done = script("inspect_sharding", f"--config={config}", *mesh, "--config.model.num_kv_heads=1", "--devices=4")
    assert done.returncode == 0, done.stderr
    assert "context parallelism: " in done.stderr
    assert "1 KV heads on 2 tensor shards: each is computed on 2 of them" in done.stderr


def test_inspect_sharding_script(config, tmp_path):
    out = tmp_path / "rows.json"
    done = script("inspect_sharding", f"--config={config}", f"--json={out}", "--compile", "--devices=4")
    assert done.returncode == 0, done.stderr
    table = json.loads(out.read_text())
    rows = {row["name"]: row for row in table["parameters"]}
    q = rows["blocks/attention/q"]
    assert q["logical_axes"] == ["layer", "embed", "heads", "head_dim"]
    assert q["parameter_axes"][1].split(",")[0] == "data"
    assert q["parameter_axes"][2] == "tensor"
    assert q["parameter_bytes"] == 2 * 32 * 4 * 8 * 4 // 4
    assert q["optimizer_bytes"] == 2 * q["parameter_bytes"]
    assert "hold the promised bytes" in done.stdout


def test_a_loss_scale_belongs_to_the_precision_of_the_run(config, tmp_path):
    scales = []
    for steps, name in ((2, "float32"), (3, "fp16"), (4, "bf16")):
        run = train(config, tmp_path / "run", f"--config.steps={steps}", f"--config.precision={name}", *ONE_DEVICE)
        assert run.returncode == 0, run.stderr
        scales.append(float(arrays_of(tmp_path / "run", steps)["loss_scale/scale"]))
    assert scales == [1.0, 2.0**15, 1.0]


def test_settings_that_changed_on_resume_are_told_once(config, tmp_path):
    first = (*ONE_DEVICE, "--config.steps=1", "--config.model.num_layers=1", "--config.checkpoint.interval=1")
    done = train(config, tmp_path / "run", *first, "--config.optimizer.warmup_steps=0")
    assert done.returncode == 0, done.stderr
    assert "settings changed" not in done.stdout
    change = ("--config.steps=2", "--config.optimizer.learning_rate=2e-2")
    again = train(config, tmp_path / "run", *first, "--config.optimizer.warmup_steps=0", *change)
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if "settings changed" in line] == [
        "settings changed since the last start, the new ones hold: steps: 1 -> 2; optimizer.learning_rate: 0.01 -> 0.02"
    ]


@pytest.mark.sweep
def test_a_killed_run_ends_bit_for_bit_as_an_unbroken_one(config, tmp_path):
    """SIGKILL after several steps, with dropout, accumulation, best-fit packing and a mixture; same mesh."""
    rows = [{"text": f"{word} " * (3 + 5 * i)} for i, word in enumerate(["red", "blue", "green"] * 30)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "source": "mixture",
        "sources": tuple(
            {"name": name, "source": "files", "files": (str(tmp_path / f"{name}.jsonl"),), "weight": 0.5}
            for name in ("text", "other")
        ),
        "phases": ((0, (0.7, 0.3)), (10, (0.4, 0.6))),
        "packing": "best_fit",
        "eval_fraction": 0.0,
        "log_samples": True,
    }
    text = config.read_text()
    begin, end = text.index('"data": {"source"'), text.index('"checkpoint"')
    config.write_text(text[:begin] + f'"data": {settings!r},\n        ' + text[end:])
    steps, kills = 24, (2, 7, 13, 19)
    extra = (f"--config.steps={steps}", "--config.log_interval=1", "--config.eval_interval=None",
             f"--config.runtime.compile_cache={tmp_path / 'compiled'}")  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(config, whole, *extra).returncode == 0
    for kill in kills:
        kill_after(kill, config, broken, *extra)
    last = train(config, broken, *extra)
    assert last.returncode == 0, last.stderr
    assert "resuming after step" in last.stdout

    timed = {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu"}
    untimed = [
        [{key: value for key, value in row.items() if key not in timed} for row in rows_of(run / "metrics.jsonl")]
        for run in (whole, broken)
    ]
    assert len(untimed[0]) == steps
    assert untimed[1] == untimed[0]
    assert rows_of(broken / "samples.jsonl") == rows_of(whole / "samples.jsonl")
    wanted, found = arrays_of(whole, steps), arrays_of(broken, steps)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("opt_state/") for name in wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert found[name].tobytes() == value.tobytes(), name


def kill_after(step: int, config: Path, workdir: Path, *args: str) -> None:
    """Run scripts/train.py until it logged `step`, and kill it there and then."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={config}", f"--workdir={workdir}"]
    with subprocess.Popen([*command, "--devices=4", *args], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step:
                child.kill()
                break
    assert child.returncode == -9


def test_a_run_that_diverges_stops_and_its_checkpoints_are_from_before(config, tmp_path):
    workdir = tmp_path / "run"
    done = train(config, workdir, *ONE_DEVICE, "--config.optimizer.learning_rate=1e38", "--config.log_interval=1",
                 "--config.optimizer.warmup_steps=0", "--config.optimizer.max_skipped=3", "--config.steps=20",
                 "--config.checkpoint.interval=1", "--config.checkpoint.keep=20",
                 "--config.model.num_layers=1")  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = rows_of(workdir / "metrics.jsonl")
    skipped = [row["skipped"] for row in rows]
    assert skipped[-3:] == [1, 2, 3], "it stops after max_skipped steps in a row"
    assert rows[-1]["skipped_total"] == sum(count > 0 for count in skipped)
    first, last = rows[-3]["step"], rows[-1]["step"]
    steps = range(1, last)  # the step that stops the run is not saved
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert lines == [
        f"train.py: stopped at step {last}: 3 steps in a row, from step {first} on, had a loss or gradient that is not "
        "finite (optimizer.max_skipped = 3). A skipped step changes no parameter and no optimizer state, so those in "
        f"every checkpoint ({', '.join(map(str, steps))}) are from before step {first}"
    ]
    assert "Traceback" not in done.stderr
    before = arrays_of(workdir, first - 1)
    for step in (first, last - 1):
        found = arrays_of(workdir, step)
        assert (found["step"], found["skipped"], found["updates"]) == (step, step - first + 1, before["updates"])
        for name, value in before.items():
            if name.startswith(("params/", "opt_state/")):
                assert np.array_equal(found[name], value, equal_nan=True), name


def test_help_does_not_import_jax():
    code = (
        "import sys, runpy; sys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('scripts/train.py', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules, 'jax was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "parallel.tensor" in done.stdout


@pytest.mark.sweep
def test_dense_and_expert_layers_move_between_pipeline_and_experts(tmp_path):
    """Eight steps on stages, four more on experts, against twelve on experts; real text, so experts fill unevenly."""
    common = [
        "--devices=8", "--config.precision=float32", "--config.remat=full", "--config.model.moe.num_experts=4",
        "--config.model.moe.expert_dim=64", "--config.model.moe.first_dense=1", "--config.model.moe.balance_loss=0.01",
        "--config.optimizer.schedule=constant", "--config.optimizer.warmup_steps=2", "--config.log_interval=1",
        "--config.eval_interval=None",
        "--config.data.log_samples=True", "--config.checkpoint.interval=8", "--config.parallel.data=2",
        "--config.parallel.tensor=2",
    ]  # fmt: skip
    stages = ["--config.parallel.stage=2", "--config.parallel.zero=1", "--config.pipeline.microbatches=4"]
    experts = ["--config.parallel.expert=2"]
    found = {}
    for name, parts in {"moved": [(8, stages), (12, experts)], "unbroken": [(12, experts)]}.items():
        folder = tmp_path / name
        for steps, layout in parts:
            run = script("train", f"--config={ROOT}/configs/quickstart.py", f"--workdir={folder}",
                         f"--config.steps={steps}", *common, *layout)  # fmt: skip
            assert run.returncode == 0, run.stderr[-3000:]
        found[name] = [row["loss"] for row in rows_of(folder / "metrics.jsonl") if "loss" in row]
    assert len(found["unbroken"]) == 12
    np.testing.assert_allclose(found["moved"], found["unbroken"], rtol=1e-5)
