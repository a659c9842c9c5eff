"""What the Llama-shaped families share: keys of config.json and tensors."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config import ModelConfig
from jaxpar.hf.fields import ACTIVATIONS, Entry, Field
from jaxpar.hf.tensors import Tensor, fused, tensor

LAYER = "model.layers.{layer}."
PROJECTIONS = (("gate", "mlp embed"), ("up", "mlp embed"), ("down", "embed mlp"))  # of gated feed-forward blocks

SIZES: tuple[Entry, ...] = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "embed_dim"),
    Field("intermediate_size", "mlp_dim"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", None, optional=True)
HEAD_DIM = Field("head_dim", "head_dim", None, optional=True)
ACTIVATION = Field("hidden_act", "activation", "silu", ACTIVATIONS)
TANH_FIRST = {"gelu_pytorch_tanh": "gelu_tanh", **{k: v for k, v in ACTIVATIONS.items() if k != "gelu_pytorch_tanh"}}


def eps(default: float) -> Field:
    """The epsilon of RMS norms."""
    return Field("rms_norm_eps", "norm_eps", default)


def tied(default: bool) -> Field:
    """Whether the embedding is also the output table."""
    return Field("tie_word_embeddings", "tied", default)


def attention_bias() -> Field:
    """A bias on all four projections of attention."""
    return Field("attention_bias", "qkv_bias out_bias", False)


def mlp_bias() -> Field:
    """A bias on the projections of the MLP."""
    return Field("mlp_bias", "mlp_bias", False)


def tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Tensors of a Llama-shaped model; biases, norms of q and k, and further norms where the model has them."""
    yield from ends(model)
    yield from attention(model)
    yield from mlp(model)
    yield from norms(model)


def ends(model: ModelConfig) -> Iterator[Tensor]:
    """Embedding, last norm and head."""
    yield tensor("model.embed_tokens.weight", "embedding", "vocab embed")
    yield tensor("model.norm.weight", "final_norm/scale", "embed")
    if not model.tied:
        yield tensor("lm_head.weight", "head", "vocab embed")


def attention(model: ModelConfig) -> Iterator[Tensor]:
    """Projections of attention, their biases, and norms of queries and keys."""
    for ours, theirs, heads in (("q", "q_proj", "heads"), ("k", "k_proj", "kv_heads"), ("v", "v_proj", "kv_heads")):
        yield tensor(f"{LAYER}self_attn.{theirs}.weight", f"blocks/attention/{ours}", f"({heads} head_dim) embed")
        if model.qkv_bias:
            yield tensor(f"{LAYER}self_attn.{theirs}.bias", f"blocks/attention/{ours}_bias", f"({heads} head_dim)")
    yield tensor(f"{LAYER}self_attn.o_proj.weight", "blocks/attention/out", "embed (heads head_dim)")
    if model.out_bias:
        yield tensor(f"{LAYER}self_attn.o_proj.bias", "blocks/attention/out_bias", "embed")
    if model.qk_norm != "none":
        for ours, heads in (("q_norm", "heads"), ("k_norm", "kv_heads")):
            dims = "head_dim" if model.qk_norm == "head" else f"({heads} head_dim)"
            yield tensor(f"{LAYER}self_attn.{ours}.weight", f"blocks/attention/{ours}/scale", dims)


def mlp(model: ModelConfig) -> Iterator[Tensor]:
    """Projections of the gated MLP and their biases."""
    for ours, dims in PROJECTIONS:
        yield tensor(f"{LAYER}mlp.{ours}_proj.weight", f"blocks/mlp/{ours}", dims)
        if model.mlp_bias:
            yield tensor(f"{LAYER}mlp.{ours}_proj.bias", f"blocks/mlp/{ours}_bias", dims.split()[0])


def stacked_experts() -> Iterator[Tensor]:
    """All experts of a layer in one tensor, as transformers has them in memory."""
    halves = {"blocks/moe/gate": "expert mlp embed", "blocks/moe/up": "expert mlp embed"}
    yield fused(f"{LAYER}mlp.experts.gate_up_proj", halves, join=1)
    yield tensor(f"{LAYER}mlp.experts.down_proj", "blocks/moe/down", "expert embed mlp")


def norms(model: ModelConfig) -> Iterator[Tensor]:
    """Norms before the sub-layers, after them, or both; `post_attention_layernorm` means another one in each case."""
    names = {
        "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
        "post": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
        "both": {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        },
    }
    for theirs, ours in names[model.norm_placement].items():
        yield tensor(f"{LAYER}{theirs}.weight", f"blocks/{ours}/scale", "embed")
