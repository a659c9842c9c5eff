"""GPT-NeoX and Pythia: attention and MLP side by side, part of each head rotated, q, k, v interleaved by head."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import ACTIVATIONS, Field
from jaxpar.hf.rope import Rope
from jaxpar.hf.tensors import Tensor, fused, tensor

LAYER = "gpt_neox.layers.{layer}."
HEAD = "embed_out.weight"
GELU_FIRST = {"gelu": "gelu", **ACTIVATIONS}


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """All tensors of a file."""
    yield tensor("gpt_neox.embed_in.weight", "embedding", "vocab embed")
    yield from _norm("gpt_neox.final_layer_norm", "final_norm")
    yield from _norm(f"{LAYER}input_layernorm", "blocks/attention_norm")
    yield from _norm(f"{LAYER}post_attention_layernorm", "blocks/mlp_norm")
    parts = {"q": ("heads", 0), "k": ("kv_heads", 1), "v": ("kv_heads", 2)}
    dims = {f"blocks/attention/{p}": f"({heads} {i}/3 head_dim)" for p, (heads, i) in parts.items()}
    yield fused(f"{LAYER}attention.query_key_value.weight", {leaf: f"{group} embed" for leaf, group in dims.items()})
    yield tensor(f"{LAYER}attention.dense.weight", "blocks/attention/out", "embed (heads head_dim)")
    if model.qkv_bias:
        biases = {f"{leaf}_bias": group for leaf, group in dims.items()}
        yield fused(f"{LAYER}attention.query_key_value.bias", biases)
    if model.out_bias:
        yield tensor(f"{LAYER}attention.dense.bias", "blocks/attention/out_bias", "embed")
    for theirs, ours, shape in (("dense_h_to_4h", "up", "mlp embed"), ("dense_4h_to_h", "down", "embed mlp")):
        yield tensor(f"{LAYER}mlp.{theirs}.weight", f"blocks/mlp/{ours}", shape)
        yield tensor(f"{LAYER}mlp.{theirs}.bias", f"blocks/mlp/{ours}_bias", shape.split()[0])
    if not model.tied:
        yield tensor(HEAD, "head", "vocab embed")


def _norm(theirs: str, ours: str) -> Iterator[Tensor]:
    yield tensor(f"{theirs}.weight", f"{ours}/scale", "embed")
    yield tensor(f"{theirs}.bias", f"{ours}/bias", "embed")


FAMILY = Family(
    preset="gpt_neox",
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    entries=(
        *common.SIZES,
        Field("hidden_act", "activation", "gelu", GELU_FIRST),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        common.tied(False),
        Field("use_parallel_residual", "parallel_residual", True),
        Field("attention_bias", "qkv_bias out_bias", True),
        Rope(fraction=0.25, base_name="rotary_emb_base", fraction_name="rotary_pct"),
    ),
    tensors=tensors,
    ignored=r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    table="gpt_neox.embed_in.weight",
    base="gpt_neox.",
    renamed={"lm_head.weight": HEAD},
    head=HEAD,
)
