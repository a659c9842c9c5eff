"""A cache is reused exactly when nothing changed, and is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_data_tokenizers import save_word_tokenizer

from jaxpar.config import Config, DataConfig
from jaxpar.data import open_data
from jaxpar.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def config(tmp_path, seq_len=8, **settings):
    defaults = {"source": "files", "files": (f"{tmp_path}/*.txt",), "eval_fraction": 0.0, "add_eos": False}
    return Config(seq_len=seq_len, data=DataConfig(**{**defaults, **settings}))


def tokens(data):
    return [data.train.row(i)["tokens"].tolist() for i in range(len(data.train))]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 4)
    return tmp_path


def test_unchanged_data_is_reused_and_said(corpus, caplog):
    caplog.set_level("INFO", "jaxpar")
    first = tokens(open_data(config(corpus), corpus))
    assert "reusing" not in caplog.text
    caplog.clear()
    assert tokens(open_data(config(corpus), corpus)) == first
    assert caplog.text.count("reusing cache") == 2
    assert "building" not in caplog.text


def test_an_edit_of_the_same_size_and_time_is_seen(corpus):
    path = corpus / "a.txt"
    before = tokens(open_data(config(corpus), corpus))
    times = path.stat()
    path.write_text("abcdefgx" * 4)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tokens(open_data(config(corpus), corpus)) != before


def test_another_tokenizer_of_the_same_path_is_seen(corpus):
    path = corpus / "tokenizer.json"
    (corpus / "a.txt").write_text("a b c d e f g h a")
    save_word_tokenizer(path, ["a", "b", "c", "d", "e", "f", "g", "h"])
    first = tokens(open_data(config(corpus, tokenizer=str(path)), corpus))
    assert first == [[0, 1, 2, 3, 4, 5, 6, 7]]
    save_word_tokenizer(path, ["h", "g", "f", "e", "d", "c", "b", "a"])
    second = tokens(open_data(config(corpus, tokenizer=str(path)), corpus))
    assert [[7 - i for i in row] for row in first] == second


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 4},
        {"add_eos": True},
        {"add_bos": True},
        {"packing": "best_fit"},
        {"long_documents": "truncate"},
        {"eval_fraction": 0.5},
        {"text_key": "other"},
    ],
)
def test_every_setting_that_changes_rows_is_in_the_key(corpus, change):
    for i in range(20):
        (corpus / f"{i}.txt").write_text(chr(97 + i) * 20)
    before = open_data(config(corpus), corpus)
    after = open_data(config(corpus, **change), corpus)
    if "text_key" not in change:  # it decides nothing for text, and another key is only a needless build
        assert tokens(before) != tokens(after)
        assert before.train.identity != after.train.identity


def test_more_files_are_seen(corpus):
    before = tokens(open_data(config(corpus), corpus))
    (corpus / "b.txt").write_text("more text here")
    assert tokens(open_data(config(corpus), corpus)) != before


def test_a_damaged_cache_is_built_again_and_said(corpus, caplog):
    before = tokens(open_data(config(corpus), corpus))
    for pattern in ("tokens-*/tokens-00000.bin", "rows-*/start.bin", "tokens-*/manifest.json"):
        path = next((corpus / "cache").glob(pattern))
        path.write_bytes(path.read_bytes()[:-1])
        caplog.clear()
        assert tokens(open_data(config(corpus), corpus)) == before
        assert "is damaged and is built again" in caplog.text


def test_a_mistake_in_the_input_leaves_no_trace(corpus):
    (corpus / "b.txt").write_bytes(b"\xff")
    before = sorted(corpus.rglob("*"))
    with pytest.raises(UserError, match=r"b.txt: not UTF-8"):
        open_data(config(corpus), corpus / "new" / "workdir")
    assert sorted(corpus.rglob("*")) == before


BUILDER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, "tests")
    from test_data_cache import config, tokens
    from jaxpar.data import build, open_data
    path, pause = Path(sys.argv[1]), float(sys.argv[2])
    count = build._count
    def slow(*args):
        time.sleep(pause)
        count(*args)
    build._count = slow
    print("started", flush=True)
    print(tokens(open_data(config(path), path)))
"""


def start_builder(path, pause):
    command = [sys.executable, "-c", textwrap.dedent(BUILDER), str(path), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_builders_give_one_valid_cache_and_a_killed_one_none(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(chr(97 + i) * 20)
    killed = start_builder(tmp_path, 30)
    cache = tmp_path / "cache"
    while not list(cache.glob(".building-tokens-*/tokens-*.bin")):
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert not list(cache.glob("tokens-*"))
    builders = [start_builder(tmp_path, 0.05) for _ in range(2)]
    outputs = [builder.communicate(timeout=120)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(cache.glob("tokens-*"))) == 1
    assert not list(cache.glob(".building-*"))
    assert json.loads(outputs[0].splitlines()[-1]) == tokens(open_data(config(tmp_path), tmp_path))
