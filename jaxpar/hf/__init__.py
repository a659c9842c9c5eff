"""Hugging Face checkpoints: read into sharded parameters, and written so that `transformers` loads them."""

from __future__ import annotations

from jaxpar.hf.files import is_checkpoint
from jaxpar.hf.load import load_params, read_model
from jaxpar.hf.save import export

__all__ = ["export", "is_checkpoint", "load_params", "read_model"]
