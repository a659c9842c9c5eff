"""A campaign of faults against a real training run, compared with an unbroken one.

Two runs train the same tiny model on the same data: `reference` is left alone, `broken` is hurt once per round (killed,
frozen, its files damaged, its disk filled) and started again, as one process or as a gang, in turn. After every round
each step that the broken run logged must have the sample ids of the reference and its loss within `LOSS_TOLERANCE`.
Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.runtime.supervisor import newest_step

LOSS_TOLERANCE = 1e-5  # relative; runs with other process counts add in another order
START_TIMEOUT_S = 600.0
DISK_BYTES = 6 * 2**20
STEP_TIMEOUT_S = 15.0  # a busy machine may need seconds for a step
FREEZE_SLACK_S = 30.0  # a frozen process is found within the step timeout; the rest is for the ends of the others
CONFIG = '''"""Tiny model of the fault campaign, with everything on that a resume could get wrong."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            steps={steps},
            global_batch=8,
            seq_len=32,
            accumulation=2,
            log_interval=1,
            precision="float32",
            model=dict(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, dropout=0.1),
            optimizer=dict(warmup_steps=10),
            checkpoint=dict(interval=4, keep=2, max_failed_saves=1000),
            runtime=dict(step_timeout_s={step_timeout_s}, heartbeat_s=120, compile_cache={cache!r}),
            metrics=dict(tensorboard=False, progress=False),
            data=dict(
                source="mixture",
                sources=(
                    dict(name="even", source="files", files=({even!r},), weight=0.7),
                    dict(name="odd", source="files", files=({odd!r},), weight=0.3),
                ),
                phases=((0, (0.7, 0.3)), ({steps} // 8, (0.3, 0.7))),
                eval_fraction=0.0,
                log_samples=True,
            ),
        )
    )
