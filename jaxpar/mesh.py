"""Named parallel degrees -> a `jax.sharding.Mesh`; simulated devices; joining a run of many processes.

The mesh always has all six axes, outermost first; an axis of size 1 costs nothing. `tensor` is innermost so that it
stays inside a host, `stage` outermost because pipelines talk least.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.config import ParallelConfig
from jaxpar.errors import UserError
from jaxpar.validate import AXES, BATCH_AXES, resolved_degrees

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["AXES", "BATCH_AXES", "degrees", "find_processes", "join_processes", "make_mesh", "simulate_devices"]
log = logging.getLogger(__name__)


def degrees(parallel: ParallelConfig | Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Size of every mesh axis, with -1 replaced by the devices that are left.

    Raises `UserError` naming the degrees, their product and the device count when they do not fit.
    """
    if not isinstance(parallel, ParallelConfig):
        if unknown := sorted(set(parallel) - set(AXES)):
            raise UserError(f"unknown mesh axes {unknown}; the axes are {', '.join(AXES)}")
        parallel = dataclasses.replace(ParallelConfig(data=1), **parallel)
    return resolved_degrees(parallel, num_devices)


def make_mesh(parallel: ParallelConfig | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes of `AXES` over `devices` (default: all of them).

    Every axis is `AxisType.Auto`: jax's default is Explicit, where a sharding constraint asserts instead of acting.
    """
    import jax
    import numpy as np
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    devices = list(jax.devices() if devices is None else devices)
    sizes = degrees(parallel, len(devices))
    shape = tuple(sizes.values())
    if isinstance(devices[0], jax.Device) and devices[0].platform == "tpu":
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        # Hosts are contiguous in this order, so the innermost axes stay inside one of them.
        ordered = np.array(sorted(devices, key=lambda d: (d.process_index, d.id))).reshape(shape)
    _warn_split_tensor(ordered, sizes["tensor"])
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _warn_split_tensor(ordered: object, tensor: int) -> None:
    import numpy as np

    hosts = np.vectorize(lambda device: device.process_index)(ordered).reshape(-1, tensor)
    if (hosts != hosts[:, :1]).any():
        log.warning("parallel.tensor = %d spans several hosts: every layer then talks over the slow network", tensor)


def simulate_devices(count: int) -> None:
    """Make jax see `count` CPU devices in this process; call it before anything asks for a device.

    Raises `UserError` when a backend is already up with another number of devices.
    """
    if not _choose_simulated(count):
        return
    import jax

    if len(jax.devices()) != count:
        raise UserError(
            f"asked for {count} simulated devices, got {len(jax.devices())}: XLA_FLAGS = "
            f"{os.environ.get('XLA_FLAGS', '')!r} says otherwise; remove --xla_force_host_platform_device_count from it"
        )


def _choose_simulated(count: int) -> bool:
    """Set `count` CPU devices for the backend to come; False when one is up with just these already."""
    if count < 1:
        raise UserError(f"devices = {count}; simulate at least 1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA sizes its thread pool from NPROC; with fewer threads than devices a collective can wait for ever (jax 0.10).
    threads = max(os.cpu_count() or 1, 2 * count, _int_variable("NPROC") or 0)
    os.environ["NPROC"] = str(threads)
    import jax

    if _backend_is_up():
        found = jax.local_devices()
        if len(found) == count and found[0].platform == "cpu":
            return False
        raise UserError(
            f"asked for {count} simulated devices, but jax already runs with {len(found)} ({found[0].platform}); "
            f"restart the interpreter and call jaxpar.simulate_devices({count}) before any other use of jax"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return True


def _backend_is_up() -> bool:
    from jax._src import xla_bridge
    from jax.extend import backend  # noqa: F401  (makes the submodule importable on every version)

    return bool(xla_bridge._backends)


# Who takes part in a run: address of process 0, number of processes, this one's number.
VARIABLES = ("JAXPAR_COORDINATOR", "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID")


@dataclasses.dataclass(frozen=True)
class Processes:
    """Where this process stands among those of the run."""

    coordinator: str | None
    count: int
    rank: int


def find_processes(
    coordinator: str | None = None, count: int | None = None, rank: int | None = None
) -> Processes | None:
    """Who takes part: from the flags, else JAXPAR_* variables, else None (alone, or a cluster that jax detects).

    Raises `UserError` when only some of coordinator, count and rank are known; a count of 1 needs no others.
    """
    names = ("--coordinator", "--num-processes", "--process-id")
    if coordinator is None and count is None and rank is None:
        names = VARIABLES
        _check_spelling()
        coordinator = os.environ.get(names[0]) or None
        count, rank = _int_variable(names[1]), _int_variable(names[2])
    if count == 1 and coordinator is None:
        return Processes(None, 1, 0)
    missing = [name for name, value in zip(names, (coordinator, count, rank)) if value is None]
    if len(missing) == len(names):
        return None
    if coordinator is None or count is None or rank is None:
        raise UserError(f"a run of many processes needs all of {', '.join(names)}; missing: {', '.join(missing)}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{names[0]} = {coordinator!r}: wanted the address of process 0, such as node1:12345")
    if count < 1:
        raise UserError(f"{names[1]} = {count}: wanted the number of processes, at least 1")
    if not 0 <= rank < count:
        raise UserError(f"{names[2]} = {rank} is not in 0..{count - 1} ({names[1]} = {count})")
    return Processes(coordinator, count, rank)


def _check_spelling() -> None:
    """Raise for a variable that is nearly one of ours: ignored, every process would train a copy of its own."""
    for name in sorted(os.environ):
        close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
        if close and name not in VARIABLES:
            raise UserError(f"the variable {name} is set, but jaxpar reads none of that name; did you mean {close[0]}?")


def join_processes(
    processes: Processes | None,
    *,
    heartbeat_s: int = 60,
    start_timeout_s: int = 300,
    local_devices: int | None = None,
) -> bool:
    """Join the run of many processes; True when this process is one of several.

    `local_devices` simulates that many CPU devices in this process. With no explicit `processes` a cluster is joined
    only when this process really was started by its launcher.
    """
    if local_devices is not None:
        _choose_simulated(local_devices)
    import jax

    common: dict[str, Any] = {"initialization_timeout": start_timeout_s, "heartbeat_timeout_seconds": heartbeat_s}
    if processes is not None:
        if processes.count == 1 and processes.coordinator is None:
            return False
        assert processes.coordinator is not None
        local = processes.coordinator.startswith(("127.0.0.1:", "localhost:"))
        if local:
            common["coordinator_bind_address"] = processes.coordinator
        jax.distributed.initialize(processes.coordinator, processes.count, processes.rank, **common)
        return processes.count > 1
    if (launcher := _cluster_launcher()) is None:
        return False
    log.info("joining the run that %s started", launcher)
    jax.distributed.initialize(**common)
    return jax.process_count() > 1


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A program that starts processes: its names, the variable with their number, what jax needs to join them."""

    name: str
    programs: tuple[str, ...]
    count: str
    needs: tuple[str, ...]


LAUNCHERS = (
    Launcher(
        "Slurm", ("slurmstepd",), "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ),
    Launcher(
        "Open MPI", ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"), "OMPI_COMM_WORLD_SIZE",
        ("OMPI_MCA_orte_hnp_uri",),  # which Open MPI 5 does not set
    ),
)  # fmt: skip


def _cluster_launcher() -> str | None:
    """The launcher that started this process as one of several, or None; raises if jax cannot join them.

    Slurm's variables alone do not decide: a shell inside an allocation has them too, and a lone process must not wait
    for a cluster. So the launcher must also be among the process's ancestors.
    """
    ancestors = _ancestor_names()
    for program in ancestors:
        for launcher in LAUNCHERS:
            count = _int_variable(launcher.count) or 1 if program in launcher.programs else 1
            if count > 1:
                return _joinable(launcher, count)
    slurm, open_mpi = LAUNCHERS
    if (count := _int_variable(open_mpi.count) or 1) > 1:  # only its ranks have this variable
        raise _not_joinable(open_mpi, count, "mpirun is not among the ancestors of this process")
    if (count := _int_variable(slurm.count) or 1) > 1:
        log.warning("%s = %d, but srun did not start this process: it trains alone", slurm.count, count)
    return None


def _joinable(launcher: Launcher, count: int) -> str:
    if missing := [name for name in launcher.needs if name not in os.environ]:
        raise _not_joinable(launcher, count, f"jax finds the others by {', '.join(missing)}, not set here")
    return launcher.name


def _not_joinable(launcher: Launcher, count: int, why: str) -> UserError:
    return UserError(
        f"{launcher.count} = {count}: {launcher.name} started {count} processes, but they cannot find each other: "
        f"{why}. Say who takes part with {', '.join(VARIABLES)}, or with train.py's --coordinator=HOST:PORT "
        f"--num-processes={count} --process-id=I; for one process alone, --num-processes=1"
    )


def _ancestor_names() -> list[str]:
    names, pid = [], os.getppid()
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        names.append(fields[fields.index("(") + 1 : fields.rindex(")")])
        pid = int(fields[fields.rindex(")") + 1 :].split()[1])
    return names


def _int_variable(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} = {text!r} is not a whole number") from None
