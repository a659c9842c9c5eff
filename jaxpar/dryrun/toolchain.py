"""Stand-ins for the CUDA tools that XLA:GPU calls after its own work is done, so that none has to be installed.

All a dry run reads is settled in XLA's program: schedule, buffers, collectives. Machine code is then made kernel by
kernel for nobody to run. The stand-in assembler answers with empty files, the stand-in library of device functions is
empty, and LLVM does not optimise: the program is the same to the bit, a compile takes a third less processor time, and
machines with and without the CUDA toolkit get the same answer. So register spills are not seen.
"""

from __future__ import annotations

from pathlib import Path

# XLA asks for the version first and wants at least that of its own headers.
_ASSEMBLER = """#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.48'; exit 0; fi
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""


def make_toolchain(folder: Path) -> str:
    """Writes the stand-ins to `folder`; returns the XLA flags that make the compiler use them."""
    programs, library = folder / "bin", folder / "nvvm" / "libdevice"
    for made in (programs, library):
        made.mkdir(parents=True)
    for name in ("ptxas", "nvlink"):
        (programs / name).write_text(_ASSEMBLER)
        (programs / name).chmod(0o755)
    (library / "libdevice.10.bc").write_text("; no device functions\n")
    flags = {
        "xla_gpu_cuda_data_dir": folder,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": "true",
    }
    return " ".join(f"--{name}={value}" for name, value in flags.items())
