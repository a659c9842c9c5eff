"""From a config to a finished run: data, build, compile, restore, loop. Imports everything, imported by nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpar import config_file, validate
from jaxpar.build import FIRST_LOSS_SCALE, Built, build
from jaxpar.checkpoint import Checkpoints, Restored, folders
from jaxpar.config import Config
from jaxpar.contract import class_bytes, compile_step
from jaxpar.data import Data, Loader, open_data, required_vocab
from jaxpar.errors import UserError
from jaxpar.lines import Lines, truncate_after
from jaxpar.loop import Outcome, Run, evaluator, run_steps
from jaxpar.mesh import simulate_devices
from jaxpar.metrics import MetricsWriter, Progress, Throughput, peak_flops_per_s
from jaxpar.models.count import flops_per_token
from jaxpar.optim import decay_counts
from jaxpar.precision import precision
from jaxpar.report import size_text
from jaxpar.runtime import lock
from jaxpar.runtime.watch import make_watch
from jaxpar.state import LossScale, TrainState
from jaxpar.unused import unused_settings

if TYPE_CHECKING:
    from jaxpar.lora import Tuning
    from jaxpar.weights import Weights

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a notebook wants back: how it ended, the logged rows, and the live state with its functions."""

    outcome: Outcome
    state: TrainState
    built: Built

    @property
    def history(self) -> list[dict[str, float]]:
        """The logged rows, oldest first."""
        return self.outcome.history


def train(config: Config, workdir: str | Path, *, devices: int | None = None) -> Result:
    """Train `config` in `workdir`, resuming what is there; `devices` simulates that many CPU devices first.

    Raises `UserError` for a mistake in the config or the data, before anything is written.
    """
    if devices is not None:
        simulate_devices(devices)
    workdir = Path(workdir).absolute()
    config = resolved(config, len(jax.devices()))
    _check_workdir(workdir)
    weights = _initial_weights(config, workdir)
    tuning = _tuning(config)
    built = tuning.built if tuning else build(config)
    is_main = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(make_watch(config, workdir))
        with watch.busy("data"):
            data = _open(config, workdir)
        progress = stack.enter_context(_progress(config, is_main))
        _describe(config, built, data, progress.message)
        stack.enter_context(lock.held(workdir, progress.message) if is_main else contextlib.nullcontext())
        _tell_changes(config, workdir, progress.message)
        with watch.busy("compile"):
            _use_compile_cache(config, workdir)
            base = (tuning.abstract_base,) if tuning else ()
            step: Any = compile_step(built, *base)
        checkpoints = stack.enter_context(
            Checkpoints(
                workdir / "checkpoints",
                config.checkpoint,
                is_main,
                to_disk=built.to_natural if built.pipeline else None,
                from_disk=built.from_natural if built.pipeline else None,
                report=progress.message,
            )
        )
        with watch.busy("restore"):
            state, extra = _first_state(config, built, checkpoints, None if tuning else weights, progress.message)
            if tuning is not None and weights is not None:
                step, built = tuning.bind(tuning.load(weights), step)
        start = int(state.step)
        with watch.busy("loader"):  # refuses to go on with other data, so it comes before anything is written
            loader = stack.enter_context(_loader(data, config, built, extra))
        writer = stack.enter_context(_writer(config, workdir, start, is_main))
        run = Run(
            config=config,
            step_fn=step,
            evaluate=_evaluator(data, config, built),
            state=state,
            loader=loader,
            checkpoints=checkpoints,
            writer=writer,
            progress=progress,
            throughput=_throughput(config),
            watch=watch,
            samples=_samples(config, workdir, start, is_main),
        )
        outcome = run_steps(run)
        return Result(outcome, run.state, built)


def resolved(config: Config, num_devices: int) -> Config:
    """The config with the vocabulary and the mesh filled in; raises one `UserError` for everything wrong with it."""
    validate.check(config, num_devices)
    model, needed = config.model, None
    if model.vocab_size is None or config.data.source in ("python_stdlib", "files"):
        needed = required_vocab(config)
        model = dataclasses.replace(model, vocab_size=model.vocab_size or needed)
    if model.positions == "learned" and model.max_position is None:
        model = dataclasses.replace(model, max_position=config.seq_len)
    sizes = validate.resolved_degrees(config.parallel, num_devices)
    config = dataclasses.replace(config, model=model, parallel=dataclasses.replace(config.parallel, **sizes))
    validate.check(config, num_devices, needed)
    return config


def _check_workdir(workdir: Path) -> None:
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; give a folder")
    if (held := workdir / "checkpoints").exists() and not held.is_dir():
        raise UserError(
            f"{held} is a file where the folder of checkpoints belongs; move it, or choose another --workdir"
        )


def _use_compile_cache(config: Config, workdir: Path) -> None:
    folder = Path(config.runtime.compile_cache) if config.runtime.compile_cache else workdir / "compile_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def _progress(config: Config, is_main: bool) -> Progress:
    return Progress(config.steps, bar=config.metrics.progress, enabled=is_main)


def _describe(config: Config, built: Built, data: Data, say: Any) -> None:
    """The first lines of a run: data, model, mesh, memory."""
    decayed, undecayed = decay_counts(built.abstract_state.params)
    mesh = " x ".join(f"{axis} {size}" for axis, size in built.mesh.shape.items() if size > 1) or "one device"
    held = class_bytes(built.abstract_state)
    say(f"data: {data.description}")
    say(
        f"model: {config.model.family}, {decayed + undecayed:,} parameters "
        f"({decayed:,} with weight decay, {undecayed:,} without)"
    )
    say(
        f"mesh: {mesh}, ZeRO-{config.parallel.zero}; per device {size_text(held['parameters'])} of parameters, "
        f"{size_text(held['optimizer'])} of optimizer state"
    )
    for line in unused_settings(config):
        say(f"note: {line}")


