"""Prompts to ids and new ids to text as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import UserError
from jaxpar.weights import Weights

BROKEN = "�"  # what decoders give for the first bytes of a character


def starts_with_bos(weights: Weights) -> bool:
    """Whether the model expects a start token: as the run was trained, or as its tokenizer files say."""
    if weights.config is not None and weights.like is None:
        return weights.config.data.add_bos
    folder = weights.like
    if folder is None:
        return False
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        told = json.loads(settings.read_text("utf-8")).get("add_bos_token")
        if told is not None:
            return bool(told)
    return _template_starts_with_special(folder / "tokenizer.json")


def _template_starts_with_special(path: Path) -> bool:
    """Whether the post-processor of a tokenizer.json puts a token before the text."""
    if not path.is_file():
        return False
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    return len(full) > len(plain) and full[-len(plain) :] == plain


def encode_prompts(tokenizer: Tokenizer, texts: Iterable[str], *, add_bos: bool) -> list[list[int]]:
    """Ids of every prompt, after a start token if asked for."""
    if add_bos and tokenizer.bos_id is None:
        raise UserError(f"{tokenizer.name} names no start token; leave it out with --no-add-bos")
    start = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    prompts = [start + ids.tolist() for ids in tokenizer.encode_batch(list(texts))]
    if any(not prompt for prompt in prompts):
        raise UserError("a prompt is empty; give text, or --add-bos to begin from a start token")
    return prompts


class Streamer:
    """Text of one row as its tokens come; holds back bytes of a character that is not whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """The text that `token` completes."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(BROKEN):
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new

    def rest(self) -> str:
        """What is left at the end."""
        return self._tokenizer.decode(self._ids)[self._shown :]
