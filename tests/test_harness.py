"""lm-evaluation-harness on tasks that need no download: its numbers are those of the model's own logits."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_tiny import ROOT, Model, make_folder

from jaxpar.data import load_tokenizer
from jaxpar.weights import open_weights

TASKS = ROOT / "tests" / "lm_eval_tasks"
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs the extra lm-eval; the part of .ci/run with the oracle has it",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with a tokenizer of words and single characters, and a start token."""
    rows = [json.loads(line) for line in (TASKS / "sums.jsonl").read_text().splitlines()]
    words = {word for row in rows for word in f"{row['question']} {' '.join(row['choices'])}".split()}
    return make_folder(tmp_path_factory.mktemp("harness") / "model", words)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "scripts/evaluate.py", f"--model={folder}", "--precision=float32", "--seq-len=16", "--json",
        f"--task-folder={TASKS}", *args,
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@functools.cache
def model_of(folder: Path) -> Model:
    return Model(folder)


def logprobs_of(folder: Path, text: str) -> tuple[list[int], np.ndarray]:
    """Ids of a text after the start token, and log-probabilities of what follows each position [T, V]."""
    ids = [0, *load_tokenizer(str(folder)).encode_batch([text])[0].tolist()]
    return ids, model_of(folder).logprobs(ids)


def continuation(folder: Path, context: str, text: str) -> float:
    start = len(logprobs_of(folder, context)[0])
    ids, logprobs = logprobs_of(folder, context + text)
    return sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids)))


@needs_lm_eval
def test_three_kinds_of_tasks_give_the_numbers_of_the_logits(folder):
    done = run(folder, "--tasks=jaxpar_sums,jaxpar_texts,jaxpar_answers", "--devices=4", "--tensor=2", "--batch=4")
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in (TASKS / "sums.jsonl").read_text().splitlines()]
    best = [int(np.argmax([continuation(folder, row["question"], c) for c in row["choices"]])) for row in rows]
    assert results["jaxpar_sums"]["acc,none"] == np.mean([b == row["answer"] for b, row in zip(best, rows)])
    texts = [row["question"] + row["choices"][row["answer"]] for row in rows]
    total = sum(continuation(folder, "", text) for text in texts)
    per_byte = -total / sum(map(len, texts)) / math.log(2)
    assert results["jaxpar_texts"]["bits_per_byte,none"] == pytest.approx(per_byte, rel=1e-5)
    assert 0.0 <= results["jaxpar_answers"]["exact_match,none"] <= 1.0


@needs_lm_eval
def test_answers_of_the_model_are_those_of_the_harness(folder):
    """Log-likelihoods within 1e-4 of the logits; generated text is the greedy one, cut at the stop text."""
    from lm_eval.api.instance import Instance
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from jaxpar.config import Config
    from jaxpar.harness import load_harness_model
    from jaxpar.score import rolling

    weights = open_weights(folder)
    config = Config(model=weights.model, precision="float32", seq_len=16, global_batch=8)
    model = load_harness_model(config, weights, load_tokenizer(str(folder)), add_bos=True)

    def ask(kind: str, *arguments):
        return getattr(model, kind)([Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)])

    pairs = [("one plus one is", " two"), ("", "three plus"), ("two plus two is", " three four two")]
    for pair, (logprob, _) in zip(pairs, ask("loglikelihood", *pairs)):
        assert logprob == pytest.approx(continuation(folder, *pair), abs=1e-4)
    (whole,) = ask("loglikelihood_rolling", ("one plus two is three",))
    assert whole == pytest.approx(continuation(folder, "", "one plus two is three"), abs=1e-4)
    for length in (3, 16, 17, 40):
        theirs = get_rolling_token_windows(list(range(length)), 99, 16, 1)
        mine = rolling(list(range(length)), 99, 16)
        assert [(r.context, r.continuation) for r in mine] == [make_disjoint_window(pair) for pair in theirs]
    prompts = ["one plus one is", "three plus one is"]
    long = ask("generate_until", *((p, {"until": ["</s>"], "max_gen_toks": 6}) for p in prompts))
    tokenizer = load_tokenizer(str(folder))
    for prompt, text in zip(prompts, long):
        ids, _ = logprobs_of(folder, prompt)
        assert text == tokenizer.decode(model_of(folder).greedy(ids, 6, tokenizer.eos_id))
    word = long[0].split()[1]
    (cut,) = ask("generate_until", (prompts[0], {"until": [word], "max_gen_toks": 6}))
    assert cut == long[0].split(word)[0]


@needs_lm_eval
@pytest.mark.sweep  # reads the harness's thousands of tasks
def test_a_task_that_is_nowhere_is_named(folder):
    done = run(folder, "--tasks=jaxpar_sums,jaxpar_nothing")
    assert done.returncode == 2
    assert "jaxpar_nothing is no task" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_give_the_loss_of_the_logits(folder, tmp_path):
    """Perplexity and bits per byte of a text, its end token included, on a mesh."""
    text = "one plus two is three"
    (tmp_path / "text.txt").write_text(text)
    command = [sys.executable, "scripts/evaluate.py", f"--model={folder}", str(tmp_path / "text.txt"), "--json"]
    done = subprocess.run(
        [*command, "--precision=float32", "--seq-len=16", "--batch=1", "--devices=4", "--tensor=2"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--batch=1 is no multiple of the 2 parts" in done.stderr
    assert "taking 2 rows at a time" in done.stderr
    values = json.loads(done.stdout)
    ids = [*load_tokenizer(str(folder)).encode_batch([text])[0].tolist(), 1]
    logprobs = model_of(folder).logprobs(ids)
    loss = -np.mean([logprobs[i, ids[i + 1]] for i in range(len(ids) - 1)])
    assert values["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert values["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_missing_key_is_named_by_its_flag(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n')
    command = [sys.executable, "scripts/evaluate.py", f"--model={folder}", str(tmp_path / "rows.jsonl"), "--seq-len=16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "no key 'text'; the row has ['body'] (set --text-key)" in done.stderr


def test_files_and_tasks_exclude_each_other(folder):
    done = run(folder)
    assert done.returncode == 2
    assert "give either files or --tasks" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed here")
def test_a_missing_harness_is_named(folder):
    done = run(folder, "--tasks=jaxpar_sums")
    assert done.returncode == 2
    assert "pip install 'jaxpar[lm-eval]'" in done.stderr
