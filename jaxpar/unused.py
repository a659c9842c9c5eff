"""Settings of a config that have no effect, because the part that would read them is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxpar.config import Config


def unused_settings(config: Config) -> list[str]:
    """One line per part that is off and has settings all the same; such a config is right, but maybe not meant."""
    return [f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}" for keys, why in _found(config)]


def _found(config: Config) -> Iterator[tuple[list[str], str]]:
    """(keys that differ from their defaults, the setting that turns them off)."""
    off = [
        ("pipeline", config.pipeline, config.parallel.stage == 1, "parallel.stage = 1"),
        ("model.moe", config.model.moe, config.model.moe.num_experts == 0, "model.moe.num_experts = 0"),
        ("lora", config.lora, config.lora.rank == 0, "lora.rank = 0"),
    ]
    for name, section, is_off, why in off:
        if is_off and (changed := _changed(section)):
            yield [f"{name}.{key}" for key in changed], why
    optimizer, parallel = config.optimizer, config.parallel
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        yield ["optimizer.decay_steps"], f"optimizer.schedule = {optimizer.schedule!r}"
    if parallel.context_mode != "auto" and parallel.context == 1:
        yield ["parallel.context_mode"], "parallel.context = 1"


def _changed(section: Any) -> list[str]:
    default = type(section)()
    return [f.name for f in dataclasses.fields(section) if getattr(section, f.name) != getattr(default, f.name)]
