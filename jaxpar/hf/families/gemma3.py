"""Gemma 3, text: Gemma 2 with norms on queries and keys, five local layers to a global one, two rotary bases."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.families.gemma2 import SHARED
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Raw, Windows
from jaxpar.hf.rope import TwoRopes


def five_of_six(raw: Raw, count: int) -> list[bool]:
    """Older files: every `sliding_window_pattern`-th layer sees everything."""
    return [bool((layer + 1) % raw.get("sliding_window_pattern", 6)) for layer in range(count)]


FAMILY = Family(
    preset="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    entries=(
        *SHARED,
        Field("final_logit_softcapping", "logit_soft_cap", None),
        Field("attn_logit_softcapping", "attention_soft_cap", None),
        Windows(default=4096, rule=five_of_six, rule_names=("sliding_window_pattern", "_sliding_window_pattern")),
        TwoRopes(),
    ),
    tensors=common.tensors,
    neutral=frozenset({"hidden_act"}),
)
