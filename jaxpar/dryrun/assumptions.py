"""Every number a time estimate rests on that no data sheet gives: achievable fractions, latencies, reserves.

One set per GPU kind, fitted by `jaxpar.dryrun.calibrate` to published runs; a user overrides single fields
(`--assume matmul_efficiency=0.6`) or fits a set to own runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxpar.errors import raise_together


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Fractions are of the data-sheet rate."""

    matmul_efficiency: float = 0.75  # of the bf16 or float32 peak, for large matmuls
    fp8_efficiency: float = 0.70  # of the fp8 peak
    matmul_half_size: float = 170.0  # smallest matmul dim at which half of the efficiency is reached
    attention_efficiency: float = 0.50  # of the bf16 peak, fused attention kernels
    first_flash_efficiency: float = 0.30  # the same for first-generation flash kernels
    hbm_efficiency: float = 0.70
    eager_traffic: float = 2.0  # memory traffic of unfused elementwise operations, relative to fused ones
    nvlink_efficiency: float = 0.75
    network_efficiency: float = 0.75
    pcie_efficiency: float = 0.80
    nvlink_latency_s: float = 8e-6  # per collective inside a node
    nvlink_hop_s: float = 0.7e-6  # and per further member
    network_latency_s: float = 18e-6  # per collective between nodes
    network_hop_s: float = 3e-6  # and per doubling of the number of nodes
    launch_s: float = 2e-6  # per kernel
    overlap: float = 0.85  # closed form only: part of a layer's compute that can hide its ZeRO collectives
    overlap_cost: float = 0.50  # share of hidden communication that slows compute down all the same
    memory_fraction: float = 0.92  # "fits" means peak <= fraction x device memory - reserve
    memory_reserve_bytes: int = 1_610_612_736  # CUDA context, NCCL buffers, library workspaces

    def usable_bytes(self, memory_bytes: float) -> float:
        """What a program may take of a device with this much memory."""
        return self.memory_fraction * memory_bytes - self.memory_reserve_bytes

    def rule(self) -> str:
        """The margin rule in words."""
        reserve_gib = self.memory_reserve_bytes / 2**30
        return f"fits when peak <= {self.memory_fraction:.2f} x device memory - {reserve_gib:.1f} GiB"


# Fitted to published runs (`scripts/dryrun.py --calibrate`); GPUs without a run of their own take the nearest.
_FITTED: dict[str, dict[str, float]] = {
    "h100": {
        "matmul_efficiency": 0.7481,
        "fp8_efficiency": 0.7388,
        "matmul_half_size": 176.25,
        "attention_efficiency": 0.4508,
        "first_flash_efficiency": 0.1874,
        "eager_traffic": 1.6223,
        "overlap_cost": 0.9035,
        "hbm_efficiency": 0.5631,
        "nvlink_efficiency": 0.737,
        "network_efficiency": 0.6419,
        "overlap": 0.8549,
    },
    "a100-80g": {
        "matmul_efficiency": 0.7229,
        "matmul_half_size": 168.12,
        "attention_efficiency": 0.3958,
        "first_flash_efficiency": 0.3323,
        "eager_traffic": 1.1804,
        "overlap_cost": 0.3652,
        "hbm_efficiency": 0.95,
        "nvlink_efficiency": 0.9051,
        "network_efficiency": 0.5324,
        "overlap": 0.8984,
    },
}
_NEAREST = {"h200": "h100", "b200": "h100", "l40s": "a100-80g", "a100-40g": "a100-80g"}


def default_assumptions(gpu: str) -> Assumptions:
    """The fitted set of this kind of GPU, or of its nearest relative."""
    fitted = _FITTED.get(gpu) or _FITTED.get(_NEAREST.get(gpu, ""), {})
    return dataclasses.replace(Assumptions(), **fitted)


def override(assumptions: Assumptions, settings: Iterable[str]) -> Assumptions:
    """Applies `name=value` settings.

    Raises:
        UserError: an unknown name or a value that is not a positive number.
    """
    known = {field.name for field in dataclasses.fields(Assumptions)}
    changes: dict[str, float] = {}
    problems = []
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            problems.append(f"--assume {setting}: no such assumption; known are {', '.join(sorted(known))}")
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if value < 0 or value != value:
            problems.append(f"--assume {setting}: found {text!r}, wanted a number of at least 0, such as {name}=0.7")
            continue
        changes[name] = value
    raise_together(problems)
    return dataclasses.replace(assumptions, **changes)
