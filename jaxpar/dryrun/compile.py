"""Compiles a run's train step for GPUs that are not there, in a child process, and explains what goes wrong.

Needs the compiler plugin (`pip install -e '.[dryrun]'`, about 130 MB; no GPU and no CUDA library). The parent
imports neither the plugin nor jax.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxpar import config_file
from jaxpar.config import Config
from jaxpar.dryrun.hlo import Module, read_module
from jaxpar.dryrun.shape import can_fuse_attention
from jaxpar.dryrun.targets import GpuTarget
from jaxpar.dryrun.toolchain import make_toolchain
from jaxpar.errors import UserError

DEFAULT_TIMEOUT_S = 900.0
_HUGE_MEMORY_BYTES = 1 << 50


class PluginMissingError(UserError):
    """The compiler plugin is not installed; the analytic part of a dry run still works."""


class CompileFailedError(UserError):
    """The child process ended without a program."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value in the memory that the compiler sets aside for temporaries; others may share its place at other times."""

    name: str  # instruction, with {index} into its tuple
    size_bytes: int
    offset: int
    joined: bool  # a loop's view of a value that another instruction makes


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiled train step of one run on one kind of GPU."""

    module: Module
    mesh_shape: dict[str, int]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int
    host_bytes: int
    state: dict[str, int]  # parameters, optimizer, gradients, counters, batch: bytes per device
    weights: list[dict[str, Any]]
    temporaries: list[Buffer]
    schedule: dict[str, str]  # {"schedule": name} where the config's is "auto", else empty
    lower_s: float
    compile_s: float
    peak_rss_bytes: int
    log: str

    @property
    def peak_bytes(self) -> int:
        """Device memory the step needs; donated state is counted once."""
        kept = self.output_bytes - self.alias_bytes
        return self.argument_bytes + kept + self.temp_bytes + self.generated_code_bytes


def missing_plugin() -> str | None:
    """What is missing to compile, with the command that installs it; None when nothing is."""
    if importlib.util.find_spec("jax_plugins") is not None:
        for name in ("xla_cuda13", "xla_cuda12"):
            if importlib.util.find_spec(f"jax_plugins.{name}") is not None:
                return None
    version = importlib.metadata.version("jax")
    return (
        "the XLA:GPU compiler is not installed, so nothing was compiled and the figures are closed-form estimates; "
        "about 130 MB, no GPU needed:\n"
        f"    pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} absl-py"
    )


def topology(num_gpus: int, gpus_per_node: int) -> str:
    """Partitions x hosts x devices, as the compiler wants it."""
    per_node = min(num_gpus, gpus_per_node)
    if num_gpus % per_node:
        raise UserError(
            f"--gpus={num_gpus} is not a multiple of --gpus-per-node={gpus_per_node}; "
            f"use {num_gpus // per_node * per_node} or {(num_gpus // per_node + 1) * per_node}"
        )
    return f"1x{num_gpus // per_node}x{per_node}"


def compile_step(
    config: Config,
    gpu: GpuTarget,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    unlimited_memory: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Compiles the train step of `config` for `num_gpus`.

    `unlimited_memory` tells the compiler's scheduler that memory is no concern: comparing the FLOPs with those of
    a normal compile shows whether it recomputes silently to save memory.

    Raises:
        PluginMissingError: the compiler is not installed.
        CompileFailedError: it crashed, ran out of memory or took longer than `timeout_s`.
        UserError: the config does not fit the GPUs.
    """
    missing = missing_plugin()
    if missing is not None:
        raise PluginMissingError(missing)
    request = {
        "config": config_file.to_dict(config),
        "fused_attention": can_fuse_attention(config),
        "target_config": gpu.target_config(_HUGE_MEMORY_BYTES if unlimited_memory else None),
        "topology": topology(num_gpus, gpus_per_node or gpu.gpus_per_node),
        "compiler_options": cost_option(gpu) | (compiler_options or {}),
    }
    with tempfile.TemporaryDirectory(prefix="jaxpar-dryrun-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        log = run_child(folder, timeout_s=timeout_s)
        result = json.loads((folder / "result.json").read_text())
        if "user_error" in result:
            raise UserError(*result["user_error"])
        return _read_result(result, folder, log)


def cost_option(gpu: GpuTarget) -> dict[str, Any]:
    """Asks for XLA's own cost of every operation, where it has the tables to tell: it fails on other generations."""
    return {"xla_gpu_collect_cost_model_stats": True} if gpu.compute_capability == (9, 0) else {}


def run_child(folder: Path, *, timeout_s: float, module: str = "jaxpar.dryrun.child") -> str:
    """Runs the compiling process on `folder` until its result is there; returns its log."""
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"  # the plugin compiles without ever looking for a driver
    dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_module_re=.*step.*"
    tools = make_toolchain(folder / "cuda")
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {dump} {tools}".strip()
    environment["TF_CPP_MIN_LOG_LEVEL"] = environment.get("TF_CPP_MIN_LOG_LEVEL", "1")
    command = [sys.executable, "-m", module, str(folder)]
    log_path = folder / "log.txt"
    with open(log_path, "wb") as log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CompileFailedError(
                f"the compile took longer than {timeout_s:.0f} s and was stopped; "
                "allow more with --compile-timeout=SECONDS, or compile a model with scan_layers=True"
            ) from error
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    log = log_path.read_text(errors="replace")
    if code != 0 or not (folder / "result.json").is_file():
        raise CompileFailedError(explain_exit(code, log))
    return log


def explain_exit(code: int, log: str) -> str:
    """One message about a child that ended without a result."""
    tail = "\n".join(f"    {line[:300]}" for line in log.strip().splitlines()[-8:])
    quoted = f"; its last words:\n{tail}" if tail else ""
    if code == -signal.SIGKILL or code == 137:
        return (
            "the compile was killed, most likely because this machine ran out of memory; free some, or compile "
            f"fewer layers with scan_layers=True{quoted}"
        )
    if "MemoryError" in log or "bad_alloc" in log:
        return f"the compile ran out of memory on this machine{quoted}"
    if code == -signal.SIGFPE:
        return f"the compiler crashed (SIGFPE): the target description is incomplete or has zeros in it{quoted}"
    if code < 0:
        return f"the compiler crashed ({signal.Signals(-code).name}){quoted}"
    return f"the compile failed (exit code {code}){quoted}"


def _read_result(result: dict[str, Any], folder: Path, log: str) -> CompiledStep:
    memory = result["memory"]
    return CompiledStep(
        module=read_module((folder / "module.pb").read_bytes()),
        mesh_shape=result["mesh"],
        argument_bytes=memory["argument"],
        output_bytes=memory["output"],
        alias_bytes=memory["alias"],
        temp_bytes=memory["temp"],
        generated_code_bytes=memory["generated_code"],
        host_bytes=memory["host_argument"] + memory["host_output"] + memory["host_temp"],
        state=result["state"],
        weights=result["weights"],
        temporaries=read_buffers(folder / "dump"),
        schedule=result["schedule"],
        lower_s=result["lower_s"],
        compile_s=result["compile_s"],
        peak_rss_bytes=result["peak_rss_bytes"],
        log=log,
    )


_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")


def read_buffers(dump: Path) -> list[Buffer]:
    """Values in the block of temporaries, from the compiler's buffer assignment; empty without a dump."""
    best: list[Buffer] = []
    for path in dump.glob("*buffer-assignment.txt"):
        found: list[Buffer] = []
        inside = False
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("allocation"):
                inside = "preallocated-temp" in line
            elif inside and (match := _VALUE.match(line)):
                index = match[2] if match[2] and match[2] != "{}" else ""
                found.append(Buffer(match[1] + index, int(match[4]), int(match[5]), match[3] is not None))
        if sum(one.size_bytes for one in found) > sum(one.size_bytes for one in best):
            best = found
    return sorted(best, key=lambda one: (-one.size_bytes, one.joined))


@functools.cache
def compiler_version() -> str:
    """Version of the installed compiler, for reports."""
    for name in ("jax-cuda13-pjrt", "jax-cuda12-pjrt"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"
