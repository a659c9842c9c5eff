"""A local gang of processes: started together, watched, restarted together, never left behind.

When one process ends badly the others end too, and all start again from the newest checkpoint on a fresh port. That
goes on while the run makes progress; `max_restarts` restarts without a newer checkpoint end it. A mistake of the user
(exit code 2) or a bug (1) would only happen again, so it ends the run at once. Imports no jax.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

RETRY = 75
_POLL_S = 0.05
_FOLLOW_S = 5.0  # after the first death the others have this long to end by themselves, with their own messages
_TAIL_LINES = 60
# gloo announces every connection on stderr, its lines sometimes mixed up, and no setting stops it.
_NOISE = re.compile(r"\[Gloo\]|peer ranks\. Expected number of connected")


@dataclasses.dataclass(frozen=True)
class Gang:
    """What to start: `command` is run `num_processes` times."""

    command: Sequence[str]
    num_processes: int
    devices_per_process: int | None = None  # simulated ones; None: the real devices
    max_restarts: int = 3  # in a row without a newer checkpoint
    grace_s: float = 60.0  # from a stop signal to SIGKILL


class Supervisor:
    """Runs a gang until it is done, stopped or hopeless."""

    def __init__(self, gang: Gang, *, say: Callable[[str], None] | None = None) -> None:
        self.gang = gang
        self.say = say or _to_stderr
        self.attempt = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self._tails: list[deque[str]] = []
        self._readers: list[threading.Thread] = []
        self._stopped_at: float | None = None  # when the first stop signal came
        self._checkpoints = checkpoints_of(gang.command)

    def run(self) -> int:
        """Start, watch and restart; the exit code of the run."""
        restarts, best = 0, newest_step(self._checkpoints)
        old = {number: signal.signal(number, self._on_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while True:
                first, code = self._one_attempt()
                step = newest_step(self._checkpoints)
                if code == 0 or self._stopped_at is not None or not worth_a_restart(code):
                    self._conclude(first, code)
                    return self._final(code)
                restarts, best = (0, step) if step > best else (restarts, best)
                restarts += 1
                if restarts > self.gang.max_restarts:
                    self.say(f"giving up: {self.gang.max_restarts} restarts without a newer checkpoint")
                    self._conclude(first, code)
                    return self._final(code)
                self.say(
                    f"process {first} ended with {describe(code)}; restart {restarts} of at most "
                    f"{self.gang.max_restarts} without progress, from "
                    + (f"step {step}" if step >= 0 else "the beginning")
                )
                self.attempt += 1
        finally:
            self._kill_all()
            for number, handler in old.items():
                signal.signal(number, handler)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _one_attempt(self) -> tuple[int, int]:
        """(process, exit code) of the one that decides: the first bad one, or process 0 when all are done."""
        self._start()
        first: int | None = None
        died_at = 0.0
        while True:
            codes = [process.poll() for process in self.processes]
            bad = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if bad and first is None:
                first, died_at = bad[0], time.monotonic()
            now = time.monotonic()
            late = first is not None and now - died_at > _FOLLOW_S
            overdue = self._stopped_at is not None and now - self._stopped_at > self.gang.grace_s
            if late or overdue or all(code is not None for code in codes):
                break
            time.sleep(_POLL_S)
        own_codes = [process.poll() for process in self.processes]  # before the kill turns the rest into -9
        self._kill_all()
        if first is None:  # all done, or stopped and still running after the grace time
            first = next((rank for rank, code in enumerate(own_codes) if code is None), 0)
            own_codes[first] = self.processes[first].returncode
        return decisive(first, own_codes)

    def _start(self) -> None:
        port = free_port()
        self._tails = [deque(maxlen=_TAIL_LINES) for _ in range(self.gang.num_processes)]
        self.processes, self._readers = [], []
        for rank in range(self.gang.num_processes):
            process = subprocess.Popen(
                self.gang.command,
                env=environment(self.gang, rank, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its children die with it, and Ctrl-C reaches it through us alone
                preexec_fn=_die_with_parent,
            )
            self.processes.append(process)
            assert process.stdout is not None
            assert process.stderr is not None
            plain = rank == 0
            for pipe, target in ((process.stdout, sys.stdout if plain else sys.stderr), (process.stderr, sys.stderr)):
                prefix = "" if plain and target is sys.stdout else f"[{rank}] "
                thread = threading.Thread(target=self._copy, args=(rank, pipe, target, prefix), daemon=True)
                thread.start()
                self._readers.append(thread)

    def _copy(self, rank: int, pipe: IO[bytes], target: IO[str], prefix: str) -> None:
        for raw in pipe:
            line = raw.decode(errors="replace").rstrip("\n")
            if _NOISE.search(line):
                continue
            self._tails[rank].append(line)
            with contextlib.suppress(OSError):  # a log on a full disk: go on reading, or the process would wait
                target.write(f"{prefix}{line}\n")
                target.flush()

    def _kill_all(self) -> None:
        """End what is left of every process group, and collect it."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._readers:
            thread.join(timeout=5.0)
        self._readers = []

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _on_stop(self, number: int, _: object) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self.say(f"{signal.Signals(number).name}: passing SIGTERM on; again to stop at once")
            pass_on = signal.SIGTERM
        else:
            pass_on = signal.SIGKILL
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(pass_on)

    def _conclude(self, first: int, code: int) -> None:
        if code == 0:
            return
        self.say(f"process {first} ended first, with {describe(code)}")
        if code != RETRY and len(self.processes) > 1 and self._tails[first]:
            self.say(f"the last lines of process {first}:")
            print("\n".join(self._tails[first]), file=sys.stderr, flush=True)

    def _final(self, code: int) -> int:
        if self._stopped_at is not None and code != 0:
            return RETRY
        return code if code >= 0 else RETRY if worth_a_restart(code) else 128 - code


