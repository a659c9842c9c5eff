"""The Python loop: next batch, step, and at intervals log, evaluate and save.

Between two log intervals nothing is fetched from the devices; the loop runs a few steps ahead of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config
from jaxpar.data import Loader
from jaxpar.errors import UserError
from jaxpar.lines import Lines
from jaxpar.metrics import MetricsWriter, Progress, Throughput
from jaxpar.runtime.exits import RETRY
from jaxpar.state import TrainState


class StepFn(Protocol):
    """A compiled train step."""

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """State and batch to the next state and metrics."""
        ...


class Watch(Protocol):
    """What the processes around the loop want to know; see runtime/."""

    def stop_requested(self, step: int) -> bool:
        """Whether every process should save after `step` and leave."""
        ...

    def finished(self, step: int) -> None:
        """Step `step` is done."""
        ...

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Context in which no step is expected to finish: compiling, evaluating, saving."""
        ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Context that is part of a step: waiting for the next batch."""
        ...


@dataclasses.dataclass
class Run:
    """Everything the loop drives. Only `state` changes."""

    config: Config
    step_fn: StepFn
    evaluate: Callable[[TrainState], dict[str, float]] | None
    state: TrainState
    loader: Loader
    checkpoints: Checkpoints
    writer: MetricsWriter
    progress: Progress
    throughput: Throughput
    watch: Watch
    samples: Lines | None = None  # written by the main process only


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the loop ended: steps done, exit code, and what was logged last."""

    step: int
    exit_code: int
    metrics: dict[str, float]
    history: list[dict[str, Any]]


def run_steps(run: Run) -> Outcome:
    """Train from the state's step to `config.steps`, or until the data or a signal ends it."""
    config, step = run.config, int(run.state.step)
    history: list[dict[str, Any]] = []
    saved_at = step if step else -1
    since_log, ahead = _SinceLog(), _Ahead()
    exit_code = 0
    while step < config.steps:
        try:
            with run.watch.waiting("data"):
                batch = run.loader.next_batch()
        except StopIteration:
            exit_code = _data_ended(run, step)
            break
        run.state, metrics = run.step_fn(run.state, batch)
        step += 1
        ahead.add(step, metrics["loss"])
        _log_samples(run, step)
        since_log.add(metrics)
        run.progress.advance(step)
        last = step == config.steps
        every = config.eval_interval if run.evaluate else None
        evaluate_now = every is not None and (step % every == 0 or last)
        if evaluate_now or step % config.log_interval == 0 or last or step == 1:
            history.append(_log(run, step, *since_log.fetch(), evaluate_now))
        if (finished := ahead.finished()) is not None:
            run.watch.finished(finished)
        if config.checkpoint.interval and step % config.checkpoint.interval == 0:
            _save(run, step, history)
            saved_at = step
        if not last and run.watch.stop_requested(step):
            run.progress.message(f"stop requested: saving step {step} and leaving")
            exit_code = RETRY
            break
    if saved_at != step:
        _save(run, step, history)
    with run.watch.busy("save"), run.throughput.pause("save"):
        run.checkpoints.wait()
    return Outcome(step, exit_code, history[-1] if history else {}, history)


class _Ahead:
    """Bounds how many steps the devices owe, and knows the last one that they have done.

    A step counts as finished when its loss is there, not when it is handed to the devices.
    """

    def __init__(self) -> None:
        # Simulated devices share few cores: no use in running ahead.
        self._most = 0 if jax.default_backend() == "cpu" else 2
        self._owed: collections.deque[tuple[int, Any]] = collections.deque()
        self._finished: int | None = None

    def add(self, step: int, loss: jax.Array) -> None:
        self._owed.append((step, loss))
        while len(self._owed) > self._most:
            self._wait()

    def finished(self) -> int | None:
        """The last step that is done; waits for none."""
        while self._owed and self._owed[0][1].is_ready():
            self._wait()
        return self._finished

    def _wait(self) -> None:
        step, loss = self._owed.popleft()
        jax.block_until_ready(loss)
        self._finished = step


