"""Does a layout change the maths? A config's mesh against one device: loss, every gradient, replicas, checkpoint bytes.

The model is the config's own, shrunk to a size that a laptop runs in seconds and in float32, with everything that
decides the maths kept: family, head ratios, norms, positions, tying, loss extras, accumulation, ZeRO, schedule.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.build import Built, build
from jaxpar.config import Config, MoeConfig, ParallelConfig, PipelineConfig
from jaxpar.context_plan import choose
from jaxpar.mesh import AXES
from jaxpar.models.loss import Sums
from jaxpar.step import row_keys_of
from jaxpar.tree import named_leaves

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Largest relative errors of a layout against one device."""

    loss: float
    gradients: dict[str, float]  # by parameter name
    differing_replicas: tuple[str, ...]  # parameters whose copies are not bit-equal after a step

    @property
    def worst_gradient(self) -> float:
        """Largest over all leaves."""
        return max(self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether everything is within the fixed tolerances."""
        exact = self.loss <= LOSS_TOLERANCE and self.worst_gradient <= GRADIENT_TOLERANCE
        return exact and not self.differing_replicas


def check_layout(config: Config) -> Comparison:
    """Compare the config's own mesh with one device; `parallel` must fit the devices that jax sees.

    Errors are max|a - b| / max|b| per leaf. Raises `UserError` for a layout that cannot be built.
    """
    small = shrunk(config)
    return compare(small, build(small))


def compare(config: Config, built: Built) -> Comparison:
    """Compare an already shrunk config, built on its mesh, with one device."""
    batch = random_batch(config)
    reference = reference_of(config)
    built_one = build(reference, jax.devices()[:1])
    loss, gradients = loss_and_gradients(built_one, batch)
    other_loss, other_gradients = loss_and_gradients(built, batch)
    return Comparison(
        loss=relative_error(np.asarray(other_loss), np.asarray(loss)),
        gradients=gradient_errors(other_gradients, gradients),
        differing_replicas=_differing_replicas(built, batch),
    )


def reference_of(config: Config) -> Config:
    """The same maths in its plainest form: one device, no accumulation, no pipeline, layers scanned and kept."""
    return dataclasses.replace(
        config,
        accumulation=1,
        parallel=ParallelConfig(data=1),
        pipeline=PipelineConfig(),
        model=dataclasses.replace(config.model, scan_layers=True),
        remat="none",
    )


def shrunk(config: Config) -> Config:
    """A small float32 copy of the config that its mesh still divides."""
    model = config.model
    degree = {axis: max(getattr(config.parallel, axis), 1) for axis in AXES}
    heads, kv_heads = _few_heads(model.num_heads, model.kv_heads, degree["tensor"], degree["context"])
    unit = math.lcm(8 * degree["tensor"], _product(degree, "data", "context", "expert"))
    width = unit * max(32 // unit, 1)
    plan = choose(config, context=degree["context"], tensor=degree["tensor"], stage=degree["stage"])
    parallel = config.parallel if plan is None else dataclasses.replace(config.parallel, context_mode=plan.mode)
    seq_len = math.lcm(32, 2 * degree["context"] * degree["tensor"])
    wanted_layers = max(2, degree["stage"] * config.pipeline.chunks, len(model.window_pattern))
    small = dataclasses.replace(
        model,
        num_layers=min(model.num_layers, wanted_layers),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        mlp_dim=2 * width,
        vocab_size=97,
        vocab_multiple=math.lcm(degree["stage"] * degree["tensor"], 8),
        max_position=seq_len if model.positions == "learned" else None,
        window=None if model.window is None else min(model.window, seq_len // 4),
        attention="xla",
        query_scale=None,
        moe=_few_experts(model.moe, degree["expert"], width),
    )
    pipeline = dataclasses.replace(config.pipeline, microbatches=_microbatches(config))
    rows = config.accumulation * _product(degree, "replica", "data", "expert") * (pipeline.microbatches or 1)
    chunk = seq_len // 2 if config.loss.chunk_tokens else None
    return dataclasses.replace(
        config,
        model=small,
        parallel=parallel,
        seq_len=seq_len,
        global_batch=rows,
        pipeline=pipeline,
        precision="float32",
        loss=dataclasses.replace(config.loss, chunk_tokens=chunk),
    )


def _few_heads(heads: int, kv_heads: int, tensor: int, context: int) -> tuple[int, int]:
    """As few heads as keep the group size, how KV heads meet the tensor axis (split, or repeated), and context."""
    group = heads // kv_heads
    groups = lambda n: math.gcd(context, n * group // tensor)  # devices that swap sequence for heads  # noqa: E731
    wanted = [2 * tensor, tensor, *range(3 * tensor, kv_heads, tensor), kv_heads]
    few = next(n for n in wanted if kv_heads % n == 0 and groups(n) == groups(kv_heads))
    return few * group, few


def _few_experts(moe: MoeConfig, expert_axis: int, width: int) -> MoeConfig:
    """As few and as small experts as keep the choice: groups, experts per token, more than one expert per shard."""
    if not moe.num_experts:
        return moe
    unit = math.lcm(expert_axis, moe.num_groups)
    wanted = max(2 * moe.experts_per_token, 2 * unit)
    few = min(moe.num_experts, -(-wanted // unit) * unit)
    return dataclasses.replace(moe, num_experts=few, expert_dim=width, first_dense=min(moe.first_dense, 1))


def _product(degree: dict[str, int], *axes: str) -> int:
    return math.prod(degree[axis] for axis in axes)


def _microbatches(config: Config) -> int | None:
    """Two rounds through the stages show what many would; a table from a file is for as many as it is."""
    stages = config.parallel.stage
    if stages > 1 and config.pipeline.schedule.endswith(".csv"):
        return config.pipeline.microbatches or 2 * stages
    return min(config.pipeline.microbatches or 2 * stages, 2 * stages) if stages > 1 else None


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows of random tokens: very uneven numbers of trained tokens, all but the first row end in padding."""
    rng = np.random.default_rng(seed)
    rows, length = config.global_batch, config.seq_len
    tokens = rng.integers(0, config.model.true_vocab, (rows, length + 1)).astype(np.int32)
    cut = rng.integers(1, length, (rows, 1))
    second = np.arange(length) >= cut  # every row packs two documents
    weights = (np.arange(length) < rng.integers(0, length + 1, (rows, 1))).astype(np.float32)
    weights[0] = 1.0
    end = rng.integers(3 * length // 4, length, (rows, 1))
    end[0] = length
    real = np.arange(length) < end
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights * real,
        "positions": (np.where(second, np.arange(length) - cut, np.arange(length)) * real).astype(np.int32),
        "segment_ids": ((1 + second) * real).astype(np.int32),
    }


def loss_and_gradients(
    built: Built, batch: dict[str, np.ndarray], params: Any = None
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss and mean gradients of a batch on a built layout, as whole numpy arrays by name.

    `params` in the layout's own arrangement; None: freshly initialised.
    """
    if params is None:
        params = built.init(jax.random.key(built.config.seed)).params
    dropout = built.config.model.dropout > 0

    def run(params: Any, batch: Any) -> tuple[Sums, Any]:
        keys = row_keys_of(built.config.seed, jnp.int32(0), batch["tokens"].shape[0]) if dropout else None
        return built.grad_fn(params, batch, keys, jnp.float32(1.0))

    sums, gradients = jax.jit(run)(params, put(built, batch))
    tokens = max(float(sums.tokens), 1.0)
    named = named_leaves(built.to_natural(gradients))
    return float(sums.loss) / tokens, {name: np.asarray(leaf, np.float32) / tokens for name, leaf in named.items()}


def put(built: Built, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The batch on the layout's devices."""
    return {name: jax.device_put(value, built.batch_sharding) for name, value in batch.items()}


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """max|got - wanted| / max|wanted|; an array of zeros is compared absolutely."""
    largest = float(np.abs(wanted).max(initial=0.0))
    return float(np.abs(got - wanted).max(initial=0.0)) / (largest or 1.0)


def gradient_errors(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative error of every leaf.

    Some gradients are zero in exact arithmetic (a key bias without rotary positions shifts all scores alike), so both
    sides are rounding noise and have no relative error. A leaf below 1e-6 of the largest gradient counts as zero,
    and then the other side must be that small too.
    """
    assert set(got) == set(wanted), set(got) ^ set(wanted)
    noise = 1e-6 * max(float(np.abs(value).max(initial=0.0)) for value in wanted.values())
    zeros = {name for name in wanted if max(np.abs(a[name]).max(initial=0.0) for a in (got, wanted)) <= noise}
    return {name: 0.0 if name in zeros else relative_error(got[name], value) for name, value in wanted.items()}


def _differing_replicas(built: Built, batch: dict[str, np.ndarray]) -> tuple[str, ...]:
    """Parameters whose copies on several devices are not bit-equal after one step."""
    state, _ = built.step(built.init(jax.random.key(built.config.seed)), put(built, batch))
    return tuple(name for name, leaf in named_leaves(state.params).items() if not _copies_agree(leaf))


def _copies_agree(array: jax.Array) -> bool:
    first: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        data = np.asarray(shard.data)
        if not np.array_equal(first.setdefault(str(shard.index), data), data):
            return False
    return True
