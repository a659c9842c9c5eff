"""Generation: greedy continuations are transformers', and sampling keeps its promises."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import DATA, NAMES, model_of, params_of, reference

from jaxpar.config import Config, ParallelConfig
from jaxpar.errors import UserError
from jaxpar.generate import Generator, Sampling, draw, kept, load_generator
from jaxpar.kv_cache import empty_caches
from jaxpar.models.sharder import UNSHARDED
from jaxpar.weights import Weights

QUICK = ("gemma3", "gpt2", "mistral", "deepseek_v3", "gpt_oss")


@functools.cache
def generator(name: str, data: int = 1, tensor: int = 1) -> Generator:
    model = model_of(DATA / name)
    config = Config(model=model, precision="float32", parallel=ParallelConfig(data=data, tensor=tensor))
    return load_generator(config, Weights(DATA / name, model), jax.devices()[: data * tensor])


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in NAMES])
def test_greedy_is_that_of_transformers(name):
    prompts, wanted = reference(name)["prompt"], reference(name)["new"]
    assert generator(name)(prompts.tolist(), wanted.shape[1]) == wanted.tolist()


@pytest.mark.parametrize(
    "name", [n if n == "mistral" else pytest.param(n, marks=pytest.mark.sweep) for n in QUICK if n != "gpt2"]
)
def test_prompts_of_different_lengths_and_a_mesh(name):
    """Rows of other lengths, one more than the mesh splits evenly, on data 2 x tensor 2: as each row alone."""
    prompt = reference(name)["prompt"].tolist()[0]
    prompts = [prompt[:4], prompt, prompt[:7]]
    together = generator(name, 2, 2)(prompts, 6)
    rows = [generator(name)([p, prompt], 6)[0] for p in prompts]  # widths as above: one compilation
    assert together == rows


def test_the_cache_of_latent_attention_holds_compressed_vectors():
    params = params_of("deepseek_v3")
    caches = empty_caches(params, 2, 30, UNSHARDED)
    latent = params.config.latent
    width = latent.kv_rank + latent.rope_dim
    assert [cache.keys.shape for cache in caches] == [(1, 2, 30, 1, width), (2, 2, 30, 1, width)]
    assert all(cache.values is None for cache in caches)


def test_a_row_ends_before_a_stop_token_and_streams_as_it_goes():
    prompts, wanted = reference("gpt2")["prompt"].tolist(), reference("gpt2")["new"].tolist()
    streamed = []
    stop = wanted[0][3]
    got = generator("gpt2")(prompts, len(wanted[0]), stop={stop}, on_tokens=streamed.append)
    ends = [row.index(stop) if stop in row else len(row) for row in wanted]
    assert got == [row[:end] for row, end in zip(wanted, ends)]
    assert [[step[i] for step in streamed if step[i] is not None] for i in range(2)] == got


def test_more_positions_than_were_learned_are_refused():
    with pytest.raises(UserError, match=r"33 positions.*32 that the model has learned"):
        generator("gpt2")([[1] * 13], 20)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"temperature": math.inf}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1},
        {"seed": 2**63},
    ],
)  # fmt: skip
def test_sampling_that_means_nothing_is_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def test_top_k_and_top_p_keep_the_likeliest():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.25, 0.2]]))
    finite = lambda a: set(np.flatnonzero(np.isfinite(np.asarray(a)[0])).tolist())  # noqa: E731
    assert finite(kept(logits, 2, None)) == {1, 3}
    assert finite(kept(logits, None, 0.6)) == {1, 3}  # 0.4 does not reach 0.6, 0.65 does
    assert finite(kept(logits, None, 0.39)) == {1}
    assert finite(kept(logits, 3, 0.99)) == {1, 3, 4}
    assert finite(kept(logits, None, 1.0)) == {0, 1, 2, 3, 4}


def test_draws_follow_the_distribution_and_the_seed():
    """Frequencies of 4000 draws lie within five standard deviations of softmax(logits / temperature)."""
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 2.0]), (4000, 3))
    positions = jnp.zeros(4000, jnp.int32)
    sampling = Sampling(temperature=2.0, seed=3)
    drawn = np.asarray(draw(logits, positions, sampling))
    wanted = np.exp(np.arange(3) / 2.0)
    wanted /= wanted.sum()
    frequencies = np.bincount(drawn, minlength=3) / 4000
    assert (np.abs(frequencies - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / 4000)).all()
    assert np.array_equal(drawn, draw(logits, positions, sampling))
    assert not np.array_equal(drawn, draw(logits, positions, dataclasses.replace(sampling, seed=4)))
    assert not np.array_equal(drawn, draw(logits, positions + 1, sampling))