'''


class LostError(Exception):
    """A fault that the run did not survive, or survived differently; the message says how."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Size of a campaign; it stops after `rounds` faults or `minutes`, whichever comes first."""

    folder: Path
    rounds: int = 50
    minutes: float = 60.0
    steps: int = 1200  # so many that a busy campaign hurts the run before it ends
    processes: int = 2
    devices: int = 4  # in all
    seed: int = 0


@dataclasses.dataclass
class Score:
    """Faults so far, of `rounds` that were asked for."""

    rounds: int
    injected: int = 0
    survived: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """One line for people."""
        early = (
            "" if self.injected == self.rounds else f"; the time ended it early, {self.rounds} rounds were asked for"
        )
        return f"faults injected {self.injected}, survived {self.survived}, lost {len(self.lost)}{early}"

    @property
    def passed(self) -> bool:
        """Whether every round that was asked for ran and was survived."""
        return self.survived == self.rounds


def run(plan: Plan, say: Callable[[str], None]) -> Score:
    """Run the campaign and return its score; everything it writes is below `plan.folder`."""
    deadline = time.monotonic() + 60.0 * plan.minutes
    folder = plan.folder.absolute()
    config = prepare(folder, plan)
    say(f"reference: {plan.steps} steps, unbroken")
    began = time.monotonic()
    with Training(plan, config, folder / "reference", gang=False) as training:
        if training.wait() != 0:
            raise LostError(f"the unbroken run failed:\n{training.tail()}")
    say(f"reference: done in {time.monotonic() - began:.0f} s")
    rng, score = random.Random(plan.seed), Score(plan.rounds)
    with _small_disk(folder / "broken" / "checkpoints") as has_disk:
        if not has_disk:
            say("a full disk needs the permission to mount a small one: left out")
        broken = Broken(plan, config, folder, rng)
        kinds = [kind for kind in FAULTS if kind != "disk full" or has_disk]
        order: list[str] = []
        while score.injected < plan.rounds and time.monotonic() < deadline:
            if not order:  # every kind comes up before one comes again
                order = rng.sample(kinds, len(kinds))
            kind, gang = order.pop(), bool(score.injected % 2)
            score.injected += 1
            began = time.monotonic()
            try:
                story = FAULTS[kind](broken, gang)
                steps = broken.compare()
                score.survived += 1
                say(f"round {score.injected}: {story}; {steps} steps equal ({time.monotonic() - began:.0f} s)")
            except LostError as error:
                score.lost.append(f"round {score.injected}, {kind}: {error}")
                say(f"LOST {score.lost[-1]}")
                broken.start_over()
    say(score.line())
    return score


class Training:
    """One start of a training command, whose output a thread reads."""

    def __init__(self, plan: Plan, config: Path, workdir: Path, *, gang: bool, restarts: int = 0) -> None:
        root = Path(__file__).parents[2]
        train = [str(root / "scripts" / "train.py"), f"--config={config}", f"--workdir={workdir}"]
        if gang:
            share = plan.devices // plan.processes
            head = [str(root / "scripts" / "launch.py"), f"--processes={plan.processes}"]
            command = [*head, f"--devices-per-process={share}", f"--max-restarts={restarts}", "--", *train]
        else:
            command = [*train, f"--devices={plan.devices}"]
        self.gang = gang
        self.workdir = workdir
        self.lines: list[str] = []
        self.step = -1  # last step that the output told of
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.ranks().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=5.0)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Exit code, at the end."""
        try:
            code = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LostError(f"the run did not end within {timeout_s:.0f} s:\n{self.tail()}") from None
        self._reader.join(timeout=5.0)
        return code

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the condition holds; it is asked again after every line and 100 times a second."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not condition():
                if self.process.poll() is not None:
                    self._news.wait(0.5)
                    if condition():
                        return
                    raise LostError(f"the run ended with {self.process.returncode} before {what}:\n{self.tail()}")
                if time.monotonic() > deadline:
                    raise LostError(f"waited {timeout_s:.0f} s for {what}:\n{self.tail()}")
                self._news.wait(0.01)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank of what trains; {0: pid} for a single process."""
        if not self.gang:
            return {0: self.process.pid} if self.process.poll() is None else {}
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if entry.name.isdigit() and parent == self.process.pid:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    variables = dict(item.split(b"=", 1) for item in environment if b"=" in item)
                    found[int(variables[b"JAXPAR_PROCESS_ID"])] = int(entry.name)
        return found

    def told(self, text: str) -> bool:
        """Whether a line of the output contains `text`."""
        return any(text in line for line in self.lines)

    def tail(self) -> str:
        """The last lines of the output, and what the watchdogs said before."""
        barks = [line for line in self.lines[:-25] if "watchdog:" in line]
        return "\n".join([*barks, *self.lines[-25:]])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                if line.startswith("step "):
                    self.step = int(line.split()[1].split("/")[0])
                self._news.notify_all()


class Broken:
    """The run that is hurt."""

    def __init__(self, plan: Plan, config: Path, folder: Path, rng: random.Random) -> None:
        self.plan, self.config, self.rng = plan, config, rng
        self.workdir, self.reference = folder / "broken", folder / "reference"
        self.checkpoints = self.workdir / "checkpoints"

    def start(self, gang: bool) -> Training:
        """Start or resume a run that is to be hurt; begins anew when it is near its end."""
        if self.newest() > self.plan.steps // 4:
            self.start_over()
        return self.resume(gang)

    def resume(self, gang: bool) -> Training:
        """Go on from what is there."""
        return Training(self.plan, self.config, self.workdir, gang=gang)

    def start_over(self) -> None:
        """Remove what the run wrote."""
        for path in self.checkpoints.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.workdir.iterdir():
            if path not in (self.checkpoints, self.workdir / "cache"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def newest(self) -> int:
        """Newest finished step, or -1."""
        return newest_step(self.checkpoints)

    def trained_to(self, training: Training, ahead: int) -> None:
        """Return when the run is some steps beyond where it started."""
        first = max(self.newest(), 0)
        training.wait_for(lambda: training.step >= first + ahead, f"step {first + ahead}")

    def compare(self) -> int:
        """Steps in the logs; raises `LostError` unless they are those of the reference."""
        rows, wanted = _rows(self.workdir / "metrics.jsonl"), _rows(self.reference / "metrics.jsonl")
        losses = {row["step"]: row["loss"] for row in wanted}
        steps = [row["step"] for row in rows]
        if not steps or steps != list(range(1, len(steps) + 1)):
            raise LostError(f"metrics.jsonl does not have every step once: {steps}")
        for row in rows:
            expected = losses[row["step"]]
            if not abs(row["loss"] - expected) <= LOSS_TOLERANCE * abs(expected):
                raise LostError(f"loss of step {row['step']} is {row['loss']!r}, unbroken {expected!r}")
        samples = {row["step"]: row["samples"] for row in _rows(self.reference / "samples.jsonl")}
        rows = _rows(self.workdir / "samples.jsonl")
        # A kill between the two logs of a step leaves it in the first one alone.
        if (read := [row["step"] for row in rows]) not in (steps, [*steps, len(steps) + 1]):
            raise LostError(f"samples.jsonl does not have every step of metrics.jsonl once: {read}")
        for row in rows:
            if row["samples"] != samples[row["step"]]:
                raise LostError(f"step {row['step']} read {row['samples']}, unbroken {samples[row['step']]}")
        return len(steps)


# -- faults: each hurts the run once, and returns what it did when the run has gone on after that ---------------------


def _kill(broken: Broken, gang: bool) -> str:
    with broken.start(gang) as training:
        broken.trained_to(training, broken.rng.randint(1, 12))
        time.sleep(broken.rng.uniform(0.0, 0.1))
        who = _signal_one(broken, training, signal.SIGKILL)
        code = training.wait(60.0)
        if gang and code != 75:
            raise LostError(f"exit code {code} of the launcher after SIGKILL, not 75:\n{training.tail()}")
        at = training.step
    return f"killed {who} after step {at}" + _goes_on(broken, not gang)


def _kill_in_save(broken: Broken, gang: bool) -> str:
    with broken.start(gang) as training:
        broken.trained_to(training, broken.rng.randint(1, 6))
        training.wait_for(lambda: any(broken.checkpoints.glob("*.partial")), "a save")
        time.sleep(broken.rng.uniform(0.0, 0.1))
        who = _signal_one(broken, training, signal.SIGKILL)
        training.wait(60.0)
        left = "left a partial one" if any(broken.checkpoints.glob("*.partial")) else "it was just done"
    return f"killed {who} in a save ({left})" + _goes_on(broken, not gang)


def _freeze(broken: Broken, _: bool) -> str:
    with broken.start(True) as training:
        broken.trained_to(training, broken.rng.randint(2, 8))
        who = _signal_one(broken, training, signal.SIGSTOP)
        began = time.monotonic()
        training.wait_for(lambda: training.told("watchdog:"), f"{who} to be found", STEP_TIMEOUT_S)
        took_s = time.monotonic() - began
        code = training.wait(FREEZE_SLACK_S)
        if code != 75:
            raise LostError(f"exit code {code} after a freeze, not 75:\n{training.tail()}")
    return f"froze {who}, found after {took_s:.0f} s" + _goes_on(broken, False)


def _stop(broken: Broken, gang: bool) -> str:
    with broken.start(gang) as training:
        broken.trained_to(training, broken.rng.randint(2, 8))
        who = _signal_one(broken, training, signal.SIGTERM)
        code = training.wait(60.0)
        if code != 75 or broken.newest() != training.step:
            raise LostError(f"exit code {code}, saved {broken.newest()}, last step {training.step}:\n{training.tail()}")
    return f"stopped {who} after step {broken.newest()}" + _goes_on(broken, not gang)


def _flip(broken: Broken, gang: bool) -> str:
    with broken.start(gang) as training:
        broken.trained_to(training, 9)
        _signal_one(broken, training, signal.SIGTERM)
        training.wait(60.0)
    newest = broken.newest()
    files = sorted(path for path in (broken.checkpoints / str(newest)).rglob("*") if path.is_file())
    path = broken.rng.choice([file for file in files if file.stat().st_size])
    how = _damage(path, broken.rng)
    story = f"{how} of {path.relative_to(broken.checkpoints)}"
    return story + _goes_on(broken, gang, skipped=newest)


def _fill_disk(broken: Broken, gang: bool) -> str:
    filler = broken.checkpoints / "filler"
    with broken.start(gang) as training:
        broken.trained_to(training, 5)
        leave = broken.rng.randint(0, 150_000)  # less than a save needs: retention frees the space of one each time
        free = shutil.disk_usage(broken.checkpoints).free
        with contextlib.suppress(OSError), filler.open("wb") as file:
            file.write(bytes(max(free - leave, 0)))
        training.wait_for(lambda: training.told("was NOT saved"), "the report of a failed save", 60.0)
        at = training.step
        filler.unlink()
        before = broken.newest()
        training.wait_for(lambda: broken.newest() > before, "the next save", 60.0)
        _signal_one(broken, training, signal.SIGKILL)
        training.wait(60.0)
    return f"filled the disk before step {at}, the next save worked" + _goes_on(broken, not gang)


FAULTS: dict[str, Callable[[Broken, bool], str]] = {
    "kill": _kill,
    "kill in a save": _kill_in_save,
    "freeze": _freeze,
    "stop": _stop,
    "flipped bytes": _flip,
    "disk full": _fill_disk,
}


def _signal_one(broken: Broken, training: Training, number: signal.Signals) -> str:
    ranks = training.ranks()
    if not ranks:
        raise LostError(f"nothing to hurt, the run is gone:\n{training.tail()}")
    rank = broken.rng.choice(sorted(ranks))
    os.kill(ranks[rank], number)
    return f"process {rank} of {len(ranks)}"


def _goes_on(broken: Broken, gang: bool, skipped: int | None = None) -> str:
    """Start again, see a step finish, and stop in good order."""
    with broken.resume(gang) as training:
        training.wait_for(lambda: training.step >= 0, "a step after the fault")
        if skipped is not None and not training.told(f"checkpoint {skipped} is skipped"):
            raise LostError(f"the damaged step {skipped} was not noticed:\n{training.tail()}")
        first = training.step
        with contextlib.suppress(LostError):
            _signal_one(broken, training, signal.SIGTERM)
        code = training.wait(60.0)
        if code not in (0, 75):
            raise LostError(f"exit code {code} after the resume:\n{training.tail()}")
    return f", resumed with step {first} as {'a gang' if gang else 'one process'}"


def _damage(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flipped a bit", "overwrote a block", "cut the end", "removed"])
    if kind == "removed":
        path.unlink()
    elif kind == "cut the end":
        os.truncate(path, rng.randrange(len(data)))
    else:
        at = rng.randrange(len(data))
        if kind == "flipped a bit":
            data[at] ^= 1 << rng.randrange(8)
        else:
            block = bytes(byte ^ 0xFF for byte in data[at : at + 64])
            data[at : at + 64] = block
        path.write_bytes(bytes(data))
    return kind


# -- surroundings -----------------------------------------------------------------------------------------------------


def prepare(folder: Path, plan: Plan) -> Path:
    """Texts and config of both runs."""
    folder.mkdir(parents=True, exist_ok=True)
    if left := [name for name in ("reference", "broken") if (folder / name).exists()]:
        raise LostError(f"{folder / left[0]} exists already; give an empty folder")
    for name in ("even", "odd"):
        rng = random.Random(name)
        text = "\n\n".join(_sentences(rng) for _ in range(60))  # no two alike, or another order would pass
        (folder / f"{name}.txt").write_text(text)
    (folder / "broken" / "checkpoints").mkdir(parents=True)
    config = folder / "config.py"
    config.write_text(
        CONFIG.format(
            steps=plan.steps,
            step_timeout_s=STEP_TIMEOUT_S,
            cache=str(folder / "compile_cache"),
            even=str(folder / "even.txt"),
            odd=str(folder / "odd.txt"),
        )
    )
    return config


def _sentences(rng: random.Random) -> str:
    words = ["mesh", "axis", "layer", "token", "shard", "stage", "batch", "loss", "step", "rank", "and", "of", "the"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(30, 120))) + "."


@contextlib.contextmanager
def _small_disk(where: Path) -> Iterator[bool]:
    """Mount a small disk, if that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(where)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(where)], check=True)


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
