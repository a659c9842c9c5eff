"""Named parallel degrees -> a `jax.sharding.Mesh`; simulated devices; joining a run of many processes.

The mesh always has all six axes, outermost first; an axis of size 1 costs nothing. `tensor` is innermost so that it
stays inside a host, `stage` outermost because pipelines talk least.
"""

from __future__ import annotations

import dataclasses
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
    threads = max(os.cpu_count() or 1, 2 * count, int(os.environ.get("NPROC", 0) or 0))
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


@dataclasses.dataclass(frozen=True)
class Processes:
    """Where this process stands among those of the run."""

    coordinator: str | None
    count: int
    rank: int


def find_processes(
    coordinator: str | None = None, count: int | None = None, rank: int | None = None
) -> Processes | None:
    """Who takes part: from the arguments, else JAXPAR_* variables, else None (alone, or a cluster that jax detects).

    Raises `UserError` when only some of coordinator, count and rank are known.
    """
    coordinator = coordinator or os.environ.get("JAXPAR_COORDINATOR")
    count = _int_variable("JAXPAR_NUM_PROCESSES") if count is None else count
    rank = _int_variable("JAXPAR_PROCESS_ID") if rank is None else rank
    if count == 1 and coordinator is None:
        return Processes(None, 1, 0)
    given = {"JAXPAR_COORDINATOR": coordinator, "JAXPAR_NUM_PROCESSES": count, "JAXPAR_PROCESS_ID": rank}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or count is None or rank is None:
        raise UserError(f"a run of many processes needs all of {', '.join(given)}; missing: {', '.join(missing)}")
    if not 0 <= rank < count:
        raise UserError(f"JAXPAR_PROCESS_ID = {rank} is not in 0..{count - 1} (JAXPAR_NUM_PROCESSES = {count})")
    return Processes(coordinator, count, rank)


def join_processes(
    processes: Processes | None,
    *,
    heartbeat_s: int = 30,
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


def _cluster_launcher() -> str | None:
    """The launcher that started this process as one of several, or None.

    Variables alone do not decide: a shell inside a Slurm allocation has them too, and a lone process must not wait
    for a cluster. So a launcher must also be among the process's ancestors.
    """
    tasks = {"slurmstepd": "SLURM_STEP_NUM_TASKS", "orted": "OMPI_COMM_WORLD_SIZE", "mpirun": "OMPI_COMM_WORLD_SIZE",
             "mpiexec": "OMPI_COMM_WORLD_SIZE", "prted": "OMPI_COMM_WORLD_SIZE"}  # fmt: skip
    for name in _ancestor_names():
        variable = tasks.get(name)
        if variable and (_int_variable(variable) or 1) > 1:
            return name
    return None


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
