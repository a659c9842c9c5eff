"""What goes wrong in a dry run gives one clear message and exit code 2; nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxpar import config_file
from jaxpar.dryrun import compile as compiling
from jaxpar.dryrun import run as running
from jaxpar.dryrun.compile import CompileFailedError, compile_step, explain_exit, run_child, topology
from jaxpar.dryrun.prepare import prepare
from jaxpar.dryrun.run import Options, dry_run
from jaxpar.dryrun.targets import find_target
from jaxpar.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"global_batch": 8, "seq_len": 128, "model": {"vocab_size": 512, "num_layers": 2}}


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def fails(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def fake_child(tmp_path, monkeypatch):
    """Makes a module of the given code that can stand in for the compiling child."""

    def make(code: str) -> str:
        (tmp_path / "stand_in.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "stand_in"

    return make


def test_killed_child(fake_child, tmp_path):
    module = fake_child("import os, signal; print('some words', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CompileFailedError, match=r"killed, most likely .* out of memory(.|\n)*some words"):
        run_child(tmp_path, timeout_s=60, module=module)


def test_crashed_child(fake_child, tmp_path):
    module = fake_child("import os, signal; os.kill(os.getpid(), signal.SIGFPE)")
    with pytest.raises(CompileFailedError, match=r"SIGFPE.*incomplete"):
        run_child(tmp_path, timeout_s=60, module=module)


def test_slow_child_is_stopped(fake_child, tmp_path):
    module = fake_child("import time; time.sleep(600)")
    started = time.monotonic()
    with pytest.raises(CompileFailedError, match="longer than 1 s"):
        run_child(tmp_path, timeout_s=1, module=module)
    assert time.monotonic() - started < 30


def test_child_without_a_result(fake_child, tmp_path):
    module = fake_child("print('odd')")
    with pytest.raises(CompileFailedError, match="exit code 0"):
        run_child(tmp_path, timeout_s=60, module=module)


def test_child_gets_tools_of_its_own(fake_child, tmp_path, monkeypatch):
    """The CUDA toolkit is not needed: the compiler is pointed to stand-ins, after flags that the user set."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/elsewhere")
    module = fake_child("import os; print(os.environ['XLA_FLAGS'])")
    with pytest.raises(CompileFailedError) as caught:
        run_child(tmp_path, timeout_s=60, module=module)
    folder = Path(str(caught.value).split("--xla_gpu_cuda_data_dir=")[2].split()[0])
    assert folder.parent == tmp_path
    answer = subprocess.run([folder / "bin" / "ptxas", "--version"], capture_output=True, text=True, check=True)
    assert "release 13" in answer.stdout
    subprocess.run([folder / "bin" / "ptxas", "in.ptx", "-o", str(tmp_path / "out.cubin"), "-arch=sm_90a"], check=True)
    assert (tmp_path / "out.cubin").read_bytes() == b""


def test_memory_error_is_named():
    assert "ran out of memory" in explain_exit(1, "Traceback\nMemoryError: no")


@pytest.mark.parametrize(("gpus", "per_node", "expected"), [(64, 8, "1x8x8"), (4, 8, "1x1x4"), (72, 72, "1x1x72")])
def test_topology(gpus, per_node, expected):
    assert topology(gpus, per_node) == expected


def test_gpus_that_do_not_fill_nodes():
    with pytest.raises(UserError, match="use 8 or 16"):
        topology(12, 8)


def test_without_the_compiler_the_closed_form_answers(monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    config = config_file.from_dict(SMALL)
    report = dry_run(config, "h100", 8)
    assert not report.compiled
    assert report.peak_bytes > 0
    assert "pip install jax-cuda13-plugin==" in report.warnings[0]
    with pytest.raises(compiling.PluginMissingError):
        compile_step(config, find_target("h100"), 8)


def test_what_does_not_fit_says_what_helps():
    model = {"num_layers": 40, "embed_dim": 8192, "num_heads": 64, "mlp_dim": 28672, "vocab_size": 32000}
    config = config_file.from_dict({"global_batch": 8, "seq_len": 2048, "remat": "full", "model": model})
    report = dry_run(config, "a100-80g", 8, options=Options(compile=False))
    assert not report.fits
    assert "does not fit by" in report.warnings[0]
    assert "saves about" in report.warnings[0]
    best = running.advice(config, report)[0]
    assert "parallel.zero = 3" in best


def test_vocabulary_must_be_known():
    config = config_file.from_dict({"data": {"tokenizer": "somewhere/tokenizer.json"}})
    with pytest.raises(UserError, match=r"--config\.model\.vocab_size=N"):
        prepare(config, 8)


def test_scripts_refuse(tmp_path):
    config = tmp_path / "small.json"
    config.write_text(json.dumps(SMALL))
    base = (f"--config={config}", "--no-compile")
    fails(script("dryrun.py"), "dryrun.py: error: --config=FILE is missing")
    fails(script("dryrun.py", *base, "--gpu=h10"), "h10", "h100")
    fails(script("dryrun.py", *base, "--gpus=16", "--config.parallel.tensor=3"), "tensor")
    fails(script("dryrun.py", *base, "--gpus=0"), "--gpus=0")
    fails(script("dryrun.py", *base, "--assume", "warp=9"), "warp")
    fails(script("dryrun.py", *base, "--config.model.num_layer=3"), "num_layers")


def test_scripts_answer_without_compiling(tmp_path):
    config = tmp_path / "small.json"
    config.write_text(json.dumps(SMALL))
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = script(
        "dryrun.py", f"--config={config}", "--no-compile", f"--json={out}", f"--plot={picture}", "--cost",
        "--assume=overlap=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    assert values["compiled"] is False
    assert values["assumptions"]["overlap"] == 0.5
    assert values["cost"]["energy_kwh"] > 0
    assert picture.stat().st_size > 10_000
    assert "estimate" in done.stdout


def test_help_is_quick_and_without_jax():
    code = "import sys; sys.argv = ['dryrun.py', '--help']; sys.path.insert(0, 'scripts')\nimport dryrun\n"
    code += "try: dryrun.main(['--help'])\nexcept SystemExit: pass\nprint('JAX', 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "JAX False" in done.stdout
