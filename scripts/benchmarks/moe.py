"""Mixture of experts: FLOPs of the compiled program over those of the routed tokens, and time over a dense layer.

    python scripts/benchmarks/moe.py

`run()` prints one row per number and returns them. FLOPs and bytes are of programs compiled for absent H100s.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
from compiled import Row, compile_for, mesh_of, report
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import expert_parallel
from jaxpar.models.experts import Across, Experts, feed
from jaxpar.models.layers import Activation

# name -> (tokens of one device, embed, expert hidden, experts, per token): one device's share of a batch
SIZES = {
    "Mixtral 8x7B": (4096, 4096, 14_336, 8, 2),
    "Qwen3 30B-A3B": (4096, 2048, 768, 128, 8),
}
SILU = Activation("silu")
ALL = P(("data", "expert"), None, None)


def run() -> list[dict[str, Any]]:
    """All rows."""
    return report(row for part in (_flops(), _wire(), _time()) for row in part)


def _flops() -> Iterator[Row]:
    """Matmul FLOPs of forward and backward on one GPU; the loop of later rounds counted as running once."""
    for name, (tokens, width, hidden, experts, k) in SIZES.items():
        mesh = mesh_of({"one": 1})
        make: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))

        def step(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: Experts, experts: int = experts) -> Any:
            run = lambda x, weights, w: feed(x, chosen, weights, w, experts, SILU)  # noqa: E731
            y, pull = jax.vjp(run, x, weights, w)
            return y, pull(y)

        bf16 = jnp.bfloat16
        into, out = make((experts, width, hidden), bf16), make((experts, hidden, width), bf16)
        found = compile_for(
            step, mesh, make((tokens, width), bf16), make((tokens, k), jnp.int32), make((tokens, k), jnp.float32),
            Experts(into, into, out),
        ).flops  # fmt: skip
        routed = 3 * 3 * 2 * tokens * k * width * hidden
        dense = f"a dense product over all experts would be {experts / k:.0f}"
        yield Row(f"compiled over routed FLOPs, {name}", found / routed, (1.0, 1.25), dense)


def _wire() -> Iterator[Row]:
    """Bytes of the first round's two all-to-alls over those of the routed tokens."""
    tokens, width, hidden, experts, k = SIZES["Qwen3 30B-A3B"]
    mesh = mesh_of({"data": 1, "expert": 8, "tensor": 1})

    def layer(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: Experts) -> jax.Array:
        def kernel(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: Experts, across: tuple) -> jax.Array:
            flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
            y = feed(flat(x), flat(chosen), flat(weights), w, experts, SILU, Across(*across))
            return y.reshape(x.shape)

        split: Any = P("expert")
        specs = Experts(split, split, split)
        return expert_parallel.run_experts(
            kernel, x, chosen, weights, w, mesh=mesh, x_spec=ALL, y_spec=ALL, experts_specs=specs
        )

    rows: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, ALL))
    split: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P("expert")), dtype=jnp.bfloat16)
    found = compile_for(
        layer, mesh, rows((8, tokens, width), jnp.bfloat16), rows((8, tokens, k), jnp.int32),
        rows((8, tokens, k), jnp.float32),
        Experts(split((experts, width, hidden)), split((experts, width, hidden)), split((experts, hidden, width))),
    )  # fmt: skip
    ideal = 2 * 7 / 8 * tokens * k * width * 2
    yield Row("bytes sent over routed bytes, forward, 8 GPUs", found.wire_bytes["all-to-all"] / ideal, (1.0, 1.25))


def _time() -> Iterator[Row]:
    """Forward and backward on this machine's CPU, random choices, over a dense MLP of equal active FLOPs."""
    tokens, width, hidden, experts, k = 2048, 256, 1024, 8, 2
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, width))
    weights, chosen = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[1], (tokens, experts))), k)
    make = lambda *shape: 0.05 * jax.random.normal(keys[2], shape)  # noqa: E731
    w = Experts(make(experts, width, hidden), make(experts, width, hidden), make(experts, hidden, width))
    dense = make(width, k * hidden), make(width, k * hidden), make(k * hidden, width)

    def routed(x: jax.Array, w: Experts, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        return feed(x, chosen, weights, w, experts, SILU).sum()

    def plain(x: jax.Array, w: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return ((jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]).sum()

    ours, theirs = _paired_s(
        jax.jit(jax.grad(routed, (0, 1))), (x, w, chosen, weights), jax.jit(jax.grad(plain, (0, 1))), (x, dense)
    )
    yield Row("time over a dense layer of equal active FLOPs, CPU", ours / theirs, (0.0, 1.3), f"{theirs * 1e3:.0f} ms")


def _paired_s(a: Callable, a_inputs: tuple, b: Callable, b_inputs: tuple) -> tuple[float, float]:
    """Median seconds of both, run in turns so that a busy machine slows both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(12):
        for function, inputs, own in ((a, a_inputs, times[0]), (b, b_inputs, times[1])):
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if number > 1:
                own.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    run()
