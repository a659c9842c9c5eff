"""SmolLM3: Llama in which every fourth layer has no positions."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError
from jaxpar.hf import common
from jaxpar.hf.family import Family
from jaxpar.hf.fields import Field, Raw, Windows, repeated, shortest
from jaxpar.hf.rope import Rope


def rotated(raw: Raw, count: int) -> list[bool]:
    """Which layers have rotary positions: `no_rope_layers` lists 1 for those that have."""
    listed = raw.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % raw.get("no_rope_layer_interval", 4) != 0 for layer in range(count)]
    if len(listed) != count:
        raise UserError(f"no_rope_layers: lists {len(listed)} layers, but num_hidden_layers is {count}")
    return [bool(value) for value in listed]


def without_rope(raw: Raw, count: int) -> list[bool]:
    """Files without `layer_types`: layers without positions have the window."""
    return [not value for value in rotated(raw, count)]


@dataclasses.dataclass(frozen=True)
class _RopeLayers:
    """`no_rope_layers`."""

    names: tuple[str, ...] = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, raw: Raw) -> dict[str, Any]:
        """Which layers are rotated, as a pattern."""
        return {"rope_pattern": shortest(rotated(raw, raw["num_hidden_layers"]))}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The list."""
        return {"no_rope_layers": [int(here) for here in repeated(model.rope_pattern, model.num_layers)]}


FAMILY = Family(
    preset="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    entries=(
        *common.SIZES, Field("num_key_value_heads", "num_kv_heads", 4), common.HEAD_DIM, common.ACTIVATION,
        common.eps(1e-6), common.tied(True), common.attention_bias(), common.mlp_bias(),
        Windows(switch=True, rule=without_rope), _RopeLayers(), Rope(base=2_000_000.0),
    ),
    tensors=common.tensors,
    defaults={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
)  # fmt: skip
