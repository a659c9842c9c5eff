"""Host memory while a Hugging Face folder is read into shards, and while a script imports it (Linux only).

    python scripts/benchmark.py hf_load

What the process holds at its peak, beyond the shards that stay, as a ratio to the largest tensor. The import keeps no
shards; what it holds for a tiny model (Python, jax, Orbax) is taken off.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BOUND = 1.3


def run() -> list[dict[str, Any]]:
    """Measure and print; a row for each way to read, with the ratio found and its limit."""
    from jaxpar.config import ModelConfig

    wide = ModelConfig(num_layers=6, embed_dim=1024, num_heads=8, num_kv_heads=4, mlp_dim=2816, vocab_size=32_000)
    small = ModelConfig(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=128, vocab_size=256)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        largest = _write(folder / "wide", wide)
        _write(folder / "small", small)
        imported = [_peak_of_import(folder / name, folder / f"{name}_run") for name in ("wide", "small")]
        rows = [
            _row("loading: host memory beyond the shards / largest tensor", _peak_of_load(folder / "wide") / largest),
            _row("convert_hf.py import: host memory / largest tensor", (imported[0] - imported[1]) / largest),
        ]
    return rows


def _write(folder: Path, model: Any) -> int:
    """A checkpoint of the model in bfloat16; bytes of its largest parameter in float32."""
    import numpy as np

    from jaxpar.hf import export
    from jaxpar.hf.convert import abstract_params
    from jaxpar.hf.load import leaf_axes

    leaves = leaf_axes(abstract_params(model))
    export(folder, model, leaves, lambda name: np.full(leaves[name][1].shape, 0.01, np.float32), dtype="bfloat16")
    return max(4 * int(np.prod(like.shape)) for _, like in leaves.values())


def _peak_of_load(folder: Path) -> int:
    """Bytes at the peak of reading into shards, less the shards and what was there before."""
    import jax

    from jaxpar.build import build
    from jaxpar.config import Config, ParallelConfig
    from jaxpar.hf import load_params, read_model

    model = read_model(folder)
    built = build(Config(model=model, precision="float32", parallel=ParallelConfig(data=4, tensor=2, zero=3)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    params = jax.block_until_ready(load_params(folder, model, built.abstract_state.params))
    peak = _status_bytes("VmHWM")
    return peak - before - sum(shard.data.nbytes for a in jax.tree.leaves(params) for shard in a.addressable_shards)


def _peak_of_import(source: Path, target: Path) -> int:
    """Bytes at the peak of a process that runs scripts/convert_hf.py import."""
    script = Path(__file__).parents[1] / "convert_hf.py"
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(script)!r}, 'import', {str(source)!r}, {str(target)!r}]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1].split()[1]) * 1024


def _row(name: str, ratio: float) -> dict[str, Any]:
    print(f"{name:<58} {ratio:5.2f} <= {BOUND:g} {'ok' if ratio <= BOUND else 'MISSED'}", flush=True)
    return {"name": name, "found": ratio, "limit": BOUND}


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
