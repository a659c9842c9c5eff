"""Checkpoints: saved in the background, verified, restored into any layout."""

from __future__ import annotations

from jaxpar.checkpoint.manager import CheckpointError, Checkpoints, Restored
from jaxpar.checkpoint.plain import load_arrays

__all__ = ["CheckpointError", "Checkpoints", "Restored", "load_arrays"]
