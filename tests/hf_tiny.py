"""A tiny Hugging Face folder made on the spot: random Llama, tokenizer of whole words, start token, chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.hf import export
from jaxpar.hf.convert import abstract_params
from jaxpar.hf.load import leaf_axes
from jaxpar.weights import open_weights

ROOT = Path(__file__).parents[1]
SPECIAL = ("<s>", "</s>", "<unk>", "<user>", "<assistant>", "\n")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_folder(target: Path, words: Iterable[str]) -> Path:
    """Write the folder; a token is a word, with or without a space before it, or a newline."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = [*SPECIAL, *sorted({form for word in words for form in (word, f" {word}")})]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([name for name in SPECIAL if name != "\n"])
    model = ModelConfig(num_layers=2, embed_dim=32, num_heads=2, mlp_dim=48, vocab_size=len(names), vocab_multiple=8)
    leaves = leaf_axes(abstract_params(model))
    rng = np.random.default_rng(0)
    values = {name: 0.5 * rng.standard_normal(like.shape, np.float32) for name, (_, like) in leaves.items()}
    export(target, model, leaves, values.__getitem__, max_position=64)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


class Model:
    """The folder's model by its full forward, without a cache."""

    def __init__(self, folder: Path) -> None:
        weights = open_weights(folder)
        self._params = weights.load(abstract_params(weights.model))
        self._logits = jax.jit(lambda params, batch: params.logits(batch))

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Log-probabilities of what follows each id, float64 [T, V]; at most 32 ids."""
        count, row = len(ids), np.zeros((1, 32), np.int32)
        row[0, :count] = ids
        batch: dict[str, Any] = {"tokens": row, "positions": np.arange(32, dtype=np.int32)[None]}
        batch["segment_ids"] = (batch["positions"] < count).astype(np.int32)
        return np.asarray(jax.nn.log_softmax(self._logits(self._params, batch)[0, :count]), np.float64)

    def greedy(self, ids: list[int], count: int, stop: int) -> list[int]:
        """Up to `count` likeliest ids after `ids`, before `stop`."""
        new: list[int] = []
        while len(new) < count and (token := int(self.logprobs([*ids, *new])[-1].argmax())) != stop:
            new.append(token)
        return new
