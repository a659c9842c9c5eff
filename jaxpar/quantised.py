"""Frozen matrices held as int8 or nf4 codes with a scale per block (QLoRA, arXiv:2305.14314).

A weight is levels[code] times the scale of its block: up to 64 entries that follow each other along one dim. Codes and
scales keep the logical names of the weight, so the same rules split them over a mesh; every device quantises and
restores what it holds. The qwix package gives the same nf4 codes, but flattens a weight to look its levels up, for
which a mesh gathers it, and keeps a code per byte outside of GPUs.
Dims: those of the weight, of which the one with blocks is divided by the block's length in scales, by 2 in nf4 codes.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.errors import raise_together
from jaxpar.names import STACKED, is_multiplied
from jaxpar.sharding import map_parameters, named_parameters

Tree = TypeVar("Tree")
Kind = Literal["float32", "int8", "nf4"]
LONGEST, SHORTEST = 64, 8  # entries of a block
PREFERRED = ("embed", "latent")  # dims that tensor parallelism leaves whole
TABLES = {"vocab", "position"}  # looked up or projected to logits: nf4 would cost too much there
# The quantiles of a normal distribution that appendix E of the paper lists; 0 is one of them.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


class Held(nnx.Module):
    """One weight as codes and float32 scales; a plain pytree whose leaves stack, scan and shard as the weight does."""

    def __init__(self, codes: nnx.Variable, scales: nnx.Variable, kind: Kind, dim: int) -> None:
        self.codes, self.scales = codes, scales
        self.kind, self.dim = kind, dim  # dim counts from the end: a scan takes leading ones away

    def restored(self) -> nnx.Variable:
        """The weight in float32."""
        codes, scales = self.codes[...], self.scales[...]
        if self.kind == "nf4":
            dim = codes.ndim + self.dim
            pairs = jnp.stack([codes & 15, codes >> 4], dim + 1)
            codes = pairs.reshape(*codes.shape[:dim], -1, *codes.shape[dim + 1 :])
            levels = jnp.asarray(NF4)[codes]
        else:
            levels = codes.astype(jnp.float32)
        blocks = _in_blocks(levels, self.dim, levels.shape[self.dim] // scales.shape[self.dim])
        value = (blocks * jnp.expand_dims(scales, self.dim)).reshape(levels.shape)
        return self.codes.replace(value)


def quantised(model: Tree, kind: Kind) -> Tree:
    """The model with its matrices `Held`; norms, biases and routers stay. Works on arrays and under `eval_shape`.

    With nf4 the tables of embedding, head and positions are int8. Raises `UserError` for a matrix without blocks.
    """
    if kind == "float32":
        return model
    raise_together(
        f"lora.base = {kind!r}: no dim of {name} {variable.get_value().shape} is a multiple of an even block of "
        f"{SHORTEST} to {LONGEST} entries; set lora.base to 'float32', or change the sizes of the model"
        for name, variable in named_parameters(model)
        if _is_held(variable) and _blocks(variable) is None
    )
    return map_parameters(lambda v: held(v, kind) if _is_held(v) else v, model)


def restored(tree: Tree) -> Tree:
    """The tree with every `Held` weight as float32."""
    return jax.tree.map(lambda n: n.restored() if isinstance(n, Held) else n, tree, is_leaf=_is_leaf)


def rounded(model: Tree, kind: Kind) -> Tree:
    """The float32 model that a quantised base computes with."""
    return restored(quantised(model, kind))


def held(weight: nnx.Variable, kind: Kind) -> Held:
    """One weight in blocks along the dim that suits it."""
    kind = "int8" if TABLES & set(weight.axes) else kind
    found = _blocks(weight)
    assert found is not None
    dim, length = found
    value = weight.get_value().astype(jnp.float32)
    blocks = _in_blocks(value, dim, length)
    largest = jnp.abs(blocks).max(dim, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1.0)
    scales = largest if kind == "nf4" else largest / 127
    levels = (blocks / scales).reshape(value.shape)
    codes = _nf4_codes(levels, dim) if kind == "nf4" else jnp.round(levels).astype(jnp.int8)
    return Held(weight.replace(codes), weight.replace(scales.squeeze(dim)), kind, dim)


def _nf4_codes(levels: jax.Array, dim: int) -> jax.Array:
    """Numbers of the nearest levels, two to a byte: the first of a pair in the low half."""
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = jnp.zeros(levels.shape, jnp.uint8)
    for middle in middles:
        codes = codes + (levels > middle).astype(jnp.uint8)
    pairs = _in_blocks(codes, dim, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, pairs.ndim + dim, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def _in_blocks(value: jax.Array, dim: int, length: int) -> jax.Array:
    """[..., N, ...] -> [..., N / length, length, ...]; `dim`, from the end, is now that of the entries of a block."""
    at = value.ndim + dim
    return value.reshape(*value.shape[:at], value.shape[at] // length, length, *value.shape[at + 1 :])


def _is_held(variable: nnx.Variable) -> bool:
    return is_multiplied(tuple(variable.axes))


def _blocks(variable: nnx.Variable) -> tuple[int, int] | None:
    """(dim from the end, length of a block) of a weight; None where nothing divides."""
    axes, shape = tuple(variable.axes), variable.get_value().shape
    dims = [i - len(axes) for i, name in enumerate(axes) if name not in STACKED]
    dims.sort(key=lambda i: (axes[i] not in PREFERRED, PREFERRED.index(axes[i]) if axes[i] in PREFERRED else -shape[i]))
    for dim in dims:
        lengths = [n for n in range(LONGEST, SHORTEST - 1, -2) if shape[dim] % n == 0]
        if lengths:
            return dim, lengths[0]
    return None


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Held)
