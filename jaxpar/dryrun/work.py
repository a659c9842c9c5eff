"""Closed-form FLOPs and collective volumes of one training step, per GPU.

FLOPs count what the program runs, recomputation and padding included. What MFU counts is `jaxpar.models.count`'s, the
one formula of the project; the matmuls listed here have the same weights, which a test checks.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxpar.dryrun.shape import Layout, ModelShape, stage_layers
from jaxpar.models.count import flops_per_token


@dataclasses.dataclass(frozen=True)
class LayerMatmul:
    """A weight matmul of a layer, per token and GPU: [tokens, rows] x [rows, columns]."""

    name: str
    rows: float
    columns: float
    tokens_factor: float = 1.0  # of the tokens that go through it (experts: those routed)

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs."""
        return 2 * self.rows * self.columns * self.tokens_factor


def layer_matmuls(shape: ModelShape, layout: Layout) -> list[LayerMatmul]:
    """Weight matmuls of one layer with the dims one GPU computes."""
    D, tensor = shape.embed_dim, layout.tensor
    out = _latent_projections(shape, tensor) if shape.kv_rank else _projections(shape, tensor)
    into = ("gate", "up") if shape.gated else ("up",)
    widths = [("", float(shape.mlp_dim), 1.0)]
    if shape.num_experts:
        widths = [("expert_", float(shape.expert_dim), float(shape.experts_per_token))]
        if shape.num_shared:
            widths.append(("shared_", float(shape.num_shared * shape.expert_dim), 1.0))
        out.append(LayerMatmul("router", D, shape.num_experts))
    for prefix, width, factor in widths:
        out += [LayerMatmul(prefix + name, D, width / tensor, factor) for name in into]
        out.append(LayerMatmul(prefix + "down", width / tensor, D, factor))
    return out


def _projections(shape: ModelShape, tensor: int) -> list[LayerMatmul]:
    D, queries = shape.embed_dim, shape.num_heads * shape.head_dim / tensor
    keys = shape.kv_heads * shape.head_dim / (tensor if shape.kv_heads % tensor == 0 else 1)
    return [
        LayerMatmul("q", D, queries), LayerMatmul("k", D, keys), LayerMatmul("v", D, keys),
        LayerMatmul("out", queries, D),
    ]  # fmt: skip


def _latent_projections(shape: ModelShape, tensor: int) -> list[LayerMatmul]:
    """Latent attention: the way into the latent features is the same on every GPU of a tensor group."""
    D, heads, K, C = shape.embed_dim, shape.num_heads / tensor, shape.head_dim, shape.kv_rank
    out = [LayerMatmul("q", shape.query_rank or D, heads * (K + shape.rope_dim))]
    if shape.query_rank:
        out.append(LayerMatmul("q_down", D, shape.query_rank))
    out += [LayerMatmul("kv_down", D, C + shape.rope_dim), LayerMatmul("kv_up", C, heads * (K + shape.value_dim))]
    return [*out, LayerMatmul("out", heads * shape.value_dim, D)]


def attention_flops_per_token(shape: ModelShape, layout: Layout, *, causal_half: bool = True) -> float:
    """Forward FLOPs of scores and weighted sum of one layer, per token. A window hides scores but spares none."""
    span = shape.seq_len * (0.5 if causal_half else 1.0)
    return 4 * span * shape.num_heads * shape.attention_dim / layout.tensor


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """What the backward pass of a layer computes again."""

    kept: frozenset[str] | None  # weight matmuls whose outputs are kept; None: all
    attention: bool  # fused attention runs its forward again
    share: float = 1.0  # of the matmuls that are not kept


REMAT: dict[str, RematPolicy] = {
    "none": RematPolicy(None, False),
    "attention": RematPolicy(None, True),
    "dots": RematPolicy(None, True),
    "full": RematPolicy(frozenset(), True),
    # Policies of other systems, for comparisons with their published runs.
    "matmuls": RematPolicy(None, False),  # keeps the outputs of weight matmuls and of attention
    "qkv": RematPolicy(frozenset({"q", "k", "v"}), True),
    "qkv_out": RematPolicy(frozenset({"q", "k", "v", "out"}), True),
    "all_but_mlp": RematPolicy(frozenset({"q", "k", "v", "out"}), False),
    "half": RematPolicy(frozenset(), False, share=0.5),
}


def recomputed_matmuls(shape: ModelShape, layout: Layout) -> list[LayerMatmul]:
    """Weight matmuls that run twice. The last of a layer never does: nothing in its backward pass reads its output."""
    policy = REMAT[layout.remat]
    if policy.kept is None:
        return []
    last = {"down", "expert_down", "shared_down"}
    return [one for one in layer_matmuls(shape, layout) if one.name not in policy.kept | last]


def attention_runs(layout: Layout) -> tuple[float, float]:
    """(forward, backward) cost of attention in units of its forward matmuls, recomputation included."""
    backward = 2.5 if layout.fused_attention else 2.0
    recomputed = 1.0 if REMAT[layout.remat].attention else 0.0
    if not layout.fused_attention and layout.remat == "attention":
        recomputed = 0.5  # the scores; nothing reads the output again
    return 1.0, backward + recomputed


def tokens_per_pass(shape: ModelShape, layout: Layout) -> float:
    """Tokens of one microbatch on one GPU."""
    return layout.microbatch_rows * shape.seq_len / layout.context


def flops_per_gpu(shape: ModelShape, layout: Layout) -> float:
    """Matmul FLOPs of one step, on the average GPU; layers that only fill up a stage are computed too."""
    tokens = tokens_per_pass(shape, layout) * layout.num_microbatches
    layers = sum(layer_flops_per_token(kind, layout) * count for kind, count in shape.kinds) / shape.num_layers
    layers *= stage_layers(shape, layout).average
    head = 2.0 * shape.embed_dim * shape.vocab / layout.tensor / layout.stage
    head *= 4 if layout.loss_chunk_tokens is not None and layout.loss_chunk_tokens < shape.seq_len else 3
    return tokens * (layers + head)


def layer_flops_per_token(shape: ModelShape, layout: Layout) -> float:
    """Matmul FLOPs of one layer and token on one GPU: forward, backward and what is computed again."""
    weights = sum(one.flops_per_token for one in layer_matmuls(shape, layout))
    again = sum(one.flops_per_token for one in recomputed_matmuls(shape, layout)) * REMAT[layout.remat].share
    attention = attention_flops_per_token(shape, layout, causal_half=layout.fused_attention)
    return 3 * weights + again + attention * sum(attention_runs(layout))


@functools.lru_cache(maxsize=1024)
def model_flops_per_token(shape: ModelShape) -> float:
    """FLOPs that MFU counts, by the formula that a training run logs with: nothing recomputed, causality counted."""
    return flops_per_token(shape.model(), shape.seq_len)
