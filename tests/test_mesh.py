"""Meshes, simulated devices and joining many processes."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from jaxpar.errors import UserError
from jaxpar.mesh import AXES, degrees, find_processes, make_mesh


def test_axes_and_order():
    mesh = make_mesh({"data": 2, "tensor": 4})
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"stage": 1, "replica": 1, "data": 2, "expert": 1, "context": 1, "tensor": 4}
    ids = [device.id for device in mesh.devices.reshape(2, 4)[0]]
    assert ids == [0, 1, 2, 3]  # tensor is innermost
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_minus_one_takes_the_rest():
    assert degrees({"data": -1, "tensor": 2}, 8)["data"] == 4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"data": 16}, ["parallel.data = 16", "16 devices", "there are 8"]),
        ({"data": 3, "tensor": -1}, ["3", "8"]),
        ({"data": 0}, ["data", "0"]),
        ({"data": -2}, ["data", "-2"]),
        ({"data": -1, "tensor": -1}, ["data", "tensor", "-1"]),
        ({"fsdp": 8}, ["fsdp", "data"]),
    ],
)
def test_wrong_degrees_are_named(asked, words):
    with pytest.raises(UserError) as error:
        degrees(asked, 8)
    for word in words:
        assert word in str(error.value)


def test_processes_need_all_three(monkeypatch):
    assert find_processes() is None
    monkeypatch.setenv("JAXPAR_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match="JAXPAR_COORDINATOR"):
        find_processes()
    monkeypatch.setenv("JAXPAR_COORDINATOR", "127.0.0.1:1234")
    monkeypatch.setenv("JAXPAR_PROCESS_ID", "2")
    with pytest.raises(UserError, match=r"JAXPAR_PROCESS_ID = 2 is not in 0\.\.1"):
        find_processes()
    monkeypatch.setenv("JAXPAR_PROCESS_ID", "one")
    with pytest.raises(UserError, match="'one'"):
        find_processes()


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "NPROC")} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


def test_lone_process_in_a_slurm_allocation_starts_alone():
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
             "SLURM_STEP_NODELIST": "node[1-4]", "SLURM_STEP_NUM_TASKS": "4", "JAX_PLATFORMS": "cpu"}  # fmt: skip
    done = run("from jaxpar.mesh import *; print('joined', join_processes(find_processes()))", **slurm)
    assert "joined False" in done.stdout, done.stderr


def test_simulated_devices_in_a_fresh_interpreter_and_too_late():
    done = run(
        "import jaxpar, sys; assert 'jax' not in sys.modules\n"
        "jaxpar.simulate_devices(4); jaxpar.simulate_devices(4)\n"
        "import jax; print(len(jax.devices()))\n"
        "try: jaxpar.simulate_devices(8)\n"
        "except jaxpar.UserError as error: print(error)"
    )
    assert done.stdout.startswith("4\n"), done.stderr
    assert "already runs with 4" in done.stdout
    assert "restart" in done.stdout
