"""How a model says where its arrays may be split, without knowing a mesh.

A model calls `sharder.activation(x, "batch", "seq", "embed")` and `sharder.weights(block)`. `jaxpar.sharding` has the
implementation that knows a mesh; `UNSHARDED` leaves everything where it is.

A row that several devices share may run through the model in another order than it was written (see
`jaxpar.context_plan`). Only attention, dropout and whoever reads the output by position need to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxpar.models.attention import Mask, ScoreRules
    from jaxpar.models.experts import Experts

Tree = TypeVar("Tree")


class Sharder(Protocol):
    """Places activations and weights by logical names."""

    @property
    def kv_repeat(self) -> int:
        """Number of tensor shards that use each KV head: 1 unless there are too few heads."""
        ...

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` placed by the rules; one logical name per dim."""
        ...

    def weights(self, module: Tree, *, lookup: bool = False) -> Tree:
        """The module with its parameters as the computation needs them (gathered when storage is split further).

        `lookup`: rows are picked by index, not multiplied, so the gradient is a scatter.
        """
        ...

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: ScoreRules
    ) -> jax.Array:
        """Attention of q [B, T, H, K] over k, v [B, T, G, K]; `kernel(q, k, v, mask, rules)` where rows are whole."""
        ...

    def experts(
        self, kernel: Callable[..., jax.Array], x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts
    ) -> jax.Array:
        """Output [B, T, D] of experts for x [B, T, D], chosen and weights [B, T, k].

        The kernel also gets the mesh axis that splits the experts (None: none does) and its size.
        """
        ...

    def order(self, length: int) -> np.ndarray | None:
        """Index in the row of every position of the stream, int32 [T]; None: the same."""
        ...

    def ordered(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A batch of [B, T] arrays with every row in the order of the stream."""
        ...


class Unsharded:
    """One device: nothing to place."""

    kv_repeat = 1

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` itself, after checking that every dim has a name."""
        assert len(axes) == x.ndim, (axes, x.shape)
        return x

    def weights(self, module: Tree, *, lookup: bool = False) -> Tree:
        """The module itself."""
        return module

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: ScoreRules
    ) -> jax.Array:
        """The kernel's attention."""
        return kernel(q, k, v, mask, rules)

    def experts(
        self, kernel: Callable[..., jax.Array], x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts
    ) -> jax.Array:
        """The kernel's output with all experts here."""
        return kernel(x, chosen, weights, experts, (None, 1))

    def order(self, length: int) -> np.ndarray | None:
        """Rows stay as they are."""
        del length

    def ordered(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch itself."""
        return dict(batch)


UNSHARDED = Unsharded()
