"""Gemma 2: norms on both sides of each sub-layer, every other layer local, scores and logits capped."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Entry, Field, QueryScale, Raw, Windows
from jaxpar.hf.rope import Rope


def alternate(raw: Raw, count: int) -> list[bool]:
    """Older files: the even layers have the window."""
    return [layer % 2 == 0 for layer in range(count)]


SHARED: tuple[Entry, ...] = (
    *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 4), Field("head_dim", "head_dim", 256),
    Field("hidden_activation", "activation", "gelu_pytorch_tanh", common.TANH_FIRST), common.eps(1e-6),
    common.tied(True), common.attention_bias(), QueryScale(),
)  # fmt: skip

FAMILY = Family(
    preset="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    entries=(
        *SHARED,
        Field("final_logit_softcapping", "logit_soft_cap", 30.0),
        Field("attn_logit_softcapping", "attention_soft_cap", 50.0),
        Windows(default=4096, rule=alternate),
        Rope(),
    ),
    tensors=common.tensors,
    neutral=frozenset({"hidden_act"}),  # written by the first releases, never read
)
