"""Phi 3: Llama with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.common import LAYER
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Windows
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, fused, tensor


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield from common.ends(model)
    yield from common.norms(model)
    parts = {"q": "(heads head_dim) embed", "k": "(kv_heads head_dim) embed", "v": "(kv_heads head_dim) embed"}
    yield fused(f"{LAYER}self_attn.qkv_proj.weight", {f"blocks/attention/{p}": dims for p, dims in parts.items()})
    yield tensor(f"{LAYER}self_attn.o_proj.weight", "blocks/attention/out", "embed (heads head_dim)")
    yield fused(f"{LAYER}mlp.gate_up_proj.weight", {"blocks/mlp/gate": "mlp embed", "blocks/mlp/up": "mlp embed"})
    yield tensor(f"{LAYER}mlp.down_proj.weight", "blocks/mlp/down", "embed mlp")


FAMILY = Family(
    preset="phi3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    entries=(
        *common.SIZES, common.KV_HEADS, common.HEAD_DIM, common.ACTIVATION, common.eps(1e-5), common.tied(False),
        Windows(per_layer=False), Rope(scalings=("default",)),
    ),
    tensors=tensors,
    defaults={"pad_token_id": None},  # the default of the class lies outside small vocabularies
)  # fmt: skip
