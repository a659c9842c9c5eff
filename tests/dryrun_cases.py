"""Small runs that the dry-run tests compile once per session for absent H100s, and share."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import Any

import pytest

from jaxpar import config_file
from jaxpar.config import Config
from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.compile import CompiledStep, compile_step, missing_plugin
from jaxpar.dryrun.run import time_step
from jaxpar.dryrun.shape import Layout, ModelShape, layout_of, model_shape
from jaxpar.dryrun.targets import find_target
from jaxpar.dryrun.timeline import Timeline
from jaxpar.errors import UserError

# A scanned model compiles as slowly with 2 layers as with 16; with 16 the layers outweigh embedding and head.
BASE: dict[str, Any] = {
    "global_batch": 16,
    "seq_len": 512,
    "remat": "full",
    "model": {
        "family": "llama",
        "num_layers": 16,
        "embed_dim": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_dim": 2048,
        "vocab_size": 1280,
    },
}
CASES: dict[str, tuple[str, ...]] = {
    "zero0": ("parallel.zero=0", "remat=none"),
    "zero1": ("parallel.zero=1", "remat=dots"),
    "zero2": ("parallel.zero=2", "accumulation=2"),
    "zero3": ("parallel.zero=3",),
    "tied": ("parallel.zero=3", "model.tied=True"),
    "tensor": ("parallel.zero=0", "parallel.tensor=4"),
    "pipeline": (
        "parallel.stage=2",
        "parallel.tensor=2",
        "parallel.zero=1",
        "pipeline.microbatches=8",
        "pipeline.schedule=fused",
    ),
    "sequence": ("parallel.zero=3", "parallel.tensor=2", "parallel.sequence_parallel=True"),
}
NUM_GPUS = 8
COUNTERS = 8 + 24  # bytes of the optimizer's two counts and of the state's six
# The configs of the repository, and a number of GPUs that each is meant for.
GPUS = {
    "gpt2_124m": 8,
    "llama3_8b": 512,
    "llama3_70b": 512,
    "llama31_405b": 16384,
    "gpt3_175b": 1024,
    "mt_nlg_530b": 2240,
    "qwen3_8b": 256,
    "mixtral_8x7b": 64,
    "qwen3_30b_a3b": 64,
    "deepseek_v3": 1024,
    "quickstart": 8,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A compiled run with everything the checks compare."""

    config: Config
    shape: ModelShape
    layout: Layout
    step: CompiledStep
    timeline: Timeline

    def payload(self, kind: str, axis: str) -> float:
        """Bytes of one kind of collective over one axis."""
        return sum(t.payload_bytes for t in self.timeline.collectives if t.kind == kind and t.axis == axis)

    def matrix_bytes(self) -> float:
        """bf16 bytes of all weight matrices of the layers that one GPU computes with."""
        matrices = [leaf.size for leaf in self.shape.leaves() if leaf.in_layer and len(leaf.shape) > 1]
        return 2.0 * sum(matrices) * self.shape.num_layers / self.layout.tensor


def compile_case(name: str) -> Case:
    """Compiles one of `CASES`."""
    config = config_file.from_dict(BASE, CASES[name])
    gpu = find_target("h100")
    step = compile_step(config, gpu, NUM_GPUS, timeout_s=900)
    layout = layout_of(config, NUM_GPUS)
    timeline = time_step(step, model_shape(config), layout, gpu, Assumptions(), 8)
    return Case(config, model_shape(config), layout, step, timeline)


@functools.cache
def _outcome() -> dict[str, Case] | UserError:
    """All cases, compiled two at a time; a failure is kept too, so that it is not met again by every test."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        try:
            return dict(zip(CASES, pool.map(compile_case, CASES)))
        except UserError as error:
            pool.shutdown(cancel_futures=True)
            return error


def compiled_cases() -> dict[str, Case]:
    """All cases; skips the test without the compiler."""
    if missing_plugin():
        pytest.skip("the compiler plugin is not installed: pip install -e '.[dryrun]'")
    outcome = _outcome()
    if isinstance(outcome, UserError):
        pytest.fail(str(outcome))
    return outcome
