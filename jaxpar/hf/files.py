"""A folder of a Hugging Face checkpoint: config.json and safetensors, in one file or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpar.errors import UserError, raise_together

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What belongs to a checkpoint besides config and weights; copied along unchanged.
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "generation_config.json",
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")  # each is one
FLOATS = ("F32", "F16", "BF16", "F64")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face checkpoint: its config.json names a model type."""
    path = folder / CONFIG
    return path.is_file() and isinstance(raw := _json(path), dict) and "model_type" in raw


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face checkpoint is a folder with config.json and safetensors")
    raw = _json(path)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds {type(raw).__name__}, wanted an object of settings")
    return raw


class TensorFiles:
    """The tensors of a folder by name: shapes and dtypes at once, values by parts when asked."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError

        self.folder = folder
        self._paths: dict[str, Path] = {}  # by tensor name
        self._open: dict[Path, Any] = {}
        problems: list[str] = []
        for path, promised in _files(folder).items():
            if not path.is_file():
                listed = ", ".join(sorted(promised)[:3])
                problems.append(f"{path}: no such file; {INDEX} says it holds {len(promised)} tensors ({listed}, ...)")
                continue
            try:
                names = set(self._handle(path).keys())
            except (SafetensorError, OSError) as error:
                problems.append(f"{path}: cannot be read ({error}); copy it again")
                continue
            if lost := sorted(promised - names):
                problems.append(f"{path}: lacks {', '.join(lost)}, which {INDEX} says it holds")
            for name in sorted(names & self._paths.keys()):
                problems.append(f"{path}: holds {name} once more; a tensor must be in one file")
            self._paths |= dict.fromkeys(names, path)
        raise_together(problems)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._paths)

    def slices(self, name: str) -> Any:
        """The tensor, to be read by parts: `slices(name)[a:b]`, `.get_shape()`, `.get_dtype()`."""
        return self._handle(self._paths[name]).get_slice(name)

    def release(self) -> None:
        """Close the files; they are opened again when asked for."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def _handle(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, "np").__enter__()
        return self._open[path]


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFiles]:
    """The tensors of a folder; raises one `UserError` for everything that is wrong with its files."""
    tensors = TensorFiles(Path(folder))
    try:
        yield tensors
    finally:
        tensors.release()


def carry(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer and its like from one folder to another; the names of what was copied."""
    found = [name for name in CARRIED if (source / name).is_file()]
    for name in found:
        (target / name).write_bytes((source / name).read_bytes())
    return found


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def _files(folder: Path) -> dict[Path, set[str]]:
    """Weight files and the names that the index promises of each."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise UserError(f"{folder / INDEX}: has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in index["weight_map"].items():
            if Path(file).name != file:
                raise UserError(f"{folder / INDEX}: {name} is in {file!r}, which is not a file of this folder")
            files.setdefault(folder / file, set()).add(name)
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    parts = sorted(folder.glob("*.safetensors"))
    if len(parts) > 1:
        raise UserError(f"{folder}: {len(parts)} safetensors files but no {INDEX}; copy the index as well")
    if parts:
        return {parts[0]: set()}
    other = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {other[0]} is a pickle, save the model as safetensors" if other else ""
    raise UserError(f"{folder}: no {SINGLE} and no {INDEX}{hint}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
