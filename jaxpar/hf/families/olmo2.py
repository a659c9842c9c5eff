"""OLMo 2: norms after the sub-layers, and norms on all queries and all keys of a token at once."""

from __future__ import annotations

from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.rope import Rope

FAMILY = Family(
    preset="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    entries=(
        *common.SIZES, common.KV_HEADS, common.HEAD_DIM, common.ACTIVATION, common.eps(1e-5), common.tied(False),
        common.attention_bias(), Rope(),
    ),
    tensors=common.tensors,
)  # fmt: skip
