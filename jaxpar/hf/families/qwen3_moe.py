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
    yield from _without_experts(model)
    for part, dims in common.PROJECTIONS:
        yield tensor(f"{LAYER}mlp.experts.{{expert}}.{part}_proj.weight", f"blocks/moe/{part}", dims)


def stacked(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file with all experts of a layer in one."""
    yield from _without_experts(model)
    yield from common.stacked_experts()


def _without_experts(model: ModelConfig) -> Iterator[Tensor]:
    yield from common.ends(model)
    yield from common.attention(model)
    yield from common.norms(model)
    yield tensor(f"{LAYER}mlp.gate.weight", "blocks/moe/router", "choice embed")


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
        Field("moe_intermediate_size", "moe.expert_dim", 768, fill=lambda model: model.mlp_dim),
        Field("norm_topk_prob", "moe.normalize_weights", False),
        Only("decoder_sparse_step", 1), Only("mlp_only_layers", []),
    ),
    tensors=tensors,
    stacked=stacked,
    neutral=frozenset({"router_aux_loss_coef", "output_router_logits"}),  # of training
    experts=True,
)  # fmt: skip
