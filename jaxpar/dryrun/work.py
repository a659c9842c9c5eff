"""Closed-form FLOPs and collective volumes of one training step, per GPU.

FLOPs count what the program runs, recomputation included; `model_flops_per_token` is the convention of MFU:
6 x matmul parameters + attention (causal: half of the square), nothing recomputed.
"""

from __future__ import annotations

import dataclasses

from jaxpar.dryrun.shape import Layout, ModelShape


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
    queries = shape.num_heads * shape.head_dim / tensor
    keys = shape.kv_heads * shape.head_dim / (tensor if shape.kv_heads % tensor == 0 else 1)
    out = [LayerMatmul("q", D, queries), LayerMatmul("k", D, keys), LayerMatmul("v", D, keys)]
    out.append(LayerMatmul("out", queries, D))
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


def attention_flops_per_token(shape: ModelShape, layout: Layout, *, causal_half: bool = True) -> float:
    """Forward FLOPs of scores and weighted sum of one layer, per token; averaged over windowed and full layers."""
    full = shape.seq_len * (0.5 if causal_half else 1.0)
    span = full
    if shape.windowed_share and shape.window is not None:
        span = full * (1 - shape.windowed_share) + min(full, shape.window) * shape.windowed_share
    return 4 * span * shape.num_heads * shape.head_dim / layout.tensor


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
    return [
        one for one in layer_matmuls(shape, layout) if one.name not in policy.kept and not one.name.endswith("down")
    ]


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
    """Matmul FLOPs of one step, on the average GPU."""
    tokens = tokens_per_pass(shape, layout) * layout.num_microbatches
    layers = shape.num_layers / layout.stage
    weights = sum(one.flops_per_token for one in layer_matmuls(shape, layout))
    again = sum(one.flops_per_token for one in recomputed_matmuls(shape, layout)) * REMAT[layout.remat].share
    forward, backward = attention_runs(layout)
    attention = attention_flops_per_token(shape, layout, causal_half=layout.fused_attention)
    per_layer = 3 * weights + again + attention * (forward + backward)
    head = 2.0 * shape.embed_dim * shape.vocab / layout.tensor / layout.stage
    head *= 4 if layout.loss_chunk_tokens is not None and layout.loss_chunk_tokens < shape.seq_len else 3
    return tokens * (layers * per_layer + head)


def model_flops_per_token(shape: ModelShape) -> float:
    """FLOPs that MFU counts: forward and backward of every matmul of the model once, causal attention halved."""
    one = Layout()
    weights = sum(matmul.flops_per_token for matmul in layer_matmuls(shape, one))
    per_layer = 3 * weights + 3 * attention_flops_per_token(shape, one)
    if shape.num_experts and shape.first_dense:
        dense = dataclasses.replace(shape, num_experts=0)
        dense_layer = 3 * sum(matmul.flops_per_token for matmul in layer_matmuls(dense, one))
        dense_layer += 3 * attention_flops_per_token(shape, one)
        layers = (shape.num_layers - shape.first_dense) * per_layer + shape.first_dense * dense_layer
    else:
        layers = shape.num_layers * per_layer
    return layers + 6.0 * shape.embed_dim * shape.vocab
