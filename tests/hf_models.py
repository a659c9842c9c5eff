"""The reference checkpoints of tests/hf_data and what is computed from them, once per session."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.build import Built, build
from jaxpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig
from jaxpar.hf import files
from jaxpar.hf.family import family_of
from jaxpar.hf.load import Plan, leaf_axes, load_params, read_model
from jaxpar.hf.save import file_tensor
from jaxpar.layout_check import loss_and_gradients, relative_error
from jaxpar.weights import Weights, load_arranged

DATA = Path(__file__).with_name("hf_data")
NAMES = sorted(path.name for path in DATA.iterdir())
BATCH_KEYS = ("tokens", "targets", "weights", "positions", "segment_ids")


def model_of(folder: Path) -> ModelConfig:
    """The model of a folder, with a vocabulary padded to a multiple of 16 (53 to 64)."""
    return dataclasses.replace(read_model(folder), vocab_multiple=16)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Arrays that transformers computed."""
    with np.load(DATA / name / "reference.npz") as arrays:
        return dict(arrays)


def batch_of(name: str) -> dict[str, np.ndarray]:
    return {key: reference(name)[key] for key in BATCH_KEYS}


@functools.cache
def built_for(name: str, pipeline: bool = False, mode: Any = "auto", **parallel: int) -> Built:
    """The model in float32 on a mesh; one device without degrees."""
    degrees: dict[str, Any] = {"data": 1, "context_mode": mode} | parallel
    config = Config(
        model=model_of(DATA / name),
        precision="float32",
        seq_len=24,
        global_batch=2,
        parallel=ParallelConfig(**degrees),
        remat="full" if pipeline and model_of(DATA / name).moe.first_dense else "none",
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2) if pipeline else PipelineConfig(),
    )
    count = math.prod(size for axis, size in parallel.items() if axis != "zero")
    return build(config, jax.devices()[:count])


@functools.cache
def params_of(name: str) -> Any:
    """Parameters on one device, read from the folder."""
    return load_params(DATA / name, model_of(DATA / name), built_for(name).abstract_state.params)


@jax.jit
def logits(params: Any, batch: Any) -> jax.Array:
    """float32 logits; compiled once per model."""
    return params.logits(batch)


def loss_and_named_gradients(name: str, built: Built) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss, and gradients by the names and in the shapes of the file."""
    model = built.config.model
    params = load_arranged(built, Weights(DATA / name, model))
    loss, gradients = loss_and_gradients(built, batch_of(name), params)
    plan = plan_of(DATA / name, model, built_for(name).abstract_state.params)
    named = {}
    for tensor in plan.tensors:
        values = [true_rows(gradients[piece.leaf], plan, piece.leaf) for piece in tensor.pieces]
        for file_name, numbers in tensor.numbered(plan.sizes):
            named[file_name] = file_tensor(tensor, plan, values, numbers)
    return loss, named


def plan_of(folder: Path, model: ModelConfig, params: Any) -> Plan:
    return Plan.make(family_of(files.read_config(folder)), model, leaf_axes(params))


def true_rows(value: np.ndarray, plan: Plan, leaf: str) -> np.ndarray:
    axes = plan.axes_and_like[leaf][0]
    return value.take(range(plan.sizes[leaf]["vocab"]), axes.index("vocab")) if "vocab" in axes else value


def assert_is_reference(name: str, built: Built) -> None:
    """Loss within 1e-5 and every gradient within 1e-3 of the largest entry of transformers' own."""
    loss, gradients = loss_and_named_gradients(name, built)
    wanted = reference(name)
    assert abs(loss - wanted["loss"]) <= 1e-5 * abs(wanted["loss"])
    assert {f"grad/{key}" for key in gradients} == {key for key in wanted if key.startswith("grad/")}
    errors = {key: relative_error(value, wanted[f"grad/{key}"]) for key, value in gradients.items()}
    assert not {key: error for key, error in errors.items() if not error <= 1e-3}
