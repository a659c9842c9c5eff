"""Adapters in the format of the PEFT package: adapter_config.json and adapter_model.safetensors.

A target is a linear layer of the Hugging Face model; its tensors there are A [rank, in] and B [out, rank]. Rank, alpha
and targets are written as they were trained.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import LoraConfig, ModelConfig
from jaxpar.errors import UserError, raise_together
from jaxpar.hf.family import family_for
from jaxpar.hf.tensors import Piece, Tensor

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Keys of adapter_config.json that must be off for the maths to be plain LoRA.
OFF = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform",
       "modules_to_save", "trainable_token_indices", "target_parameters", "exclude_modules", "layer_replication",
       "megatron_config", "use_qalora", "alora_invocation_tokens")  # fmt: skip


def export_adapter(
    folder: str | Path, model: ModelConfig, config: LoraConfig, values: Mapping[str, Any], *, base: str | None = None
) -> None:
    """Write an adapter; `values` are its arrays by name ("q/a" [L, in..., R], "q/b" [L, R, out...]).

    `base` is recorded as the model that it belongs to.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder}: exists already; export into a new folder")
    from safetensors.numpy import save_file

    tensors = _targets(model, config)
    arrays = {}
    for target, tensor in tensors.items():
        a, b = np.asarray(values[f"{target}/a"]), np.asarray(values[f"{target}/b"])
        for layer in range(a.shape[0]):
            name = PREFIX + tensor.named({"layer": layer}).removesuffix(".weight")
            rank = a.shape[-1]
            arrays[f"{name}.lora_A.weight"] = np.ascontiguousarray(a[layer].reshape(-1, rank).T)
            arrays[f"{name}.lora_B.weight"] = np.ascontiguousarray(b[layer].reshape(rank, -1).T)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(arrays, partial / TENSORS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": config.rank,
        "lora_alpha": config.alpha if config.alpha % 1 else int(config.alpha), "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(_module(tensor) for tensor in tensors.values()), "fan_in_fan_out": False,
        "inference_mode": True, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
    }  # fmt: skip
    (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    partial.rename(folder)


def read_adapter_config(folder: str | Path, model: ModelConfig) -> LoraConfig:
    """Rank, alpha and targets of an adapter; raises `UserError` for anything but plain LoRA on this model."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; an adapter is a folder with {CONFIG} and {TENSORS}")
    raw = json.loads(path.read_text("utf-8"))
    problems = [f"{path}: {key} = {raw[key]!r} is not supported; jaxpar has plain LoRA" for key in OFF if raw.get(key)]
    if raw.get("peft_type") != "LORA":
        problems.append(f"{path}: peft_type = {raw.get('peft_type')!r} is not supported; jaxpar has LORA")
    if raw.get("bias", "none") != "none":
        problems.append(f"{path}: bias = {raw['bias']!r} is not supported; jaxpar has none")
    modules = {_module(tensor): target for target, tensor in _linear(model).items()}
    wanted = raw.get("target_modules") or []
    wanted = [name for name in modules if re.fullmatch(wanted, name)] if isinstance(wanted, str) else wanted
    if unknown := sorted(set(wanted) - modules.keys()):
        problems.append(f"{path}: target_modules {', '.join(unknown)} match nothing; there are {', '.join(modules)}")
    raise_together(problems)
    targets = tuple(target for name, target in modules.items() if name in wanted)
    return LoraConfig(rank=raw["r"], alpha=float(raw["lora_alpha"]), targets=targets)


def load_adapter(folder: str | Path, model: ModelConfig, abstract: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of an adapter by name, float32, shaped like `abstract`; refuses missing, extra and mis-shaped ones."""
    from safetensors.numpy import load_file

    config = read_adapter_config(folder, model)
    stored = load_file(Path(folder) / TENSORS)
    values: dict[str, np.ndarray] = {}
    problems, used = [], set()
    for target, tensor in _targets(model, config).items():
        for part in ("a", "b"):
            shape = tuple(abstract[f"{target}/{part}"].shape)
            rank, other = config.rank, int(np.prod(shape[1:])) // config.rank
            wanted = (rank, other) if part == "a" else (other, rank)
            layers = []
            for layer in range(shape[0]):
                name = PREFIX + tensor.named({"layer": layer}).removesuffix(".weight") + f".lora_{part.upper()}.weight"
                used.add(name)
                if name not in stored:
                    problems.append(f"{folder}: {name} is missing")
                elif stored[name].shape != wanted:
                    problems.append(f"{folder}: {name} has shape {stored[name].shape}, wanted {wanted}")
                else:
                    layers.append(stored[name].astype(np.float32).T.reshape(shape[1:]))
            if len(layers) == shape[0]:
                values[f"{target}/{part}"] = np.stack(layers)
    problems += [f"{folder}: {name} is not part of this adapter" for name in sorted(stored.keys() - used)]
    raise_together(problems)
    return values


def _targets(model: ModelConfig, config: LoraConfig) -> dict[str, Tensor]:
    if model.moe.num_experts and model.moe.first_dense:
        raise UserError(
            f"model.moe.first_dense = {model.moe.first_dense}: an adapter has no part for the leading layers, which "
            "PEFT would look for; merge the adapter instead"
        )
    linear = _linear(model)
    raise_together(
        f"lora.targets: {target!r} is no linear layer of its own in a {model.family} of transformers, "
        f"which PEFT needs; merge the adapter instead, or train {', '.join(linear)}"
        for target in config.targets
        if target not in linear
    )
    return {target: linear[target] for target in config.targets}


def _linear(model: ModelConfig) -> dict[str, Tensor]:
    """Targets whose weight is a tensor [out, in] of its own in the file."""
    from jaxpar.lora import TARGETS

    leaves = {f"blocks/{owner}/{name}": target for target, (owner, name) in TARGETS.items()}
    found = {}
    for tensor in family_for(model).tensors(model):
        piece = tensor.pieces[0]
        if len(tensor.pieces) == 1 and piece.leaf in leaves and _is_linear(piece, leaves[piece.leaf]):
            found[leaves[piece.leaf]] = tensor
    return found


def _is_linear(piece: Piece, target: str) -> bool:
    """Whether the file has the output first, as linear layers do; GPT-2 has it last."""
    ends_in_embed = target in ("out", "down")
    return piece.groups[0] == ("embed",) if ends_in_embed else piece.groups[1] == ("embed",)


def _module(tensor: Tensor) -> str:
    """The last name of the layer: "q_proj"."""
    return tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
