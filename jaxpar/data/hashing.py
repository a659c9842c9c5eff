"""Hashes that do not change between machines, versions and runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def mix64(values: np.ndarray) -> np.ndarray:
    """A 64-bit mix (uint64) of uint64 values: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def text_hash(data: bytes) -> bytes:
    """Eight bytes that stand for a text."""
    return hashlib.blake2b(data, digest_size=8).digest()


def chain_hash(before: bytes, part: int) -> bytes:
    """Hash of a document's parts so far and one more; that of a single part is the part's own."""
    own = part.to_bytes(8, "little")
    return text_hash(before + own) if before else own


def content_identity(parts: Sequence[Any]) -> str:
    """A short hash (hex) of JSON-able parts that stands for a content."""
    return hashlib.sha256(json.dumps(list(parts), sort_keys=True).encode()).hexdigest()[:32]
