"""Which dtype is used where, as one object that models and the step read.

Parameters, moments, norms, softmax and loss are float32 under every policy; `compute` is the dtype of matmuls and of
the residual stream. Under fp8 the projections of attention and of dense MLPs multiply 8-bit floats; embedding, head and
attention scores stay in bfloat16.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.errors import UserError


@dataclasses.dataclass(frozen=True)
class Precision:
    """A dtype policy; `loss_scaling` is dynamic and belongs to fp16 alone."""

    name: str
    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.bfloat16
    loss_scaling: bool = False
    # Projections of the blocks multiply 8-bit floats (models/projection.py).
    fp8: bool = False
    # float32 matmuls on an accelerator default to fewer bits; "highest" makes float32 mean float32.
    matmul: str | None = None


POLICIES = {
    "bf16": Precision("bf16"),
    "float32": Precision("float32", compute=jnp.float32, matmul="highest"),
    "fp16": Precision("fp16", compute=jnp.float16, loss_scaling=True),
    "fp8": Precision("fp8", fp8=True),
}


def precision(name: str) -> Precision:
    """The policy of that name; raises `UserError` for an unknown one."""
    if name not in POLICIES:
        raise UserError(f"precision = {name!r} is not available; choose from {', '.join(POLICIES)}")
    return POLICIES[name]
