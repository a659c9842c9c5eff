"""Model families as plain data: what each changes in `ModelConfig`. Sizes are not presets: a config file gives them.

The maths follows the definitions of the `transformers` package (`modeling_<family>.py`), constants such as the rotary
base those of the released models; a config file overrides either. Imports no jax.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-5,
    "norm_placement": "pre",
    "positions": "rope",
    "activation": "silu",
    "gated": True,
    "tied": False,
}

# sqrt(embed_dim) is put in by `preset`, as it depends on a size.
_GEMMA: dict[str, Any] = _LLAMA | {
    "norm_eps": 1e-6,
    "norm_plus_one": True,
    "activation": "gelu_tanh",
    "tied": True,
    "embed_scale": "sqrt(embed_dim)",
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "norm": "layer",
        "norm_eps": 1e-5,
        "positions": "learned",
        "activation": "gelu_tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": True,
    },
    "llama": _LLAMA,  # Llama 3 has rope.base 500000, and 3.1 rope.scaling llama3
    "mistral": _LLAMA | {"window": 4096},  # 7B v0.1; later releases have no window and rope.base 1e6
    "qwen2": _LLAMA | {"norm_eps": 1e-6, "qkv_bias": True, "rope": {"base": 1_000_000.0}},
    "qwen3": _LLAMA | {"norm_eps": 1e-6, "qk_norm": "head", "rope": {"base": 1_000_000.0}},
    "gemma": _GEMMA,
    "gemma2": _GEMMA
    | {
        "norm_placement": "both",
        "window": 4096,
        "window_pattern": (True, False),
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
        "query_scale": 256**-0.5,  # query_pre_attn_scalar; 27B: 144
    },
    "gemma3": _GEMMA
    | {
        "norm_placement": "both",
        "qk_norm": "head",
        "window": 1024,  # 1B: 512
        "window_pattern": (True, True, True, True, True, False),
        "query_scale": 256**-0.5,  # 27B: 168
        "rope": {"base": 1_000_000.0, "local_base": 10_000.0},
    },
    "olmo2": _LLAMA | {"norm_eps": 1e-6, "norm_placement": "post", "qk_norm": "full", "rope": {"base": 500_000.0}},
    "phi3": _LLAMA,
    "gpt_neox": {
        "norm": "layer",
        "norm_eps": 1e-5,
        "positions": "rope",
        "rope": {"fraction": 0.25},
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "parallel_residual": True,
        "tied": False,
    },
    "smollm3": _LLAMA
    | {
        "norm_eps": 1e-6,
        "tied": True,
        "rope": {"base": 5_000_000.0},
        "rope_pattern": (True, True, True, False),
    },
    "deepseek_v3": _LLAMA
    | {
        "norm_eps": 1e-6,
        "rope": {"interleaved": True},
        "latent": {"norm_eps": 1e-6},
        "moe": {"router": "sigmoid", "choice_bias": True, "weight_scale": 2.5},
    },
    "gpt_oss": _LLAMA
    | {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "window": 128,
        "window_pattern": (True, False),
        "rope": {
            "base": 150_000.0,
            "scaling": "yarn",
            "factor": 32.0,
            "original_max_position": 4096,
            "truncate": False,
        },
        "moe": {"router_bias": True},
    },
}


def preset(family: str, *, embed_dim: Any) -> dict[str, Any]:
    """Nested `ModelConfig` settings of a family; `embed_dim` fixes those that depend on the width."""
    settings = dict(PRESETS[family])
    if settings.get("embed_scale") == "sqrt(embed_dim)":
        settings["embed_scale"] = float(embed_dim) ** 0.5
    return settings


def unknown(family: str) -> str:
    """The message about a family that is not one."""
    close = difflib.get_close_matches(family.lower(), PRESETS, n=1)
    return f"got {family!r}, wanted one of {', '.join(PRESETS)}" + (f"; did you mean {close[0]}?" if close else "")
