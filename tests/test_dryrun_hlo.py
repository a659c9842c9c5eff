"""Reading compiled programs: the wire format, replica groups in every spelling, GPU descriptions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpar.dryrun.groups import axes_of, decode_groups, groups_of, transposed_iota
from jaxpar.dryrun.hlo import Shape, read_module
from jaxpar.dryrun.targets import TARGETS, find_target
from jaxpar.dryrun.wire import Message
from jaxpar.errors import UserError


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append((value & 0x7F) | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: list[int]) -> bytes:
    return field(number, b"".join(varint(value) for value in values))


def mesh_groups(sizes: list[int], references: list[tuple[int, int, int] | int]) -> bytes:
    axes = b"".join(field(1, field(1, f"axis_{i}") + field(2, size)) for i, size in enumerate(sizes))
    listed = b""
    for reference in references:
        if isinstance(reference, int):
            listed += field(2, field(1, reference))
        else:
            axis, before, size = reference
            listed += field(2, field(1, axis) + field(2, field(1, before) + field(2, size)))
    return field(1, axes) + listed


def by_numpy(sizes: list[int], inner: list[int]) -> list[list[int]]:
    """Groups over the axes `inner`, computed by reshape and transpose."""
    outer = [axis for axis in range(len(sizes)) if axis not in inner]
    ids = np.arange(np.prod(sizes)).reshape(sizes).transpose(outer + inner)
    return ids.reshape(-1, int(np.prod([sizes[axis] for axis in inner]))).tolist()


def test_wire_reads_packed_unpacked_and_negative_numbers():
    message = Message(packed(3, [1, 300, 70000]) + field(3, 5) + field(4, -2) + field(9, "name"))
    assert message.integers(3) == [1, 300, 70000, 5]
    assert message.integer(4) == -2
    assert message.text(9) == "name"
    assert message.integer(77, 13) == 13
    assert not message.has(77)


def test_wire_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="wire type 3"):
        Message(bytes([0x0B]))


@pytest.mark.parametrize(
    ("dims", "order"), [((2, 3), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((4,), (0,)), ((2, 2, 2), (1, 2, 0))]
)
def test_iota_is_numpys_transpose(dims, order):
    expected = np.arange(np.prod(dims)).reshape(dims).transpose(order).ravel().tolist()
    assert transposed_iota(dims, order) == expected


def test_groups_are_the_same_in_every_encoding():
    """Axis 1 of a 2 x 4 x 2 mesh, written as a list, as an iota and as mesh axes, and in the older wrapping."""
    sizes = [2, 4, 2]
    expected = tuple(map(tuple, by_numpy(sizes, [1])))
    lists = b"".join(field(1, packed(1, list(group))) for group in expected)
    iota = field(1, 4) + field(2, 4) + packed(3, sizes) + packed(4, [0, 2, 1])
    mesh = mesh_groups(sizes, [1])
    assert decode_groups(87, lists) == expected
    assert decode_groups(92, iota) == expected
    assert decode_groups(93, mesh) == expected
    assert decode_groups(87, field(2, iota)) == expected
    assert decode_groups(87, field(3, mesh)) == expected
    oldest = b"".join(field(49, packed(1, list(group))) for group in expected)
    assert groups_of(Message(oldest), 16) == expected


def test_no_groups_means_all_devices():
    assert groups_of(Message(b""), 4) == ((0, 1, 2, 3),)


def test_part_of_an_axis():
    """The inner 2 of an axis of 8: pairs of neighbours; the outer 4: strided groups."""
    assert decode_groups(93, mesh_groups([8], [(0, 4, 2)])) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert decode_groups(93, mesh_groups([8], [(0, 1, 4)])) == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("inner", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
def test_axes_of_groups(inner):
    names = ["stage", "data", "tensor"]
    sizes = [2, 4, 2]
    groups = tuple(map(tuple, by_numpy(sizes, inner)))
    assert axes_of(groups, dict(zip(names, sizes))) == tuple(names[axis] for axis in inner)


def test_module_keeps_schedule_order():
    shape = field(2, 11) + packed(3, [4, 8])
    first = field(1, "a") + field(2, "parameter") + field(3, shape) + field(35, 1)
    second = field(1, "b") + field(2, "negate") + field(3, shape) + field(35, 2) + packed(36, [1])
    computation = field(1, "main") + field(2, second) + field(2, first) + field(5, 7) + field(6, 2)
    plain = field(1, "m") + field(3, computation) + field(6, 7)
    module = read_module(plain)
    assert module.entry.root.name == "b"
    assert module.entry.operand_shapes(module.entry.root) == [Shape("f32", 32, (4, 8))]
    assert module.entry.root.shape.size_bytes == 128
    assert not module.scheduled
    sequence = field(1, field(1, 7) + field(2, packed(1, [1, 2])))
    scheduled = read_module(plain + field(7, sequence))
    assert scheduled.scheduled
    assert [one.name for one in scheduled.entry.instructions] == ["a", "b"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_target_descriptions_are_complete(target):
    """A missing field kills the compiler, so each must be there and positive."""
    text = target.target_config()
    for name in ("core_count", "threads_per_warp", "block_dim_limit_x", "shared_memory_per_block_optin"):
        (line,) = [line for line in text.splitlines() if line.strip().startswith(name + ":")]
        assert int(line.split(":")[1]) > 0
    assert f"device_memory_size: {target.memory_bytes}" in text
    assert "device_memory_size: 5" in target.target_config(5)


def test_unknown_gpu_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'h100'"):
        find_target("h10")


def test_own_target_file(tmp_path):
    file = tmp_path / "h20.json"
    file.write_text(json.dumps({"base": "h100", "sms": 78, "bf16_flops_per_s": 148e12, "memory_bytes": 96e9}))
    target = find_target(str(file))
    assert target.name == "h20"
    assert target.sms == 78
    assert "core_count: 78" in target.target_config()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"base": "h1"}', '"base" is'),
        ('{"base": "h100", "cores": 3}', "unknown field cores"),
        ('{"base": "h100", "sms": -1}', "wanted a positive number"),
        ("[1]", "wanted an object"),
        ("{", "not valid JSON"),
        ('{"base": "h100", "target_config_file": "/nowhere"}', "does not exist"),
    ],
)
def test_bad_target_files(tmp_path, content, message):
    file = tmp_path / "gpu.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        find_target(str(file))
