"""The step against a hand-written one, the bytes of its arguments, the memory of its creation, the start-up time.

The floor is a single-file transformer step that knows nothing of jaxpar: plain dictionaries, no names, no rules. Both
run the same sizes in turn, and a step is divided by its neighbour, so a machine that slows for a while slows both. With
data 8 a device gets 1,024 tokens per step; the last row of steps has 256, where the update of all parameters on every
device weighs most, and with it the skip of steps that are not finite, which the hand-written step does not have.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.build import Built, build
from jaxpar.config import Config, ModelConfig, OptimizerConfig, ParallelConfig
from jaxpar.contract import class_bytes
from jaxpar.layout_check import put, random_batch

L, D, H, K, F, V, T, B = 4, 128, 4, 32, 384, 512, 128, 64
ROUNDS = 21
LAYOUTS = {  # degrees, devices, rows of the global batch
    "1 device": ({"data": 1}, 1, B),
    "data 8": ({"data": 8}, 8, B),
    "data 4 x tensor 2": ({"data": 4, "tensor": 2}, 8, B),
    "data 8, ZeRO-3": ({"data": 8, "zero": 3}, 8, B),
    "data 8, 256 tokens a device": ({"data": 8}, 8, B // 4),
}


def run() -> list[dict[str, Any]]:
    """Print every row as it comes and return them."""
    rows = []
    for row in _rows():
        mark = "ok" if row["found"] <= row["limit"] else "ABOVE"
        print(f"{row['name']:58} {row['found']:8.3f}  at most {row['limit']:<6.3g} {mark}", flush=True)
        rows.append(row)
    return rows


def _rows() -> Iterator[dict[str, Any]]:
    yield from _steps()
    yield from _arguments()
    yield _init()
    yield _imports()
    yield _help()


def _row(name: str, found: float, limit: float) -> dict[str, Any]:
    return {"name": name, "found": found, "limit": limit}


def _config(parallel: dict[str, Any], rows: int = B) -> Config:
    return Config(
        seq_len=T, global_batch=rows, precision="float32",
        model=ModelConfig(num_layers=L, embed_dim=D, num_heads=H, head_dim=K, mlp_dim=F, vocab_size=V),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(schedule="constant"),
    )  # fmt: skip


def _steps() -> Iterator[dict[str, Any]]:
    for name, (parallel, count, rows) in LAYOUTS.items():
        built = build(_config(parallel, rows), jax.devices()[:count])
        batch = put(built, random_batch(built.config))
        ours = _Runner(
            built.step.lower(built.abstract_state, built.abstract_batch).compile(), built.init(jax.random.key(0)), batch
        )
        floor = _hand_written(built, batch)
        for runner in (ours, floor):
            runner.run()
        ratios = []
        for i in range(ROUNDS):
            pair = {runner: runner.run() for runner in ((ours, floor) if i % 2 else (floor, ours))}
            ratios.append(pair[ours] / pair[floor])
        yield _row(f"step time / hand-written step, {name}", statistics.median(ratios), 1.05)


class _Runner:
    def __init__(self, step: Callable, state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def run(self) -> float:
        """Seconds of one step."""
        begun = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - begun


def _hand_written(built: Built, batch: Any) -> _Runner:
    """The same model, loss and AdamW by hand, with the shardings one would write for this mesh."""
    mesh, zero3 = built.mesh, built.config.parallel.zero == 3
    fsdp, tensor = ("data" if zero3 else None), "tensor"
    specs = {
        "table": P(tensor, fsdp), "head": P(fsdp, tensor), "norm": P(fsdp), "norm1": P(None, fsdp),
        "norm2": P(None, fsdp), "q": P(None, fsdp, tensor), "k": P(None, fsdp, tensor), "v": P(None, fsdp, tensor),
        "o": P(None, tensor, None, fsdp), "gate": P(None, fsdp, tensor), "up": P(None, fsdp, tensor),
        "down": P(None, tensor, fsdp),
    }  # fmt: skip
    shapes = {
        "table": (V, D), "head": (D, V), "norm": (D,), "norm1": (L, D), "norm2": (L, D), "q": (L, D, H, K),
        "k": (L, D, H, K), "v": (L, D, H, K), "o": (L, H, K, D), "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D),
    }  # fmt: skip
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.device_put(
            jnp.ones(shape) if "norm" in name else 0.02 * jax.random.normal(key, shape), shardings[name]
        )
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    moments = jax.jit(optimizer.init)(params)
    moments = optax.tree.map_params(
        optimizer, jax.device_put, moments, shardings,
        transform_non_params=lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P())),
    )  # fmt: skip
    kept = jax.tree.map(lambda leaf: leaf.sharding, (params, moments))
    step = jax.jit(_plain_step(optimizer, mesh), donate_argnums=0, out_shardings=(kept, None))
    return _Runner(step.lower((params, moments), batch).compile(), (params, moments), batch)


def _plain_step(optimizer: optax.GradientTransformation, mesh: Any) -> Callable:
    def rows(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(params: Any, batch: Any) -> jax.Array:
        angles = batch["positions"][..., None] * 10_000.0 ** -(jnp.arange(0, K, 2) / K)
        cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
        same = batch["segment_ids"][:, None, :, None] == batch["segment_ids"][:, None, None, :]

        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            h = norm(x, p["norm1"])
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
            y = jax.nn.dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, mask=same, is_causal=True)
            x = rows(x + jnp.einsum("bthk,hkd->btd", y, p["o"]))
            h = norm(x, p["norm2"])
            return rows(x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]), None

        blocks = {name: value for name, value in params.items() if name not in ("table", "head", "norm")}
        x, _ = jax.lax.scan(layer, rows(params["table"][batch["tokens"]]), blocks)
        logits = norm(x, params["norm"]) @ params["head"]
        picked = jnp.where(jnp.arange(V) == batch["targets"][..., None], logits, 0.0).sum(-1)
        nll = jax.nn.logsumexp(logits, -1) - picked
        return (nll * batch["weights"]).sum() / batch["weights"].sum()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        size = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / size), grads)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "grad_norm": size}

    return step


def _arguments() -> Iterator[dict[str, Any]]:
    """Bytes that the compiled step takes per device, over the analytic ones."""
    for zero in (0, 1, 2, 3):
        built = build(_config({"data": 4, "tensor": 2, "zero": zero}))
        compiled = built.step.lower(built.abstract_state, built.abstract_batch).compile()
        stats = compiled.memory_analysis()
        assert stats is not None
        batch = sum(4 * B * T // 4 for _ in built.abstract_batch)
        promised = sum(class_bytes(built.abstract_state).values()) + batch
        yield _row(f"argument bytes per device / analytic, ZeRO-{zero}", stats.argument_size_in_bytes / promised, 1.0)


def _init() -> dict[str, Any]:
    """Largest array in the compiled, ZeRO-3 initialisation over the largest shard that a device should hold."""
    built = build(_config({"data": 8, "zero": 3}))
    text = built.init.lower(jax.random.key(0)).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r" f32\[([\d,]+)\]", text)]
    largest_shard = L * D * F // 8
    return _row("largest array in init / largest parameter shard", max(sizes) / largest_shard, 1.0)


def _cpu_seconds(code: str) -> float:
    probe = f"import time; {code}; print(time.process_time())"
    # With the bytecode cached, as pip leaves it for the packages that this is compared with; the first run writes it.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=env)
    return float(run.stdout.split()[-1])


def _imports() -> dict[str, Any]:
    codes = ("import jaxpar; jaxpar.train, jaxpar.make_mesh", "import flax.nnx, optax")
    ours, floor = (min(times) for times in zip(*([_cpu_seconds(code) for code in codes] for _ in range(7))))
    return _row("import of jaxpar's trainer / flax + optax", ours / floor, 1.2)


def _help() -> dict[str, Any]:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "scripts/train.py", "--help"], capture_output=True, check=True)
    return _row("seconds of train.py --help", time.perf_counter() - begun, 1.0)
