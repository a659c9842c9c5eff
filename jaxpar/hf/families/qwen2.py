"""Qwen 2 and 2.5: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Raw, Windows
from jaxpar.hf.rope import Rope


def later_layers(raw: Raw, count: int) -> list[bool]:
    """Older files: layers from `max_window_layers` on have the window."""
    return [layer >= raw.get("max_window_layers", 28) for layer in range(count)]


WINDOWS = Windows(default=4096, switch=True, rule=later_layers, rule_names=("max_window_layers",))

FAMILY = Family(
    preset="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 32), common.HEAD_DIM, common.ACTIVATION,
        common.eps(1e-6), common.tied(False), WINDOWS, Rope(),
    ),
    tensors=common.tensors,
)  # fmt: skip
