"""How a model says where its arrays may be split, without knowing a mesh.

A model calls `sharder.activation(x, "batch", "seq", "embed")` and `sharder.weights(block)`. `jaxpar.sharding` has the
implementation that knows a mesh; `UNSHARDED` leaves everything where it is.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import jax

Tree = TypeVar("Tree")


class Sharder(Protocol):
    """Places activations and weights by logical names."""

    kv_repeat: int  # every KV head is used on this many tensor shards (1 unless there are too few of them)

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` placed by the rules; one logical name per dim."""
        ...

    def weights(self, module: Tree) -> Tree:
        """The module with its parameters as the computation needs them (gathered when storage is split further)."""
        ...


class Unsharded:
    """One device: nothing to place."""

    kv_repeat = 1

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` itself, after checking that every dim has a name."""
        assert len(axes) == x.ndim, (axes, x.shape)
        return x

    def weights(self, module: Tree) -> Tree:
        """The module itself."""
        return module


UNSHARDED = Unsharded()
