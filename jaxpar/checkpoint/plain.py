"""Checkpoints as plain NumPy arrays by name: for export, plots and other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpar.checkpoint import checksum, folders, manifest, storage
from jaxpar.errors import UserError


def load_arrays(directory: Path, step: int | None = None, *, prefix: str = "") -> tuple[int, dict[str, Any]]:
    """Step and NumPy arrays by name of a checkpoint directory, verified; `step` None takes the newest.

    `prefix` "params/" reads and returns only those arrays, without the prefix.
    """
    import jax

    directory = Path(directory).absolute()
    present = folders.steps(directory)
    step = max(present, default=None) if step is None else step
    if step is None or step not in present:
        raise UserError(f"no checkpoint of step {step} in {directory}; there are: {present or 'none'}")
    folder = folders.path(directory, step)
    try:
        found = manifest.read(folder)
        manifest.check_files(found, folder)
        wanted = {
            name: jax.ShapeDtypeStruct(entry.shape, jax.numpy.dtype(entry.dtype))
            for name, entry in found.arrays.items()
            if name.startswith(prefix)
        }
        named = storage.read(folder / folders.STATE, wanted)
        manifest.check_arrays(found, checksum.start(named, {name: found.arrays[name].grid for name in named})())
    except (manifest.DamagedError, *storage.STORAGE_ERRORS) as error:
        raise UserError(f"checkpoint {folder} is damaged: {storage.reason(error)}") from None
    if not named:
        raise UserError(f"checkpoint {folder} holds no array whose name starts with {prefix!r}")
    return step, {name.removeprefix(prefix): array for name, array in named.items()}