def decisive(first: int, codes: Sequence[int | None]) -> tuple[int, int]:
    """(process, exit code) that says what to do: a bug or a mistake anywhere outweighs the peers that it took along."""
    for rank, code in enumerate(codes):
        if code in (1, 2):
            return rank, code
    return first, codes[first] or 0


def worth_a_restart(code: int) -> bool:
    """Whether starting again can help: 75, or a death by a signal (out of memory, a lost coordinator, a kill)."""
    return code == RETRY or code < 0


def describe(code: int) -> str:
    """An exit code of a child in words."""
    if code < 0:
        known = -code in list(signal.Signals)  # real-time signals have numbers only
        return signal.Signals(-code).name if known else f"signal {-code}"
    return f"exit code {code}"


def environment(gang: Gang, rank: int, port: int) -> dict[str, str]:
    """Variables of one process: who takes part, and the simulated devices if asked for."""
    env = dict(os.environ)
    env["JAXPAR_COORDINATOR"] = f"127.0.0.1:{port}"
    env["JAXPAR_NUM_PROCESSES"] = str(gang.num_processes)
    env["JAXPAR_PROCESS_ID"] = str(rank)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if gang.devices_per_process is not None:
        env["JAX_PLATFORMS"] = "cpu"
        env["JAX_NUM_CPU_DEVICES"] = str(gang.devices_per_process)
        env["NPROC"] = str(max(os.cpu_count() or 1, 2 * gang.devices_per_process))
        flags = env.get("XLA_FLAGS", "").split()
        env["XLA_FLAGS"] = " ".join(f for f in flags if not f.startswith("--xla_force_host_platform_device_count"))
    return env


def free_port() -> int:
    """A TCP port of this machine that is free now; a new one per attempt, since the old one may still linger."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def checkpoints_of(command: Sequence[str]) -> Path | None:
    """The checkpoint folder of a training command, from its `--workdir`."""
    for argument, following in zip(command, [*command[1:], ""]):
        if argument.startswith("--workdir="):
            return Path(argument.partition("=")[2]) / "checkpoints"
        if argument == "--workdir":
            return Path(following) / "checkpoints"
    return None


def newest_step(checkpoints: Path | None) -> int:
    """Newest finished step, or -1."""
    if checkpoints is None or not checkpoints.is_dir():
        return -1
    names = [entry.name for entry in checkpoints.iterdir() if entry.is_dir()]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=-1)


def _die_with_parent() -> None:
    # PR_SET_PDEATHSIG: even a supervisor that is killed with SIGKILL leaves no orphan.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launch: {line}", file=sys.stderr, flush=True)
