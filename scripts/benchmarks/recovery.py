"""Time from SIGKILL of one process of a gang to its next finished step, against a warm start of the same gang.

    python scripts/benchmarks/recovery.py [--processes=2]

Both include the imports, the compile from a warm cache, the restore and the first step; recovery adds noticing the
death and the steps since the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxpar.runtime import campaign

BOUND = 3.0


def run(processes: int = 2) -> list[dict[str, Any]]:
    """Measure and print; rows with the ratio found and its limit."""
    with tempfile.TemporaryDirectory() as temporary:
        plan = campaign.Plan(folder=Path(temporary), steps=5000, processes=processes)
        config = campaign.prepare(plan.folder, plan)
        workdir = plan.folder / "run"
        _time_to_step(plan, config, workdir)  # fills the caches and leaves a checkpoint
        warm_s = _time_to_step(plan, config, workdir)
        rows = []
        for rank in (processes - 1, 0):  # the last one, and the one that coordinates
            seconds = _time_to_recover(plan, config, workdir, rank)
            name = f"recovery from SIGKILL of process {rank} / warm start"
            rows.append({"name": name, "found": seconds / warm_s, "limit": BOUND})
            kept = "ok" if seconds <= BOUND * warm_s else "MISSED"
            print(
                f"{name:<52} {seconds / warm_s:5.2f} <= {BOUND:g} {kept}  {seconds:.1f} s / {warm_s:.1f} s", flush=True
            )
    return rows


def _time_to_step(plan: campaign.Plan, config: Path, workdir: Path) -> float:
    began = time.monotonic()
    with campaign.Training(plan, config, workdir, gang=True) as training:
        training.wait_for(lambda: training.step >= 0, "the first step")
        seconds = time.monotonic() - began
        os.kill(training.ranks()[0], signal.SIGTERM)
        training.wait(120.0)
    return seconds


def _time_to_recover(plan: campaign.Plan, config: Path, workdir: Path, rank: int) -> float:
    with campaign.Training(plan, config, workdir, gang=True, restarts=3) as training:
        training.wait_for(lambda: training.step >= 0, "the first step")
        first = training.step
        training.wait_for(lambda: training.step >= first + 6, "some steps")
        told = len(training.lines)
        began = time.monotonic()
        os.kill(training.ranks()[rank], signal.SIGKILL)

        def is_back() -> bool:
            news = training.lines[told:]
            restart = next((i for i, line in enumerate(news) if line.startswith("launch:") and "restart" in line), None)
            return restart is not None and any(line.startswith("step ") for line in news[restart:])

        training.wait_for(is_back, "a step after the kill")
        seconds = time.monotonic() - began
        os.kill(training.ranks()[0], signal.SIGTERM)
        time.sleep(1.0)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    return 0 if all(row["found"] <= row["limit"] for row in run(args.processes)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
