"""Which layers each stage holds, when layers differ or do not divide: the cheapest contiguous cut.

The model is cut into `stages x chunks` blocks in order; block k lives on stage `k % stages` as chunk `k // stages`.
Every layer sits in exactly one block and every block has at least one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError
from jaxpar.models.count import layer_count


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Layers per block, in model order."""

    stages: int
    chunks: int
    sizes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.sizes)

    @property
    def slots(self) -> int:
        """Layer slots of one chunk: the size of the largest block."""
        return max(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether no slot is padding."""
        return len(set(self.sizes)) == 1

    def part(self, start: int, stop: int) -> Assignment:
        """The same cut of the layers from `start` to `stop`, numbered from 0; blocks may be empty."""
        edges = np.clip(np.concatenate([[0], np.cumsum(self.sizes)]), start, stop)
        return Assignment(self.stages, self.chunks, tuple(int(n) for n in np.diff(edges)))

    def layers(self) -> np.ndarray:
        """The layer in every slot, int32 `[stages, chunks, slots]`; -1 for padding."""
        out = np.full((self.stages, self.chunks, self.slots), -1, np.int32)
        first = 0
        for block, size in enumerate(self.sizes):
            chunk, stage = divmod(block, self.stages)
            out[stage, chunk, :size] = np.arange(first, first + size)
            first += size
        return out

    def positions(self) -> np.ndarray:
        """Where every layer sits in the flattened `[stages x chunks x slots]`, int32 `[layers]`."""
        flat = self.layers().reshape(-1)
        out = np.empty(self.num_layers, np.int32)
        out[flat[flat >= 0]] = np.nonzero(flat >= 0)[0]
        return out

    def chunk_costs(self, layer_costs: Sequence[float]) -> np.ndarray:
        """Cost of every chunk, float `[stages, chunks]`."""
        layers, costs = self.layers(), np.asarray(layer_costs, float)
        return np.where(layers >= 0, costs[layers], 0.0).sum(-1)

    def table(self, layer_costs: Sequence[float] | None = None) -> str:
        """One line per stage with the layers of its chunks."""
        costs = self.chunk_costs(layer_costs if layer_costs is not None else [1.0] * self.num_layers)
        lines = []
        for stage, chunks in enumerate(self.layers()):
            spans = [f"{live[0]}-{live[-1]}" for live in (chunk[chunk >= 0] for chunk in chunks)]
            lines.append(f"stage {stage}: layers {', '.join(spans)}  (cost {costs[stage].sum():.4g})")
        return "\n".join(lines)


def layer_costs(model: ModelConfig, seq_len: int) -> list[float]:
    """Relative cost of every layer, the dearest 1.0: its weights' multiplications and its attention scores, per token.

    The scores are counted as computed, over the whole row or window.
    """
    window = seq_len if model.window is None else min(model.window, seq_len)
    latent = model.latent
    width = 2 * model.num_heads * model.head_size
    if latent.kv_rank:  # scores over more features than the weighted sum
        width = model.num_heads * (model.head_size + latent.rope_dim + model.value_size)
    costs = []
    for layer in range(model.num_layers):
        is_local = model.window is not None and model.window_pattern[layer % len(model.window_pattern)]
        costs.append(layer_count(model, layer).matmul + width * (window if is_local else seq_len) / 2)
    return [cost / max(costs) for cost in costs]


def assign_layers(
    layer_costs: Sequence[float], *, stages: int, chunks: int = 1, first: float = 0.0, last: float = 0.0
) -> Assignment:
    """The cut whose dearest block is cheapest, and of those the most even one, by dynamic programming.

    `first` and `last` are extra costs of the first and last block: an embedding or a head that is not split over the
    stages. Raises `UserError` when there are fewer layers than blocks.
    """
    blocks, num_layers = stages * chunks, len(layer_costs)
    if num_layers < blocks:
        raise UserError(
            f"model.num_layers={num_layers} on parallel.stage={stages} x pipeline.chunks={chunks} = {blocks} blocks: "
            f"every block needs a layer; use at most {num_layers} blocks"
        )
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(layer_costs, float))])

    def costs(block: int, end: int) -> np.ndarray:
        """Of the block from every layer up to `end`."""
        extra = (first if block == 0 else 0.0) + (last if block == blocks - 1 else 0.0)
        return sums[end] - sums[:end] + extra

    bottleneck = _best_cut(num_layers, blocks, costs, np.maximum)[0]
    limit = bottleneck * (1 + 1e-9)
    even = lambda so_far, c: np.where(c <= limit, so_far + c * c, np.inf)  # noqa: E731
    cuts = _best_cut(num_layers, blocks, costs, even)[1]
    return Assignment(stages, chunks, tuple(int(n) for n in np.diff(cuts)))


def _best_cut(
    num_layers: int,
    blocks: int,
    costs: Callable[[int, int], np.ndarray],
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[float, list[int]]:
    """Least combined cost of all cuts into non-empty blocks, and the layer at which each block starts and ends."""
    best = np.full((blocks + 1, num_layers + 1), np.inf)
    start = np.zeros((blocks + 1, num_layers + 1), int)
    best[0, 0] = 0.0
    for block in range(blocks):
        for end in range(block + 1, num_layers - (blocks - block - 1) + 1):
            totals = combine(best[block, :end], costs(block, end))
            start[block + 1, end] = begin = int(np.argmin(totals))
            best[block + 1, end] = totals[begin]
    cuts = [num_layers]
    for block in range(blocks, 0, -1):
        cuts.append(int(start[block, cuts[-1]]))
    return float(best[blocks, num_layers]), cuts[::-1]
