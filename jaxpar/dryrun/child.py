"""The process that compiles: builds the run's own train step for absent GPUs and writes down what the compiler says.

Started by jaxpar.dryrun.compile as `python -m jaxpar.dryrun.child DIR`; reads DIR/request.json and leaves
DIR/result.json and DIR/module.pb there. A process of its own, because a wrong target kills the compiler, compiler flags
are per process, and its memory is given back. It never touches a device: the CUDA plugin only compiles.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from jaxpar.errors import UserError


def main(folder: Path) -> None:
    """Compiles the request in `folder`."""
    request = json.loads((folder / "request.json").read_text())
    try:
        result = compile_request(request, folder)
    except UserError as error:
        result = {"user_error": list(error.problems)}
    partial = folder / "result.partial"
    partial.write_text(json.dumps(result))
    os.replace(partial, folder / "result.json")


def compile_request(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Builds, lowers and compiles; returns sizes and times, and writes the program to `folder`."""
    from jaxpar import config_file

    started = time.monotonic()
    config = config_file.from_dict(request["config"])
    devices = absent_devices(request["target_config"], request["topology"])
    options = request["compiler_options"] or None
    if request["fused_attention"]:
        _accept_absent_cudnn()
    # "auto" asks for the devices of this process, which are not those that are compiled for.
    kernel = "cudnn" if request["fused_attention"] else "xla"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=kernel))
    built, compiled, lower_s, compile_s = _compile(config, devices, options)
    (module,) = compiled.runtime_executable().hlo_modules()
    (folder / "module.pb").write_bytes(module.as_serialized_hlo_module_proto())
    memory = compiled.memory_analysis()
    return {
        "mesh": {str(axis): int(size) for axis, size in built.mesh.shape.items()},
        "memory": {
            name: int(getattr(memory, f"{name}_size_in_bytes"))
            for name in ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_output")
        }
        | {"host_temp": int(memory.host_temp_size_in_bytes)},
        "state": state_sizes(built),
        "weights": weight_shapes(built),
        "schedule": schedule_of(built),
        "lower_s": lower_s,
        "compile_s": compile_s,
        "total_s": time.monotonic() - started,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _compile(config: Any, devices: list[Any], options: Any) -> tuple[Any, Any, float, float]:
    """(built run, compiled step, seconds of tracing and lowering, seconds of compiling)."""
    from jaxpar.build import build

    started = time.monotonic()
    built = build(config, devices)
    lowered = built.step.lower(built.abstract_state, built.abstract_batch)
    lowered_at = time.monotonic()
    compiled = lowered.compile(compiler_options=options)
    return built, compiled, lowered_at - started, time.monotonic() - lowered_at


def _accept_absent_cudnn() -> None:
    """Lets jax lower to cuDNN attention although the library is not installed; only its version is asked for.

    Uses a private module of jax. Can go once jax.nn.dot_product_attention lowers for absent devices by itself.
    """
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91_200


def absent_devices(target_config: str, topology: str) -> list[Any]:
    """Devices that can be compiled for but not used."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=topology).devices)


def _device_bytes(leaf: Any) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    size = leaf.dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def state_sizes(built: Any) -> dict[str, int]:
    """Bytes per device of each class of the step's arguments, and of the gradients."""
    import jax

    def total(tree: Any) -> int:
        return sum(_device_bytes(leaf) for leaf in jax.tree.leaves(tree))

    state = built.abstract_state
    sizes = {
        "parameters": total(state.params),
        "optimizer": total(state.opt_state),
        "batch": total(built.abstract_batch),
    }
    sizes["counters"] = total(state) - sizes["parameters"] - sizes["optimizer"]
    gradients = 0
    for placement in jax.tree.leaves(built.placements, is_leaf=lambda node: hasattr(node, "gradient")):
        if not hasattr(placement, "gradient"):
            placement = placement.get_value()
        shard = jax.sharding.NamedSharding(built.mesh, placement.gradient).shard_shape(placement.shape)
        size = 4
        for dim in shard:
            size *= dim
        gradients += size
    return sizes | {"gradients": gradients}


def schedule_of(built: Any) -> dict[str, str]:
    """The schedule that "auto" came to; empty where the config names one, and without a pipeline."""
    if built.pipeline is None or built.config.pipeline.schedule != "auto":
        return {}
    return {"schedule": built.pipeline.schedule.name}


def weight_shapes(built: Any) -> list[dict[str, Any]]:
    """Every parameter: path, shape without stacked dims, and the shape one device computes with."""
    import jax

    from jaxpar.names import STACKED

    out = []
    for placement in jax.tree.leaves(built.placements, is_leaf=lambda node: hasattr(node, "gradient")):
        if not hasattr(placement, "gradient"):
            placement = placement.get_value()
        local = jax.sharding.NamedSharding(built.mesh, placement.compute).shard_shape(placement.shape)
        kept = [i for i, name in enumerate(placement.axes) if name not in STACKED]
        out.append(
            {
                "path": placement.path,
                "shape": [placement.shape[i] for i in kept],
                "local": [local[i] for i in kept],
                "axes": [placement.axes[i] for i in kept],
            }
        )
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
