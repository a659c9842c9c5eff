"""The logical axis names of parameters and activations, and what follows from them.

Models tag every dim with one of these; sharding rules map them to mesh axes; the optimizer reads them to decide
which leaves are matrices. Nothing here imports jax.
"""

from __future__ import annotations

# name -> what the dim counts
LOGICAL_AXES: dict[str, str] = {
    "batch": "rows of the global batch",
    "seq": "positions of a row, where a layer needs all that its context shard holds",
    "residual_seq": "positions of the residual stream between blocks (split further by sequence parallelism)",
    "embed": "features of the residual stream",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "features of one head",
    "mlp": "hidden features of the MLP",
    "vocab": "rows of the vocabulary, padded",
    "position": "rows of a learned position table",
    "layer": "stacked layers",
    "leading": "stacked layers without experts, before those that have them",
    "expert": "experts",
    "choice": "what a router chooses from: the experts, never split",
    "balance": "the same, of the bias that keeps the choice balanced without a loss",
    "latent": "compressed features of multi-head latent attention",
    "rank": "rank of a low-rank adapter",
    "stage": "pipeline stages",
    "chunk": "chunks of layers that one stage holds",
}

# Leading dims that repeat a leaf; they never make a vector a matrix.
STACKED = ("stage", "chunk", "layer", "leading", "expert")
# Names that together span one side of a projection: (heads, head_dim) of a bias is one vector.
SIDES = {"heads": "projection", "kv_heads": "projection", "head_dim": "projection"}


def unstacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The names without the leading dims that only repeat the leaf."""
    return tuple(name for name in axes if name not in STACKED)


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a leaf maps one feature space to another: a weight, not a bias or a norm scale.

    Decided by names, not by rank: stacked norm scales `(layer, embed)` have two dims and a projection's bias
    `(heads, head_dim)` too, yet both are vectors.
    """
    return len({SIDES.get(name, name) for name in unstacked(axes)}) > 1


def is_multiplied(axes: tuple[str, ...]) -> bool:
    """Whether products take a leaf in the compute dtype: a matrix that is not a router, which works in float32."""
    return is_matrix(axes) and "choice" not in axes
