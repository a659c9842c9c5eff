"""DeepSeek-V3: latent attention, leading dense layers, a sigmoid router with a bias in its choice, shared experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError
from jaxpar.hf import common
from jaxpar.hf.common import LAYER
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Only, Raw
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, moved, tensor


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file with a tensor per expert."""
    experts = [
        tensor(f"{LAYER}mlp.experts.{{expert}}.{part}_proj.weight", f"blocks/moe/{part}", dims)
        for part, dims in common.PROJECTIONS
    ]
    yield from _all(model, experts)


def stacked(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file with all experts of a layer in one."""
    yield from _all(model, common.stacked_experts())


def _all(model: ModelConfig, experts: Iterable[Tensor]) -> Iterator[Tensor]:
    dense = model.moe.first_dense
    yield from common.ends(model)
    shared = [*_attention(model), *common.norms(model)]
    if dense:
        yield from moved([*shared, *common.mlp(model)], "leading", "leading", first_layer=0)
    yield from moved([*shared, *_router(model), *experts], "blocks", "layer", first_layer=dense)


def _attention(model: ModelConfig) -> Iterator[Tensor]:
    theirs, ours = f"{LAYER}self_attn.", "blocks/attention/"
    if model.latent.query_rank is None:
        yield tensor(f"{theirs}q_proj.weight", f"{ours}q", "(heads head_dim) embed")
    else:
        yield tensor(f"{theirs}q_a_proj.weight", f"{ours}q_down", "latent embed")
        yield tensor(f"{theirs}q_a_layernorm.weight", f"{ours}q_norm/scale", "latent")
        yield tensor(f"{theirs}q_b_proj.weight", f"{ours}q", "(heads head_dim) latent")
        if model.qkv_bias:
            yield tensor(f"{theirs}q_a_proj.bias", f"{ours}q_down_bias", "latent")
    yield tensor(f"{theirs}kv_a_proj_with_mqa.weight", f"{ours}kv_down", "latent embed")
    if model.qkv_bias:
        yield tensor(f"{theirs}kv_a_proj_with_mqa.bias", f"{ours}kv_down_bias", "latent")
    yield tensor(f"{theirs}kv_a_layernorm.weight", f"{ours}kv_norm/scale", "latent")
    yield tensor(f"{theirs}kv_b_proj.weight", f"{ours}kv_up", "(heads head_dim) latent")
    yield tensor(f"{theirs}o_proj.weight", f"{ours}out", "embed (heads head_dim)")
    if model.out_bias:
        yield tensor(f"{theirs}o_proj.bias", f"{ours}out_bias", "embed")


def _router(model: ModelConfig) -> Iterator[Tensor]:
    """Router and shared experts."""
    yield tensor(f"{LAYER}mlp.gate.weight", "blocks/moe/router", "choice embed")
    yield tensor(f"{LAYER}mlp.gate.e_score_correction_bias", "blocks/moe/balance", "balance")
    for part, dims in common.PROJECTIONS if model.moe.num_shared else ():
        yield tensor(f"{LAYER}mlp.shared_experts.{part}_proj.weight", f"blocks/moe/shared/{part}", dims)


@dataclasses.dataclass(frozen=True)
class _LatentRope(Rope):
    """Rotary settings, how pairs lie in a head, and the factor of the scores that YaRN's `mscale_all_dim` means."""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        return (*super().names, "rope_interleave")

    def read(self, raw: Raw) -> dict[str, Any]:
        """Settings of `model.rope`, and `query_scale` where scores have a factor of their own."""
        settings = super().read(raw) | {"rope.interleaved": bool(raw.get("rope_interleave", True))}
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if settings["rope.scaling"] != "none" and (mscale := given.get("mscale_all_dim")):
            width = raw.get("qk_nope_head_dim", 128) + raw.get("qk_rope_head_dim", 64)
            settings["query_scale"] = width**-0.5 * (1.0 + mscale * _log_factor(given["factor"])) ** 2
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys; a factor that `mscale_all_dim` cannot express is found when they are read again."""
        keys = self.parameters(model.rope)
        factor = model.score_scale * (model.head_size + model.latent.rope_dim) ** 0.5
        if abs(factor - 1) > 1e-9 and _log_factor(model.rope.factor) and model.rope.scaling == "yarn":
            keys["mscale_all_dim"] = round((math.sqrt(factor) - 1) / _log_factor(model.rope.factor), 9)
        return {"rope_parameters": keys, "rope_interleave": model.rope.interleaved}


def _log_factor(factor: float) -> float:
    """By how much a context extension raises the temperature, for an mscale of 1."""
    return 0.1 * math.log(factor) if factor > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Keys that follow from others; a file that disagrees is not what transformers would compute."""

    names: tuple[str, ...] = ("num_key_value_heads", "head_dim", "qk_head_dim")

    def read(self, raw: Raw) -> dict[str, Any]:
        """No setting."""
        rope, nope = raw.get("qk_rope_head_dim", 64), raw.get("qk_nope_head_dim", 128)
        wanted = {"num_key_value_heads": raw.get("num_attention_heads"), "head_dim": rope, "qk_head_dim": nope + rope}
        for name, value in wanted.items():
            if raw.get(name) not in (None, value):
                raise UserError(f"{name}: {raw[name]!r} is not supported; latent attention of this file has {value}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The key that has no default of its own."""
        return {"num_key_value_heads": model.num_heads}


@dataclasses.dataclass(frozen=True)
class _FirstDense(Field):
    """`first_k_dense_replace`; some layer must have experts."""

    def read(self, raw: Raw) -> dict[str, Any]:
        """Leading layers without experts."""
        found = super().read(raw)
        if found[self.keys] >= raw["num_hidden_layers"]:
            raise UserError(
                f"{self.name}: {found[self.keys]} of {raw['num_hidden_layers']} layers is not supported; "
                "at least one layer must have experts"
            )
        return found


FAMILY = Family(
    preset="deepseek_v3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    entries=(
        *common.SIZES, _Heads(), common.ACTIVATION, common.eps(1e-6), common.tied(False), common.attention_bias(),
        Field("kv_lora_rank", "latent.kv_rank", 512), Field("q_lora_rank", "latent.query_rank", 1536),
        Field("qk_rope_head_dim", "latent.rope_dim", 64),
        Field("qk_nope_head_dim", "head_dim", 128, fill=lambda model: model.head_size),
        Field("v_head_dim", "latent.value_dim", 128, fill=lambda model: model.value_size), _LatentRope(),
        Field("n_routed_experts", "moe.num_experts", 256, aliases=("num_local_experts",)),
        Field("num_experts_per_tok", "moe.experts_per_token", 8),
        Field("moe_intermediate_size", "moe.expert_dim", 2048, fill=lambda model: model.mlp_dim),
        Field("n_shared_experts", "moe.num_shared", 1), _FirstDense("first_k_dense_replace", "moe.first_dense", 3),
        Field("n_group", "moe.num_groups", 8), Field("topk_group", "moe.groups_per_token", 4),
        Field("norm_topk_prob", "moe.normalize_weights", True),
        Field("routed_scaling_factor", "moe.weight_scale", 2.5),
        Only("scoring_func", "sigmoid"), Only("topk_method", "noaux_tc"), Only("moe_layer_freq", 1),
    ),
    tensors=tensors,
    stacked=stacked,
    float32=r".*\.mlp\.gate\.(weight|e_score_correction_bias)",
    # Of training, of serving, and of the extra layers that predict further tokens.
    neutral=frozenset({"aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits", "ep_size",
                       "num_nextn_predict_layers", "num_mtp_layers"}),
    ignored=r".*rotary_emb\.inv_freq",
    extra_layers=True,
    experts=True,
)  # fmt: skip
