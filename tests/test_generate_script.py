"""scripts/generate.py on a Hugging Face folder with its own tokenizer: plain prompts, chats, streaming."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hf_tiny import ROOT, Model, make_folder
from tokenizers import Tokenizer

WORDS = ["what", "is", "one", "and", "two", "plus", "the", "sum", "of", "three"]
START, END, USER, ASSISTANT = 0, 1, 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("generate") / "model", WORDS)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/generate.py", f"--model={folder}", "--precision=float32", "--max-new=7", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@functools.cache
def greedy(folder: Path, ids: tuple[int, ...]) -> list[int]:
    return Model(folder).greedy(list(ids), 7, END)


def ids_of(folder: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_prompts_begin_with_the_start_token_and_chats_with_the_template(folder):
    """One process per kind, rows of different lengths, two devices to a row."""
    prompts = ["what is one", "the sum of two and three"]
    asked = [f"--prompt={prompt}" for prompt in prompts]
    for kind, ids in (
        ((), [[START, *ids_of(folder, text)] for text in prompts]),
        (("--chat",), [[START, USER, *ids_of(folder, text), ASSISTANT] for text in prompts]),
    ):
        done = run(folder, *asked, *kind, "--json", "--devices=4", "--tensor=2")
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["tokens"] for row in rows] == [greedy(folder, tuple(row)) for row in ids]
        assert [row["prompt"] for row in rows] == prompts


def test_a_single_chat_streams_its_answer(folder):
    done = run(folder, "--prompt=what is two", "--chat")
    assert done.returncode == 0, done.stderr
    tokens = greedy(folder, (START, USER, *ids_of(folder, "what is two"), ASSISTANT))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert done.stdout == tokenizer.decode(tokens, skip_special_tokens=False) + "\n"


def test_a_chat_without_a_template_is_refused(folder, tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    done = run(other, "--prompt=what", "--chat")
    assert done.returncode == 2
    assert "has no chat template" in done.stderr
    assert "Traceback" not in done.stderr
