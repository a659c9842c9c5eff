"""Write parameters as a folder that `transformers` loads.

The folder is written under another name and renamed when everything is on the disk, so a killed export leaves nothing
that looks like a checkpoint. Parameters are asked for one at a time, and a file is written as soon as it is full.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.data.tokenizers import Tokenizer, copy_tokenizer
from jaxpar.errors import UserError
from jaxpar.hf import files
from jaxpar.hf.family import Family, differences, family_for, family_of
from jaxpar.hf.load import Plan
from jaxpar.hf.tensors import Tensor, leaf_part

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Source = Callable[[str], np.ndarray]  # name of a parameter -> its whole value, in natural order


def export(
    folder: str | Path,
    model: ModelConfig,
    axes: Mapping[str, tuple[tuple[str, ...], Any]],
    source: Source,
    *,
    dtype: str = "float32",
    max_file_bytes: int = 5_000_000_000,
    like: str | Path | None = None,
    max_position: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model of parameters {name: (logical axes, array-like)} whose values `source` gives.

    `like`: a checkpoint folder whose tokenizer files and neutral config keys are kept. `max_position`: the context
    length to state where `like` does not. `tokenizer`: its files are written too. Raises `UserError` when the folder
    exists, the family cannot express the model, or a value overflows `dtype`.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder}: exists already; export into a new folder")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported; choose from {', '.join(DTYPES)}")
    family, config = _config(model, dtype, like, max_position)
    plan = Plan.make(family, model, axes)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial, plan, source, dtype, max_file_bytes)
        if like is not None:
            files.carry(Path(like), partial)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, partial)
        (partial / files.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(folder.parent)


def _config(
    model: ModelConfig, dtype: str, like: str | Path | None, max_position: int | None
) -> tuple[Family, dict[str, Any]]:
    """The family and the config.json to write; that of `like` is kept where it describes the same model."""
    old = {} if like is None else files.read_config(Path(like))
    family = family_for(model) if like is None else family_of(old)
    if like is None or differences(model, family.read_config(old, ignore=old)):
        owned = {name for entry in family.entries for name in entry.names}
        kept = {name: value for name, value in old.items() if name not in owned}
        config = family.write_config(model) | kept
    else:
        config = dict(old)
    if max_position is not None and model.positions != "learned":
        config.setdefault("max_position_embeddings", max_position)
    return family, config | {"torch_dtype" if "torch_dtype" in old else "dtype": dtype}


def _write_tensors(folder: Path, plan: Plan, source: Source, dtype: str, max_file_bytes: int) -> None:
    from safetensors.numpy import save_file

    wanted = _numpy_dtype(dtype)
    dtypes = {name: np.dtype(np.float32) if plan.float32.fullmatch(name) else wanted for name in plan.shapes()}
    sizes = {name: int(np.prod(shape)) * dtypes[name].itemsize for name, shape in plan.shapes().items()}
    groups = _split(sizes, max_file_bytes)
    arrays = _arrays(plan, source)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = files.SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        contents = {}
        for name in names:
            given, array = next(arrays)
            assert given == name, (given, name)
            contents[name] = _cast(name, array, dtypes[name])
        save_file(contents, folder / file, metadata={"format": "pt"})
        _flush(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(sizes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Names of each file, in the order of {name: bytes}; a tensor larger than a file has one to itself."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _arrays(plan: Plan, source: Source) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value) of every file tensor in the order of the plan; a parameter is asked for once."""
    for tensor in plan.tensors:
        values = [_unpadded(source(piece.leaf), plan, piece.leaf) for piece in tensor.pieces]
        for name, numbers in tensor.numbered(plan.sizes):
            yield name, file_tensor(tensor, plan, values, numbers)


def file_tensor(tensor: Tensor, plan: Plan, values: list[Any], numbers: Mapping[str, int]) -> np.ndarray:
    """One copy of a file tensor from the whole values of its parameters."""
    parts = [
        leaf_part(value, plan.axes_and_like[piece.leaf][0], piece, numbers)
        for piece, value in zip(tensor.pieces, values)
    ]
    return np.ascontiguousarray(tensor.assemble(parts))


def _unpadded(value: Any, plan: Plan, leaf: str) -> Any:
    axes, sizes = plan.axes_and_like[leaf][0], plan.sizes[leaf]
    return value[tuple(slice(0, sizes[name]) if name == "vocab" else slice(None) for name in axes)]


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.name == "float16" and not np.isfinite(cast).all() and np.isfinite(array).all():
        raise UserError(
            f"{name}: values up to {np.abs(array).max():.3g} overflow float16; export as bfloat16 or float32"
        )
    return cast


def _numpy_dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
