"""Gemma: norms scale by 1 + weight, the embedding is scaled by the root of the width, MLP with tanh GELU."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field
from jaxpar.hf.rope import Rope

# The first files say "gelu", yet mean the tanh form; transformers reads them so.
ACTIVATIONS = {**common.TANH_FIRST, "gelu": "gelu_tanh"}

FAMILY = Family(
    preset="gemma",
    model_type="gemma",
    architecture="GemmaForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 16), Field("head_dim", "head_dim", 256),
        Field("hidden_act", "activation", "gelu_pytorch_tanh", ACTIVATIONS, aliases=("hidden_activation",)),
        common.eps(1e-6), common.tied(True), common.attention_bias(), Rope(),
    ),
    tensors=common.tensors,
)  # fmt: skip
