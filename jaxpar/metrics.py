"""What a run reports: throughput and MFU, metrics.jsonl, TensorBoard, the progress bar.

Owns clocks and files, not values: the loop fetches those. Only the process that is told to (`enabled`) writes.
FLOPs of a token are those of `models.count.flops_per_token`. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxpar.lines import FULL_DISK, Lines, truncate_after, warn

# Dense bfloat16 TFLOP/s (float16 where a GPU has no bfloat16) by a word of jax's device_kind; the first match counts.
# Source: vendors' data sheets, without structured sparsity.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("B300", 2250.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1800.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_flops_per_s(device_kind: str, peak_tflops: float | None = None) -> float | None:
    """Peak of one device: `peak_tflops` if set (config.metrics.peak_tflops), else by the table; None if unknown."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    # Whole words: an RTX A4000 is no A40.
    found = (tflops for name, tflops in PEAK_TFLOPS if re.search(rf"\b{name}(?!\d)", device_kind, re.IGNORECASE))
    tflops = next(found, None)
    return None if tflops is None else tflops * 1e12


# --- throughput ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rates:
    """One log interval. `mfu` is a fraction of the peak, None where the peak is not known."""

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None

    def as_metrics(self) -> dict[str, float]:
        """For the log; without what is not known."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


class Throughput:
    """Times training between two log lines; what runs inside `pause` (evaluation, saving, compiling) is left out."""

    def __init__(
        self,
        *,
        flops_per_token: float,
        num_devices: int,
        peak_flops_per_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`peak_flops_per_s` is that of one device."""
        self._flops_per_token = flops_per_token
        self._num_devices = num_devices
        self._peak = peak_flops_per_s
        self._clock = clock
        self._begun = self._interval_begun = clock()
        self._interval_paused_s = 0.0
        self._pausing = False
        self.paused_s: dict[str, float] = {}

    @contextlib.contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Leave the block's time out of the rates and add it to `paused_s[reason]`; an inner pause changes nothing."""
        if self._pausing:
            yield
            return
        self._pausing = True
        begun = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - begun
            self._pausing = False
            self._interval_paused_s += elapsed
            self.paused_s[reason] = self.paused_s.get(reason, 0.0) + elapsed

    def interval(self, *, steps: int, tokens: int) -> Rates:
        """Rates of the steps and tokens (of all devices) since the last call, and start the next interval."""
        now = self._clock()
        elapsed = max(now - self._interval_begun - self._interval_paused_s, 1e-9)
        self._interval_begun, self._interval_paused_s = now, 0.0
        per_s = tokens / elapsed
        per_device = per_s / self._num_devices
        return Rates(
            step_time_s=elapsed / steps,
            tokens_per_s=per_s,
            tokens_per_s_per_device=per_device,
            mfu=None if self._peak is None else per_device * self._flops_per_token / self._peak,
        )

    def goodput(self) -> float:
        """Share of the time since the start that went into training steps."""
        elapsed = max(self._clock() - self._begun, 1e-9)
        return 1.0 - min(sum(self.paused_s.values()) / elapsed, 1.0)


# --- files -----------------------------------------------------------------------------------------------------------


class MetricsWriter:
    """`metrics.jsonl` always and TensorBoard if asked: one object a line, one line a step, steps rising.

    Opened again for a run that resumes after `resume_step`, it first drops the lines of later steps and a line that a
    crash cut short, so that each step stands once. A full disk costs lines, with a warning, and not the run.
    """

    def __init__(
        self, workdir: Path, *, resume_step: int | None = None, tensorboard: bool = False, enabled: bool = True
    ) -> None:
        self._lines: Lines | None = None
        self._tensorboard: _TensorBoard | None = None
        self._last_step = -1
        if not enabled:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "metrics.jsonl"
        self._last_step = truncate_after(path, -1 if resume_step is None else resume_step)
        self._lines = Lines(path)
        if tensorboard:
            self._tensorboard = _TensorBoard(workdir / "tensorboard", resume_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of one step: numbers (numpy and jax arrays too) or text; nan and inf become null."""
        if self._lines is None:
            return
        assert step > self._last_step, f"step {step} is logged after step {self._last_step}"
        self._last_step = step
        row = {"step": step} | {key: _plain(value) for key, value in values.items()}
        self._lines.append(row)
        if self._tensorboard is not None:
            self._tensorboard.write(step, row)

    def close(self) -> None:
        """Flush and close the files."""
        self._lines = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TensorBoard:
    """Scalars for TensorBoard, until the disk refuses them."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        import tensorboardX  # half a second of imports, only where it is used

        self._folder = folder
        purge_step = None if resume_step is None else resume_step + 1
        before = set(threading.enumerate())
        # A write that fails ends the thread that writes, without a word; after that a full queue would wait for ever.
        self._writer: Any = tensorboardX.SummaryWriter(str(folder), purge_step=purge_step, max_queue=10_000)
        self._threads = set(threading.enumerate()) - before

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """The numbers of a row; the first sign that the disk refuses them ends it, with a warning."""
        if self._writer is None:
            return
        if not all(thread.is_alive() for thread in self._threads):
            self._give_up("its thread ended")
            return
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close; a disk that refuses is told."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(str(error.strerror))

    def _give_up(self, why: str) -> None:
        self._writer = None
        warn(f"{self._folder} cannot be written ({why}); this run goes on without it")


def _plain(value: Any) -> Any:
    """A Python number, text, None or a list of them; json then writes floats by repr, in full precision."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """A live bar on a terminal, else one plain line per log interval; on stdout, from one process."""

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        bar: bool = True,
        enabled: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self._total = total_steps
        self._file = sys.stdout if file is None else file
        self._enabled = enabled
        self._bar: Any = None
        if enabled and bar and self._file.isatty():
            self._bar, self._task = _make_bar(self._file, total_steps, start_step)

    def advance(self, step: int) -> None:
        """Move the bar to a step; cheap, and touches no device value."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the values of a log interval: those of `Rates`, and loss."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=_status(values), eta=self._eta(step, values))
        elif self._enabled:
            parts = [f"step {step}/{self._total}", _status(values), f"eta {self._eta(step, values)}"]
            self.message("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        """Print a line of text, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._enabled:
            try:
                print(text, file=self._file, flush=True)
            except OSError as error:  # a log file on a full disk; a reader that left (EPIPE) ends the run
                if error.errno not in FULL_DISK:
                    raise

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._enabled = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eta(self, step: int, values: Mapping[str, Any]) -> str:
        if "step_time_s" not in values:
            return "?"
        return duration((self._total - step) * float(values["step_time_s"]))


def duration(seconds: float) -> str:
    """A length of time as people read it: 42s, 3m07s, 5h12m, 2d03h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def _status(values: Mapping[str, Any]) -> str:
    formats: dict[str, Callable[[Any], str]] = {
        "loss": lambda value: f"loss {value:.4f}",
        "eval_loss": lambda value: f"eval loss {value:.4f}",
        "grad_norm": lambda value: f"grad norm {value:.3g}",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "mfu": lambda value: f"MFU {value:.1%}",
    }
    return "  ".join(show(values[key]) for key, show in formats.items() if values.get(key) is not None)


def _make_bar(file: TextIO, total_steps: int, start_step: int) -> tuple[Any, Any]:
    from rich import console, progress

    bar = progress.Progress(
        progress.TextColumn("step"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[status]}", markup=False),
        progress.TextColumn("eta {task.fields[eta]}", markup=False),
        console=console.Console(file=file),
    )
    task = bar.add_task("train", total=total_steps, completed=start_step, status="starting", eta="?")
    bar.start()
    return bar, task
