"""Token sets that were damaged or edited after they were made: noticed, and told by name."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from test_data_prepare import run, write_corpus
from test_data_tokenizers import save_word_tokenizer

from jaxpar.config import Config, DataConfig
from jaxpar.data import open_data, prepare
from jaxpar.data.encode import Recipe
from jaxpar.data.prepare import PrepareOptions
from jaxpar.data.store import DOCUMENT, open_store, verify_store
from jaxpar.errors import UserError


def test_damage_is_found(tmp_path):
    files = write_corpus(tmp_path, 20)
    prepare.prepare(PrepareOptions(files, tmp_path / "set", Recipe()))
    tokens = tmp_path / "set" / "tokens-00000.bin"
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)
    done = run(f"--verify={tmp_path}/set")
    assert done.returncode == 2
    assert "tokens-00000.bin" in done.stderr
    tokens.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"tokens-00000.bin: .* bytes; want"):
        open_store(tmp_path / "set")


def tokens_config(folder):
    return Config(seq_len=4, data=DataConfig(source="tokens", files=(str(folder),), eval_fraction=0.0))


def test_an_id_that_was_never_written_is_refused(tmp_path):
    prepare.prepare(PrepareOptions(write_corpus(tmp_path, 20), tmp_path / "set", Recipe()))
    data = open_data(tokens_config(tmp_path / "set"), tmp_path)
    before = data.train.row(2)
    path = tmp_path / "set" / "tokens-00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[10] = 40_000
    ids.tofile(path)
    data = open_data(tokens_config(tmp_path / "set"), tmp_path)
    for packing_row in (1, 2):
        assert len(data.train.row(packing_row + 10)["tokens"]) == 4
    with pytest.raises(UserError, match=r"tokens-00000.bin: holds the id 40000 at .* but none above 258 when"):
        data.train.row(2)
    ids[10] = before["tokens"][2]
    ids.tofile(path)
    assert np.array_equal(data.train.row(2)["tokens"], before["tokens"])


def test_a_damaged_list_of_documents_is_refused(tmp_path):
    prepare.prepare(PrepareOptions(write_corpus(tmp_path, 20), tmp_path / "set", Recipe()))
    path = tmp_path / "set" / "documents-00000.bin"
    records = np.fromfile(path, DOCUMENT)
    records["end"][3] = 1 << 40
    records.tofile(path)
    with pytest.raises(UserError, match=r"documents-00000.bin: document 4 ends before it starts; it is damaged"):
        open_data(tokens_config(tmp_path / "set"), tmp_path)


@pytest.mark.parametrize("files_told", [True, False], ids=["told", "older"])
def test_a_tokenizer_copy_that_changed_is_noticed(tmp_path, files_told):
    save_word_tokenizer(tmp_path / "tokenizer.json", ["hello", "world", "END"])
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "world"}')
    (tmp_path / "a.jsonl").write_text('{"text": "hello world hello"}')
    recipe = Recipe(str(tmp_path / "tokenizer.json"), eos_token="END")
    folder = tmp_path / "set"
    prepare.prepare(PrepareOptions((f"{tmp_path}/a.jsonl",), folder, recipe))
    if not files_told:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["tokenizer"]["files"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify_store(folder) == []
    data = open_data(tokens_config(folder), tmp_path)
    assert (data.tokenizer.eos_id, data.tokenizer.pad_id) == (2, 1)
    copy = folder / "tokenizer" / "tokenizer.json"
    content = copy.read_text()
    copy.write_text(content.replace('"hello"', '"hallo"'))
    done = run(f"--verify={folder}")
    assert done.returncode == 2
    assert f"damaged or missing: {copy} " in done.stderr
    with pytest.raises(UserError, match=rf"{copy}: the copy of the tokenizer is damaged or missing; .* data.tokenizer"):
        open_data(tokens_config(folder), tmp_path)
    copy.write_text(content)
    assert verify_store(folder) == []
    shutil.rmtree(folder / "tokenizer")
    assert bool(verify_store(folder)) == files_told
    with pytest.raises(UserError, match=r"/set/tokenizer.*: the copy of the tokenizer is damaged or missing"):
        open_data(tokens_config(folder), tmp_path)
    settings = dataclasses.replace(
        tokens_config(folder).data, tokenizer=str(tmp_path / "tokenizer.json"), eos_token="END"
    )
    assert open_data(Config(seq_len=4, data=settings), tmp_path).tokenizer.eos_id == 2


def test_a_manifest_that_was_edited_is_refused_by_name(tmp_path):
    prepare.prepare(PrepareOptions(write_corpus(tmp_path, 20), tmp_path / "set", Recipe()))
    path = tmp_path / "set" / "manifest.json"
    content = path.read_text()

    def check(message):
        for use in (lambda: open_data(tokens_config(tmp_path / "set"), tmp_path), lambda: verify_store(path.parent)):
            with pytest.raises(UserError, match=message) as error:
                use()
            assert str(path) in str(error.value)

    for key in ("version", "shards", "dtype", "tokenizer", "max_id", "identity", "documents", "tokens", "text_bytes"):
        manifest = json.loads(content)
        del manifest[key]
        path.write_text(json.dumps(manifest))
        check("version None; this jaxpar reads 1" if key == "version" else f'no "{key}"')
    for edit, message in [
        (lambda m: m["shards"].append(m["shards"][0]), "tokens-00000.bin is listed 2 times"),
        (lambda m: m["shards"][0].pop("tokens"), r'no "shards\[0\].tokens"'),
        (lambda m: m["shards"].append(5), r'"shards\[1\]" is int, no object'),
        (lambda m: m["shards"][0].update(tokens_file="../x"), r"'\.\./x' is no name of a file"),
        (lambda m: m["tokenizer"].pop("sha256"), 'no "tokenizer.sha256"'),
        (lambda m: m.update(tokens=7), r'"tokens" is 7, but its shards hold \d'),
        (lambda m: m.update(documents=7), '"documents" is 7, but its shards hold 21'),
        (lambda m: m.update(documents="21"), '"documents" is .21., no int'),
        (lambda m: m.update(max_id=259), '"max_id" is 259, but the tokenizer has 259 ids'),
        (lambda m: m.update(dtype="<f4"), '"dtype" is .<f4.; want one of <u2, <u4'),
        (lambda m: m["shards"][0].update(tokens_crc32=1), '"identity" is not that of its shards'),
        (lambda m: m.update(identity="0"), '"identity" is not that of its shards'),
    ]:
        manifest = json.loads(content)
        edit(manifest)
        path.write_text(json.dumps(manifest))
        check(message)
    path.write_text(content[:-20])
    check("not valid JSON")
