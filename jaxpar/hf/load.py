"""From a folder of `transformers` into sharded parameters.

Every device's part is read from the files by itself, so the host holds no more than the local shards and the part
being read. Names and shapes are compared before anything is read: what is missing, extra or mis-shaped is listed,
never filled in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError, raise_together
from jaxpar.hf import files
from jaxpar.hf.family import Family, family_of
from jaxpar.hf.files import TensorFiles
from jaxpar.hf.tensors import Sizes, Tensor
from jaxpar.tree import from_named

Index = tuple[slice, ...]
SHOWN = 20  # names of one kind in a message
STACKED = re.compile(r".*\.experts\.(gate_up|down)_proj")  # names of a file with all experts in one tensor
LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\..*")
log = logging.getLogger(__name__)


def read_model(folder: str | Path, ignore: Iterable[str] = ()) -> ModelConfig:
    """The model that a folder's config.json describes; `ignore` names keys to pass over.

    Raises one `UserError` for everything in it that is unknown or not supported.
    """
    raw = files.read_config(Path(folder))
    try:
        return family_of(raw).read_config(raw, ignore)
    except UserError as error:
        place = Path(folder) / files.CONFIG
        raise UserError(*(f"{place}: {problem}" for problem in error.problems)) from None


def load_params(folder: str | Path, model: ModelConfig, abstract: Any) -> Any:
    """Parameters from a folder; shaped, typed and sharded like `abstract` (natural `[layer, ...]` leaves).

    `abstract`: a `Transformer` of `ShapeDtypeStruct`s that may carry shardings. Raises `UserError` for files that
    lack a tensor, have one too many, or one of another shape.
    """
    return from_named(abstract, dict(each_param(folder, model, abstract)))


def each_param(folder: str | Path, model: ModelConfig, abstract: Any) -> Iterator[tuple[str, Any]]:
    """(name, array) of every parameter that `load_params` gives, as it is read."""
    with open_leaves(folder, model, abstract) as (likes, read, release):
        for leaf, like in likes.items():
            array = _load_leaf(like, functools.partial(read, leaf))
            release()  # mapped pages count as memory until then
            yield leaf, array
            del array  # whoever took it may give it up before the next one is read


@contextlib.contextmanager
def open_leaves(
    folder: str | Path, model: ModelConfig, abstract: Any
) -> Iterator[tuple[dict[str, Any], Callable[[str, Index], np.ndarray], Callable[[], None]]]:
    """(array-likes of `abstract` by name, read(name, index) -> the values there, release() mapped pages).

    Raises as `load_params` does, before anything is read.
    """
    folder = Path(folder)
    family = family_of(files.read_config(folder))
    with files.open_tensors(folder) as tensors:
        stacked = any(STACKED.fullmatch(name) for name in tensors.names)
        plan = Plan.make(family, model, leaf_axes(abstract), stacked=stacked)
        names = _match(plan, family, tensors, model)

        def read(leaf: str, index: Index) -> np.ndarray:
            axes, like = plan.axes_and_like[leaf]
            return _read_part(plan, leaf, axes, index, like, names, tensors)

        yield {leaf: like for leaf, (_, like) in plan.axes_and_like.items()}, read, tensors.release


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which file tensor holds which parameter."""

    tensors: tuple[Tensor, ...]
    by_leaf: Mapping[str, Tensor]
    axes_and_like: Mapping[str, tuple[tuple[str, ...], Any]]
    sizes: Mapping[str, Sizes]  # by leaf; the vocabulary without padding
    float32: re.Pattern[str]  # names of tensors that are float32 in files of any dtype

    @staticmethod
    def make(
        family: Family,
        model: ModelConfig,
        leaves: Mapping[str, tuple[tuple[str, ...], Any]],
        *,
        stacked: bool = False,
    ) -> Plan:
        """The plan of a model whose parameters are {name: (logical axes, array-like)}.

        `stacked`: all experts of a layer lie in one tensor, where the family has such files.
        """
        listed = family.stacked if stacked and family.stacked is not None else family.tensors
        tensors = tuple(listed(model))
        by_leaf = {piece.leaf: tensor for tensor in tensors for piece in tensor.pieces}
        if by_leaf.keys() != leaves.keys():
            lost, extra = sorted(leaves.keys() - by_leaf.keys()), sorted(by_leaf.keys() - leaves.keys())
            raise UserError(
                f"a {family.model_type} of transformers has no place for the parameters {lost}"
                if lost
                else f"this model has no parameters {extra}, which a {family.model_type} of transformers needs"
            )
        sizes = {
            leaf: dict(zip(axes, like.shape)) | ({"vocab": model.true_vocab} if "vocab" in axes else {})
            for leaf, (axes, like) in leaves.items()
        }
        return Plan(tensors, by_leaf, leaves, sizes, re.compile(family.float32))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the file."""
        return {name: tensor.shape(self.sizes) for tensor in self.tensors for name, _ in tensor.numbered(self.sizes)}


def leaf_axes(params: Any) -> dict[str, tuple[tuple[str, ...], Any]]:
    """{name: (logical axes, array-like)} of every parameter."""
    from jaxpar.sharding import named_parameters

    return {name: (tuple(leaf.axes), leaf.get_value()) for name, leaf in named_parameters(params)}


def _match(plan: Plan, family: Family, tensors: TensorFiles, model: ModelConfig) -> dict[str, str]:
    """{name by the family's table: name in these files}; refuses what does not match."""
    wanted = plan.shapes()
    names = {_full_name(name, wanted, family): name for name in tensors.names if not family.ignores.fullmatch(name)}
    if family.extra_layers:
        names = _without_extra_layers(names, model.num_layers, tensors.folder)
    problems = []
    if model.tied and family.head in names:
        problems += _check_redundant_head(tensors, names, family)
        names.pop(family.head)
    missing = sorted(wanted.keys() - names.keys())
    extra = sorted(names[name] for name in names.keys() - wanted.keys())
    if missing:
        problems.append(f"{tensors.folder}: {len(missing)} tensors are missing: {_listed(missing)}")
    if extra:
        problems.append(f"{tensors.folder}: {len(extra)} tensors are not part of this model: {_listed(extra)}")
    for name in sorted(wanted.keys() & names.keys()):
        stored = tensors.slices(names[name])
        if tuple(stored.get_shape()) != wanted[name]:
            problems.append(
                f"{tensors.folder}: {names[name]} has shape {tuple(stored.get_shape())}, wanted {wanted[name]}"
            )
        elif stored.get_dtype() not in files.FLOATS:
            problems.append(
                f"{tensors.folder}: {names[name]} is stored as {stored.get_dtype()}; "
                f"jaxpar reads {', '.join(files.FLOATS)}"
            )
    raise_together(problems)
    return names


def _full_name(name: str, wanted: Mapping[str, Any], family: Family) -> str:
    """The name that the family's table has for a stored one: older names, and files without the base prefix."""
    name = family.renamed.get(name, name)
    return family.base + name if name not in wanted and family.base + name in wanted else name


def _without_extra_layers(names: Mapping[str, str], num_layers: int, folder: Path) -> dict[str, str]:
    """The names of the model's own layers; tells about the others."""
    number = {name: int(match[1]) for name in names if (match := LAYER_NUMBER.fullmatch(name))}
    extra = sorted(name for name, layer in number.items() if layer >= num_layers)
    if extra:
        log.warning(
            "%s: %d tensors of layers beyond the %d of the model are left out: they predict further tokens (%s, ...)",
            folder, len(extra), num_layers, extra[0],
        )  # fmt: skip
    return {name: stored for name, stored in names.items() if number.get(name, 0) < num_layers}


def _check_redundant_head(tensors: TensorFiles, names: Mapping[str, str], family: Family) -> list[str]:
    """A head that is stored although tied must be the embedding; compared by parts."""
    if family.table not in names:
        return []
    table, head = tensors.slices(names[family.table]), tensors.slices(names[family.head])
    rows = table.get_shape()[0]
    parts = [slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096)]
    same = table.get_shape() == head.get_shape() and all(np.array_equal(table[part], head[part]) for part in parts)
    if same:
        return []
    return [
        f"{tensors.folder}: tie_word_embeddings is true, but {family.head} differs from {family.table}; "
        f"set tie_word_embeddings to false to use both"
    ]


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _load_leaf(like: Any, read: Callable[[Index], np.ndarray]) -> Any:
    """One parameter; every part that a device of this process holds is read once."""
    import jax

    parts: dict[Any, np.ndarray] = {}

    def part(index: Index) -> np.ndarray:
        key = tuple(bounds.indices(dim) for bounds, dim in zip(index, like.shape))
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return jax.numpy.asarray(part(tuple(slice(None) for _ in like.shape)))
    return jax.make_array_from_callback(like.shape, sharding, part)  # type: ignore[arg-type]


