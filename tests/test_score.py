"""Scores of continuations are those of the reference's logits, whatever the batch, the padding and the mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hf_models import DATA, model_of, reference

from jaxpar.config import Config, ParallelConfig
from jaxpar.errors import UserError
from jaxpar.generate import built_for_generation
from jaxpar.score import Request, Scorer, check_length, padded_length, rolling
from jaxpar.weights import open_weights

NAME = "llama"


@functools.cache
def scorer_of(tensor: int, max_length: int = 24, batch: int = 3) -> Scorer:
    config = Config(model=model_of(DATA / NAME), precision="float32", parallel=ParallelConfig(data=-1, tensor=tensor))
    built = built_for_generation(config, jax.devices()[: 2 * tensor])
    return Scorer(
        built, open_weights(DATA / NAME).load(built.abstract_state.params), max_length=max_length, batch=batch
    )


def row() -> tuple[list[int], np.ndarray]:
    """Ids of a row that is one document, and the reference's log-probabilities [T, V]."""
    logits = reference(NAME)["logits"][0].astype(np.float64)
    return reference(NAME)["tokens"][0].tolist(), logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("tensor", [1, 2])
def test_scores_are_those_of_transformers(tensor):
    ids, logprobs = row()
    cuts = [(1, 5), (8, 24), (3, 4), (23, 24), (12, 20)]
    scores = scorer_of(tensor)([Request(ids[:a], ids[a:b]) for a, b in cuts])
    for (a, b), score in zip(cuts, scores):
        picked = [logprobs[i - 1, ids[i]] for i in range(a, b)]
        assert score.logprob == pytest.approx(sum(picked), abs=1e-4)
        assert score.is_greedy == all(logprobs[i - 1].argmax() == ids[i] for i in range(a, b))


def test_what_is_likeliest_is_known_as_greedy():
    ids, logprobs = row()
    best = int(logprobs[11].argmax())
    assert scorer_of(1)([Request(ids[:12], [best]), Request(ids[:12], [(best + 1) % 50])])[0].is_greedy
    assert not scorer_of(1)([Request(ids[:12], [(best + 1) % 50])])[0].is_greedy


def test_a_long_context_loses_its_beginning():
    ids, _ = row()
    short = Scorer(scorer_of(1).built, scorer_of(1).params, max_length=8, batch=2)
    cut, whole = short([Request(ids[:12], ids[12:14])])[0], short([Request(ids[5:12], ids[12:14])])[0]
    assert cut == whole
    assert cut != scorer_of(1)([Request(ids[:12], ids[12:14])])[0]


@pytest.mark.parametrize(("length", "most"), [(1, 4), (4, 4), (5, 4), (9, 4), (10, 4), (24, 7)])
def test_rolling_predicts_every_id_once_with_as_much_before_it_as_fits(length, most):
    windows = rolling(list(range(100, 100 + length)), 1, most)
    assert [i for window in windows for i in window.continuation] == list(range(100, 100 + length))
    assert windows[0].context == [1]
    for window in windows[1:]:
        assert window.length == most
        assert window.context[-1] == window.continuation[0] - 1


def test_few_lengths_are_compiled():
    assert [padded_length(n, 100) for n in (1, 32, 33, 64, 65, 100)] == [32, 32, 64, 64, 100, 100]


def test_requests_that_cannot_be_scored_are_named_together():
    with pytest.raises(UserError) as caught:
        scorer_of(1)([Request([], [3]), Request([3], [4]), Request([3], [4] * 25), Request([53], [4])])
    assert [text.split(":")[0].split(" has")[0] for text in caught.value.problems] == [
        "request 1", "request 3", "request 4",
    ]  # fmt: skip
    with pytest.raises(UserError, match="32 positions that the model has learned"):
        check_length(dataclasses.replace(model_of(DATA / "gpt2"), max_position=32), 64)
