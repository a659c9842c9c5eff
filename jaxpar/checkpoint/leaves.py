"""Leaves of a state, as they are saved and as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.tree import from_named, named_leaves

Convert = Callable[[Any], Any]


def to_save(state: Any) -> dict[str, Any]:
    """Arrays of `state` by name; Python numbers become NumPy scalars."""
    import jax
    import numpy as np

    named = {}
    for name, leaf in named_leaves(state).items():
        if isinstance(leaf, jax.Array):
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise TypeError(f"{name} is a typed random key; keep its jax.random.key_data in the state")
            named[name] = leaf
        elif isinstance(leaf, bool | int | float | np.ndarray | np.generic):
            named[name] = np.asarray(leaf)
        else:
            raise TypeError(f"{name} is a {type(leaf).__name__}; a state holds arrays and numbers")
    return named


def target(leaf: Any, dtype: Any = None) -> Any:
    """Shape, dtype and sharding to read a leaf of an abstract state into; sharding None means a NumPy array.

    `dtype` replaces the leaf's own.
    """
    import jax
    import numpy as np

    if isinstance(leaf, bool | int | float):
        leaf = np.asarray(leaf)
    dtype = leaf.dtype if dtype is None else jax.numpy.dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=getattr(leaf, "sharding", None))


def size_bytes(leaf: Any) -> int:
    """Bytes of one leaf of a state or an abstract state."""
    wanted = target(leaf)
    return wanted.size * wanted.dtype.itemsize


def cast(array: Any, wanted: Any) -> Any:
    """`array` in the dtype of `wanted`, in the same sharding."""
    import jax

    if wanted.sharding is None:
        return array.astype(wanted.dtype)
    return jax.jit(lambda x: x.astype(wanted.dtype), out_shardings=wanted.sharding)(array)


def assemble(named: Mapping[str, Any], abstract_state: Any) -> Any:
    """A state from arrays by name; where the abstract state has a Python number, so has the result."""
    asked = named_leaves(abstract_state)
    numbers = {n: type(leaf)(named[n].item()) for n, leaf in asked.items() if isinstance(leaf, bool | int | float)}
    return from_named(abstract_state, {**named, **numbers})


def disk_abstract(to_disk: Convert, abstract_state: Any) -> Any:
    """What `to_disk` makes of the abstract state, with the shardings that the compiler gives it."""
    import jax

    converted = jax.eval_shape(to_disk, abstract_state)
    shardings = jax.jit(to_disk).lower(abstract_state).compile().output_shardings
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), converted, shardings)


def from_disk_layout(from_disk: Convert, to_disk: Convert, named: Mapping[str, Any], abstract_state: Any) -> Any:
    """A state in the layout of the run from arrays in the layout of the disk, which are consumed."""
    import jax

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    stored = from_named(jax.eval_shape(to_disk, abstract_state), named)
    return jax.jit(from_disk, out_shardings=shardings, donate_argnums=0)(stored)
