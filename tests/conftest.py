"""Eight simulated devices, set up once before jax starts."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

SIMULATED_DEVICES = 8
# XLA sizes its thread pool from NPROC; with fewer threads than devices a collective can wait for ever (jax 0.10).
os.environ.setdefault("NPROC", str(2 * SIMULATED_DEVICES))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The tests compile much and compute little; the laws they state do not depend on how well the loops are optimised.
FAST_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# The older emitters of loops compile three times as fast. jax 0.12 knows them no more; remove this with jax 0.10.
if version("jaxlib").startswith("0.10."):
    FAST_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FAST_COMPILE))

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
