"""Saving and restoring against the raw speed of the same disk, for a state of 1 GB on 8 simulated devices.

    python scripts/benchmarks/checkpoint.py [--folder=/dev/shm] [--gigabytes=1]

Raw speed is one thread that writes the same bytes to one file, with fsync, and reads them back into fresh memory. Best
of several repetitions each, taken in turn, since the memory behind a tmpfs is slow the first time it is touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

ARRAYS = 24
REPETITIONS = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One ratio with its bound."""

    name: str
    ratio: float
    bound: float
    at_most: bool
    note: str

    @property
    def ok(self) -> bool:
        """Whether the ratio keeps its bound."""
        return self.ratio <= self.bound if self.at_most else self.ratio >= self.bound

    def line(self) -> str:
        """One line for people."""
        sign = "<=" if self.at_most else ">="
        return f"{self.name:<44} {self.ratio:7.3f} {sign} {self.bound:<5g} {'ok' if self.ok else 'MISSED'}  {self.note}"


def run(folder: Path | None = None, gigabytes: float = 1.0) -> list[Row]:
    """Measure in a new folder below `folder` (default: a tmpfs if there is one), print and return the rows."""
    if folder is None:
        folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        rows = _measure(Path(temporary), gigabytes)
    for row in rows:
        print(row.line(), flush=True)
    return rows


def _measure(folder: Path, gigabytes: float) -> list[Row]:
    import jax

    state = _state(gigabytes)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    times: dict[str, list[float]] = {}
    for repetition in range(REPETITIONS):
        for name, seconds in (_raw(folder / "raw", state) | _ours(folder / "ours", state, abstract)).items():
            if repetition:  # the first one compiles, and touches the memory
                times.setdefault(name, []).append(seconds)
    best = {name: min(values) for name, values in times.items()}
    rate = {name: f"{size / seconds / 1e6:,.0f} MB/s" for name, seconds in best.items()}
    return [
        Row("save, speed / raw write", best["raw write"] / best["save"], 0.7, False,
            f"{rate['save']} / {rate['raw write']}"),
        Row("restore, speed / raw read", best["raw read"] / best["restore"], 0.7, False,
            f"{rate['restore']} / {rate['raw read']}"),
        Row("training blocked / time of the write", best["blocked"] / best["save"], 0.05, True,
            f"{best['blocked'] * 1e3:.0f} ms / {best['save'] * 1e3:.0f} ms"),
    ]  # fmt: skip


def _state(gigabytes: float) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    width = int(gigabytes * 1e9 / 4 / ARRAYS / 2048)
    return {
        f"w{i}": jax.device_put(rng.standard_normal((2048, width), np.float32), NamedSharding(mesh, P("data")))
        for i in range(ARRAYS)
    }


def _raw(path: Path, state: dict[str, Any]) -> dict[str, float]:
    import numpy as np

    arrays = [np.asarray(x) for x in state.values()]
    began = time.perf_counter()
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    write_s = time.perf_counter() - began
    began = time.perf_counter()
    fresh = [np.empty_like(array) for array in arrays]
    with path.open("rb", buffering=0) as file:
        for array in fresh:
            file.readinto(array.reshape(-1).view(np.uint8).data)
    read_s = time.perf_counter() - began
    path.unlink()
    return {"raw write": write_s, "raw read": read_s}


def _ours(folder: Path, state: dict[str, Any], abstract: dict[str, Any]) -> dict[str, float]:
    import jax

    from jaxpar.checkpoint import Checkpoints
    from jaxpar.config import CheckpointConfig

    checkpoints = Checkpoints(folder, CheckpointConfig())
    began = time.perf_counter()
    checkpoints.save(1, state, {})
    blocked_s = time.perf_counter() - began
    checkpoints.wait()
    save_s = time.perf_counter() - began
    began = time.perf_counter()
    restored = checkpoints.restore_latest(abstract)
    assert restored is not None
    jax.block_until_ready(restored.state)
    restore_s = time.perf_counter() - began
    shutil.rmtree(folder)
    return {"save": save_s, "blocked": blocked_s, "restore": restore_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="disk to measure (default: a tmpfs if there is one)")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    from jaxpar.mesh import simulate_devices

    simulate_devices(8)
    return 0 if all(row.ok for row in run(args.folder, args.gigabytes)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
