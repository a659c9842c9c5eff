"""What the loop tells about steps that no log line falls on."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import loop
from jaxpar.config import Config, OptimizerConfig
from jaxpar.loop import NonFiniteError, Run, run_steps


def run_of(skipped: list[int], tokens: list[int], *, max_skipped: int = 3) -> tuple[Run, list[str]]:
    """A run whose steps report these counters; it logs step 1, every tenth and the last."""
    said: list[str] = []
    idle = lambda what: contextlib.nullcontext()  # noqa: E731

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        i = int(state.step)
        total = sum(count > 0 for count in skipped[: i + 1])
        values = {"loss": 1.0, "tokens": tokens[i], "skipped": skipped[i], "skipped_total": total}
        return SimpleNamespace(step=i + 1), {name: jnp.asarray(value) for name, value in values.items()}

    made: Any = Run(
        config=Config(steps=len(skipped), log_interval=10, optimizer=OptimizerConfig(max_skipped=max_skipped)),
        step_fn=step, evaluate=None, state=SimpleNamespace(step=0), loader=SimpleNamespace(next_batch=dict, state=dict),
        checkpoints=SimpleNamespace(wait=lambda: None, steps=lambda: [4], save=lambda *args: None),
        writer=SimpleNamespace(write=lambda step, row: None),
        progress=SimpleNamespace(advance=lambda step: None, log=lambda step, row: None, message=said.append),
        throughput=SimpleNamespace(
            interval=lambda steps, tokens: SimpleNamespace(as_metrics=dict), pause=idle
        ),
        watch=SimpleNamespace(
            finished=lambda step: None, stop_requested=lambda step: False, busy=idle, waiting=idle
        ),
    )  # fmt: skip
    return made, said


class Fetched:
    """A value on a device that tells when it comes to the host."""

    def __init__(self, value: Any, tell: Callable[[], None]) -> None:
        self.value, self.tell = value, tell

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.tell()
        return np.asarray(self.value, dtype)

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def item(self) -> Any:
        return np.asarray(self).item()

    def tolist(self) -> Any:
        return np.asarray(self).tolist()


def test_nothing_is_fetched_between_log_lines():
    run, _ = run_of([0] * 25, [8] * 25)
    honest, taken, fetched = run.step_fn, 0, set()

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        nonlocal taken
        state, metrics = honest(SimpleNamespace(step=state.step.value), batch)
        taken = state.step
        return SimpleNamespace(step=on_device(taken)), {name: on_device(value) for name, value in metrics.items()}

    def on_device(value: Any) -> Fetched:
        return Fetched(value, lambda: fetched.add(taken))

    run.step_fn, run.state = step, SimpleNamespace(step=on_device(0))
    run_steps(run)
    assert fetched == {0, 1, 10, 20, 25}


def test_steps_between_log_lines_are_told_of():
    run, said = run_of([0, 0, 1, 0, 0, 0, 1, 2, 0, 0], [8, 8, 8, 8, 0, 8, 8, 8, 8, 8])
    run_steps(run)
    assert said == [
        "warning: step 5 had no trained token and updated nothing",
        "warning: steps 3, 7, 8 not finite: 2 skipped in a row, 3 in all",
    ]


def test_a_streak_between_log_lines_stops_the_run():
    run, _ = run_of([0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0], [8] * 11)
    with pytest.raises(NonFiniteError, match=r"at step 10: 3 steps in a row, from step 4 on.*step 7 was finite"):
        run_steps(run)


def test_a_streak_that_goes_on_leaves_every_checkpoint_good():
    run, _ = run_of([0] * 5 + list(range(1, 6)), [8] * 10)
    with pytest.raises(NonFiniteError, match=r"5 steps in a row.*checkpoint \(4\) are from before step 6"):
        run_steps(run)


class Loss:
    """A loss that a device has or still owes."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def is_ready(self) -> bool:
        return self.done

    def block_until_ready(self) -> None:
        self.done = True


def test_a_step_is_finished_when_its_loss_is_there(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ahead: Any = loop._Ahead()
    owed = [Loss(False) for _ in range(4)]
    ahead.add(1, owed[0])
    assert ahead.finished() is None, "the devices owe it still"
    ahead.add(2, owed[1])
    ahead.add(3, owed[2])
    assert owed[0].done, "the loop waits for a step before it is three ahead"
    assert ahead.finished() == 1
    owed[1].done = True
    assert ahead.finished() == 2


def test_simulated_devices_owe_nothing():
    ahead: Any = loop._Ahead()
    ahead.add(1, Loss(False))
    assert ahead.finished() == 1
