"""The token sets that scripts/prepare_data.py writes: the same however they are made, and resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_data_tokenizers import save_word_tokenizer

from jaxpar.config import Config, DataConfig, MixtureSource, ModelConfig
from jaxpar.data import build, open_data, prepare, required_vocab, sources
from jaxpar.data.build import Inputs, build_token_set
from jaxpar.data.encode import Recipe
from jaxpar.data.manifest import open_manifest
from jaxpar.data.prepare import PrepareOptions
from jaxpar.data.store import open_store, verify_store
from jaxpar.errors import UserError
from jaxpar.runtime import lock
from jaxpar.weights import Weights

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def write_corpus(folder, count=400):
    rng = np.random.default_rng(0)
    rows = [json.dumps({"text": "".join(map(chr, rng.integers(97, 123, n)))}) for n in rng.integers(0, 2000, count)]
    (folder / "a.jsonl").write_text("\n".join(rows[: count // 2]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(rows[count // 2 :]))
    (folder / "c.txt").write_text("a text of its own\n" * 50)
    return (str(folder / "a.jsonl"), str(folder / "b.jsonl"), str(folder / "c.txt"))


def contents(folder):
    """Every file of a token set but the key of its inputs."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "inputs.key"}


def run(*arguments, **options):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1 << 14)


def test_processes_do_not_change_the_result(tmp_path):
    files = write_corpus(tmp_path)
    for count in (1, 2):
        done = run(*files, f"--output={tmp_path}/set{count}", f"--processes={count}")
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "set1") == contents(tmp_path / "set2")
    store = open_store(tmp_path / "set1")
    assert verify_store(tmp_path / "set1") == []
    manifest = open_manifest(tmp_path / "set1")
    assert [source["documents"] for source in manifest["sources"]][2] == 1
    lengths = np.concatenate([d.length for d in store.documents()])
    assert manifest["documents"] == len(lengths)
    assert manifest["tokens"] == lengths.sum() == manifest["text_bytes"] + len(lengths)
    assert manifest["tokenizer"]["sha256"]
    assert run(f"--verify={tmp_path}/set1").returncode == 0


@pytest.mark.parametrize("stop", [1, 5, 20, 26, 27])
def test_a_killed_build_goes_on_exactly(tmp_path, small_blocks, monkeypatch, stop):
    files = tuple(map(Path, write_corpus(tmp_path)))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    build_token_set(whole, Inputs(files), Recipe(add_bos=True))
    monkeypatch.setattr(build, "COMMIT_INTERVAL_S", 0.0)
    seen = []

    def die(counts, writer):
        seen.append(writer.num_tokens)
        if len(seen) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_token_set(halves, Inputs(files, key="k"), Recipe(add_bos=True), on_progress=die)
    # What was written after the last commit is cut off.
    with (halves / "tokens-00000.bin").open("ab") as stream:
        stream.write(b"half a document")
    build_token_set(halves, Inputs(files, key="k"), Recipe(add_bos=True))
    assert contents(whole) == contents(halves)


def test_a_text_killed_between_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(sources, "PART_BYTES", 4000)
    monkeypatch.setattr(build, "COMMIT_INTERVAL_S", 0.0)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"line {i}\n" for i in range(3000)))
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    build_token_set(tmp_path / "whole", Inputs(files), Recipe())
    stops = 0
    while True:
        count = 0

        def die(counts, writer):
            nonlocal count
            count += 1
            if count == 2:
                raise KeyboardInterrupt

        try:
            build_token_set(tmp_path / "parts", Inputs(files, key="k"), Recipe(), on_progress=die)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 5
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_shards(tmp_path, small_blocks):
    files = tuple(map(Path, write_corpus(tmp_path)))
    build_token_set(tmp_path / "one", Inputs(files), Recipe())
    build_token_set(tmp_path / "many", Inputs(files), Recipe(), shard_tokens=50_000)
    one, many = open_store(tmp_path / "one"), open_store(tmp_path / "many")
    assert len(many.shards) > 4

    def rows(store):
        return [
            store.read(s, n).tolist() for d in store.documents() for s, n in zip(d.start.tolist(), d.length.tolist())
        ]

    assert rows(one) == rows(many)
    config = Config(seq_len=64, data=DataConfig(source="tokens", files=(f"{tmp_path}/one",), eval_fraction=0.1))
    other = Config(seq_len=64, data=DataConfig(source="tokens", files=(f"{tmp_path}/many",), eval_fraction=0.1))
    a, b = open_data(config, tmp_path).train, open_data(other, tmp_path).train
    assert len(a) == len(b)
    assert all(np.array_equal(a.row(i)[key], b.row(i)[key]) for i in range(0, len(a), 17) for key in a.row(0))


