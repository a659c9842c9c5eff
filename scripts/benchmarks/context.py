"""Context parallelism as the compiler sees it: even work, bytes on the wire, memory that falls with the axis.

    python scripts/benchmarks/context.py

`run()` prints one row per number and returns them. Programs are compiled for absent H100s and never run.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
from compiled import Compiled, Row, compile_for, mesh_of, report
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import context
from jaxpar.context import ring
from jaxpar.context.tiles import Place

HEADS, KV_HEADS, HEAD_DIM, BYTES = 8, 4, 64, 2
MODES = ("ring", "all_to_all", "all_gather")


def run() -> list[dict[str, Any]]:
    """All rows."""
    parts = (_work(), _wire(), _hidden(), _against_sequence_parallel(), _memory())
    return report(row for part in parts for row in part)


def _work() -> Iterator[Row]:
    """Visible pairs of tokens per device, most over least."""
    for places in (2, 4, 8):
        pieces = np.split(context.stream_order(8192, places), places)
        work = [int((piece + 1).sum()) for piece in pieces]
        natural = [int((piece + 1).sum()) for piece in np.split(np.arange(8192), places)]
        detail = f"in the order of the row it would be {max(natural) / min(natural):.1f}"
        yield Row(f"causal work, most over least, ring of {places}", max(work) / min(work), (1.0, 1.1), detail)


def _plan(mode: str, size: int, groups: int, *, stage: int = 1) -> context.ContextPlan:
    """A mode on an axis; `groups` neighbours swap sequence for heads where rings and swaps are combined."""
    ring = {"ring": size, "all_to_all": 1, "all_gather": size}.get(mode, size // groups)
    return context.ContextPlan(mode, size, ring, size // ring, "", in_branches=stage > 1)


def _attention(
    mode: str, size: int, length: int, *, gradient: bool, kv_heads: int = KV_HEADS, stage: int = 1, groups: int = 1
) -> Compiled:
    """One attention of one row, bfloat16, compiled for `size` GPUs; as in a pipeline if `stage` is more than 1."""
    mesh = mesh_of({"context": size})
    plan = _plan(mode, size, groups, stage=stage)
    spec = P(None, "context", None, None)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return context.attend(
            q, k, v, None, None, scores=context.Scores(HEAD_DIM**-0.5), plan=plan, mesh=mesh, q_spec=spec, kv_spec=spec
        )

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, tuple]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(cotangent)

    sharding = NamedSharding(mesh, spec)
    make = lambda heads: jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding)  # noqa: E731
    inputs = make(HEADS), make(kv_heads), make(kv_heads)
    return compile_for(backward, mesh, *inputs, make(HEADS)) if gradient else compile_for(attend, mesh, *inputs)


def _wire() -> Iterator[Row]:
    """Bytes that one device sends in the forward pass, over the textbook's."""
    length = 8192
    for mode in MODES:
        for size in (2, 4, 8):
            head = length // size * HEAD_DIM * BYTES  # one head of a device's tokens
            kv_heads = math.lcm(KV_HEADS, size) if mode == "all_to_all" else KV_HEADS
            textbook = {
                "ring": (size - 1) * 2 * KV_HEADS * head,
                "all_gather": (size - 1) * 2 * KV_HEADS * head,
                "all_to_all": (size - 1) / size * 2 * (HEADS + kv_heads) * head,
            }[mode]
            for stage, where in ((1, ""), (2, " in a pipeline")) if mode == "ring" else ((1, ""),):
                found = sum(_attention(mode, size, length, gradient=False, stage=stage).wire_bytes.values())
                yield Row(f"bytes sent over the textbook's, {mode}{where}, {size} GPUs", found / textbook, (0.99, 1.01))
    for groups in (2, 4):
        # The swap in a group, with KV heads repeated to divide; then a ring of groups, each device with its heads.
        head, kv_heads, ring = length // 8 * HEAD_DIM * BYTES, math.lcm(KV_HEADS, groups), 8 // groups
        swaps = (groups - 1) / groups * 2 * (HEADS + kv_heads) * head
        textbook = swaps + (ring - 1) * 2 * kv_heads * head
        found = sum(_attention("ring_all_to_all", 8, length, gradient=False, groups=groups).wire_bytes.values())
        name = f"bytes sent over the textbook's, ring_all_to_all, {ring} x {groups} GPUs"
        yield Row(name, found / textbook, (0.99, 1.01))


