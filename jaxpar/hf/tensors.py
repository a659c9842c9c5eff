"""Where the values of a parameter lie in the tensors of a Hugging Face file: one description, read in both directions.

A file tensor is described by its name, with `{layer}` for the layer number, and by the logical names of its dims:

    Tensor("model.layers.{layer}.self_attn.q_proj.weight", "blocks/attention/q", "(heads head_dim) embed")

says that dim 0 of the file holds heads and, inside them, head_dim, and that dim 1 is embed. The parameter's own dims
have names already, so transposes, splits and merges follow. A tensor that fuses several parameters lists them: laid
end to end along the dim `join`, or interleaved, where `0/3` in a group stands for "the first of three".
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Index = Mapping[str, slice]  # what is wanted of every logical dim
Sizes = Mapping[str, int]


class Slices(Protocol):
    """A tensor in a file that is read by parts (`safetensors` has one)."""

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part."""
        ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """One parameter inside a file tensor; `groups` has the logical names of every dim of the file."""

    leaf: str
    groups: tuple[tuple[str, ...], ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape that the piece spans in the file, interleaved neighbours included."""
        return tuple(math.prod(_length(name, sizes) for name in group) for group in self.groups)

    @property
    def names(self) -> list[str]:
        """Logical names in the order of the file."""
        return [name for group in self.groups for name in group if "/" not in name]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file and the parameters in it; made by `tensor` or `fused`.

    `first_layer`: number in the file of the first layer of the parameter, whose layers are a part of the model's.
    """

    name: str
    pieces: tuple[Piece, ...]
    join: int = 0
    first_layer: int = 0

    @property
    def counted(self) -> tuple[str, ...]:
        """Logical dims that are numbers in the name, such as layer."""
        return tuple(re.findall(r"{(\w+)}", self.name))

    @property
    def interleaved(self) -> bool:
        """Whether the pieces alternate inside a dim."""
        return any("/" in name for group in self.pieces[0].groups for name in group)

    def shape(self, sizes: Mapping[str, Sizes]) -> tuple[int, ...]:
        """Shape in the file; `sizes` by leaf."""
        shapes = [piece.shape(sizes[piece.leaf]) for piece in self.pieces]
        if self.interleaved or len(shapes) == 1:
            return shapes[0]
        total = list(shapes[0])
        total[self.join] = sum(shape[self.join] for shape in shapes)
        return tuple(total)

    def numbered(self, sizes: Mapping[str, Sizes]) -> Iterator[tuple[str, dict[str, int]]]:
        """(name in the file, number of every counted dim) of all copies of the tensor."""
        ranges = [range(sizes[self.pieces[0].leaf][name]) for name in self.counted]
        for numbers in itertools.product(*ranges):
            values = dict(zip(self.counted, numbers))
            yield self.named(values), values

    def named(self, numbers: Mapping[str, int]) -> str:
        """Name in the file of the copy with these numbers in the parameter."""
        shift = {"layer": numbers["layer"] + self.first_layer} if "layer" in numbers else {}
        return self.name.format(**{**numbers, **shift})

    def read(self, slices: Slices, leaf: str, index: Index, sizes: Mapping[str, Sizes]) -> np.ndarray:
        """The part `index` of one parameter; dims in the order of the file. Reads no more rows than needed."""
        position = [piece.leaf for piece in self.pieces].index(leaf)
        before = [] if self.interleaved else self.pieces[:position]
        offset = sum(piece.shape(sizes[piece.leaf])[self.join] for piece in before)
        piece, own = self.pieces[position], sizes[leaf]
        ranges, shape, inner = [], [], []
        for dim, group in enumerate(piece.groups):
            rest = math.prod(_length(name, own) for name in group[1:])
            first = _range(group[0], index, own) if group else slice(0, 1)
            shift = offset if dim == self.join else 0
            ranges.append(slice(shift + first.start * rest, shift + first.stop * rest))
            shape += [first.stop - first.start, *(_length(name, own) for name in group[1:])]
            inner += [0 if "/" in group[0] else slice(None)]  # the outer part is read exactly
            inner += [_fixed(name) if "/" in name else _range(name, index, own) for name in group[1:]]
        return slices[tuple(ranges)].reshape(shape)[tuple(inner)]

    def assemble(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The file tensor from its parameters, each with dims in the order of the file."""
        parts, axis = [], self.join
        for piece, value in zip(self.pieces, values):
            names = [name for group in piece.groups for name in group]
            sizes = iter(value.shape)
            spread = value.reshape([1 if "/" in name else next(sizes) for name in names])
            if self.interleaved:
                axis = next(i for i, name in enumerate(names) if "/" in name)
            else:
                spread = spread.reshape(_grouped(piece.groups, spread.shape))
            parts.append(spread)
        whole = np.concatenate(parts, axis) if len(parts) > 1 else parts[0]
        return whole.reshape(_grouped(self.pieces[0].groups, whole.shape)) if self.interleaved else whole


def tensor(name: str, leaf: str, dims: str) -> Tensor:
    """A file tensor that is one parameter."""
    return Tensor(name, (Piece(leaf, _groups(dims)),))


def fused(name: str, pieces: Mapping[str, str], *, join: int = 0) -> Tensor:
    """A file tensor that holds several parameters, {leaf: dims}, end to end along `join` or interleaved."""
    return Tensor(name, tuple(Piece(leaf, _groups(dims)) for leaf, dims in pieces.items()), join)


def moved(tensors: Iterable[Tensor], stack: str, axis: str, *, first_layer: int) -> Iterator[Tensor]:
    """Tensors of "blocks/..." as those of another stack of layers, counted by `axis`.

    The first of them has the number `first_layer` in the file.
    """
    for one in tensors:
        pieces = tuple(dataclasses.replace(p, leaf=p.leaf.replace("blocks/", f"{stack}/", 1)) for p in one.pieces)
        name = one.name.replace("{layer}", f"{{{axis}}}")
        yield dataclasses.replace(one, name=name, pieces=pieces, first_layer=first_layer)


def leaf_part(value: Any, axes: Sequence[str], piece: Piece, numbers: Mapping[str, int]) -> np.ndarray:
    """One copy of a whole parameter, its dims `axes` put into the order of the file."""
    taken = value[tuple(numbers.get(name, slice(None)) for name in axes)]
    left = [name for name in axes if name not in numbers]
    return np.asarray(taken).transpose([left.index(name) for name in piece.names])


def _groups(dims: str) -> tuple[tuple[str, ...], ...]:
    """Names by dim of the file: "(heads head_dim) embed" -> (("heads", "head_dim"), ("embed",))."""
    return tuple(tuple(word.strip("()").split()) for word in re.findall(r"\([^)]*\)|\S+", dims))


def _length(name: str, sizes: Sizes) -> int:
    return int(name.partition("/")[2]) if "/" in name else sizes[name]


def _fixed(name: str) -> int:
    return int(name.partition("/")[0])


def _range(name: str, index: Index, sizes: Sizes) -> slice:
    if "/" in name:
        return slice(_fixed(name), _fixed(name) + 1)
    start, stop, _ = index.get(name, slice(None)).indices(sizes[name])
    return slice(start, stop)


def _grouped(groups: Sequence[Sequence[str]], shape: Sequence[int]) -> list[int]:
    sizes = iter(shape)
    return [math.prod(next(sizes) for _ in group) for group in groups]
