"""The GPUs a dry run can compile for: what the compiler must know, peak rates, link speeds, watts and price.

Figures are from public data sheets (dense rates, one direction of a link). A user's own GPU is a JSON file
that names a base and the fields that differ; `target_config_file` there points to the
`*gpu_target_config.pbtxt` that `XLA_FLAGS=--xla_dump_to=DIR` writes on a real device.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from jaxpar.errors import UserError


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """One kind of GPU in its usual server."""

    name: str
    compute_capability: tuple[int, int]
    sms: int
    clock_ghz: float
    l2_bytes: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    threads_per_sm: int
    memory_bytes: int  # usable by a program, as the driver reports it
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float  # as bf16 where the GPU has no fp8 units
    f32_flops_per_s: float  # TF32: what XLA uses by default for float32 matmuls on these GPUs
    nvlink_bytes_per_s: float  # per GPU, one direction; PCIe peer copies where there is no NVLink
    network_bytes_per_s: float  # per GPU, one direction
    pcie_bytes_per_s: float
    watts: float  # board power
    price_per_hour: float  # US dollars per GPU and hour, a round rental price
    fpus_per_sm: int = 128
    gpus_per_node: int = 8
    target_config_file: str | None = None

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak of a matmul whose operands have this HLO dtype."""
        if dtype.startswith(("f8", "f4")):
            return self.fp8_flops_per_s
        if dtype in ("bf16", "f16"):
            return self.bf16_flops_per_s
        if dtype == "f64":
            return self.f32_flops_per_s / 8
        return self.f32_flops_per_s

    def target_config(self, memory_bytes: int | None = None) -> str:
        """Text of XLA's GpuTargetConfig; `memory_bytes` replaces the memory limit its scheduler works with."""
        if self.target_config_file is not None:
            return Path(self.target_config_file).read_text()
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_sm_bytes}
  shared_memory_per_block_optin: {self.shared_per_block_bytes}
  threads_per_core_limit: {self.threads_per_sm}
  core_count: {self.sms}
  fpus_per_core: {self.fpus_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.hbm_bytes_per_s)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {memory_bytes if memory_bytes is not None else self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{self.name}"
"""


_T = 1e12
_A100 = GpuTarget(
    name="a100-80g",
    compute_capability=(8, 0),
    sms=108,
    clock_ghz=1.41,
    l2_bytes=41_943_040,
    shared_per_sm_bytes=167_936,
    shared_per_block_bytes=166_912,
    threads_per_sm=2048,
    memory_bytes=85_100_000_000,
    hbm_bytes_per_s=2.039e12,
    bf16_flops_per_s=312 * _T,
    fp8_flops_per_s=312 * _T,
    f32_flops_per_s=156 * _T,
    nvlink_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    pcie_bytes_per_s=25e9,
    watts=400,
    price_per_hour=1.5,
    fpus_per_sm=64,
)
_H100 = GpuTarget(
    name="h100",
    compute_capability=(9, 0),
    sms=132,
    clock_ghz=1.98,
    l2_bytes=52_428_800,
    shared_per_sm_bytes=233_472,
    shared_per_block_bytes=232_448,
    threads_per_sm=2048,
    memory_bytes=84_930_000_000,
    hbm_bytes_per_s=3.352e12,
    bf16_flops_per_s=989 * _T,
    fp8_flops_per_s=1979 * _T,
    f32_flops_per_s=495 * _T,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    pcie_bytes_per_s=55e9,
    watts=700,
    price_per_hour=2.5,
)

TARGETS: tuple[GpuTarget, ...] = (
    _A100,
    _H100,
    dataclasses.replace(
        _H100,
        name="h200",
        l2_bytes=62_914_560,
        memory_bytes=150_100_000_000,
        hbm_bytes_per_s=4.8e12,
        price_per_hour=3.0,
    ),
    dataclasses.replace(
        _H100,
        name="b200",
        compute_capability=(10, 0),
        sms=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        memory_bytes=191_500_000_000,
        hbm_bytes_per_s=8.0e12,
        bf16_flops_per_s=2250 * _T,
        fp8_flops_per_s=4500 * _T,
        f32_flops_per_s=1100 * _T,
        nvlink_bytes_per_s=900e9,
        watts=1000,
        price_per_hour=4.5,
    ),
    dataclasses.replace(
        _A100,
        name="l40s",
        compute_capability=(8, 9),
        sms=142,
        clock_ghz=2.52,
        l2_bytes=100_663_296,
        shared_per_sm_bytes=102_400,
        shared_per_block_bytes=101_376,
        threads_per_sm=1536,
        memory_bytes=47_800_000_000,
        hbm_bytes_per_s=8.64e11,
        bf16_flops_per_s=362 * _T,
        fp8_flops_per_s=733 * _T,
        f32_flops_per_s=183 * _T,
        nvlink_bytes_per_s=25e9,
        fpus_per_sm=128,
        watts=350,
        price_per_hour=1.0,
    ),
    dataclasses.replace(
        _A100, name="a100-40g", memory_bytes=42_300_000_000, hbm_bytes_per_s=1.555e12, price_per_hour=1.2
    ),
)


def find_target(name: str) -> GpuTarget:
    """The built-in GPU of this name, or the one a JSON file describes.

    Raises:
        UserError: the name is unknown, or the file is not a valid description.
    """
    by_name = {target.name: target for target in TARGETS}
    name = {"a100": "a100-80g", "h100-sxm": "h100"}.get(name.lower(), name)
    if name.lower() in by_name:
        return by_name[name.lower()]
    if name.endswith(".json"):
        return _load_target(Path(name), by_name)
    near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(f"--gpu={name}: not a known GPU.{hint} Known: {', '.join(by_name)}; or the path of a .json file.")


def _load_target(path: Path, by_name: dict[str, GpuTarget]) -> GpuTarget:
    if not path.is_file():
        raise UserError(f"--gpu={path}: there is no such file")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: found a {type(values).__name__}, wanted an object of GpuTarget fields")
    base = values.pop("base", None)
    if base not in by_name:
        raise UserError(f'{path}: "base" is {base!r}, wanted one of {", ".join(by_name)}')
    known = {field.name for field in dataclasses.fields(GpuTarget)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(f"{path}: unknown field {', '.join(unknown)}; fields are {', '.join(sorted(known))}")
    values.setdefault("name", path.stem)
    default = by_name[base]
    for key, value in values.items():
        wanted = getattr(default, key)
        number = isinstance(wanted, (int, float))
        if number and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise UserError(f"{path}: {key} is {value!r}, wanted a positive number such as {wanted!r}")
    if "compute_capability" in values:
        values["compute_capability"] = tuple(values["compute_capability"])
    config_file = values.get("target_config_file")
    if config_file is not None and not Path(config_file).is_file():
        raise UserError(f"{path}: target_config_file {config_file!r} does not exist")
    return dataclasses.replace(default, **values)
