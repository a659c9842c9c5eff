"""Qwen 3 with experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.common import LAYER
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Only, Windows
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, tensor


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield from common.ends(model)
    yield from common.attention(model)
    yield from common.norms(model)
    yield tensor(f"{LAYER}mlp.gate.weight", "blocks/moe/router", "choice embed")
    for part, dims in (("gate", "mlp embed"), ("up", "mlp embed"), ("down", "embed mlp")):
        yield tensor(f"{LAYER}mlp.experts.{{expert}}.{part}_proj.weight", f"blocks/moe/{part}", dims)


FAMILY = Family(
    preset="qwen3",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 4), common.HEAD_DIM, common.ACTIVATION,
        common.eps(1e-6), common.tied(False), common.attention_bias(),
        Windows(default=4096, switch=True, per_layer=False, rule_names=("max_window_layers",)), Rope(),
        Field("num_experts", "moe.num_experts", 128, aliases=("num_local_experts",)),
        Field("num_experts_per_tok", "moe.experts_per_token", 8),
        Field("moe_intermediate_size", "moe.expert_dim", 768),
        Field("norm_topk_prob", "moe.normalize_weights", False),
        Only("decoder_sparse_step", 1), Only("mlp_only_layers", []),
    ),
    tensors=tensors,
    neutral=frozenset({"router_aux_loss_coef", "output_router_logits"}),  # of training
    experts=True,
)  # fmt: skip
