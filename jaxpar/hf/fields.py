"""Entries of a Hugging Face config.json and the settings of `ModelConfig` that they mean, in both directions.

An entry owns some keys of config.json. `read` turns them into dotted settings ("rope.base"), `write` does the
inverse; a value that jaxpar has no maths for raises `UserError`. Defaults are those of the config classes of
`transformers`, which apply where a file leaves a key out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError

Raw = Mapping[str, Any]
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
NO_DEFAULT = object()


class Entry(Protocol):
    """Some keys of config.json."""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        ...

    def read(self, raw: Raw) -> dict[str, Any]:
        """Settings that the keys mean."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys that the settings need."""
        ...


def setting(model: ModelConfig, key: str) -> Any:
    """The value of a dotted setting."""
    value: Any = model
    for name in key.split("."):
        value = getattr(value, name)
    return value


@dataclasses.dataclass(frozen=True)
class Field:
    """One key that is one or several settings (all with the same value), translated by `values` where given.

    `fill` gives what is written where the setting is None, which means that it follows from others.
    """

    name: str
    keys: str  # separated by blanks
    default: Any = NO_DEFAULT
    values: Mapping[Any, Any] | None = None
    aliases: tuple[str, ...] = ()
    optional: bool = False  # not written when the setting is None
    fill: Callable[[ModelConfig], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The key and what older files call it."""
        return (self.name, *self.aliases)

    def read(self, raw: Raw) -> dict[str, Any]:
        """The setting; raises for a missing key without a default and for a value without a translation."""
        value = next((raw[name] for name in self.names if name in raw), self.default)
        if value is NO_DEFAULT or (value is None and self.default is NO_DEFAULT):
            raise UserError(f"{self.name}: missing; a model needs it")
        if self.values is not None:
            if value not in self.values:
                known = ", ".join(str(known) for known in self.values)
                raise UserError(f"{self.name}: {value!r} is not supported; jaxpar has {known}")
            value = self.values[value]
        return dict.fromkeys(self.keys.split(), value)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The key."""
        value = setting(model, self.keys.split()[0])
        if value is None and self.optional:
            return {}
        if value is None and self.fill is not None:
            value = self.fill(model)
        if self.values is not None:
            value = next((theirs for theirs, ours in self.values.items() if ours == value), None)
        return {self.name: value}


@dataclasses.dataclass(frozen=True)
class Only:
    """A key that changes the maths and of which jaxpar has one value; a file may leave it out or have null."""

    name: str
    value: Any
    written: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The key."""
        return (self.name,)

    def read(self, raw: Raw) -> dict[str, Any]:
        """No setting; raises for another value."""
        found = raw.get(self.name)
        if found is not None and found != self.value:
            raise UserError(f"{self.name}: {found!r} is not supported; jaxpar has {self.value!r} alone")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The key, where readers need it."""
        return {self.name: self.value} if self.written else {}


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """`query_pre_attn_scalar`: scores are multiplied by its power -1/2."""

    names: tuple[str, ...] = ("query_pre_attn_scalar",)

    def read(self, raw: Raw) -> dict[str, Any]:
        """The factor of the scores."""
        return {"query_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number whose power -1/2 is the factor; whole where it is meant to be."""
        scale = model.query_scale or model.head_size**-0.5
        scalar = scale**-2
        whole = round(scalar)
        return {"query_pre_attn_scalar": whole if abs(whole - scalar) < 1e-6 * scalar else scalar}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Which layers have a sliding window, and how long it is.

    Newer files list `layer_types`; older ones follow a rule of the family, a function of the file and the number of
    layers. `switch`: `use_sliding_window` must be true for any of it to count. `per_layer` False: the window is that
    of all layers.
    """

    default: int | None = None
    switch: bool = False
    per_layer: bool = True
    rule: Any = None  # (raw, num_layers) -> which layers have the window
    rule_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        own = ("sliding_window", "layer_types") if self.per_layer else ("sliding_window",)
        return (*own, *self.rule_names, *(("use_sliding_window",) if self.switch else ()))

    def read(self, raw: Raw) -> dict[str, Any]:
        """Window and pattern."""
        window = raw.get("sliding_window", self.default)
        if self.switch and not raw.get("use_sliding_window", False):
            window = None
        if not self.per_layer or window is None:
            local = [True] if window is not None else [False]
        else:
            local = self._layers(raw)
        if window is None or not any(local):
            return {"window": None, "window_pattern": (True,)}
        return {"window": window, "window_pattern": shortest(local)}

    def _layers(self, raw: Raw) -> list[bool]:
        count = raw["num_hidden_layers"]
        types = raw.get("layer_types")
        if types is None:
            return list(self.rule(raw, count))
        if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
            raise UserError(
                f"layer_types: {', '.join(unknown)} is not supported; jaxpar has sliding_attention, full_attention"
            )
        if len(types) != count:
            raise UserError(f"layer_types: lists {len(types)} layers, but num_hidden_layers is {count}")
        return [kind == "sliding_attention" for kind in types]

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys."""
        keys: dict[str, Any] = {"sliding_window": model.window}
        if self.switch:
            keys["use_sliding_window"] = model.window is not None
        if self.per_layer:
            local = local_layers(model)
            keys["layer_types"] = ["sliding_attention" if here else "full_attention" for here in local]
        return keys


def local_layers(model: ModelConfig) -> list[bool]:
    """Which layers have the sliding window."""
    pattern = model.window_pattern if model.window is not None else (False,)
    return repeated(pattern, model.num_layers)


def repeated(pattern: tuple[bool, ...], count: int) -> list[bool]:
    """A pattern over all layers."""
    return [bool(pattern[i % len(pattern)]) for i in range(count)]


def shortest(values: list[bool]) -> tuple[bool, ...]:
    """The shortest pattern whose repetition gives `values`."""
    for length in range(1, len(values) + 1):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)
