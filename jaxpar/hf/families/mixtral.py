"""Mixtral: Mistral with experts in every layer; the weights of the chosen ones sum to one."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.common import LAYER
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Windows
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, tensor


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield from common.ends(model)
    yield from common.attention(model)
    yield from common.norms(model)
    moe = f"{LAYER}block_sparse_moe."
    yield tensor(f"{moe}gate.weight", "blocks/moe/router", "choice embed")
    for theirs, ours, dims in (("w1", "gate", "mlp embed"), ("w2", "down", "embed mlp"), ("w3", "up", "mlp embed")):
        yield tensor(f"{moe}experts.{{expert}}.{theirs}.weight", f"blocks/moe/{ours}", dims)


def stacked(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file with all experts of a layer in one."""
    yield from common.ends(model)
    yield from common.attention(model)
    yield from common.norms(model)
    yield tensor(f"{LAYER}mlp.gate.weight", "blocks/moe/router", "choice embed")
    yield from common.stacked_experts()


FAMILY = Family(
    preset="llama",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 8), common.HEAD_DIM, common.ACTIVATION,
        common.eps(1e-5), common.tied(False), Windows(per_layer=False), Rope(base=1_000_000.0),
        Field("num_local_experts", "moe.num_experts", 8), Field("num_experts_per_tok", "moe.experts_per_token", 2),
    ),
    tensors=tensors,
    stacked=stacked,
    neutral=frozenset({"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"}),  # of training
    experts=True,
)  # fmt: skip
