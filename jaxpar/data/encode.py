"""Blocks of documents to token ids: the work that is spread over processes.

Owns the order start token, text, end token, and what counts as an empty document.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxpar.data.hashing import text_hash
from jaxpar.data.sources import Block, block_texts
from jaxpar.data.store import id_dtype
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer, require_special

BATCH_CHARACTERS = 1 << 19  # texts are handed to the tokenizer in batches of about this size


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How texts become ids; together with the texts it decides every stored token."""

    tokenizer: str = "bytes"
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    add_eos: bool = True
    text_key: str = "text"

    def load(self, threads: int | None = None) -> Tokenizer:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer, bos_token=self.bos_token, eos_token=self.eos_token, threads=threads)

    def encoder(self, tokenizer: Tokenizer | None = None) -> Encoder:
        """The encoder, with the width that the largest possible id needs."""
        tokenizer = tokenizer or self.load()
        bos, eos = require_special(tokenizer, add_bos=self.add_bos, add_eos=self.add_eos)
        return Encoder(tokenizer, bos, eos, id_dtype(tokenizer.vocab_size), self.text_key)

    def facts(self, tokenizer: Tokenizer) -> list[Any]:
        """JSON-able facts that change when any id could change."""
        return [tokenizer.sha256, tokenizer.vocab_size, self.add_bos, self.add_eos, self.text_key]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of a block: whole documents, or one part of a document.

    `tokens` holds the ids of all documents one after the other; arrays [N]: `lengths` in tokens, `hashes` of the
    texts, `sizes` of the texts in bytes. A part has N = 1 and its text's hash is not yet chained to the parts before.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    sizes: np.ndarray
    num_empty: int
    is_part: bool
    closes: bool

    @property
    def is_empty_document(self) -> bool:
        """Whether this is the only part of a document without text."""
        return self.is_part and self.num_empty > 0


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Tokenizer and the tokens around every document."""

    tokenizer: Tokenizer
    bos: int | None
    eos: int | None
    dtype: np.dtype
    text_key: str

    def encode(self, block: Block) -> Encoded:
        """Ids of a block."""
        is_part = block.kind == "text"
        texts = block_texts(block, self.text_key)
        kept = texts if is_part else [text for text in texts if text]
        ids: list[np.ndarray] = []
        for batch in _batches(kept):
            ids += self.tokenizer.encode_batch(batch)
        start = [self.bos] if self.bos is not None and block.opens else []
        end = [self.eos] if self.eos is not None and block.closes else []
        lengths = np.array([len(one) for one in ids], np.int64) + len(start) + len(end)
        tokens = np.empty((int(lengths.sum()),), self.dtype)
        _place(tokens, ids, lengths, start, end)
        data = [text.encode("utf-8") for text in kept]
        whole = block.opens and block.closes
        return Encoded(
            tokens=tokens,
            lengths=lengths,
            hashes=np.array([int.from_bytes(text_hash(one), "little") for one in data], np.uint64),
            sizes=np.array([len(one) for one in data], np.int64),
            num_empty=int(whole and not texts[0]) if is_part else len(texts) - len(kept),
            is_part=is_part,
            closes=block.closes,
        )


def _place(tokens: np.ndarray, ids: list[np.ndarray], lengths: np.ndarray, start: list[int], end: list[int]) -> None:
    """Fill `tokens` with start, ids, end of every document."""
    position = 0
    for one, length in zip(ids, lengths.tolist()):
        stop = position + length
        if start:
            tokens[position] = start[0]
        tokens[position + len(start) : stop - len(end)] = one
        if end:
            tokens[stop - 1] = end[0]
        position = stop


def _batches(texts: list[str]) -> list[list[str]]:
    """Runs of texts of about BATCH_CHARACTERS."""
    batches: list[list[str]] = []
    size = BATCH_CHARACTERS
    for text in texts:
        if size >= BATCH_CHARACTERS:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches
