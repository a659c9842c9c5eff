"""A small mixture of experts and the meshes that its sweep tries."""

from __future__ import annotations

import dataclasses
from typing import Any

from layouts import tiny

from jaxpar.config import Config, LatentConfig, MoeConfig

# Four experts, two per token, every loss on, so that router, expert and dense gradients all carry weight.
MOE = MoeConfig(
    num_experts=4, experts_per_token=2, expert_dim=32, balance_loss=0.1, router_z_loss=0.01, capacity_factor=0.75
)
DEEPSEEK = dataclasses.replace(
    MOE, num_experts=8, router="sigmoid", num_groups=4, groups_per_token=2, num_shared=1, weight_scale=2.5,
    bias_update_rate=1e-3,
)  # fmt: skip


def tiny_moe(parallel: dict[str, Any], moe: MoeConfig = MOE, **settings: Any) -> Config:
    """The tiny model with experts."""
    model = {"moe": moe, "num_kv_heads": 4} | settings.pop("model", {})
    return tiny(parallel=parallel, model=model, **settings)


def meshes() -> dict[str, tuple[dict[str, Any], MoeConfig, dict[str, Any]]]:
    """By name: (mesh, experts, other settings)."""
    found: dict[str, tuple[dict[str, Any], MoeConfig, dict[str, Any]]] = {}
    capacity = dataclasses.replace(MOE, dispatch="capacity")
    for expert in (1, 2, 4):
        for data in (1, 2, 4, 8):
            for tensor in (1, 2, 4):
                left = 8 // (expert * data * tensor)
                if left * expert * data * tensor != 8:
                    continue
                number = len(found)
                mesh = {
                    "expert": expert, "data": data, "tensor": tensor, "replica": left, "zero": number % 4,
                    "sequence_parallel": tensor > 1 and number % 2 == 1,
                }  # fmt: skip
                kind = (MOE, capacity, DEEPSEEK)[number % 3]
                found[f"expert{expert}-data{data}-tensor{tensor}-zero{number % 4}"] = mesh, kind, {}
    for mode in ("ring", "all_to_all", "all_gather"):
        for kind in (MOE, capacity):
            mesh = {"expert": 2, "context": 2, "tensor": 2, "context_mode": mode, "sequence_parallel": kind is MOE}
            found[f"context-{mode}-{kind.dispatch}"] = mesh, kind, {}
            mesh = {"expert": 2, "context": 2, "data": 2, "context_mode": mode, "zero": 3}
            found[f"context-{mode}-{kind.dispatch}-zero3"] = mesh, kind, {"remat": "full"}
    for zero in (0, 3):
        for expert in (1, 2, 4):
            mesh = {"stage": 2, "expert": expert, "data": 4 // expert, "zero": zero}
            found[f"stages-expert{expert}-zero{zero}"] = mesh, MOE, {"global_batch": 16, "seq_len": 32}
    mesh = {"stage": 2, "expert": 2, "tensor": 2, "sequence_parallel": True}
    found["stages-tensor"] = mesh, DEEPSEEK, {"global_batch": 16, "seq_len": 32}
    for zero in (2, 3):
        mesh = {"stage": 2, "data": 2, "tensor": 2, "zero": zero, "sequence_parallel": zero == 2}
        found[f"stages-data-tensor-zero{zero}"] = mesh, DEEPSEEK, {"global_batch": 16, "seq_len": 32}
    # The shape of DeepSeek-V3: latent attention, a leading dense layer, groups, a shared expert.
    latent = {"latent": LatentConfig(kv_rank=16, query_rank=24, rope_dim=4, value_dim=6), "num_kv_heads": None}
    for mode in ("ring", "all_to_all"):
        mesh = {"expert": 2, "context": 2, "tensor": 2, "context_mode": mode, "zero": 3}
        deepseek = dataclasses.replace(DEEPSEEK, first_dense=1)
        found[f"latent-{mode}"] = mesh, deepseek, {"model": {"num_layers": 3} | latent}
    few = {"global_batch": 16, "seq_len": 32, "remat": "full"}
    for name, mesh in {
        "zero3": {"stage": 2, "data": 2, "tensor": 2, "zero": 3},
        "experts": {"stage": 2, "expert": 2, "tensor": 2, "sequence_parallel": True},
        "context": {"stage": 2, "expert": 2, "context": 2, "zero": 2, "context_mode": "all_gather"},
    }.items():
        found[f"latent-stages-{name}"] = mesh, deepseek, few | {"model": {"num_layers": 5} | latent}
    found["accumulation"] = {"expert": 2, "data": 2, "tensor": 2, "zero": 2}, MOE, {"accumulation": 2}
    found["dots"] = {"expert": 4, "data": 2, "zero": 3}, DEEPSEEK, {"remat": "dots", "model": {"dropout": 0.1}}
    return found
