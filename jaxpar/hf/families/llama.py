"""Llama 2, 3, 3.1, 3.2 and what has their shape."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.rope import Rope

FAMILY = Family(
    preset="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    entries=(
        *common.SIZES, common.KV_HEADS, common.HEAD_DIM, common.ACTIVATION, common.eps(1e-6), common.tied(False),
        common.attention_bias(), common.mlp_bias(), Rope(),
    ),
    tensors=common.tensors,
    ignored=r".*rotary_emb\.inv_freq",
)  # fmt: skip
