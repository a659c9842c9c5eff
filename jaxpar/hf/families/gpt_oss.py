"""gpt-oss: attention sinks, alternating windows, experts with biases whose gate and up features alternate in a file."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.common import LAYER
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Raw, Windows
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, fused, tensor

# What the config class assumes of a file without rotary settings.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield from common.ends(model)
    yield from common.attention(model)
    yield tensor(f"{LAYER}self_attn.sinks", "blocks/attention/sinks", "heads")
    yield from common.norms(model)
    yield tensor(f"{LAYER}mlp.router.weight", "blocks/moe/router", "choice embed")
    yield tensor(f"{LAYER}mlp.router.bias", "blocks/moe/router_bias", "choice")
    theirs, gate, up = f"{LAYER}mlp.experts.", "blocks/moe/gate", "blocks/moe/up"
    yield fused(f"{theirs}gate_up_proj", {gate: "expert embed (mlp 0/2)", up: "expert embed (mlp 1/2)"})
    yield fused(f"{theirs}gate_up_proj_bias", {f"{gate}_bias": "expert (mlp 0/2)", f"{up}_bias": "expert (mlp 1/2)"})
    yield tensor(f"{theirs}down_proj", "blocks/moe/down", "expert mlp embed")
    yield tensor(f"{theirs}down_proj_bias", "blocks/moe/down_bias", "expert embed")


def every_other(raw: Raw, count: int) -> list[bool]:
    """Files without `layer_types`: the first layer of two has the window."""
    del raw
    return [layer % 2 == 0 for layer in range(count)]


FAMILY = Family(
    preset="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 8),
        Field("head_dim", "head_dim", 64, fill=lambda model: model.head_size), common.eps(1e-5), common.tied(False),
        Field("attention_bias", "qkv_bias out_bias", True), Windows(default=128, rule=every_other),
        Rope(base=150_000.0, default=YARN),
        Field("num_local_experts", "moe.num_experts", 128, aliases=("num_experts",)),
        Field("num_experts_per_tok", "moe.experts_per_token", 4),
        Field("swiglu_alpha", "swiglu_alpha", 1.702), Field("swiglu_limit", "swiglu_limit", 7.0),
    ),
    tensors=tensors,
    # Read by nobody (the activation is what it is), or of training.
    neutral=frozenset({"hidden_act", "initial_context_length", "experts_per_token", "router_aux_loss_coef",
                       "output_router_logits"}),
    experts=True,
)  # fmt: skip
