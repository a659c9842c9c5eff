"""Files of one JSON object a line: whole lines, each step at most once; a full disk costs lines, not the run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from jaxpar.lines import Lines, read_objects, truncate_after


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "rows.jsonl"


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Disk:
    """Stands for `os.write` on a disk that has room for `room` more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        taken = data[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        return self._write(descriptor, taken)


@pytest.mark.parametrize("room", [0, 1, 5, 11])
def test_a_full_disk_costs_lines_and_is_told_once(path, room, monkeypatch, capsys):
    lines = Lines(path)
    lines.append({"step": 1})
    disk = Disk(room)
    monkeypatch.setattr("jaxpar.lines.os.write", disk.write)
    for step in (2, 3):
        lines.append({"step": step})
        assert path.read_text() == '{"step": 1}\n'
    disk.room = 10**6
    lines.append({"step": 4})
    assert steps_of(path) == [1, 4]
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(path) in warning
    assert "NOT written (No space left on device); the run goes on" in warning


def test_a_file_that_cannot_be_opened_is_told_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    lines = Lines(tmp_path / "file" / "rows.jsonl")
    for step in (1, 2):
        lines.append({"step": step})
    assert capsys.readouterr().err.count("NOT written") == 1


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\xff" * 200_000, b""])
def test_a_torn_line_is_dropped_before_the_next_one(path, torn):
    lines = Lines(path)
    lines.append({"step": 1})
    path.write_bytes(path.read_bytes() + torn)
    lines.append({"step": 2})
    assert steps_of(path) == [1, 2]
    path.write_bytes(torn)
    lines.append({"step": 3})
    assert steps_of(path) == [3]


ROWS = b'{"step": 1}\n{"step": 2}\n'


BROKEN = [b"{", b"[1]\n", b"7\n", b"\xff\xfe\n", b'{"loss": 1}\n', b'{"step": "3"}\n', b'{"step": 2}\n', b"\n"]


@pytest.mark.parametrize("broken", [*BROKEN, b"[" * 100_000 + b"\n"])
def test_what_is_no_row_is_dropped(path, broken):
    path.parent.mkdir()
    inner = broken if broken.endswith(b"\n") else b""
    for data in (ROWS + broken, ROWS[:12] + inner + ROWS[12:]):
        path.write_bytes(data)
        assert [row for row in read_objects(path) if row.get("step") in (1, 2)][:2] == [{"step": 1}, {"step": 2}]
        assert truncate_after(path, 5) == 2
        assert path.read_bytes() == ROWS
    assert truncate_after(path, 1) == 1
    assert path.read_bytes() == ROWS[:12]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_cutting_the_end_needs_no_room(path, monkeypatch):
    path.parent.mkdir()
    path.write_bytes(ROWS + b'{"st')
    monkeypatch.setattr("jaxpar.lines._replace", None)
    assert truncate_after(path, 1) == 1
    assert path.read_bytes() == ROWS[:12]
    assert truncate_after(path.with_name("absent"), 1) == -1
