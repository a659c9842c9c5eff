"""Rotary position embedding with the published context extensions.

Angles and tables are float32: position x frequency in bfloat16 is off by whole turns beyond a few hundred positions.
Dims: B batch, T sequence, N heads, K head_dim, R = rotated features / 2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, base: float | None = None) -> np.ndarray:
    """Radians per position of each rotated pair, float64 [R], after the context extension that `rope` names."""
    rotated = int(head_dim * rope.fraction)
    base = rope.base if base is None else base
    frequencies = base ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies, rotated, base)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn(rope: RopeConfig, frequencies: np.ndarray, rotated: int, base: float) -> np.ndarray:
    """NTK-by-parts of YaRN (arXiv:2309.00071): a ramp over the pair index between two numbers of turns."""

    def pair_with(turns: float) -> float:
        return rotated * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    span = high - low if high > low else 0.001  # the ramp of a degenerate range is a step
    ramp = np.clip((np.arange(rotated // 2) - low) / span, 0.0, 1.0)
    return frequencies * (1 - ramp) + frequencies / rope.factor * ramp


def attention_factor(rope: RopeConfig) -> float:
    """What multiplies cos and sin: YaRN's temperature, else 1."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def frequency_tables(config: ModelConfig, head_dim: int) -> np.ndarray:
    """Frequencies of every kind of layer, float32 [kind, R]; `layer_kinds` says which layer has which.

    Kind 0 is the ordinary one, kind 1 a sliding-window layer with a base of its own (Gemma 3), kind 2 a layer
    without positions (frequency 0 rotates by nothing).
    """
    ordinary = inverse_frequencies(config.rope, head_dim)
    local_base = config.rope.local_base
    local = ordinary if local_base is None else inverse_frequencies(RopeConfig(base=local_base), head_dim)
    return np.stack([ordinary, local, np.zeros_like(ordinary)]).astype(np.float32)


def layer_kinds(config: ModelConfig) -> np.ndarray:
    """Kind of every layer, int32 [num_layers]; see `frequency_tables`."""
    layers = np.arange(config.num_layers)
    rotates = np.resize(np.array(config.rope_pattern), config.num_layers)
    local = np.resize(np.array(config.window_pattern), config.num_layers) & (config.window is not None)
    kinds = np.where(local & (config.rope.local_base is not None), 1, 0)
    return np.where(rotates, kinds, 2).astype(np.int32)[layers]


def tables(config: ModelConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin, float32 [kind, B, T, R], of positions [B, T]; only as many kinds as the model has."""
    frequencies = frequency_tables(config, head_dim)[: int(layer_kinds(config).max(initial=0)) + 1]
    angles = positions[None, :, :, None].astype(jnp.float32) * frequencies[:, None, None, :]
    factor = attention_factor(config.rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotate the pairs (i, i + R) of x [B, T, N, K] by tables [B, T, R]; features beyond 2R pass through.

    `interleaved`: the pairs are (2i, 2i + 1). They come out as (i, i + R): products of rotated queries and keys do not
    notice, and nothing has to be woven together again.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], -1) if rest.shape[-1] else rotated
