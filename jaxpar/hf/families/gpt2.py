"""GPT-2: learned positions, biases everywhere, weights stored [in, out], queries, keys and values in one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import ACTIVATIONS, Field, Only, Raw
from jaxpar.hf.tensors import Tensor, fused, tensor

LAYER = "transformer.h.{layer}."
GELU_FIRST = {"gelu_new": "gelu_tanh", **ACTIVATIONS}


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield tensor("transformer.wte.weight", "embedding", "vocab embed")
    yield tensor("transformer.wpe.weight", "positions", "position embed")
    q, k, v = (f"blocks/attention/{part}" for part in "qkv")
    weights = {q: "embed (heads head_dim)", k: "embed (kv_heads head_dim)", v: "embed (kv_heads head_dim)"}
    yield fused(f"{LAYER}attn.c_attn.weight", weights, join=1)
    biases = {f"{q}_bias": "(heads head_dim)", f"{k}_bias": "(kv_heads head_dim)", f"{v}_bias": "(kv_heads head_dim)"}
    yield fused(f"{LAYER}attn.c_attn.bias", biases)
    for theirs, ours, dims in (
        ("attn.c_proj", "attention/out", "(heads head_dim) embed"),
        ("mlp.c_fc", "mlp/up", "embed mlp"),
        ("mlp.c_proj", "mlp/down", "mlp embed"),
    ):
        yield tensor(f"{LAYER}{theirs}.weight", f"blocks/{ours}", dims)
        yield tensor(f"{LAYER}{theirs}.bias", f"blocks/{ours}_bias", dims.split()[-1])
    for theirs, ours in ((f"{LAYER}ln_1", "blocks/attention_norm"), (f"{LAYER}ln_2", "blocks/mlp_norm")):
        yield from _norm(theirs, ours)
    yield from _norm("transformer.ln_f", "final_norm")
    if not model.tied:
        yield tensor("lm_head.weight", "head", "vocab embed")


def _norm(theirs: str, ours: str) -> Iterator[Tensor]:
    yield tensor(f"{theirs}.weight", f"{ours}/scale", "embed")
    yield tensor(f"{theirs}.bias", f"{ours}/bias", "embed")


@dataclasses.dataclass(frozen=True)
class _MlpSize:
    """`n_inner`, which is four times the width where it is null."""

    names: tuple[str, ...] = ("n_inner",)

    def read(self, raw: Raw) -> dict[str, Any]:
        """Hidden features of the MLP."""
        return {"mlp_dim": raw.get("n_inner") or 4 * raw["n_embd"]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The key."""
        return {"n_inner": None if model.mlp_dim == 4 * model.embed_dim else model.mlp_dim}


FAMILY = Family(
    preset="gpt2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    entries=(
        Field("vocab_size", "vocab_size"),
        Field("n_positions", "max_position", 1024),
        Field("n_embd", "embed_dim"),
        Field("n_layer", "num_layers"),
        Field("n_head", "num_heads"),
        _MlpSize(),
        Field("activation_function", "activation", "gelu_new", GELU_FIRST),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        common.tied(True),
        Only("scale_attn_weights", True),
        Only("scale_attn_by_inverse_layer_idx", False),
    ),
    tensors=tensors,
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    table="transformer.wte.weight",
    base="transformer.",
)
