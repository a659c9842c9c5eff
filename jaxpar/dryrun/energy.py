"""Energy and price of a run from its step time and a few stated figures."""

from __future__ import annotations

import dataclasses

from jaxpar.dryrun.targets import GpuTarget


@dataclasses.dataclass(frozen=True)
class EnergyAssumptions:
    """None takes the GPU's own figure. PUE is what the data centre draws per watt of computer."""

    gpu_watts: float | None = None
    load: float = 0.85  # average draw of a training GPU, relative to its board power
    other_watts_per_gpu: float = 150.0  # CPUs, memory, network cards, fans
    pue: float = 1.2
    price_per_gpu_hour: float | None = None
    price_per_kwh: float = 0.10


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Estimated totals of a run."""

    hours: float
    gpu_hours: float
    energy_kwh: float
    rent_usd: float
    energy_usd: float
    assumed: dict[str, float]


def run_cost(
    gpu: GpuTarget,
    *,
    num_gpus: int,
    steps: int,
    step_s: float,
    assumed: EnergyAssumptions = EnergyAssumptions(),
) -> RunCost:
    """Totals of `steps` steps without interruptions, evaluation or saving."""
    watts = assumed.gpu_watts if assumed.gpu_watts is not None else gpu.watts
    price = assumed.price_per_gpu_hour if assumed.price_per_gpu_hour is not None else gpu.price_per_hour
    hours = steps * step_s / 3600
    gpu_hours = hours * num_gpus
    energy_kwh = gpu_hours * (watts * assumed.load + assumed.other_watts_per_gpu) * assumed.pue / 1000
    figures = dataclasses.asdict(dataclasses.replace(assumed, gpu_watts=watts, price_per_gpu_hour=price))
    return RunCost(hours, gpu_hours, energy_kwh, gpu_hours * price, energy_kwh * assumed.price_per_kwh, figures)
