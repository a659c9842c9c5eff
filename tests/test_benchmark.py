"""The benchmark fails when a row is out of its limits, in whatever way the part states them."""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PART = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    ratio: float
    bound: float
    at_most: bool


def run():
    return [{"name": "a", "found": FOUND, "limit": 1.0}, Row("b", RATIO, 2.0, False), {"name": "c", "ratio": 9.0}]
"""


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"found": 1.0, "limit": 1.0}, True),
        ({"found": 1.1, "limit": 1.0}, False),
        ({"found": math.nan, "limit": 1.0}, False),
        ({"found": 1.1, "limit": 1.0, "at_most": False}, True),
        ({"found": 0.9, "limit": 1.0, "at_most": False}, False),
        ({"found": 0.5, "limits": (0.5, 1.0)}, True),
        ({"found": 0.4, "limits": (0.5, 1.0)}, False),
        ({"found": 1.1, "limits": (0.5, 1.0)}, False),
        ({"found": math.nan, "limits": (0.5, 1.0)}, False),
        ({"ratio": 1.0, "bound": 1.0, "at_most": True}, True),
        ({"ratio": 1.1, "bound": 1.0, "at_most": True}, False),
        ({"ratio": 0.9, "bound": 1.0, "at_most": False}, False),
        ({"ratio": 3.0}, True),
    ],
)
def test_a_row_is_judged_by_the_limits_it_states(row, kept):
    assert load(ROOT / "scripts" / "benchmark.py").within_limits(row) is kept


@pytest.mark.parametrize(
    ("found", "ratio", "code", "last"),
    [
        (1.0, 2.0, 0, "0 of 6 rows are out of their limits"),
        (1.1, 2.0, 1, "2 of 6 rows are out of their limits; one: a; two: a"),
        (1.1, 1.9, 1, "4 of 6 rows are out of their limits; one: a; one: b; two: a; two: b"),
    ],
)
def test_a_row_out_of_its_limits_fails_the_run(tmp_path, found, ratio, code, last):
    parts = tmp_path / "scripts" / "benchmarks"
    parts.mkdir(parents=True)
    (tmp_path / "jaxpar").mkdir()
    (tmp_path / "jaxpar" / "__init__.py").touch()
    (tmp_path / "jaxpar" / "mesh.py").write_text("def simulate_devices(count):\n    pass\n")  # no need to start jax
    for name in ("one", "two"):
        (parts / f"{name}.py").write_text(PART.replace("FOUND", str(found)).replace("RATIO", str(ratio)))
    copy = shutil.copy(ROOT / "scripts" / "benchmark.py", tmp_path / "scripts")
    command = [sys.executable, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == last
