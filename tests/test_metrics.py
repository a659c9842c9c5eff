"""Metrics: rates that add up to the wall time, files that a crash cannot spoil, FLOPs by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar import metrics
from jaxpar.config import ModelConfig, MoeConfig
from jaxpar.models.count import flops_per_token, matmul_parameters, parameter_count


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, peak: float | None = 1e6) -> metrics.Throughput:
    return metrics.Throughput(flops_per_token=50.0, num_devices=4, peak_flops_per_s=peak, clock=clock)


def test_pauses_are_left_out_and_the_rest_adds_up():
    clock = Clock()
    throughput = meter(clock)
    logged_s = 0.0
    for _ in range(3):
        clock.now += 5.0
        with throughput.pause("evaluation"):
            clock.now += 30.0
            with throughput.pause("saving"):  # inside another: counted once
                clock.now += 1.0
        clock.now += 3.0
        rates = throughput.interval(steps=4, tokens=800)
        assert rates.step_time_s == pytest.approx(2.0)
        assert rates.tokens_per_s == pytest.approx(100.0)
        assert rates.mfu == pytest.approx(25.0 * 50.0 / 1e6)
        logged_s += rates.step_time_s * 4
    assert throughput.paused_s == {"evaluation": pytest.approx(93.0)}
    assert logged_s + 93.0 == pytest.approx(clock.now - 100.0)
    assert throughput.goodput() == pytest.approx(24.0 / 117.0)


def test_a_pause_ends_with_an_exception():
    clock = Clock()
    throughput = meter(clock, peak=None)

    def failing_save():
        with throughput.pause("saving"):
            clock.now += 2.0
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        failing_save()
    clock.now += 1.0
    rates = throughput.interval(steps=1, tokens=1)
    assert rates.step_time_s == pytest.approx(1.0)
    assert rates.mfu is None
    assert "mfu" not in rates.as_metrics()


def test_logged_step_time_is_the_wall_time():
    throughput = metrics.Throughput(flops_per_token=1.0, num_devices=1, peak_flops_per_s=None)
    begun = time.perf_counter()
    logged_s = 0.0
    for _ in range(3):
        for _ in range(4):
            time.sleep(0.01)
        logged_s += throughput.interval(steps=4, tokens=4).step_time_s * 4
    assert logged_s == pytest.approx(time.perf_counter() - begun, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA RTX A4000", None),
        ("cpu", None),
    ],
)
def test_peaks_by_device_kind(kind: str, tflops: float | None):
    assert metrics.peak_flops_per_s(kind) == (None if tflops is None else tflops * 1e12)
    assert metrics.peak_flops_per_s(kind, 3.0) == 3e12


def rows(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_floats_keep_full_precision(tmp_path: Path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(
            1, {"loss": 0.1 + 0.2, "single": np.float32(0.1), "count": np.int64(3), "bad": math.nan, "note": "x"}
        )
    (row,) = rows(tmp_path)
    assert row == {"step": 1, "loss": 0.1 + 0.2, "single": float(np.float32(0.1)), "count": 3, "bad": None, "note": "x"}


def test_resume_keeps_each_step_once_and_drops_half_lines(tmp_path: Path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for step in (100, 150, 200, 210, 212):
            writer.write(step, {"loss": 1.0 / step})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 213, "lo')  # the crash
    before = path.read_text().splitlines()
    with metrics.MetricsWriter(tmp_path, resume_step=200) as writer:
        assert path.read_text().splitlines() == before[:3]
        for step in (210, 220):
            writer.write(step, {"loss": 2.0 / step})
    assert [row["step"] for row in rows(tmp_path)] == [100, 150, 200, 210, 220]
    assert rows(tmp_path)[3]["loss"] == 2.0 / 210
    assert not list(tmp_path.glob("*.tmp"))


def test_a_fresh_run_starts_a_fresh_file(tmp_path: Path):
    for _ in range(2):
        with metrics.MetricsWriter(tmp_path) as writer:
            writer.write(5, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [5]


def test_steps_must_rise(tmp_path: Path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(5, {})
        with pytest.raises(AssertionError, match="step 5 is logged after step 5"):
            writer.write(5, {})


def test_other_processes_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    workdir = tmp_path / "run"
    with metrics.MetricsWriter(workdir, tensorboard=True, enabled=False) as writer:
        writer.write(1, {"loss": 1.0})
    with metrics.Progress(10, enabled=False) as progress:
        progress.log(1, {"loss": 1.0})
        progress.message("hello")
    assert not workdir.exists()
    assert capsys.readouterr().out == ""


def test_tensorboard_files_are_written(tmp_path: Path):
    with metrics.MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0, "note": "x", "bad": math.inf})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()
    assert b"note" not in events.read_bytes()


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    with metrics.Progress(100, start_step=0, file=out) as progress:
        progress.advance(5)
        progress.log(10, {"loss": 2.34567, "tokens_per_s": 12345.6, "mfu": 0.4321, "step_time_s": 2.0})
        progress.message("[saved] step 10")
    assert out.getvalue() == ("step 10/100  loss 2.3457  12,346 tokens/s  MFU 43.2%  eta 3m00s\n[saved] step 10\n")


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with metrics.Progress(100, start_step=10, file=out) as progress:
        progress.log(50, {"loss": 2.34567, "step_time_s": 1.0})
        progress.advance(51)
        progress.message("[saved] step 50")
        progress.close()
    assert "loss 2.3457" in out.getvalue()
    assert "51/100" in out.getvalue()
    assert "[saved] step 50" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3s"), (59.6, "1m00s"), (187, "3m07s"), (18720, "5h12m"), (183600, "2d03h")]
)
def test_durations(seconds: float, text: str):
    assert metrics.duration(seconds) == text


TINY = ModelConfig(num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=3, mlp_dim=16, vocab_size=10)


def test_parameters_and_flops_by_hand():
    layer = 8 * 12 * 2 + 8 * 6 * 2 + 3 * 8 * 16
    assert parameter_count(TINY) == 2 * (layer + 16) + 2 * 80 + 8
    assert matmul_parameters(TINY) == 2 * layer + 80
    # scores and weighted sum: 2 matmuls x 2 FLOPs x 3 passes x heads x head_dim x seq / 2, for both layers
    assert flops_per_token(TINY, 32) == 6 * (2 * layer + 80) + 2 * (12 * 12 * 16)
    tied = dataclasses.replace(TINY, tied=True)
    assert parameter_count(TINY) - parameter_count(tied) == 80
    assert flops_per_token(tied, 32) == flops_per_token(TINY, 32)


def test_windows_and_experts_lower_the_flops():
    windowed = dataclasses.replace(TINY, window=8, window_pattern=(True, False))
    seen = sum(min(t + 1, 8) for t in range(32)) / 32 - 8 / (2 * 32)  # seq_len / 2 leaves out the diagonal alike
    full = flops_per_token(TINY, 32)
    assert full - flops_per_token(windowed, 32) == pytest.approx(12 * 12 * (16 - seen))
    assert flops_per_token(dataclasses.replace(TINY, window=32), 32) == full

    experts = dataclasses.replace(TINY, moe=MoeConfig(num_experts=8, experts_per_token=2, expert_dim=16, num_shared=1))
    more = 8 * 8 + 2 * 3 * 8 * 16  # the router, and two more active MLPs
    assert matmul_parameters(experts) - matmul_parameters(TINY) == 2 * more
    assert parameter_count(experts) - parameter_count(TINY) == 2 * (8 * 8 + 8 * 3 * 8 * 16)
