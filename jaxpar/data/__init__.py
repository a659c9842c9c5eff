"""Data: files to rows to batches. Nothing here imports jax before a `Loader` is made."""

from __future__ import annotations

from jaxpar.data.loader import Loader
from jaxpar.data.opening import Data, open_data
from jaxpar.data.readers import required_vocab
from jaxpar.data.rows import Rows
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Data", "Loader", "Rows", "Tokenizer", "load_tokenizer", "open_data", "required_vocab"]
