"""Meshes, simulated devices and joining many processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpar.mesh as mesh_module
from jaxpar.errors import UserError
from jaxpar.mesh import AXES, Processes, degrees, find_processes, make_mesh


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


def test_flags_come_before_variables_and_are_all_or_none(monkeypatch):
    monkeypatch.setenv("JAXPAR_COORDINATOR", "127.0.0.1:1234")
    monkeypatch.setenv("JAXPAR_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAXPAR_PROCESS_ID", "1")
    assert find_processes() == Processes("127.0.0.1:1234", 2, 1)
    assert find_processes("node1:9", 4, 3) == Processes("node1:9", 4, 3)
    assert find_processes(count=1) == Processes(None, 1, 0)
    for flags, words in (
        (("node1:9", None, 3), "missing: --num-processes"),
        ((None, 4, 3), "missing: --coordinator"),
        (("node1:9", 4, 4), r"--process-id = 4 is not in 0\.\.3 \(--num-processes = 4\)"),
        (("node1:9", 0, 0), "--num-processes = 0.*at least 1"),
        (("node1", 4, 3), "--coordinator = 'node1'.*node1:12345"),
    ):
        with pytest.raises(UserError, match=words):
            find_processes(*flags)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("JAXPAR_PROCES_ID", "JAXPAR_PROCESS_ID"), ("JAXPAR_COORDINATER", "JAXPAR_COORDINATOR"),
     ("JAXPAR_NUM_PROCESS", "JAXPAR_NUM_PROCESSES"), ("JAXPAR_NPROCESSES", "JAXPAR_NUM_PROCESSES")],
)  # fmt: skip
def test_a_misspelt_variable_is_not_ignored(typo, meant, monkeypatch):
    monkeypatch.setenv(typo, "1")
    monkeypatch.setenv("JAXPAR_SOMETHING_ELSE", "1")
    with pytest.raises(UserError, match=f"{typo} .*did you mean {meant}"):
        find_processes()
    assert find_processes("node1:9", 2, 0) is not None


SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_STEP_NODELIST": "node[1-4]", "SLURM_STEP_NUM_TASKS": "4"}  # fmt: skip
OMPI4 = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}


@pytest.mark.parametrize(
    ("ancestors", "variables", "wanted"),
    [
        ([], {}, None),
        (["bash", "slurmstepd"], SLURM, "Slurm"),
        (["bash", "sshd"], SLURM, None),
        (["slurmstepd"], SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (["slurmstepd"], SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        (["orted"], OMPI4, "Open MPI"),
        (["mpirun"], OMPI4 | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (["bash", "prterun"], {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_MCA_orte_hnp_uri"),
        (["prted", "slurmstepd"], SLURM | {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_MCA_orte_hnp_uri"),
        (["bash"], OMPI4, "not among the ancestors"),
    ],
)
def test_several_processes_are_joined_or_refused(ancestors, variables, wanted, monkeypatch):
    for name in {*SLURM, *OMPI4}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        if value:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh_module, "_ancestor_names", lambda: ancestors)
    if wanted in (None, "Slurm", "Open MPI"):
        assert mesh_module._cluster_launcher() == wanted
    else:
        with pytest.raises(UserError, match=rf"{wanted}.*--num-processes=[24] --process-id=I"):
            mesh_module._cluster_launcher()


def test_a_thread_count_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("NPROC", "abc")
    with pytest.raises(UserError, match="NPROC = 'abc' is not a whole number"):
        mesh_module.simulate_devices(8)


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "NPROC")} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


def test_lone_process_in_a_slurm_allocation_starts_alone():
    done = run(
        "from jaxpar.mesh import *; print('joined', join_processes(find_processes()))", JAX_PLATFORMS="cpu", **SLURM
    )
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


def test_training_on_devices_asked_for_too_late_is_refused(tmp_path: Path):
    done = run(
        "import jax, jaxpar, sys\n"
        "jax.config.update('jax_num_cpu_devices', 2); jax.devices()\n"
        f"try: jaxpar.train(jaxpar.Config(), {str(tmp_path / 'run')!r}, devices=8)\n"
        "except jaxpar.UserError as error: print(error)"
    )
    assert "asked for 8 simulated devices, but jax already runs with 2 (cpu)" in done.stdout, done.stderr
    assert not (tmp_path / "run").exists()