def _initial_weights(config: Config, workdir: Path) -> Weights | None:
    """What `init_from` names, checked against the model; None where a run needs none."""
    if config.lora.rank and config.init_from is None:
        raise UserError(f"lora.rank = {config.lora.rank}, but init_from names no weights to adapt; set it to a folder")
    resumes = folders.steps(workdir / "checkpoints") and not config.lora.rank  # an adapter needs its base each time
    if config.init_from is None or resumes:
        return None
    from jaxpar.weights import check_same_model, open_weights

    weights = open_weights(config.init_from)
    check_same_model(weights, config.model)
    return weights


# What most runs do not need is imported where it is needed: start-up counts.
def _tuning(config: Config) -> Tuning | None:
    if not config.lora.rank:
        return None
    from jaxpar.lora import make_tuning

    return make_tuning(config)


def _open(config: Config, workdir: Path) -> Data:
    if config.data.source != "chat":
        return open_data(config, workdir)
    from jaxpar.chat import open_chat

    return open_chat(config)


def _tell_changes(config: Config, workdir: Path, say: Any) -> None:
    """Name the settings that differ from the run that this one continues; the new ones hold from here on.

    The learning rate follows the new schedule at the number of updates already applied.
    """
    path = workdir / "config.json"
    if not path.exists():
        return
    try:
        before = _flat(json.loads(path.read_text()))
    except (ValueError, AttributeError):
        say(f"{path} is damaged, so changed settings cannot be told; it is written anew")
        return
    now = _flat(json.loads(json.dumps(config_file.to_dict(config))))
    changed = [f"{key}: {before.get(key)} -> {value}" for key, value in now.items() if before.get(key) != value]
    if changed:
        say("settings changed since the last start, the new ones hold: " + "; ".join(changed))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _first_state(
    config: Config, built: Built, checkpoints: Checkpoints, weights: Weights | None, say: Any
) -> tuple[TrainState, dict[str, Any] | None]:
    """The newest checkpoint that verifies, or a fresh state: from the weights of `init_from`, or random."""
    restored = checkpoints.restore_latest(built.abstract_state)
    if restored is not None:
        finished = restored.step >= config.steps
        say(f"resuming after step {restored.step}" + (f": all {config.steps} steps are done" if finished else ""))
        return _with_own_scale(restored, config), restored.extra
    if weights is not None:
        from jaxpar.weights import start_state

        say(f"starting from {weights.folder}" + ("" if weights.step is None else f", step {weights.step}"))
        return start_state(built, weights), None
    return built.init(jax.random.key(config.seed)), None


def _with_own_scale(restored: Restored, config: Config) -> TrainState:
    """The restored state; a loss scale that another precision left behind starts anew."""
    before, now = (precision(name) for name in (restored.extra.get("precision", config.precision), config.precision))
    if before.loss_scaling == now.loss_scaling:
        return restored.state
    old = restored.state.loss_scale
    scale = jax.device_put(np.float32(FIRST_LOSS_SCALE if now.loss_scaling else 1.0), old.scale.sharding)
    return restored.state._replace(loss_scale=LossScale(scale, jax.device_put(np.int32(0), old.good.sharding)))


def _writer(config: Config, workdir: Path, start: int, is_main: bool) -> MetricsWriter:
    if is_main:
        workdir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config_file.to_dict(config), indent=2) + "\n"
        temporary = workdir / "config.json.tmp"
        try:
            temporary.write_text(text)
            temporary.replace(workdir / "config.json")
        except OSError as error:
            error.filename = error.filename or str(temporary)  # a full disk does not name it
            raise
    resume = start if start else None
    return MetricsWriter(workdir, resume_step=resume, tensorboard=config.metrics.tensorboard, enabled=is_main)


@contextlib.contextmanager
def _loader(data: Data, config: Config, built: Built, extra: dict[str, Any] | None) -> Iterator[Loader]:
    loader = Loader(
        data.train,
        config.global_batch,
        seed=config.seed,
        sharding=built.batch_sharding,
        shuffle=config.data.shuffle,
        repeat=config.data.repeat,
        state=extra["data"] if extra else None,
    )
    try:
        yield loader
    finally:
        loader.close()


def _evaluator(data: Data, config: Config, built: Built) -> Any:
    rows = data.evaluation
    if rows is None or config.eval_interval is None:
        return None

    def batches() -> Iterator[Any]:
        """Held-out batches from the first row on, at most `eval_steps` of them."""
        loader = Loader(rows, config.global_batch, seed=0, sharding=built.batch_sharding, shuffle=False, repeat=False)
        try:
            count = 0
            while config.eval_steps is None or count < config.eval_steps:
                try:
                    yield loader.next_batch()
                except StopIteration:
                    return
                count += 1
        finally:
            loader.close()

    return evaluator(built.evaluate, batches, data.bytes_per_token)


def _throughput(config: Config) -> Throughput:
    device = jax.devices()[0]
    return Throughput(
        flops_per_token=flops_per_token(config.model, config.seq_len),
        num_devices=len(jax.devices()),
        peak_flops_per_s=peak_flops_per_s(device.device_kind, config.metrics.peak_tflops),
    )


def _samples(config: Config, workdir: Path, start: int, is_main: bool) -> Lines | None:
    """The samples log, cut back to the step that the run resumes from."""
    if not (config.data.log_samples and is_main):
        return None
    path = workdir / "samples.jsonl"
    truncate_after(path, start)
    return Lines(path)
