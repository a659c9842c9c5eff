"""The layout that a model sees inside the executor, where `stage` (and perhaps axes of the batch) are split by hand.

Two operations are split by hand over the remaining axes as well, because automatic partitioning fails on them inside a
partly manual region: attention (cuDNN's partitioning rule is not known there) and the lookup of rows in a split table
(some versions of XLA stop on it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.manual import entry_axes, split_by_hand, sum_over
from jaxpar.sharding import Layout, Rules


@dataclasses.dataclass(frozen=True)
class InsideLayout(Layout):
    """A `Layout` whose rules name neither `stage` nor the axes that split the batch by hand."""

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, rules: Any
    ) -> jax.Array:
        """The kernel's attention on every device's own rows and heads."""
        if self.context is not None:
            return super().attend(kernel, q, k, v, mask, rules)
        kv_heads = "heads" if self.kv_repeat > 1 else "kv_heads"
        q_spec = self.rules.spec(("batch", "seq", "heads", "head_dim"))
        kv_spec = self.rules.spec(("batch", "seq", kv_heads, "head_dim"))
        mask_spec = type(mask)(
            segments=None if mask.segments is None else self.rules.spec(("batch", "seq")),
            window=None if mask.window is None else P(),
            sinks=None if mask.sinks is None else self.rules.spec(("heads",)),
        )
        mapped = split_by_hand(
            lambda q, k, v, mask: kernel(q, k, v, mask, rules),
            self.mesh,
            in_specs=(q_spec, kv_spec, kv_spec, mask_spec),
            out_specs=q_spec,
        )
        window = None if mask.window is None else jnp.asarray(mask.window, jnp.int32)
        return mapped(q, k, v, mask._replace(window=window))

    def reduces_whole(self, compute: P) -> bool:
        """So for weights that every tensor shard holds whole.

        The partitioner would share the work out over `tensor`, and then swap parts between devices by a permute, which
        a branch that only some stages take must not hold.
        """
        split = {axis for entry in compute for axis in entry_axes(entry)}
        return self.mesh.shape["tensor"] > 1 and "tensor" not in split

    def lookup(self, table: jax.Array, row: jax.Array) -> jax.Array:
        """Rows [B, T, D] of `table` [V, D] for `row` int32 [B, T]; zeros where `row` is outside of it."""
        axes = self.rules.axes("vocab")

        def local(table: jax.Array, row: jax.Array) -> jax.Array:
            if axes:
                row = row - lax.axis_index(axes) * table.shape[0]
            here = (row >= 0) & (row < table.shape[0])
            found = jnp.where(here[..., None], table[jnp.where(here, row, 0)], jnp.zeros((), table.dtype))
            return sum_over(found, axes) if axes else found  # exact: one shard has the row

        mapped = split_by_hand(
            local,
            self.mesh,
            in_specs=(self.rules.spec(("vocab", "embed")), self.rules.spec(("batch", "seq"))),
            out_specs=self.rules.spec(("batch", "seq", "embed")),
        )
        return mapped(table, row)


def inside(layout: Layout, *, by_hand: tuple[str, ...]) -> InsideLayout:
    """`layout` for functions in which `by_hand` of the batch axes, and `stage`, are split already."""
    rows = tuple(axis for axis in layout.rules.axes("batch") if axis not in by_hand)
    fields: dict[str, Any] = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    fields["rules"] = Rules({**layout.rules.table, "batch": rows})
    return InsideLayout(**fields)
