"""Qwen 3, dense: norms on the queries and keys of each head."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.families.qwen2 import WINDOWS
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field
from jaxpar.hf.rope import Rope

FAMILY = Family(
    preset="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 32), Field("head_dim", "head_dim", 128),
        common.ACTIVATION, common.eps(1e-6), common.tied(False), common.attention_bias(), WINDOWS, Rope(),
    ),
    tensors=common.tensors,
)  # fmt: skip
