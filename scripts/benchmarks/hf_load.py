"""Host memory while a Hugging Face folder is read into shards, against the shards themselves.

    python scripts/benchmark.py hf_load

What the process holds at its peak, beyond the shards that stay, as a ratio to the largest tensor (Linux only).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

BOUND = 1.3


def run() -> list[dict[str, Any]]:
    """Measure and print; one row with the ratio found and its limit."""
    import jax
    import numpy as np

    from jaxpar.build import build
    from jaxpar.config import Config, ModelConfig, ParallelConfig
    from jaxpar.hf import export, load_params, read_model
    from jaxpar.hf.convert import abstract_params
    from jaxpar.hf.load import leaf_axes

    wide = ModelConfig(num_layers=6, embed_dim=1024, num_heads=8, num_kv_heads=4, mlp_dim=2816, vocab_size=32_000)
    leaves = leaf_axes(abstract_params(wide))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export(folder, wide, leaves, lambda name: np.full(leaves[name][1].shape, 0.01, np.float32), dtype="bfloat16")
        model = read_model(folder)
        config = Config(model=model, precision="float32", parallel=ParallelConfig(data=4, tensor=2, zero=3))
        built = build(config)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status_bytes("VmRSS")
        params = jax.block_until_ready(load_params(folder, model, built.abstract_state.params))
        peak = _status_bytes("VmHWM")
    arrays = jax.tree.leaves(params)
    shards = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    ratio = (peak - before - shards) / max(array.nbytes for array in arrays)
    name = "host memory beyond the shards / largest tensor"
    print(f"{name:<52} {ratio:5.2f} <= {BOUND:g} {'ok' if ratio <= BOUND else 'MISSED'}  shards {shards / 1e6:.0f} MB")
    return [{"name": name, "found": ratio, "limit": BOUND}]


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
