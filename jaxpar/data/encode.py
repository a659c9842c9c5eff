"""Blocks of documents to token ids: the work that is spread over processes.

Owns the order start token, text, end token, and what counts as an empty document.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jaxpar.data.sources import Block, block_texts
from jaxpar.data.tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20  # texts are handed to the tokenizer in batches of about this size


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
    opens: bool
    closes: bool


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
        sizes = [text.encode("utf-8") for text in kept]
        return Encoded(
            tokens=tokens,
            lengths=lengths,
            hashes=np.array([int.from_bytes(text_hash(data), "little") for data in sizes], np.uint64),
            sizes=np.array([len(data) for data in sizes], np.int64),
            num_empty=len(texts) - len(kept),
            is_part=is_part,
            opens=block.opens,
            closes=block.closes,
        )


def text_hash(data: bytes) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(data, digest_size=8).digest()


def chain_hash(before: bytes, part: int) -> bytes:
    """Hash of a document's parts so far and one more; that of a single part is the part's own."""
    own = part.to_bytes(8, "little")
    return text_hash(before + own) if before else own


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