def test_token_sets_give_the_rows_of_the_texts(tmp_path):
    files = write_corpus(tmp_path)
    build_token_set(tmp_path / "set", Inputs(tuple(map(Path, files))), Recipe())
    text = open_data(Config(seq_len=64, data=DataConfig(source="files", files=files)), tmp_path)
    tokens = open_data(Config(seq_len=64, data=DataConfig(source="tokens", files=(f"{tmp_path}/set",))), tmp_path)
    for a, b in ((text.train, tokens.train), (text.evaluation, tokens.evaluation)):
        assert a.identity == b.identity
        assert all(np.array_equal(a.row(i)["tokens"], b.row(i)["tokens"]) for i in range(len(a)))
    assert tokens.tokenizer.name == "bytes"
    assert tokens.bytes_per_token == text.bytes_per_token


def test_required_vocabulary(tmp_path):
    files = write_corpus(tmp_path, 20)
    save_word_tokenizer(tmp_path / "tokenizer.json", [f"w{i}" for i in range(1000)])
    recipe = Recipe(str(tmp_path / "tokenizer.json"), add_eos=False)
    build_token_set(tmp_path / "set", Inputs(tuple(map(Path, files))), recipe)
    tokens = (f"{tmp_path}/set",)
    assert required_vocab(Config()) == 259
    assert required_vocab(Config(data=DataConfig(source="tokens", files=tokens))) == 1000
    mixture = (MixtureSource("a", "tokens", tokens), MixtureSource("b", "raw", ("x.bin",)))
    assert required_vocab(Config(data=DataConfig(source="mixture", sources=mixture))) == 1000
    with pytest.raises(UserError, match=r"model.vocab_size is not set"):
        required_vocab(Config(data=DataConfig(source="megatron", files=("x",))))
    other = DataConfig(source="tokens", files=tokens, tokenizer=str(tmp_path / "other.json"))
    save_word_tokenizer(tmp_path / "other.json", [f"v{i}" for i in range(1000)])
    with pytest.raises(UserError, match=r"was written with another tokenizer"):
        open_data(Config(seq_len=64, data=other), tmp_path)


def test_standard_input(tmp_path):
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    for name, data, documents in (("jsonl", rows, 2), ("text", b"{\x20not json".replace(b"{", b"(") * 9, 1)):
        done = run_with_input(data, "-", f"--output={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
        assert open_manifest(tmp_path / name)["documents"] == documents
    done = run_with_input(b"", "-", f"--output={tmp_path}/empty")
    assert done.returncode == 2
    assert b"standard input: is empty" in done.stderr


def run_with_input(data, *arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, input=data, capture_output=True, timeout=60)


def test_the_output_is_left_alone_when_complete_and_protected_when_not(tmp_path, capsys):
    files = write_corpus(tmp_path, 20)
    options = PrepareOptions(files, tmp_path / "set", Recipe())
    first = prepare.prepare(options)
    assert prepare.prepare(options) == first
    assert "is complete already" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"was made of other inputs or settings"):
        prepare.prepare(PrepareOptions(files, tmp_path / "set", Recipe(add_eos=False)))
    (tmp_path / "c.txt").write_text("changed")
    with pytest.raises(UserError, match=r"was made of other inputs or settings"):
        prepare.prepare(options)


def test_a_token_set_brings_its_tokenizer_along(tmp_path):
    folder = tmp_path / "moved away later"
    folder.mkdir()
    save_word_tokenizer(folder / "words.json", ["hello", "world", "END"])
    (folder / "tokenizer_config.json").write_text('{"eos_token": "END"}')
    (tmp_path / "a.jsonl").write_text('{"text": "hello world hello"}')
    prepare.prepare(PrepareOptions((f"{tmp_path}/a.jsonl",), tmp_path / "set", Recipe(f"{folder}/words.json")))
    folder.rename(tmp_path / "elsewhere")
    settings = DataConfig(source="tokens", files=(f"{tmp_path}/set",), eval_fraction=0.0)
    data = open_data(Config(seq_len=4, data=settings), tmp_path)
    assert (data.vocab_size, data.tokenizer.eos_id) == (3, 2)
    assert data.train.row(0)["targets"].tolist()[:3] == [1, 0, 2]

    def tokenizer_of_run(settings):
        config = Config(model=ModelConfig(vocab_size=3), data=settings)
        return Weights(tmp_path, config.model, config).tokenizer

    assert tokenizer_of_run(settings) == str(tmp_path / "set" / "tokenizer")
    assert tokenizer_of_run(DataConfig(source="tokens", files=(f"{tmp_path}/gone",))) is None
    assert tokenizer_of_run(DataConfig(source="megatron", files=("x",))) is None
    assert tokenizer_of_run(DataConfig()) == "bytes"
    prepare.prepare(PrepareOptions((f"{tmp_path}/a.jsonl",), tmp_path / "bytes", Recipe()))
    assert tokenizer_of_run(DataConfig(source="tokens", files=(f"{tmp_path}/bytes",))) == "bytes"


