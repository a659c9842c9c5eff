"""Rotary settings of a config.json, as transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`) write.

Every key inside is accounted for: an unknown scaling or an unknown key of a known scaling is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxpar.config import ModelConfig, RopeConfig
from jaxpar.errors import UserError
from jaxpar.hf.fields import Raw, local_layers

SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Settings of each scaling: key in the file -> setting of RopeConfig.
KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "original_max_position_embeddings": "original_max_position",
    },
}
COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary settings of a family: the base and the rotated fraction that apply where a file names none."""

    base: float = 10_000.0
    fraction: float = 1.0
    base_name: str = "rope_theta"  # in files of transformers 4
    fraction_name: str = "partial_rotary_factor"
    scalings: tuple[str, ...] = tuple(SCALINGS)
    default: Mapping[str, Any] | None = None  # the whole of `rope_parameters` where a file has none

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        older = (self.base_name, self.fraction_name, "rope_scaling", "original_max_position_embeddings")
        return ("rope_parameters", *older)

    def read(self, raw: Raw) -> dict[str, Any]:
        """Settings of `model.rope`."""
        given = _section(raw, "rope_scaling") or _section(raw, "rope_parameters") or self.default or {}
        return _prefixed(self._settings(given, raw, raw.get(self.base_name) or self.base))

    def _settings(self, given: Raw, raw: Raw, base: float) -> dict[str, Any]:
        kind = _kind(given, self.scalings)
        settings: dict[str, Any] = {"scaling": SCALINGS[kind], "base": float(given.get("rope_theta") or base)}
        fraction = given.get("partial_rotary_factor", raw.get(self.fraction_name))
        settings["fraction"] = float(self.fraction if fraction is None else fraction)
        keys = KEYS[kind]
        if "original_max_position_embeddings" in keys:
            length = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
            given = {**given, "original_max_position_embeddings": length or raw.get("max_position_embeddings")}
        if "factor" in keys and given.get("factor") is None:
            raise UserError(f"rope type {kind!r}: factor is missing; a scaling needs it")
        for key, name in keys.items():
            if given.get(key) is not None:
                settings[name] = given[key]
        if kind == "yarn" and settings.get("attention_factor") is None:
            settings["attention_factor"] = _yarn_factor(given)
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The key of transformers 5."""
        return {"rope_parameters": self.parameters(model.rope)}

    def parameters(self, rope: RopeConfig, base: float | None = None) -> dict[str, Any]:
        """What `rope_parameters` holds."""
        kind = next(theirs for theirs, ours in SCALINGS.items() if ours == rope.scaling)
        parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.base if base is None else base}
        for key, name in KEYS[kind].items():
            if getattr(rope, name) is not None:
                parameters[key] = getattr(rope, name)
        if self.fraction != 1.0 or rope.fraction != 1.0:
            parameters["partial_rotary_factor"] = rope.fraction
        return parameters


@dataclasses.dataclass(frozen=True)
class TwoRopes(Rope):
    """Rotary settings of Gemma 3: those of full-attention layers, and a base for sliding-window layers."""

    base: float = 1_000_000.0
    local_base: float = 10_000.0

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        return (*super().names, "rope_local_base_freq")

    def read(self, raw: Raw) -> dict[str, Any]:
        """Settings of `model.rope`, `local_base` included."""
        nested = _section(raw, "rope_parameters")
        unknown = sorted(set(nested) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UserError(f"rope_parameters: unknown layer type {', '.join(unknown)}")
        whole = {**_section(nested, "full_attention"), **_section(raw, "rope_scaling")}
        settings = self._settings(whole, raw, raw.get("rope_theta") or self.base)
        local = _section(nested, "sliding_attention")
        if _kind(local, self.scalings) != "default":
            raise UserError(f"rope_parameters.sliding_attention: {local!r}; jaxpar scales full-attention layers alone")
        local_base = local.get("rope_theta") or raw.get("rope_local_base_freq") or self.local_base
        return _prefixed(settings | {"local_base": float(local_base)})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The nested key of transformers 5."""
        local_base = model.rope.local_base
        if local_base is None:
            if any(local_layers(model)) and model.rope.scaling != "none":
                raise UserError("model.rope.local_base: unset with a rope scaling, which this family cannot express")
            local_base = model.rope.base
        local = {"rope_type": "default", "rope_theta": local_base}
        return {"rope_parameters": {"full_attention": self.parameters(model.rope), "sliding_attention": local}}


def _section(raw: Raw, name: str) -> Raw:
    """The object under a key; empty where there is none."""
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise UserError(f'{name}: got {value!r}, wanted an object such as {{"rope_type": "linear", "factor": 2.0}}')
    return value


def _kind(given: Raw, known: tuple[str, ...]) -> str:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in known:
        raise UserError(f"rope type {kind!r} is not supported; jaxpar has {', '.join(known)}")
    extra = set(given) - set(COMMON) - set(KEYS[kind]) - {"original_max_position_embeddings"}
    if kind == "yarn":
        extra -= {"mscale", "mscale_all_dim", "finetuned"}
    if extra := sorted(name for name in extra if given[name] is not None):
        raise UserError(
            f"rope type {kind!r}: {', '.join(f'{name} = {given[name]!r}' for name in extra)} is not supported"
        )
    return kind


def _yarn_factor(given: Raw) -> float | None:
    """The factor of cos and sin that `mscale` and `mscale_all_dim` imply together; None without both."""
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        return None
    log = math.log(given["factor"]) if given["factor"] > 1 else 0.0
    return (0.1 * given["mscale"] * log + 1.0) / (0.1 * given["mscale_all_dim"] * log + 1.0)


def _prefixed(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"rope.{name}": value for name, value in settings.items()}