def _read_part(
    plan: Plan, leaf: str, axes: tuple[str, ...], index: tuple[slice, ...], like: Any, names: Mapping[str, str],
    tensors: TensorFiles,
) -> np.ndarray:  # fmt: skip
    """The part `index` of a parameter, in its own dtype; rows that pad the vocabulary are zero."""
    tensor, sizes = plan.by_leaf[leaf], plan.sizes[leaf]
    bounds = {name: slice(*i.indices(dim)) for name, i, dim in zip(axes, index, like.shape)}
    out = _aligned_zeros([b.stop - b.start for b in bounds.values()], like.dtype)
    piece = next(piece for piece in tensor.pieces if piece.leaf == leaf)
    kept = [name for name in axes if name not in tensor.counted]
    order = [piece.names.index(name) for name in kept]
    stored = {name: slice(min(b.start, sizes[name]), min(b.stop, sizes[name])) for name, b in bounds.items()}
    rows = tuple(slice(0, stored[name].stop - stored[name].start) for name in kept)
    if any(row.start == row.stop for row in rows):  # a shard that holds nothing but padding
        return out
    for name, numbers in tensor.numbered(plan.sizes):
        if all(bounds[axis].start <= number < bounds[axis].stop for axis, number in numbers.items()):
            place = tuple(numbers[axis] - bounds[axis].start for axis in axes if axis in numbers)
            block = tensor.read(tensors.slices(names[name]), leaf, stored, plan.sizes)
            out[place][rows] = block.transpose(order)
    return out


def _aligned_zeros(shape: list[int], dtype: Any) -> np.ndarray:
    """Zeros that start at a multiple of 64 bytes, which a CPU device takes over without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
