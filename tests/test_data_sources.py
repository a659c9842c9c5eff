"""Files to documents: every oddity of a file is handled by a stated rule or refused by name."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from jaxpar.config import Config, DataConfig
from jaxpar.data import open_data, sources
from jaxpar.data.build import Inputs, build_token_set
from jaxpar.data.encode import Recipe
from jaxpar.data.store import open_store
from jaxpar.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["one", "zwei Wörter", "line\nbreak", "emoji \U0001f600", "last"]
LINES = [json.dumps({"text": text}).encode() for text in TEXTS]


def read(path: Path, key: str = "text") -> list[str]:
    """Documents of a file, as ids of the byte tokenizer turned back into text."""
    folder = path.parent / f"set-{path.name}"
    build_token_set(folder, Inputs((path,)), Recipe(add_eos=False, text_key=key))
    store = open_store(folder)
    documents = [bytes(store.read(s, n).astype(np.uint8)).decode() for s, n in documents_of(store)]
    return documents


def documents_of(store) -> list[tuple[int, int]]:
    return [(s, n) for d in store.documents() for s, n in zip(d.start.tolist(), d.length.tolist())]


@pytest.mark.parametrize(
    "content",
    [
        b"\n".join(LINES) + b"\n",
        sources.UTF8_MARK + b"\n".join(LINES) + b"\n",
        b"\r\n".join(LINES) + b"\r\n",
        b"\n".join(LINES),
        b"\n\n" + b"\n \n".join(LINES) + b"\n\n",
    ],
    ids=["plain", "mark", "crlf", "no_final_newline", "blank_lines"],
)
def test_jsonl_variants_give_the_same_rows(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert read(path) == TEXTS


def test_empty_text_is_left_out_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*LINES[:2], b'{"text": ""}', *LINES[2:]]))
    counts = build_token_set(tmp_path / "out", Inputs((path,)), Recipe())
    assert counts == {"documents": 5, "tokens": sum(len(t.encode()) + 1 for t in TEXTS), "empty_documents": 1}


def test_line_separator_does_not_split_a_row(tmp_path):
    path = tmp_path / "a.jsonl"
    text = "before\u2028after \U0001f600\x85"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", "utf-8")
    assert read(path) == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"no": "text"}', "no key 'text'"),
        (b'{"text": 5}', "'text' is int"),
        (b'{"text": null}', "'text' is NoneType"),
        (b'{"text": "open', "not valid JSON"),
        (b'["text"]', "a JSON list"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "JSON that cannot be read (Exceeds the limit (4300 digits)"),
        (b'{"text": "a", "n": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "JSON that cannot be read (maximum recur"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
    ],
)
def test_broken_row_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([LINES[0], b"", line, LINES[1]]))
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}, line 3" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz"])
def test_empty_file_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(UserError, match=f"{name}: is empty"):
        read(path)


@pytest.mark.parametrize("content", [b"\n \n", sources.UTF8_MARK, b'{"text": ""}\n'])
def test_file_without_a_document_is_refused_by_name(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.jsonl: holds no document"):
        read(path)


def test_file_without_a_document_among_others(tmp_path):
    good, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    good.write_bytes(LINES[0])
    empty.write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"b.jsonl.gz: holds no document"):
        build_token_set(tmp_path / "out", Inputs((good, empty, good)), Recipe())


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt: not UTF-8 \(byte 2: 0xfc"):
        read(path)
    path.write_bytes("text".encode("utf-16"))
    with pytest.raises(UserError, match=r"looks like UTF-16"):
        read(path)


def test_long_line_needs_little_memory(tmp_path):
    size = 50 << 20
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * size + b'"}\n' + LINES[0])
    tracemalloc.start()
    (tmp_path / "out").mkdir()
    counts = build_token_set(tmp_path / "out", Inputs((path,)), Recipe(add_eos=False))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts["tokens"] == size + len(TEXTS[0])
    assert peak < 10 * size


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_text_in_parts_is_one_document(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 4096)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    text = "".join(f"line {i} with wörds\n" for i in range(5000)) + "x" * 30000 + "é" * 30000
    path = tmp_path / name
    path.write_bytes(compress(name, text.encode()))
    assert read(path) == [text]


def compress(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data)
    if name.endswith(".zst"):
        import zstandard

        half = len(data) // 2  # two frames
        return zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_formats_give_the_same_documents(tmp_path, kind, suffix):
    path = tmp_path / f"a{kind}{suffix}"
    data = b"\n".join(LINES)
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS, "n": range(5)}), tmp_path / "plain")
        data = (tmp_path / "plain").read_bytes()
    path.write_bytes(compress(path.name, data))
    assert read(path, key="body" if kind == ".parquet" else "text") == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_cut_compressed_file_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    rows = b"".join(
        json.dumps({"text": f"{np.random.default_rng(i).bytes(300)!r}"}).encode() + b"\n" for i in range(99)
    )
    path.write_bytes(compress(name, rows)[:-2000])
    with pytest.raises(UserError, match=f"{name}: cannot be read to its end"):
        read(path)


def test_parquet_errors_name_file_and_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(UserError, match=r"a.parquet, row 1: 'text' is null"):
        read(path)
    with pytest.raises(UserError, match=r"a.parquet: no column 'body'"):
        read(path, key="body")
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"a.parquet: not a Parquet file"):
        read(path)


def test_parquet_names_the_file_of_damage_and_of_two_columns(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    offsets = pyarrow.py_buffer(np.array([0, 2, 4], "<i4").tobytes())
    texts = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"ok\xc3\xc3"))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(UserError, match=r"a.parquet, row 1: 'text': not UTF-8 \(byte 0: 0xc3\)"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"]), path)
    with pytest.raises(UserError, match=r"a.parquet: 2 columns have the name 'text'; want one"):
        read(path)
    rows = pyarrow.table({"text": [f"text {i}" for i in range(1000)]})
    for place in (10, 3000):  # the header of the page, and its data
        pyarrow.parquet.write_table(rows, path, use_dictionary=False, write_page_checksum=True)
        data = bytearray(path.read_bytes())
        data[place : place + 20] = b"\xab" * 20
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a.parquet: cannot be read to its end \("):
            read(path)


MEMORY = """
    import sys, pyarrow
    from pathlib import Path
    from jaxpar.data import sources
    blocks = sources.read_blocks(Path(sys.argv[1]), text_key="text")
    print(sum(len(block.texts) for block in blocks), pyarrow.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("group_rows", [500, 1 << 20])
def test_memory_does_not_grow_with_a_parquet_file(tmp_path, group_rows):
    import pyarrow
    import pyarrow.parquet

    peaks = []
    for count in (1000, 20_000):
        path = tmp_path / f"{count}.parquet"
        texts = pyarrow.array([f"{i}" + "x" * 2000 for i in range(count)])
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(
            table, path, row_group_size=group_rows, compression="none", use_dictionary=False, write_statistics=False
        )
        command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        rows, peak = map(int, done.stdout.split())
        assert rows == count, done.stderr
        peaks.append(peak)
    assert peaks[1] < 1.5 * peaks[0] + (4 << 20), peaks


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ", "A.Jsonl.Zst", "A.PARQUET"])
def test_suffixes_in_capitals(tmp_path, name):
    path = tmp_path / name
    if name == "A.PARQUET":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    else:
        path.write_bytes(compress(name.lower(), b"\n".join(LINES)))
    assert read(path) == TEXTS


def test_other_compressions_are_named(tmp_path):
    for name in ("a.jsonl.bz2", "A.TXT.XZ", "a.parquet.zip"):
        path = tmp_path / name
        path.write_bytes(b"something")
        with pytest.raises(UserError, match=rf"{name}: {path.suffix} is not read; want the plain file, .gz or .zst: "):
            read(path)
    for name, data in (("a.txt", gzip.compress(b"text")), ("b.jsonl", bz2.compress(LINES[0]))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"{name}.*: not UTF-8 .* it looks like (gzip|bzip2)\)"):
            read(tmp_path / name)


def test_standard_input_is_told_by_its_first_bytes():
    rows = b"\n".join(LINES)
    for data in (
        rows,
        compress(".gz", rows),
        compress(".zst", rows),
        gzip.compress(rows[:9]) + gzip.compress(rows[9:]),
    ):
        blocks = list(sources.stream_blocks(io.BytesIO(data)))
        assert [text for block in blocks for text in sources.block_texts(block, "text")] == TEXTS
    assert [block.kind for block in sources.stream_blocks(io.BytesIO(gzip.compress(b"a text")))] == ["text"]
    for data, message in [
        (bz2.compress(rows), "is bzip2, which is not read; want text or JSONL"),
        (b"PAR1\x15\x04", "is Parquet, which is not read"),
        (gzip.compress(rows)[:-9], "cannot be read to its end"),
        (gzip.compress(b""), "is empty"),
        (b"", "is empty"),
    ]:
        with pytest.raises(UserError, match=f"standard input: {message}"):
            list(sources.stream_blocks(io.BytesIO(data)))


def test_missing_files_are_reported_together(tmp_path):
    config = Config(data=DataConfig(source="files", files=(f"{tmp_path}/x*.txt", f"{tmp_path}/y.txt", str(tmp_path))))
    with pytest.raises(UserError) as error:
        open_data(config, tmp_path)
    for part in ("x*.txt", "y.txt", "is a folder", "3 problems"):
        assert part in str(error.value)


def open_files(path: Path) -> object:
    return open_data(Config(data=DataConfig(source="files", files=(str(path),))), path.parent)


@pytest.mark.parametrize("opened", [open_files, read])
def test_a_file_without_permission_is_refused_by_name(
    tmp_path: Path, opened: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
):
    path, honest = tmp_path / "mine.txt", Path.open
    path.write_text("text")

    def refusing(self: Path, *args: Any, **settings: Any) -> IO[Any]:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(self, *args, **settings)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(UserError, match=r"mine\.txt: cannot be (read|opened) \(Permission denied\)"):
        opened(path)


def test_document_order_is_that_of_the_sorted_names(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    assert [p.name for p in sources.expand_files([f"{tmp_path}/*.txt"], "k")] == ["a.txt", "b.txt", "c.txt"]
    both = sources.expand_files([f"{tmp_path}/c.txt", f"{tmp_path}/*.txt"], "k")
    assert [p.name for p in both] == ["c.txt", "a.txt", "b.txt"]


def test_standard_library_is_a_corpus():
    files, skipped = sources.stdlib_files()
    assert files == sorted(files, key=lambda p: files.index(p))
    assert len(files) > 100
    assert skipped < 10
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard"), ("a.model", "sentencepiece")]
)
def test_a_missing_library_is_named_with_the_command(tmp_path, monkeypatch, name, library):
    from jaxpar.data import load_tokenizer

    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / name
    path.write_bytes(b"something")
    with pytest.raises(UserError, match=rf"{name}: .* needs the {library} package; run: pip install 'jaxpar\[data\]'"):
        load_tokenizer(str(path)) if name == "a.model" else read(path)


def test_cutting_a_text_does_not_change_its_ids(monkeypatch):
    import tokenizers

    monkeypatch.setattr(sources, "PART_BYTES", 12000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    text = "".join(path.read_text("utf-8") for path in sources.stdlib_files()[0][:12]) + "Größe, 大きさ\n大きさ\n" * 300
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False))
    blocks = list(sources.text_blocks(io.BytesIO(text.encode()), "name", 0))
    parts = [sources.block_texts(block, "text")[0] for block in blocks]
    assert len(parts) > 20
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part).ids] == tokenizer.encode(text).ids
