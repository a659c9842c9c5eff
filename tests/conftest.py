"""Eight simulated devices, set up once before jax starts."""

import os
import sys
from pathlib import Path

SIMULATED_DEVICES = 8
# XLA sizes its thread pool from NPROC; with fewer threads than devices a collective can wait for ever (jax 0.10).
os.environ.setdefault("NPROC", str(2 * SIMULATED_DEVICES))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={SIMULATED_DEVICES}")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
