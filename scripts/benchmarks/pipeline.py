"""Pipeline numbers as ratios within one run: prediction, bubble, other ways to pipeline, memory and compile time.

`run()` prints one row per number and returns them; needs 8 (simulated) devices. Every row says what it should be.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import pipeline

from .pipeline_ways import Model

STAGES = 4
SLEEP_S = 0.08  # F, B and W of one microbatch on one stage
SLEEPERS = (("gpipe", 1), ("1f1b", 1), ("fused", 1), ("fused", 2), ("interleaved", 2), ("zb_h1", 1))


@dataclasses.dataclass(frozen=True)
class Row:
    """One number: `found` is right when it is at most `limit`."""

    name: str
    found: float
    limit: float
    detail: str

    def line(self) -> str:
        """For a terminal."""
        mark = "ok" if self.found <= self.limit else "ABOVE"
        return f"{self.name:58} {self.found:8.3f}  at most {self.limit:<6.3g} {mark:6} {self.detail}"


def run() -> list[dict[str, Any]]:
    """Print every row as it comes; return them as dicts."""
    rows = []
    for row in (*_predictions(), *_memory_and_compile_time(), *_other_ways()):
        print(row.line(), flush=True)
        rows.append(dataclasses.asdict(row))
    return rows


def _predictions() -> Iterator[Row]:
    """Stages that sleep instead of computing, so that two cores can play any number of devices."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES])
    # What a tick costs besides its actions is measured on stages that hardly sleep, and given to the simulator.
    overhead_s = _sleeping_step_s(mesh, pipeline.fused(STAGES, 8), 0.0) / pipeline.fused(STAGES, 8).ticks
    costs = pipeline.Costs(SLEEP_S, SLEEP_S, SLEEP_S, tick_overhead=overhead_s)
    for name, chunks in SLEEPERS:
        schedule = pipeline.named(name, stages=STAGES, microbatches=8, chunks=chunks)
        measured, predicted = _sleeping_step_s(mesh, schedule, SLEEP_S), pipeline.simulate(schedule, costs).lockstep_s
        yield Row(
            f"|step time / prediction - 1|, {name}, chunks {chunks}", abs(measured / predicted - 1), 0.10,
            f"{measured:.2f} s against {predicted:.2f} s",
        )  # fmt: skip
    schedule = pipeline.fused(STAGES, 32, 2)
    yield Row(
        "bubble in lock-step, fused, chunks 2, M=32", pipeline.simulate(schedule).bubble_lockstep, 0.06, "simulator"
    )
    measured, predicted = _sleeping_step_s(mesh, schedule, SLEEP_S), pipeline.simulate(schedule, costs).lockstep_s
    detail = f"{measured:.2f} s against {predicted:.2f} s"
    yield Row("|step time / prediction - 1|, fused, chunks 2, M=32", abs(measured / predicted - 1), 0.10, detail)


def _sleeping_step_s(mesh: Mesh, schedule: pipeline.Schedule, duration_s: float) -> float:
    """Shortest step time of a schedule whose F, B and W each sleep."""
    stage_s = duration_s / schedule.chunks

    def sleep(x: jax.Array) -> jax.Array:
        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(stage_s)
            return np.asarray(x)

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def stage(w: jax.Array, x: jax.Array) -> jax.Array:
        return sleep(x) * w

    def forward(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return stage(w, x), w

    def backward(w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx = sleep(dy) * w
        return sleep(dx).sum(), dx  # one after the other, also when both are in B

    stage.defvjp(forward, backward)
    function = pipeline.value_and_grad(
        lambda w, x, side: stage(w, x),
        lambda ends, batch: batch["x"] * ends["scale"],
        lambda ends, y, batch: (y.sum() * ends["scale"], ()),
        schedule,
        mesh,
    )
    params = pipeline.Params({"scale": jnp.ones(())}, jnp.ones((schedule.stages, schedule.chunks)))
    batch = {"x": jnp.ones((schedule.microbatches, 4))}
    return _shortest_s(jax.jit(function), params, batch, repeats=3)


def _memory_and_compile_time() -> Iterator[Row]:
    """Compiled programs of one model with more and more microbatches."""
    model = Model()
    mesh = _mesh()
    seconds: dict[int, float] = {}
    for name in ("fused", "1f1b"):
        sizes = {}
        for m in (8, 16, 32, 64):
            program, compile_s, _ = _compiled(model.executor(mesh, name, m), mesh, model, m)
            sizes[m], seconds[m] = _temp_bytes(program), min(compile_s, seconds.get(m, compile_s))
        detail = ", ".join(f"M={m}: {size / 2**20:.2f} MiB" for m, size in sizes.items())
        yield Row(f"growth of temp bytes from M=8 to 64, {name}", max(sizes.values()) / sizes[8] - 1, 0.02, detail)
    detail = f"{seconds[64]:.1f} s, {seconds[8]:.1f} s"
    yield Row("compile time, M=64 / M=8", seconds[64] / seconds[8], 1.15, detail)


def _other_ways() -> Iterator[Row]:
    """The executor against a circular pipeline by vmap and roll, and against GPipe by autodiff."""
    model, mesh = Model(), _mesh()
    few, many = 8, 32
    ways: dict[str, Callable[[int], Any]] = {
        "executor": lambda m: model.executor(mesh, "fused", m, chunks=2),
        "vmap + roll": lambda m: model.vmap_roll(mesh, m, chunks=2),
        "GPipe by autodiff": lambda m: model.gpipe_by_autodiff(mesh, m),
    }
    programs = {name: {m: _compiled(way(m), mesh, model, m) for m in (few, many)} for name, way in ways.items()}
    losses = {name: float(jax.tree.leaves(p[few][0](*p[few][2])[0])[0]) for name, p in programs.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4 * max(losses.values()), losses
    # in turns, so that other work on the machine hits all alike
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name in ways:
            program, _, arguments = programs[name][few]
            times[name].append(_once_s(program, *arguments))
    seconds = {name: min(taken) for name, taken in times.items()}
    temp = {name: _temp_bytes(p[many][0]) for name, p in programs.items()}
    for name, limit in (("vmap + roll", 0.85), ("GPipe by autodiff", 1.05)):
        detail = f"{seconds['executor']:.2f} s against {seconds[name]:.2f} s"
        yield Row(f"step time, executor / {name}, S=4, M={few}", seconds["executor"] / seconds[name], limit, detail)
    for name in ("vmap + roll", "GPipe by autodiff"):
        detail = f"{temp['executor'] / 2**20:.1f} MiB against {temp[name] / 2**20:.1f} MiB"
        yield Row(f"temp bytes, executor / {name}, S=4, M={many}", temp["executor"] / temp[name], 0.5, detail)


def _compiled(way: Any, mesh: Mesh, model: Any, microbatches: int) -> tuple[jax.stages.Compiled, float, Any]:
    """The compiled gradient function of `way` = (function, params), its compile seconds and its arguments."""
    function, params = way
    batch = jax.device_put(model.batch(microbatches), NamedSharding(mesh, P(None, "data")))
    start = time.perf_counter()
    program = jax.jit(function).lower(params, batch).compile()
    return program, time.perf_counter() - start, (params, batch)


def _temp_bytes(program: jax.stages.Compiled) -> int:
    report = program.memory_analysis()
    assert report is not None
    return report.temp_size_in_bytes


def _mesh() -> Mesh:
    return jax.make_mesh((STAGES, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def _once_s(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def _shortest_s(function: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    jax.block_until_ready(function(*arguments))
    return min(_once_s(function, *arguments) for _ in range(repeats))
