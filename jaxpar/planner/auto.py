"""The layout of a training run chosen by the planner, for the devices that the run has (`train.py --layout=auto`).

By the closed form alone: it takes seconds and gives every process of a run, and every restart, the same answer.
`scripts/plan.py` compiles the best few as well and writes a config file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpar.config import Config
from jaxpar.dryrun.prepare import prepare
from jaxpar.dryrun.targets import TARGETS, GpuTarget, find_target
from jaxpar.errors import UserError
from jaxpar.planner.plan import Search, mesh_words, plan

# How a word of the name that a driver gives its device begins -> target; the first match counts.
DEVICE_KINDS: dict[str, str] = {
    "H200": "h200",
    "H100": "h100",
    "B200": "b200",
    "GB200": "b200",
    "L40S": "l40s",
    "A100-SXM4-40GB": "a100-40g",
    "A100-PCIE-40GB": "a100-40g",
    "A100": "a100-80g",
}


def with_planned_layout(config: Config, gpu: str | None, report: Callable[[str], None]) -> Config:
    """`config` with the planner's layout for the devices of this run; tells `report` what it is and why.

    `gpu` is the kind to plan for; None: what the devices are.

    Raises:
        UserError: the devices are of no known kind, or nothing fits.
    """
    import jax

    devices = jax.devices()
    target = find_target(gpu) if gpu is not None else target_of_device(devices[0].device_kind)
    prepared = prepare(_with_vocabulary(config), len(devices), automatic=True)
    best = plan(prepared, target, len(devices), search_options=Search(compile=False)).best
    report(
        f"layout for {len(devices)} x {target.name}, in place of the config's parallel, pipeline, accumulation and "
        f"remat: {mesh_words(best.layout)}\n  {best.reason} (estimate, closed form: {best.report.step_time_s:.3g} s a "
        f"step, {best.report.peak_bytes / 2**30:.1f} GiB per GPU; scripts/plan.py compiles the best few)"
    )
    chosen = best.config
    return dataclasses.replace(
        config, parallel=chosen.parallel, pipeline=chosen.pipeline, accumulation=chosen.accumulation, remat=chosen.remat
    )


def target_of_device(kind: str) -> GpuTarget:
    """The GPU that a driver names like this, such as "NVIDIA H100 80GB HBM3".

    Raises:
        UserError: it is none of those a plan can be made for.
    """
    name = next((name for part, name in DEVICE_KINDS.items() if f" {part}" in f" {kind.upper()}"), None)
    if name is None:
        known = ", ".join(target.name for target in TARGETS)
        raise UserError(
            f"--layout=auto: the devices are of the kind {kind!r}, which is no GPU that a plan can be made for; name "
            f"the one to plan for: --gpu={known.split(', ')[1]} (known: {known}; or a .json file)"
        )
    return find_target(name)


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None:
        return config
    from jaxpar.data import required_vocab

    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=required_vocab(config)))
