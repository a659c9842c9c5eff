"""How long communication takes: ring collectives on NVLink, hierarchical ones between nodes.

Used by both the time line of a compiled program and the closed-form model, so that they agree.
"""

from __future__ import annotations

import math

from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.targets import GpuTarget


def collective_time_s(
    kind: str, payload_bytes: float, *, num_nodes: int, members_per_node: int, gpu: GpuTarget, assumed: Assumptions
) -> float:
    """Seconds of one collective over a group of `num_nodes` x `members_per_node` devices.

    Inside a node a ring moves (n - 1) / n of the payload (twice that for an all-reduce). Between nodes each
    member moves its share of the payload through its own network card; the other GPUs of the node, which run
    the same collective in other groups, use theirs.
    """
    size = num_nodes * members_per_node
    if size <= 1 or payload_bytes <= 0:
        return 0.0
    rounds = 2 if kind == "all-reduce" else 1
    wire = payload_bytes if kind == "collective-permute" else payload_bytes * (size - 1) / size * rounds
    inside_s = wire / (gpu.nvlink_bytes_per_s * assumed.nvlink_efficiency)
    if num_nodes == 1:
        return assumed.nvlink_latency_s + assumed.nvlink_hop_s * (size - 1) + inside_s
    if kind == "collective-permute":
        across, cards = payload_bytes, 1
    elif kind in ("all-to-all", "ragged-all-to-all"):
        across, cards = payload_bytes * (num_nodes - 1) / num_nodes, 1
    else:
        across, cards = payload_bytes * (num_nodes - 1) / num_nodes * rounds, members_per_node
    across_s = across / (cards * gpu.network_bytes_per_s * assumed.network_efficiency)
    hops = math.ceil(2 * math.log2(num_nodes))
    return assumed.network_latency_s + assumed.network_hop_s * hops + max(inside_s, across_s)


def matmul_time_s(
    dtype: str, flops: float, smallest_dim: float, *, attention: bool, gpu: GpuTarget, assumed: Assumptions
) -> float:
    """Seconds of a matmul; small dims reach less of the peak."""
    if attention:
        return flops / (gpu.bf16_flops_per_s * assumed.attention_efficiency)
    best = assumed.fp8_efficiency if dtype.startswith("f8") else assumed.matmul_efficiency
    reached = best * smallest_dim / (smallest_dim + assumed.matmul_half_size)
    return flops / (gpu.peak_flops_per_s(dtype) * reached)


def exposed_time_s(communication_s: float, compute_s: float, assumed: Assumptions) -> float:
    """What communication adds to a step when it runs beside `compute_s`: what sticks out, and the slowdown it causes.

    Collective kernels take multiprocessors and memory bandwidth from the matmuls they run beside.
    """
    hidden = min(communication_s, assumed.overlap * compute_s)
    return communication_s - hidden + assumed.overlap_cost * hidden