def test_mistakes_end_with_one_message(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"texd": "x"}\n')
    for arguments, message in [
        (
            [tmp_path / "a.jsonl", f"--output={tmp_path}/o", "--processes=2"],
            f"{tmp_path}/a.jsonl, line 2: no key 'text'; the row has ['texd'] (set --text-key)",
        ),
        ([tmp_path / "nothing", f"--output={tmp_path}/o"], "matches no file"),
        (
            [tmp_path / "a.jsonl", f"--output={tmp_path}/o", "--tokenizer=none.json"],
            "prepare_data.py: error: --tokenizer: none.json does not exist",
        ),
        ([tmp_path / "a.jsonl"], "want INPUT and --output"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_refused_run_leaves_nothing_and_finished_work_stays(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"texd": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    before = sorted(tmp_path.rglob("*"))
    for arguments, data in ((["-"], b'{"texd": 1}'), ([tmp_path / "a.jsonl"], b"")):
        done = run_with_input(data, *arguments, f"--output={tmp_path}/new/deep/o", "--processes=1")
        assert done.returncode == 2, done.stderr
        assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(build, "COMMIT_INTERVAL_S", 0.0)
    files = (f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl")
    with pytest.raises(UserError, match=r"a.jsonl, line 2: no key"):
        prepare.prepare(PrepareOptions(files, tmp_path / "o", Recipe()))
    assert (tmp_path / ".o.unfinished" / "progress.json").is_file()


@pytest.mark.parametrize("content", ["{}", "", "[]", "half", "no counts", "no writer", "counts of another kind"])
def test_a_broken_progress_file_tells_what_to_delete(tmp_path, monkeypatch, content):
    monkeypatch.setattr(build, "COMMIT_INTERVAL_S", 0.0)
    options = PrepareOptions(write_corpus(tmp_path, 20), tmp_path / "set", Recipe())
    path = tmp_path / ".set.unfinished" / "progress.json"

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "_count", die)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(options)
    stored = json.loads(path.read_text())
    broken = {
        "half": path.read_text()[:-50],
        "no counts": json.dumps({**stored, "counts": None}),
        "no writer": json.dumps({**stored, "writer": {}}),
        "counts of another kind": json.dumps({**stored, "counts": {"file": 0, "offset": 0, "other": 1}}),
    }
    path.write_text(broken.get(content, content))
    with pytest.raises(UserError, match=rf"{path}: .*; delete {path.parent} and start again"):
        prepare.prepare(options)


def test_two_runs_with_one_output(tmp_path):
    files = write_corpus(tmp_path)
    output = tmp_path / "new" / "set"
    output.parent.mkdir()
    lock_file = output.with_name(".set.lock")
    with lock.exclusive(lock_file, output, "--output", print):
        refused = run(*files, f"--output={output}")
        assert refused.returncode == 2
        assert f"--output={output} is in use by process {os.getpid()} on " in refused.stderr
        assert sorted(path.name for path in output.parent.iterdir()) == [".set.lock"]
    command = [sys.executable, str(SCRIPT), *files, f"--output={output}", "--processes=1"]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [one.communicate(timeout=120)[1] for one in runs]
    assert 0 in [one.returncode for one in runs]
    assert all(one.returncode == 0 or "is in use by" in error for one, error in zip(runs, errors))
    assert verify_store(output) == []
    assert [path.name for path in output.parent.iterdir()] == ["set"]


def test_messages_name_the_flags_of_the_script(tmp_path):
    save_word_tokenizer(tmp_path / "tokenizer.json", ["a"])
    messages = [
        (Recipe(str(tmp_path)), "--add-eos: ", "set --eos-token to its text or --no-add-eos"),
        (Recipe(str(tmp_path), add_bos=True), "--add-bos: ", "set --bos-token to its text or --no-add-bos"),
        (Recipe(str(tmp_path), eos_token="b"), "--eos-token: 'b' is not in the vocabulary", ""),
        (Recipe(eos_token="b"), "--bos-token and --eos-token mean nothing", ""),
    ]
    for recipe, begin, end in messages:
        with pytest.raises(UserError) as error:
            recipe.encoder()
        message = prepare.in_flags(str(error.value))
        assert message.startswith(begin)
        assert end in message
    kept = "/x/data.tokenizer: is empty; data.tokenizer/y.json, my-data.text_key, data.text_key.jsonl, data.files"
    assert prepare.in_flags(kept) == kept


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), "cannot start (Resource temporarily unavailable)"),
        (RuntimeError("can't start new thread"), "cannot start (can't start new thread): use fewer --processes"),
        (OSError("handle is closed"), "a.jsonl: a worker process was killed or could not start"),
    ],
)
def test_a_worker_that_cannot_start_is_told(tmp_path, monkeypatch, error, message):
    def submit(*_):
        raise error

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError) as caught:
        build_token_set(tmp_path / "set", Inputs((tmp_path / "a.jsonl",)), Recipe(), processes=2)
    assert message in str(caught.value)
    assert "start again to go on" in str(caught.value)


def test_killed_script_leaves_no_worker_and_goes_on(tmp_path):
    """A script killed in the middle: its workers end, and the next call finishes the same set."""
    rng = np.random.default_rng(0)
    row = json.dumps({"text": "".join(map(chr, rng.integers(97, 123, 20_000)))}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * 1500)
    arguments = [f"{tmp_path}/a.jsonl", f"--output={tmp_path}/set", "--processes=2"]
    script = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stderr=subprocess.DEVNULL)
    unfinished = tmp_path / ".set.unfinished"
    while not (workers := children(script.pid)):
        assert script.poll() is None
    script.send_signal(signal.SIGKILL)
    script.wait()
    deadline = time.monotonic() + 30
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)
    assert unfinished.is_dir()
    assert not (tmp_path / "set").exists()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "going on with the unfinished work" in done.stderr
    assert open_manifest(tmp_path / "set")["documents"] == 1500
    assert not unfinished.exists()


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_help_does_not_import_jax():
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['prepare_data.py', '--help']\n"
        f"try:\n    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "print('LOADED', [m for m in ('jax', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "LOADED []" in done.stdout


def test_opening_data_does_not_import_jax(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jaxpar.data import open_data; from jaxpar.config import *\n"
        f"open_data(Config(data=DataConfig(source='files', files=('{tmp_path}/a.txt',), eval_fraction=0.0)),"
        f" Path('{tmp_path}')); print('jax' in sys.modules, 'grain' in sys.modules)"
    )
    (tmp_path / "a.txt").write_text("text")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr
