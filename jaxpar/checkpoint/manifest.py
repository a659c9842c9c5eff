"""The manifest of a checkpoint: what it holds, and how to tell that it is whole.

`manifest.json` is written last. It lists every array (shape, dtype, the grid of blocks into which the sharding of the
save cut it, a checksum per block) and every other file of the folder (size, and CRC-32 where the file is small), and
carries a CRC-32 of itself. A folder without a valid manifest is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import checksum

NAME = "manifest.json"
FORMAT = 2
_WHOLE_ARRAYS = 1  # the format with one checksum per array, which is still read
_SMALL_FILE_BYTES = 4 * 2**20  # indices and metadata; the arrays in larger files have checksums of their own


class DamagedError(Exception):
    """The folder is not what was saved; the message says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array: `grid` has the number of its blocks along each dim, `checksums` are in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    checksums: tuple[int, ...]

    def block(self, number: int) -> str:
        """Where a block lies in the array, as "[0:4, 512:1024]"."""
        places = []
        for size, parts in zip(reversed(self.shape), reversed(self.grid)):
            number, place = divmod(number, parts)
            places.append(f"{place * size // parts}:{(place + 1) * size // parts}")
        return f"[{', '.join(reversed(places))}]"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Arrays by name, and files by path relative to the folder with (bytes, CRC-32 or None)."""

    step: int
    arrays: dict[str, Entry]
    files: dict[str, tuple[int, int | None]]


def describe(step: int, folder: Path, named: Mapping[str, Any], checksums: Mapping[str, tuple[int, ...]]) -> Manifest:
    """The manifest of a finished folder and the arrays that were written there, in the sharding of the save."""
    arrays = {
        name: Entry(tuple(map(int, array.shape)), str(array.dtype), checksum.grid_of(array), checksums[name])
        for name, array in named.items()
    }
    return Manifest(step, arrays, {str(f.relative_to(folder)): _fingerprint(f) for f in _files(folder)})


def write(manifest: Manifest, folder: Path) -> None:
    """Write `manifest.json` after everything else in the folder has reached the disk."""
    for file in _files(folder):
        _flush(file)
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "arrays": {name: _to_json(entry) for name, entry in sorted(manifest.arrays.items())},
        "files": dict(sorted(manifest.files.items())),
    }
    path = folder / NAME
    path.write_text(json.dumps({"crc32": _crc(body), **body}, indent=1))
    _flush(path)
    for directory in {file.parent for file in _files(folder)}:
        _flush(directory)


def read(folder: Path) -> Manifest:
    """The manifest of `folder`; raise `DamagedError` when it is absent or damaged."""
    try:
        body = json.loads((folder / NAME).read_text())
        crc32 = body.pop("crc32")
        if body["format"] not in (_WHOLE_ARRAYS, FORMAT):
            raise DamagedError(f"{NAME} has format {body['format']}, this version reads {_WHOLE_ARRAYS} and {FORMAT}")
        if _crc(body) != crc32:
            raise DamagedError(f"{NAME} was changed after the save")
        if folder.name != str(body["step"]):
            raise DamagedError(f"it is a copy of step {body['step']}, by its {NAME}; only a folder of that name counts")
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{NAME} cannot be read ({error})") from None
    arrays = {name: _from_json(entry) for name, entry in body["arrays"].items()}
    return Manifest(body["step"], arrays, {name: tuple(value) for name, value in body["files"].items()})


def check_files(manifest: Manifest, folder: Path) -> None:
    """Raise `DamagedError` naming the files that are missing, cut short or changed (small files only)."""
    found = (_problem(folder, name, *wanted) for name, wanted in manifest.files.items())
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise DamagedError("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))


def _problem(folder: Path, name: str, size: int, crc32: int | None) -> str | None:
    path = folder / name
    try:
        if not path.is_file():
            return f"file {name} is missing"
        if path.stat().st_size != size:
            return f"file {name} has {path.stat().st_size} bytes, the save wrote {size}"
        if crc32 is not None and zlib.crc32(path.read_bytes()) != crc32:
            return f"file {name} was changed after the save"
    except OSError as error:
        return f"file {name} cannot be read ({error.strerror})"
    return None


def check_arrays(manifest: Manifest, checksums: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `DamagedError` naming the arrays, and their blocks, whose restored bytes are not those that were saved."""
    wrong = []
    for name, found in checksums.items():
        entry = manifest.arrays[name]
        bad = [number for number, pair in enumerate(zip(found, entry.checksums, strict=True)) if pair[0] != pair[1]]
        if bad and math.prod(entry.grid) > 1:
            more = f" and {len(bad) - 1} more of its {len(entry.checksums)} blocks" if len(bad) > 1 else ""
            wrong.append(f"{name} {entry.block(bad[0])}{more}")
        elif bad:
            wrong.append(name)
    if wrong:
        names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more arrays" if len(wrong) > 3 else "")
        raise DamagedError(f"the bytes of {names} changed after the save (checksum differs)")


def differences(
    manifest: Manifest, wanted: Mapping[str, Any], *, subset: bool, cast: bool
) -> list[tuple[str, str, str]]:
    """Rows (array, in the checkpoint, in this run) for everything that does not fit.

    `subset`: arrays that the run does not ask for are no difference. `cast`: nor is another float type.
    """
    import jax.numpy as jnp

    rows = []
    for name in [*wanted, *(name for name in manifest.arrays if name not in wanted)]:
        stored, target = manifest.arrays.get(name), wanted.get(name)
        if target is None:
            if stored is not None and not subset:
                rows.append((name, _text(stored.shape, stored.dtype), "-"))
            continue
        dtype = jnp.dtype(target.dtype)
        if stored is None:
            rows.append((name, "-", _text(target.shape, dtype)))
            continue
        castable = cast and _is_float(stored.dtype) and _is_float(dtype)
        if stored.shape != tuple(target.shape) or (stored.dtype != str(dtype) and not castable):
            rows.append((name, _text(stored.shape, stored.dtype), _text(target.shape, dtype)))
    return rows


def table(rows: list[tuple[str, str, str]], *, limit: int = 40) -> str:
    """Rows as aligned text with a header."""
    shown = [("array", "checkpoint", "this run"), *rows[:limit]]
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown]
    return "\n".join(lines + ([f"  ... and {len(rows) - limit} more"] if len(rows) > limit else []))


def _is_float(dtype: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def _text(shape: Sequence[int], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _to_json(entry: Entry) -> dict[str, Any]:
    return dataclasses.asdict(entry) | {"checksums": " ".join(f"{value:08x}" for value in entry.checksums)}


def _from_json(found: dict[str, Any]) -> Entry:
    shape = tuple(found["shape"])
    if "checksum" in found:
        return Entry(shape, found["dtype"], (1,) * len(shape), (found["checksum"],))
    return Entry(shape, found["dtype"], tuple(found["grid"]), tuple(int(x, 16) for x in found["checksums"].split()))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)


def _fingerprint(path: Path) -> tuple[int, int | None]:
    size = path.stat().st_size
    return size, zlib.crc32(path.read_bytes()) if size <= _SMALL_FILE_BYTES else None


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
