"""Token files of other systems: right rows, or a refusal that names the file; never a crash."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from jaxpar.config import Config, DataConfig, ModelConfig
from jaxpar.data import open_data
from jaxpar.data.foreign import open_megatron
from jaxpar.errors import UserError

SEQ = 8


def index_bytes(lengths, bounds=None, *, code=8, itemsize=2, version=1, magic=b"MMIDIDX\x00\x00", pointers=None):
    """A Megatron index, laid out by hand."""
    lengths = np.asarray(lengths, np.int64)
    bounds = np.arange(len(lengths) + 1) if bounds is None else np.asarray(bounds)
    if pointers is None:
        pointers = (np.cumsum(lengths) - lengths) * itemsize
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    return head + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()


def write_pair(folder, lengths, bounds=None, dtype="<u2", **header):
    """A valid pair with the ids 1, 2, 3, ...; returns its prefix."""
    tokens = np.arange(1, sum(lengths) + 1).astype(dtype)
    (folder / "x.bin").write_bytes(tokens.tobytes())
    (folder / "x.idx").write_bytes(index_bytes(lengths, bounds, itemsize=tokens.itemsize, **header))
    return folder / "x"


def open_config(tmp_path, files, source="megatron", vocab=None, **settings):
    data = DataConfig(source=source, files=files, **{"packing": "none", "eval_fraction": 0.0, **settings})
    return open_data(Config(seq_len=SEQ, model=ModelConfig(vocab_size=vocab), data=data), tmp_path)


def documents(data):
    found = []
    for i in range(len(data.train)):
        row = data.train.row(i)
        used = int(row["weights"].sum())
        found.append([*row["tokens"][:used].tolist(), int(row["targets"][used - 1])])
    return found


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5), ("<u1", 1)])
def test_documents_of_a_pair(tmp_path, dtype, code):
    write_pair(tmp_path, [3, 2, 4, 2], dtype=dtype, code=code)
    wanted = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    for name in ("x", "x.idx", "x.bin", "*"):
        assert documents(open_config(tmp_path, (f"{tmp_path}/{name}",))) == wanted


def test_documents_of_several_sequences(tmp_path):
    write_pair(tmp_path, [3, 2, 4, 2], bounds=[0, 2, 2, 4])
    assert documents(open_config(tmp_path, (f"{tmp_path}/x",))) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_offsets_beyond_32_bits(tmp_path):
    long = 2_000_000_000
    lengths = [long, long, 3, 4]
    (tmp_path / "x.idx").write_bytes(index_bytes(lengths))
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate(2 * sum(lengths))  # sparse
        stream.seek(4 * long)
        stream.write(np.arange(1, 8, dtype="<u2").tobytes())
    import jaxpar.data.foreign as foreign

    # The scan would read 8 GB of holes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "_scan", lambda *_: foreign._Content(7, "hash"))
        store = open_megatron(tmp_path / "x", tmp_path)
    windows = list(store.documents())
    assert windows[0].start.tolist() == [0, long, 2 * long, 2 * long + 3]
    assert windows[0].length.tolist() == lengths
    assert store.read(2 * long, 3).tolist() == [1, 2, 3]
    assert store.read(2 * long + 3, 4).tolist() == [4, 5, 6, 7]
    assert store.read(long, 2).tolist() == [0, 0]


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def swap(folder):
    a, b = (folder / "x.bin").read_bytes(), (folder / "x.idx").read_bytes()
    (folder / "x.bin").write_bytes(b)
    (folder / "x.idx").write_bytes(a)


def index(lengths=(3, 2, 4, 2), **header):
    return lambda folder: (folder / "x.idx").write_bytes(index_bytes(list(lengths), **header))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f / "x.bin", 1), "x.bin: 21 bytes; its index describes 22"),
        (lambda f: cut(f / "x.bin", 22), "x.bin: 0 bytes; its index describes 22"),
        (lambda f: cut(f / "x.idx", 1), r"x.idx: 121 bytes; .* make 122: it is cut"),
        (lambda f: cut(f / "x.idx", 60), r"x.idx: 62 bytes; .* it is cut"),
        (lambda f: cut(f / "x.idx", 100), "x.idx: cut inside its header"),
        (lambda f: (f / "x.idx").write_bytes(b""), "x.idx: does not start with MMIDIDX"),
        (swap, "x.idx: does not start with MMIDIDX: .* swapped"),
        (index(magic=b"TNTIDX\x00\x00\x00"), r"x.idx: the older fairseq layout"),
        (index(version=2), "x.idx: version 2; want 1"),
        (index(code=9), "x.idx: type code 9"),
        (index(code=7), "x.idx: its type code 7 means float32"),
        (index(code=4), "x.idx: the byte offset of sequence 1 is 6, its lengths make 12"),
        (index(lengths=(3, 2, 4, 3)), "x.bin: 22 bytes; its index describes 24"),
        (index(bounds=[0, 1, 2, 3]), "x.idx: its last document ends at sequence 3, but it has 4 sequences"),
        (index(bounds=[0, 3, 2, 4]), "x.idx: its document bounds go backwards"),
        (index(bounds=[1, 2, 3, 4]), "x.idx: its document bounds do not start at 0"),
        (index(bounds=[]), "x.idx: its document bounds do not start at 0"),
        (index(lengths=()), "x.idx: holds no sequence"),
        (index(lengths=(3, -2, 8, 2)), "x.idx: sequence 1 has a negative length"),
        (index(pointers=np.array([0, 6, 10 - (1 << 32), 18])), "the byte offset of sequence 2 .*overflowed"),
        (lambda f: (f / "x.idx").write_bytes(index_bytes([3, 2, 4, 2]) + bytes(4)), "has a mode per sequence"),
        (lambda f: (f / "x.idx").write_bytes(index_bytes([3, 2, 4, 2]) + bytes(5)), "longer than it says"),
        (lambda f: (f / "x.bin").unlink(), "x.bin: missing"),
        (lambda f: (f / "x.idx").unlink(), "x.idx: missing"),
    ],
)
def test_malformed_pairs_are_refused_by_name(tmp_path, damage, message):
    write_pair(tmp_path, [3, 2, 4, 2])
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_config(tmp_path, (f"{tmp_path}/x*",))
    assert str(tmp_path) in str(error.value)


def test_negative_and_too_large_ids_are_refused(tmp_path):
    prefix = write_pair(tmp_path, [3, 2], dtype="<i4", code=4)
    with pytest.raises(UserError, match=r"holds the id 5, but the vocabulary has 5 ids"):
        open_config(tmp_path, (str(prefix),), vocab=5)
    assert open_config(tmp_path, (str(prefix),), vocab=6).vocab_size == 6
    (tmp_path / "x.bin").write_bytes(np.array([1, 2, -3, 4, 5], "<i4").tobytes())
    with pytest.raises(UserError, match=r"x.bin: holds the negative id -3"):
        open_config(tmp_path, (str(prefix),))


def test_headerless_files(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(np.array([1, 2, 3, 0, 4, 5, 0, 6, 7], "<u2").tobytes())
    kind = {"source": "raw", "raw_dtype": "uint16"}
    assert documents(open_config(tmp_path, (str(path),), **kind, raw_document_end=0)) == [
        [1, 2, 3, 0],
        [4, 5, 0],
        [6, 7],
    ]
    assert documents(open_config(tmp_path, (str(path),), **kind)) == [[1, 2, 3, 0, 4, 5, 0, 6, 7]]
    wide = {**kind, "raw_dtype": "uint32"}
    with pytest.raises(UserError, match=r"train.bin: 18 bytes is no multiple of 4"):
        open_config(tmp_path, (str(path),), **wide)
    with pytest.raises(UserError, match=r"data.raw_dtype: unset"):
        open_config(tmp_path, (str(path),), source="raw")
    with pytest.raises(UserError, match=r"16-bit ids, but model.vocab_size is 70000"):
        open_config(tmp_path, (str(path),), vocab=70_000, **kind)
    for width, end, most in (("uint16", 65_536, 65_535), ("uint16", -1, 65_535), ("uint32", 1 << 32, (1 << 32) - 1)):
        with pytest.raises(UserError, match=rf"data.raw_document_end: {end}, which no {width} id .* want 0 to {most}"):
            open_config(tmp_path, (str(path),), source="raw", raw_dtype=width, raw_document_end=end)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin: is empty"):
        open_config(tmp_path, (str(path),), **kind)


def test_held_out_tail_of_a_headerless_file(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(np.arange(1000, dtype="<u4").tobytes())
    kind = {"source": "raw", "raw_dtype": "uint32", "packing": "concat"}
    data = open_config(tmp_path, (str(path),), **kind, eval_fraction=0.1)
    assert data.train.row(0)["tokens"][0] == 0
    assert data.evaluation.row(0)["tokens"][0] == 900
    assert data.train.plan.stats.tokens == 900
    assert data.evaluation.plan.stats.tokens == 100


def test_document_ends_across_scan_windows(tmp_path, monkeypatch):
    import jaxpar.data.foreign as foreign

    monkeypatch.setattr(foreign, "SCAN_TOKENS", 4)
    tokens = np.array([1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 0, 1, 0, 0, 2, 3], "<u2")
    path = tmp_path / "t.bin"
    path.write_bytes(tokens.tobytes())
    store = foreign.open_raw(path, "uint16", 0, tmp_path)
    found = [tokens[s : s + n].tolist() for d in store.documents() for s, n in zip(d.start, d.length)]
    assert found == [[1, 2, 3, 0], [4, 5, 6, 7, 8, 9, 0], [1, 0], [0], [2, 3]]


@pytest.mark.parametrize("name", ["x.bin", "x.idx"])
def test_every_edit_of_a_pair_is_another_identity(tmp_path, name):
    """Whatever byte of a large file is edited, and also where size and time stay as they are."""
    write_pair(tmp_path, [10] * 800_000)
    path = tmp_path / name
    data, times = path.read_bytes(), path.stat()
    before = open_config(tmp_path, (f"{tmp_path}/x",)).train.identity
    edited = bytearray(data)
    if name == "x.bin":
        edited[2_679_290] ^= 1
    else:  # a document gets a sequence of the next one
        edited[-8 * 200_000] ^= 1
    path.write_bytes(edited)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_config(tmp_path, (f"{tmp_path}/x",)).train.identity != before
    path.write_bytes(data)
    assert open_config(tmp_path, (f"{tmp_path}/x",)).train.identity == before


def test_a_headerless_file_is_known_by_its_content(tmp_path):
    kind = {"source": "raw", "raw_dtype": "uint16"}
    data = np.arange(4_000_000, dtype=np.uint32).astype("<u2")
    found = []
    for name, place in (("a.bin", None), ("copy.bin", None), ("edited.bin", 1_234_567)):
        if place is not None:
            data[place] ^= 1
        data.tofile(tmp_path / name)
        found.append(open_config(tmp_path, (f"{tmp_path}/{name}",), **kind).train.identity)
    assert found[0] == found[1] != found[2]


def test_held_out_documents_of_a_pair_are_disjoint(tmp_path):
    write_pair(tmp_path, [2] * 500)
    data = open_config(tmp_path, (f"{tmp_path}/x",), eval_fraction=0.2)
    train = documents(data)
    held = [int(data.evaluation.row(i)["tokens"][0]) for i in range(len(data.evaluation))]
    assert 60 < len(held) < 140
    assert sorted([*held, *(document[0] for document in train)]) == list(range(1, 1000, 2))
