"""Small models and the meshes that the sweeps try."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import numpy as np

from jaxpar import config_file
from jaxpar.build import build
from jaxpar.config import Config, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from jaxpar.layout_check import gradient_errors, loss_and_gradients, random_batch, reference_of, relative_error
from jaxpar.tree import from_named, named_leaves

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 8, "num_kv_heads": 8},
    "gpt2": {
        "family": "gpt2", "num_heads": 8, "norm": "layer", "positions": "learned", "max_position": 64, "gated": False,
        "activation": "gelu_tanh", "qkv_bias": True, "out_bias": True, "mlp_bias": True,
    },
}  # fmt: skip


# What the families with experts have besides: 4 experts, 2 of them per token; one dense layer, one shared expert.
EXPERTS = {
    "gpt_oss": {"moe.num_experts": 4},
    "deepseek_v3": {
        "moe.num_experts": 4, "moe.first_dense": 1, "moe.num_shared": 1, "num_kv_heads": 4,
        "latent.kv_rank": 16, "latent.query_rank": 12, "latent.rope_dim": 4,
    },
}  # fmt: skip


def small(family: str) -> ModelConfig:
    """A family with 2 layers, width 32, 4 heads, vocabulary 97 and 48 positions."""
    settings: dict[str, Any] = {
        "family": family, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "mlp_dim": 64,
        "vocab_size": 97, "max_position": 48, "num_kv_heads": 4 if family in ("gpt2", "gpt_neox") else 2,
    }  # fmt: skip
    for key, value in EXPERTS.get(family, {}).items():
        section, _, name = key.rpartition(".")
        (settings.setdefault(section, {}) if section else settings)[name] = value
    return config_file.from_dict({"model": settings}).model


def tiny(family: str = "llama", *, parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None,
         **settings: Any) -> Config:  # fmt: skip
    """A float32 model with 2 layers, width 64, 8 heads, vocabulary 97 and 64 positions."""
    shape = {"num_layers": 2, "embed_dim": 64, "head_dim": 8, "mlp_dim": 64, "vocab_size": 97, "vocab_multiple": 8}
    settings = {"seq_len": 64, "global_batch": 8, "precision": "float32"} | settings
    return Config(
        model=ModelConfig(**(shape | FAMILIES[family] | (model or {}))),
        parallel=ParallelConfig(**({"data": 1} | (parallel or {}))),
        optimizer=settings.pop("optimizer", OptimizerConfig(name="sgd", schedule="constant", weight_decay=0.0)),
        **settings,
    )


def meshes() -> list[dict[str, Any]]:
    """Every way of splitting 8 devices over replica, data and tensor; ZeRO level and sequence parallelism vary."""
    found = []
    for replica, data, tensor in itertools.product((1, 2, 4, 8), repeat=3):
        if replica * data * tensor != 8:
            continue
        levels = (0, 1, 2, 3) if data > 1 else (0,)
        for zero, sequence in itertools.product(levels, (False, True) if tensor > 1 else (False,)):
            found.append(
                {"replica": replica, "data": data, "tensor": tensor, "zero": zero, "sequence_parallel": sequence}
            )
    return found


Case = tuple[str, dict[str, Any], int, bool]  # family, mesh, accumulation, tied


def choices() -> list[list[Case]]:
    """For every mesh and family, each accumulation that fits and tying on or off."""
    found = []
    for mesh, family in itertools.product(meshes(), FAMILIES):
        fitting = [n for n in (1, 2, 4) if n <= 8 // (mesh["replica"] * mesh["data"])]
        found.append([(family, mesh, n, tied) for n, tied in itertools.product(fitting, (False, True))])
    return found


def cases() -> list[Case]:
    """One of the choices for every mesh and family: the one whose pairs of settings were met least so far."""
    seen: collections.Counter[Any] = collections.Counter()
    found = []
    for options in choices():
        case = min(options, key=lambda option: sum(seen[pair] for pair in pairs(option)))
        seen.update(pairs(case))
        found.append(case)
    return found


def pairs(case: Case) -> set[tuple[Any, ...]]:
    """Every two settings of a case."""
    family, mesh, accumulation, tied = case
    settings = {"family": family, "accumulation": accumulation, "tied": tied} | mesh
    return set(itertools.combinations(sorted(settings.items()), 2))


class References:
    """One-device losses and gradients, computed once per model."""

    def __init__(self) -> None:
        self._known: dict[Config, tuple[float, dict[str, np.ndarray]]] = {}
        self._params: dict[Any, Any] = {}

    def params(self, config: Config) -> Any:
        """Initial parameters of the config's model, on the host; the same on every mesh (which has its own test)."""
        config = reference_of(config)
        key = config.model, config.loss
        if key not in self._params:
            built = build(config, jax.devices()[:1])
            self._params[key] = jax.device_get(built.init(jax.random.key(config.seed)).params)
        return self._params[key]

    def of(self, config: Config) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients by name of the config on one device."""
        key = reference_of(config)
        if key not in self._known:
            self._known[key] = loss_and_gradients(build(key, jax.devices()[:1]), random_batch(key), self.params(key))
        return self._known[key]


def assert_same(config: Config, references: References) -> None:
    """The config's mesh gives the loss of one device within 1e-5 and every gradient leaf within 1e-4."""
    wanted_loss, wanted = references.of(config)
    built = build(config)
    # The modules are the config's own, only their numbers are shared: a module knows its remat and whether it scans.
    own = jax.eval_shape(built.to_natural, built.abstract_state.params)
    natural = from_named(own, named_leaves(references.params(config)))
    params = jax.device_put(built.from_natural(natural), built.shardings.params)
    assert (params.remat, params.config.scan_layers) == (config.remat, config.model.scan_layers)
    loss, gradients = loss_and_gradients(built, random_batch(config), params)
    assert relative_error(np.asarray(loss), np.asarray(wanted_loss)) <= 1e-5
    bad = {name: error for name, error in gradient_errors(gradients, wanted).items() if not error <= 1e-4}
    assert not bad


__all__ = ["FAMILIES", "LossConfig", "References", "assert_same", "cases", "choices", "meshes", "pairs", "small",
           "tiny"]  # fmt: skip
