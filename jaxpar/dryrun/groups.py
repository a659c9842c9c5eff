"""Replica groups: which devices take part in a collective, in each of the forms the compiler writes them.

Ids are positions in the flattened mesh, not device ids. Four encodings are in use: a list of lists, an iota
(reshape, transpose, cut), and a mesh with the axes (or parts of axes) that vary inside a group; older
compilers wrap these in one common message.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxpar.dryrun.wire import Message

Groups = tuple[tuple[int, ...], ...]


def transposed_iota(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """`arange(prod(dims)).reshape(dims).transpose(order)`, flattened."""
    out = [0]
    for axis in order:
        stride = math.prod(dims[axis + 1 :])
        out = [base + step * stride for base in out for step in range(dims[axis])]
    return out


def _cut(flat: Sequence[int], size: int) -> Groups:
    return tuple(tuple(flat[at : at + size]) for at in range(0, len(flat), size))


def lists_from_iota(data: bytes) -> Groups:
    """Groups of an IotaReplicaGroupList message."""
    message = Message(data)
    dims = message.integers(3)
    order = message.integers(4) or list(range(len(dims)))
    return _cut(transposed_iota(dims, order), message.integer(2, 1))


def lists_from_mesh(data: bytes) -> Groups:
    """Groups of a MeshAxesReplicaGroupList message; an axis may be referenced in part (`pre`, `size`)."""
    message = Message(data)
    mesh = message.message(1)
    sizes = [Message(axis).integer(2, 1) for axis in mesh.each(1)]
    total = math.prod(sizes)
    if mesh.has(3):
        iota = mesh.message(3)
        dims = iota.integers(1)
        devices = transposed_iota(dims, iota.integers(2) or range(len(dims)))
    else:
        devices = mesh.integers(2) or list(range(total))
    references = []
    for data_of_reference in message.each(2):
        reference = Message(data_of_reference)
        axis = reference.integer(1)
        part = reference.message(2) if reference.has(2) else None
        references.append((axis, part.integer(1, 1), part.integer(2, 1)) if part else (axis, 1, sizes[axis]))
    # Cut each axis at the bounds of its references, then move the referenced pieces innermost.
    pieces: list[tuple[int, int, int]] = []  # axis, product of the pieces before it, size
    for axis, size in enumerate(sizes):
        bounds = {1, size}
        for where, before, length in references:
            if where == axis:
                bounds |= {before, before * length}
        steps = sorted(bounds)
        pieces += [(axis, low, high // low) for low, high in itertools.pairwise(steps)]
    inner: list[int] = []
    for axis, before, length in references:
        inner += [k for k, (a, low, _) in enumerate(pieces) if a == axis and before <= low < before * length]
    outer = [k for k in range(len(pieces)) if k not in inner]
    dims = [size for _, _, size in pieces]
    flat = [devices[position] for position in transposed_iota(dims, outer + inner)]
    return _cut(flat, math.prod(dims[k] for k in inner))


def _lists(data_of_groups: Sequence[bytes]) -> Groups:
    return tuple(tuple(Message(group).integers(1)) for group in data_of_groups)


@functools.lru_cache(maxsize=4096)
def decode_groups(field: int, data: bytes) -> Groups:
    """Groups of one CollectiveDeviceList-like field (87, 92 or 93 of an instruction)."""
    if field == 92:
        return lists_from_iota(data)
    if field == 93:
        return lists_from_mesh(data)
    message = Message(data)
    if message.has(1):
        return _lists(list(message.each(1)))
    if message.has(2):
        return lists_from_iota(message.raw(2))
    if message.has(3):
        return lists_from_mesh(message.raw(3))
    return ()


def groups_of(message: Message, num_devices: int) -> Groups:
    """Groups of an instruction; without any, all devices are one group."""
    for field in (93, 92, 87):
        if message.has(field):
            found = decode_groups(field, message.raw(field))
            if found:
                return found
    if message.has(49):
        return _lists(list(message.each(49)))
    return (tuple(range(num_devices)),)


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which members of a group differ, outermost first."""
    names, sizes = list(mesh_shape), list(mesh_shape.values())
    varying: set[int] = set()
    for group in (groups[0], groups[-1]) if groups else ():
        for axis, size in enumerate(sizes):
            stride = math.prod(sizes[axis + 1 :])
            if len({member // stride % size for member in group}) > 1:
                varying.add(axis)
    return tuple(names[axis] for axis in sorted(varying))