class _SinceLog:
    """The metrics of the last step, and of every step since the last log line what none of them may hide."""

    EVERY = ("tokens", "skipped")

    def __init__(self) -> None:
        self._last: Mapping[str, jax.Array] = {}
        self._every: list[list[jax.Array]] = []

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        self._last = metrics
        self._every.append([metrics[name] for name in self.EVERY])

    def fetch(self) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Values of the last step, and one per step of `EVERY`; the one fetch of the interval."""
        last, every = jax.device_get((dict(self._last), self._every))
        self._every = []
        values = {name: np.asarray(value).tolist() for name, value in last.items()}
        return values, {name: [float(row[i]) for row in every] for i, name in enumerate(self.EVERY)}


def _log(
    run: Run, step: int, values: dict[str, Any], every: dict[str, list[float]], evaluate_now: bool
) -> dict[str, Any]:
    """Evaluate if asked, write and show one row of the metrics of a step; stops a run that no longer learns."""
    tokens, skipped = int(sum(every["tokens"])), [int(count) for count in every["skipped"]]
    rates = run.throughput.interval(steps=max(len(skipped), 1), tokens=tokens)
    row = {**values, "interval_tokens": tokens, **rates.as_metrics()}
    if evaluate_now:
        assert run.evaluate is not None
        with run.watch.busy("evaluation"), run.throughput.pause("evaluation"):
            row |= run.evaluate(run.state)
    run.writer.write(step, row)
    run.progress.log(step, row)
    first = step - len(skipped) + 1
    if empty := [first + i for i, count in enumerate(every["tokens"]) if count == 0]:
        run.progress.message(f"warning: {_steps(empty)} had no trained token and updated nothing")
    if bad := [first + i for i, count in enumerate(skipped) if count]:
        run.progress.message(
            f"warning: {_steps(bad)} not finite: {max(skipped)} skipped in a row, {values['skipped_total']} in all"
        )
    if max(skipped, default=0) >= run.config.optimizer.max_skipped:
        run.checkpoints.wait()
        raise NonFiniteError(_diverged(run, step, first + skipped.index(max(skipped)), max(skipped)))
    return {"step": step, **row}


def _steps(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"step{'s' if len(numbers) > 1 else ''} {shown}"


class NonFiniteError(RuntimeError):
    """Training diverged: too many non-finite steps in a row."""


def _diverged(run: Run, step: int, last: int, skipped: int) -> str:
    """Why a run stops at `step`: `skipped` steps up to `last` changed nothing."""
    first = last - skipped + 1
    saved = ", ".join(map(str, run.checkpoints.steps())) or "none"
    told = (
        f"stopped at step {step}: {skipped} steps in a row, from step {first} on, had a loss or gradient that is not "
        f"finite (optimizer.max_skipped = {run.config.optimizer.max_skipped}). A skipped step changes no parameter and "
        "no optimizer state"
    )
    if last < step:
        return f"{told}; step {last + 1} was finite again (checkpoints: {saved})"
    return f"{told}, so those in every checkpoint ({saved}) are from before step {first}"


def _save(run: Run, step: int, history: list[dict[str, Any]]) -> None:
    evaluated = next((row for row in reversed(history) if "eval_loss" in row and row["step"] == step), None)
    extra: dict[str, Any] = {"data": run.loader.state(), "precision": run.config.precision}
    if evaluated is not None:
        extra["metrics"] = {"eval_loss": evaluated["eval_loss"]}
    with run.watch.busy("save"), run.throughput.pause("save"):
        run.checkpoints.save(step, run.state, extra)


def _data_ended(run: Run, step: int) -> int:
    """Exit code when the data ended early; raises unless the config allows it."""
    message = f"the data ended after {step} of {run.config.steps} steps"
    if run.config.allow_fewer_steps:
        run.progress.message(message)
        return 0
    _save(run, step, [])
    run.checkpoints.wait()
    raise UserError(
        f"{message}; the state is saved. Set data.repeat=true for further epochs, a smaller `steps`, "
        "or allow_fewer_steps=true"
    )


def _log_samples(run: Run, step: int) -> None:
    if run.samples is not None:
        run.samples.append({"step": step, "samples": run.loader.sample_ids()})


def evaluator(
    evaluate: Callable[[Any, Any], Any], batches: Callable[[], Iterator[Any]], bytes_per_token: float | None
) -> Callable[[TrainState], dict[str, float]]:
    """A function from the state to evaluation metrics: one token-weighted mean over all batches."""

    def run(state: TrainState) -> dict[str, float]:
        """Mean loss per token, perplexity and bits per byte of the held-out rows."""
        parts = [evaluate(state.params, batch) for batch in batches()]
        loss = tokens = 0.0
        for part in jax.device_get(parts):
            loss, tokens = loss + float(part.loss), tokens + float(part.tokens)
        mean = loss / max(tokens, 1.0)
        values = {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0)), "eval_tokens": tokens}
        if bytes_per_token:
            values["eval_bits_per_byte"] = mean / math.log(2) / bytes_per_token
        return values

    return run
