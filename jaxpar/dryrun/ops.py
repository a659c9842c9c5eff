"""What one instruction of a compiled program does: matmul FLOPs, memory traffic, host copies, communication.

Knows nothing of hardware. FLOPs count a multiply and an add as two. Causal fused attention counts half of the
square; unfused attention counts the whole square, as it computes it.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from jaxpar.dryrun.hlo import HOST_MEMORY_SPACE, Computation, Instruction, Module, Shape

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"opt-barrier", "add-dependency", "domain"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """One matrix multiplication or fused attention call."""

    dtype: str
    flops: float
    smallest_dim: int  # of m, n, k
    attention: bool = False


def _dot(computation: Computation, instruction: Instruction) -> Matmul:
    lhs, rhs = computation.operand_shapes(instruction)[:2]
    dims = instruction.message.message(30)
    contract = math.prod(lhs.dims[dim] for dim in dims.integers(1))
    batch = math.prod(lhs.dims[dim] for dim in dims.integers(3))
    rows = math.prod(lhs.dims) // max(contract * batch, 1)
    columns = math.prod(rhs.dims) // max(contract * batch, 1)
    return Matmul(lhs.dtype, 2.0 * math.prod(instruction.shape.dims) * contract, min(rows, columns, contract))


def _fused_attention(instruction: Instruction, shapes: list[Shape]) -> Matmul:
    """Attention by cuDNN: 2 matmuls forward, 5 backward, over the scores the mask leaves."""
    config = instruction.config.get("cudnn_fmha_backend_config", {})
    query, key = shapes[0], shapes[1]
    scores_dims = config.get("intermediate_tensor_shape", {}).get("dimensions")
    if scores_dims:
        scores = math.prod(int(dim) for dim in scores_dims)
    else:
        scores = math.prod(query.dims) // query.dims[-1] * key.dims[1]
    matmuls = 5 if "backward" in instruction.target.lower() else 2
    kept = 0.5 if "CAUSAL" in str(config.get("mask_type", "")) else 1.0
    return Matmul(query.dtype, 2.0 * matmuls * scores * query.dims[-1] * kept, query.dims[-1], attention=True)


def _custom_call(computation: Computation, instruction: Instruction) -> list[Matmul]:
    shapes = computation.operand_shapes(instruction)
    if "fmha" in instruction.target.lower():
        return [_fused_attention(instruction, shapes)]
    gemm = instruction.config.get("gemm_backend_config")
    if gemm is None:
        return []
    numbers = gemm.get("dot_dimension_numbers", {})
    lhs = shapes[0]
    contract = math.prod(lhs.dims[int(dim)] for dim in numbers.get("lhs_contracting_dimensions", ()))
    batch = math.prod(lhs.dims[int(dim)] for dim in numbers.get("lhs_batch_dimensions", ()))
    out = next(instruction.shape.arrays())
    rows = math.prod(lhs.dims) // max(contract * batch, 1)
    columns = math.prod(out.dims) // max(rows * batch, 1)
    return [Matmul(lhs.dtype, 2.0 * math.prod(out.dims) * contract, min(rows, columns, contract))]


def matmuls_of(module: Module, computation: Computation, instruction: Instruction) -> list[Matmul]:
    """Matmuls that run as this instruction; for a fusion those inside it."""
    if instruction.opcode in ("dot", "scaled-dot"):
        return [_dot(computation, instruction)]
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction)
    found: list[Matmul] = []
    if instruction.opcode == "fusion":
        for called in instruction.called:
            body = module.computations[called]
            for inner in body.instructions:
                found += matmuls_of(module, body, inner)
    return found


def _fusion_traffic(module: Module, instruction: Instruction) -> float:
    """A parameter that is only sliced counts as its slices; an update in place as the update."""
    body = module.computations[instruction.called[0]]
    users: dict[int, list[tuple[Instruction, int]]] = collections.defaultdict(list)
    for inner in body.instructions:
        for position, operand in enumerate(inner.operands):
            users[operand].append((inner, position))

    def read(node: Instruction, full: int) -> float:
        """Bytes of a value that its users read: slices count what they take."""
        total = 0.0
        for user, position in users[node.id]:
            if user.opcode in ("bitcast", "get-tuple-element"):
                total += read(user, full)
            elif position == 0 and user.opcode in ("dynamic-slice", "slice", "gather"):
                total += user.shape.size_bytes
            elif not (position == 0 and user.opcode == "dynamic-update-slice"):
                return full
        return min(total, full)

    def written(node: Instruction) -> float:
        if node.opcode == "tuple":
            return sum(written(body.by_id[operand]) for operand in node.operands)
        if node.opcode == "bitcast":
            return written(body.by_id[node.operands[0]])
        if node.opcode == "dynamic-update-slice":
            return body.by_id[node.operands[1]].shape.size_bytes
        return node.shape.size_bytes

    reads = sum(read(node, node.shape.size_bytes) for node in body.instructions if node.opcode == "parameter")
    return reads + written(body.root)


def traffic_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Device memory read and written."""
    if instruction.opcode == "fusion":
        return _fusion_traffic(module, instruction)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * instruction.shape.size_bytes
    shapes = computation.operand_shapes(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * shapes[1].size_bytes
    return float(instruction.shape.size_bytes + sum(shape.size_bytes for shape in shapes))


@dataclasses.dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes moved between device and pinned host memory."""

    to_host: bool
    size_bytes: float


def _spaces(shape: Shape) -> set[int]:
    return {array.memory_space for array in shape.arrays()}


def host_copy_of(module: Module, computation: Computation, instruction: Instruction) -> HostCopy | None:
    """The copy this instruction makes to or from host memory, if any."""
    if instruction.opcode not in ("copy", "copy-start", "dynamic-update-slice", "dynamic-slice", "fusion"):
        return None
    shapes = computation.operand_shapes(instruction)
    target = next(instruction.shape.arrays())
    if not any(HOST_MEMORY_SPACE in _spaces(shape) for shape in [*shapes, instruction.shape]):
        return None
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        for inner in body.instructions:
            if inner.opcode == "dynamic-update-slice" and inner.shape.memory_space == HOST_MEMORY_SPACE:
                return HostCopy(True, body.by_id[inner.operands[1]].shape.size_bytes)
            if inner.opcode == "dynamic-slice":
                source = body.by_id[inner.operands[0]].shape
                if source.memory_space == HOST_MEMORY_SPACE:
                    return HostCopy(False, inner.shape.size_bytes)
        return None
    to_host = target.memory_space == HOST_MEMORY_SPACE
    if instruction.opcode == "dynamic-update-slice":
        return HostCopy(to_host, shapes[1].size_bytes)
    return HostCopy(to_host, target.size_bytes)


def sol_s(instruction: Instruction) -> float:
    """Seconds by XLA's own "speed of light" model, which its scheduler hides communication by; 0 where it has none."""
    for entry in instruction.config.get("reification_cost", ()):
        if entry.get("name") == "sol":
            return float(entry.get("exec_time_us", 0.0)) * 1e-6
    return 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """One collective, per device. `payload` is the larger of operand and result, the size textbooks quote."""

    kind: str
    axes_key: tuple[tuple[int, ...], tuple[int, ...]]  # first and last group: enough to name the axes
    group_size: int
    dtype: str
    payload_bytes: float
    wire_bytes: float  # sent by one device with a ring
    arrays: tuple[Shape, ...]  # operands
    sol_s: float  # one run of it, by XLA's own cost model
    num_nodes: int  # that one group spans
    members_per_node: int
    asynchronous: bool
    op_name: str


def collective_kind(opcode: str) -> str | None:
    """Kind of a collective opcode, its `-start` form included; None for others."""
    base = opcode.removesuffix("-start")
    return base if base in COLLECTIVES else None


def communication_of(
    computation: Computation, instruction: Instruction, *, num_devices: int, gpus_per_node: int, asynchronous: bool
) -> Communication:
    """Facts of a collective instruction."""
    kind = collective_kind(instruction.opcode)
    assert kind is not None, instruction.opcode
    arrays = [array for shape in computation.operand_shapes(instruction) for array in shape.arrays()]
    operand = float(sum(array.size_bytes for array in arrays))
    largest = max(arrays, key=lambda array: array.size_bytes)
    if kind == "collective-permute":
        pairs = [pair for pair in instruction.pairs() if pair[0] != pair[1]]
        first, last = (pairs[0], pairs[-1]) if pairs else ((0,), (0,))
        crosses = any(a // gpus_per_node != b // gpus_per_node for a, b in pairs)
        nodes, members = (2, 1) if crosses else (1, 2)
        size, payload, wire = (2 if pairs else 1), operand, operand
    else:
        groups = instruction.groups(num_devices)
        first, last = groups[0], groups[-1]
        size = len(first)
        per_node = collections.Counter(member // gpus_per_node for member in first)
        nodes, members = len(per_node), max(per_node.values())
        payload = operand * (size if kind == "all-gather" else 1)
        wire = payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)
    return Communication(
        kind=kind,
        axes_key=(tuple(first), tuple(last)),
        group_size=size,
        dtype=largest.dtype,
        payload_bytes=payload,
        wire_bytes=wire,
        arrays=tuple(arrays),
        sol_s=sol_s(instruction),
        num_nodes=nodes,
        members_per_node=members,
        asynchronous=asynchronous,
        op_name=instruction.op_name,
    )
