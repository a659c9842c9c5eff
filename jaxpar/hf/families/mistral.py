"""Mistral: Llama with a sliding window in every layer, or none."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Windows
from jaxpar.hf.rope import Rope

FAMILY = Family(
    preset="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 8), common.HEAD_DIM, common.ACTIVATION,
        common.eps(1e-6), common.tied(False), Windows(default=4096, per_layer=False), Rope(),
    ),
    tensors=common.tensors,
    ignored=r".*rotary_emb\.inv_freq",
)  # fmt: skip
