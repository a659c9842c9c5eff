"""jaxpar: train large language models on many GPUs with one SPMD JAX program.

The public names; each is loaded when it is first used, so `import jaxpar` starts no backend and
`jaxpar.simulate_devices(8)` can still choose the devices. No name here is that of a submodule.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.config import Config as Config
    from jaxpar.config_file import load as load_config
    from jaxpar.errors import UserError as UserError
    from jaxpar.layout_check import check_layout as check_layout
    from jaxpar.mesh import make_mesh as make_mesh
    from jaxpar.mesh import simulate_devices as simulate_devices
    from jaxpar.sharding import Rules as Rules
    from jaxpar.sharding import resolve as resolve
    from jaxpar.trainer import train as train

_HOMES = {
    "Config": "config",
    "load_config": "config_file:load",
    "UserError": "errors",
    "check_layout": "layout_check",
    "make_mesh": "mesh",
    "simulate_devices": "mesh",
    "Rules": "sharding",
    "resolve": "sharding",
    "train": "trainer",
}

__all__ = [
    "Config",
    "Rules",
    "UserError",
    "check_layout",
    "load_config",
    "make_mesh",
    "resolve",
    "simulate_devices",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}; it has {', '.join(__all__)}")
    home, _, original = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"jaxpar.{home}"), original or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