def _hidden() -> Iterator[Row]:
    """Share of the ring's transfers that attention waits for, forward and backward, by the dry run's clock."""
    for length in (32_768, 131_072):
        moved = _attention("ring", 8, length, gradient=True).timeline.collectives
        exposed, total = (sum(getattr(row, name) for row in moved) for name in ("exposed_s", "time_s"))
        yield Row(f"exposed share of the ring's transfers, {length} tokens, 8 GPUs", exposed / total, (0.0, 0.25))


def _against_sequence_parallel() -> Iterator[Row]:
    """One layer at 10 240 tokens: all-to-all attention against the gathers and scatters of Megatron."""
    length, size, width = 10_240, 8, HEADS * HEAD_DIM
    found = sum(_attention("all_to_all", size, length, gradient=True).wire_bytes.values())
    # Two gathers and two scatters of the stream forward, as many backward (Korthikanti et al., arXiv:2205.05198).
    megatron = 8 * (size - 1) / size * length * width * BYTES
    yield Row("all-to-all bytes over Megatron sequence parallelism, 10k tokens", found / megatron, (0.0, 0.6))


def _memory() -> Iterator[Row]:
    """Temporary bytes x the axis over those of one device with the same kernel: at most 1.1 where they fall with it.

    Of forward and backward of two rematerialised layers of attention, without the gradients of the weights, which are
    the same on every axis. All keys and values are with every device under all_gather, so it has no rows.
    """
    for length in (32_768, 131_072):
        for kv_heads in (32, 8):
            alone = _layers("ring", 1, length, kv_heads)
            for mode, size in itertools.product(("ring", "all_to_all"), (2, 4, 8)):
                found = _layers(mode, size, length, kv_heads) * size / alone
                name = f"temp bytes x axis over one GPU's, {mode}, {length} tokens, {kv_heads} KV heads, {size} GPUs"
                yield Row(name, found, (0.0, 1.1))
            for groups in (2, 4) if length == 32_768 else ():
                found = _layers("ring_all_to_all", 8, length, kv_heads, groups) * 8 / alone
                name = f"temp bytes x axis over one GPU's, ring_all_to_all {8 // groups} x {groups}"
                yield Row(f"{name}, {length} tokens, {kv_heads} KV heads", found, (0.0, 1.1))


def _layers(mode: str, size: int, length: int, kv_heads: int, groups: int = 1) -> int:
    """Temporary bytes of two layers of 32 heads of 128 features in a narrow stream, bfloat16."""
    heads, width, head_dim = 32, 512, 128
    mesh, plan = mesh_of({"context": size}), _plan(mode, size, groups) if size > 1 else None
    scores, spec = context.Scores(head_dim**-0.5), P(None, "context", None, None)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if plan is None:
            place = Place(jnp.arange(length), None)
            return ring.whole(q, k, v, place, place, None, None, scores)
        return context.attend(q, k, v, None, None, scores=scores, plan=plan, mesh=mesh, q_spec=spec, kv_spec=spec)

    @jax.checkpoint
    def layer(stream: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("BTD,DHK->BTHK", stream, weight) for weight in weights[:3])
        return stream + jnp.einsum("BTHK,HKD->BTD", attend(q, k, v), weights[3]), None

    def backward(stream: jax.Array, weights: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda stream: jax.lax.scan(layer, stream, weights)[0], stream)
        return out, *pull(cotangent)

    def make(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    into = [make(P(), 2, width, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    stream = make(P(None, "context"), 1, length, width)
    return compile_for(backward, mesh, stream, (*into, make(P(), 2, heads, head_dim, width)), stream).temp_bytes


if __name__ == "__main__":
    run()
