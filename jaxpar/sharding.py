"""Logical axis names -> mesh axes: strict rules, placement of activations, and ZeRO as a second mapping.

Two mappings say everything. The *compute* mapping places dims where the computation wants them (tensor, context,
expert parallelism). The *zero* mapping splits a leaf further, over the axes that hold copies of it. Parameters,
gradients and optimizer state each use the one or the other, by ZeRO level:

    level   parameters   gradients   optimizer state
    0       compute      compute     compute
    1       compute      compute     zero
    2       compute      zero        zero
    3       zero         zero        zero

A rule that cannot apply raises `UserError`; the one exception, vectors too short to split, is in the sharding report.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.custom_derivatives import linear_call
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpar import context, expert_parallel
from jaxpar.config import Config, ParallelConfig
from jaxpar.errors import UserError
from jaxpar.manual import entry_axes
from jaxpar.mesh import BATCH_AXES
from jaxpar.names import STACKED, is_matrix, is_multiplied

Tree = TypeVar("Tree")
log = logging.getLogger(__name__)

# Of one row, above which attention over whole rows that context parallelism brings together takes our own kernel: cuDNN
# has no documents and no window that change within a batch or a model, only a mask of all pairs of tokens.
LARGEST_MASK_BYTES = 2**30


class Rules:
    """A strict table from logical names to mesh axes: None (whole), one axis, or several, outermost first.

    Every logical name in use must be listed; a mesh axis may serve one dim of an array only.
    """

    def __init__(self, table: Mapping[str, str | Iterable[str] | None]) -> None:
        self.table: dict[str, tuple[str, ...]] = {
            name: () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            for name, axes in table.items()
        }

    def __repr__(self) -> str:
        return f"Rules({self.table})"

    def axes(self, name: str, what: str = "array") -> tuple[str, ...]:
        """Mesh axes of one logical name; raises `UserError` for an unknown one."""
        if name not in self.table:
            raise UserError(f"{what}: no sharding rule for the logical axis {name!r}; known: {', '.join(self.table)}")
        return self.table[name]

    def spec(self, axes: Iterable[str], what: str = "array") -> P:
        """The `PartitionSpec` of dims named `axes`; raises when a mesh axis would split two dims."""
        axes = tuple(axes)
        per_dim = [self.axes(name, what) for name in axes]
        used = [axis for group in per_dim for axis in group]
        if twice := sorted({axis for axis in used if used.count(axis) > 1}):
            raise UserError(
                f"{what} with dims ({', '.join(axes)}): mesh axis {', '.join(twice)} would split more than one dim; "
                f"rules: { {name: self.table[name] for name in axes} }"
            )
        return _spec(per_dim)


def resolve(axes: Iterable[str], shape: tuple[int, ...], rules: Rules, mesh: Mesh, what: str = "array") -> P:
    """`rules.spec` checked against a shape: every dim must divide by the mesh axes that split it."""
    axes = tuple(axes)
    if len(axes) != len(shape):
        raise UserError(f"{what}: {len(axes)} logical axes {axes} for {len(shape)} dims {shape}")
    spec = rules.spec(axes, what)
    for name, dim, group in zip(axes, shape, spec, strict=True):
        parts = _size(mesh, entry_axes(group))
        if dim % parts:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in entry_axes(group))
            raise UserError(
                f"{what}: dim {name} = {dim} does not divide by {sizes}; "
                f"choose a multiple of {parts}, or a smaller parallel.{' or parallel.'.join(entry_axes(group))}"
            )
    return spec


def default_rules(parallel: ParallelConfig, *, kv_heads_split: bool = True) -> Rules:
    """The compute mapping of a run; see the table in docs/parallelism.md."""
    residual = ("context", "tensor") if parallel.sequence_parallel else ("context",)
    return Rules(
        {
            "batch": BATCH_AXES,
            "seq": "context",
            "residual_seq": residual,
            "embed": None,
            "heads": "tensor",
            "kv_heads": "tensor" if kv_heads_split else None,
            "head_dim": None,
            "mlp": "tensor",
            "vocab": "tensor",
            "position": None,
            "layer": None,
            "leading": None,
            "expert": "expert",
            "choice": None,
            "balance": None,
            "latent": None,
            "rank": None,
            "stage": "stage",
            "chunk": None,
        }
    )


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lives: its compute and its zero mapping, and which of them each class of state uses."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    compute: P
    zero: P
    level: int

    @property
    def parameter(self) -> P:
        """Spec of the parameter between steps."""
        return self.zero if self.level >= 3 else self.compute

    @property
    def gradient(self) -> P:
        """Spec of the gradient."""
        return self.zero if self.level >= 2 else self.compute

    @property
    def optimizer(self) -> P:
        """Spec of every optimizer leaf of the parameter's shape."""
        return self.zero if self.level >= 1 else self.compute


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh, rules and ZeRO level of a run; the `Sharder` that models are given."""

    mesh: Mesh
    rules: Rules
    zero: int = 0
    zero_axes: tuple[str, ...] = ("data", "context")
    kv_repeat: int = 1
    compute_dtype: DTypeLike = jnp.float32
    context: context.ContextPlan | None = None  # how attention crosses the axis of that name

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` constrained to the rules; one logical name per dim."""
        return _constrain(x, resolve(axes, x.shape, self.rules, self.mesh, "activation"), self.mesh)

    def weights(self, module: Tree, *, lookup: bool = False) -> Tree:
        """The module's parameters in the compute mapping, their gradients in the gradient mapping.

        Matrices (but for routers) are cast to the compute dtype first, so that gathering a split weight moves the
        smaller bytes.
        """

        def place(variable: nnx.Variable) -> nnx.Variable:
            value = variable.get_value()
            axes = variable.axes[len(variable.axes) - value.ndim :]  # a scan has taken the leading stacked dims
            dtype = self.compute_dtype if is_multiplied(axes) else value.dtype
            placed = self.placement(axes, value.shape, "weight")
            reduce_first = lookup or self.reduces_whole(placed.compute)
            return variable.replace(_gather(value, dtype, placed, self.mesh, reduce_first=reduce_first))

        return map_parameters(place, module)

    def reduces_whole(self, compute: P) -> bool:
        """Whether the gradient of a weight of this compute mapping is summed before it is sliced."""
        return False

    def attend(
        self, kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, rules: Any
    ) -> jax.Array:
        """Attention; across devices by the plan, where `context` splits the rows.

        Whole rows go to cuDNN where the config asks for it, or where "auto" takes it and its mask is not too large.
        """
        if self.context is None:
            return kernel(q, k, v, mask, rules)
        ours = rules.kernel == "xla" or (not rules.asked and mask.dense_bytes(q.shape[1]) > LARGEST_MASK_BYTES)
        kv_heads = "heads" if self.kv_repeat > 1 else "kv_heads"
        return context.attend(
            q, k, v, mask.segments, mask.window, mask.sinks,
            scores=context.Scores(rules.scale, rules.soft_cap),
            plan=self.context,
            mesh=self.mesh,
            q_spec=self.rules.spec(("batch", "seq", "heads", "head_dim")),
            kv_spec=self.rules.spec(("batch", "seq", kv_heads, "head_dim")),
            kernel=None if ours else lambda q, k, v, *m: kernel(q, k, v, type(mask)(*m), rules),
        )  # fmt: skip

    def experts(
        self, kernel: Callable[..., jax.Array], x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Any
    ) -> jax.Array:
        """Experts, split over `expert` and their features over `tensor`."""
        names = {
            "gate": ("expert", "embed", "mlp"),
            "up": ("expert", "embed", "mlp"),
            "down": ("expert", "mlp", "embed"),
            "gate_bias": ("expert", "mlp"),
            "up_bias": ("expert", "mlp"),
        }
        specs = {name: None if w is None else self.rules.spec(names[name]) for name, w in experts._asdict().items()}
        return expert_parallel.run_experts(
            kernel, x, chosen, weights, experts,
            mesh=self.mesh,
            x_spec=self.rules.spec(("batch", "seq", "embed")),
            y_spec=self.rules.spec(("batch", "residual_seq", "embed")),
            experts_specs=type(experts)(**specs),
        )  # fmt: skip

    def order(self, length: int) -> np.ndarray | None:
        """Index in the row of every position of the stream; None: the same."""
        return None if self.context is None else self.context.order(length)

    def ordered(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch with every row in the order of the stream."""
        order = self.order(batch["tokens"].shape[1])
        if order is None:
            return dict(batch)
        return {name: self.activation(a[:, order], "batch", "seq") for name, a in batch.items()}

    def placement(self, axes: tuple[str, ...], shape: tuple[int, ...], path: str) -> Placement:
        """Both mappings of one parameter."""
        compute = resolve(axes, shape, self.rules, self.mesh, path)
        zero = self._split_further(axes, shape, compute, path) if self.zero else compute
        return Placement(path, tuple(shape), tuple(axes), compute, zero, self.zero)

    def _split_further(self, axes: tuple[str, ...], shape: tuple[int, ...], compute: P, path: str) -> P:
        """`compute` with one dim split over the zero axes too: `embed` where it divides, else the largest that does."""
        groups = [entry_axes(group) for group in compute]
        used = {axis for group in groups for axis in group}
        extra = tuple(axis for axis in self.zero_axes if axis not in used)
        parts = _size(self.mesh, extra)
        if parts == 1:
            return compute
        fits = [
            i for i, name in enumerate(axes)
            if name not in STACKED and shape[i] % (parts * _size(self.mesh, groups[i])) == 0
        ]  # fmt: skip
        if not fits:
            if is_matrix(axes):
                sizes = " x ".join(f"parallel.{axis} = {self.mesh.shape[axis]}" for axis in extra)
                dims = ", ".join(f"{name} = {dim}" for name, dim in zip(axes, shape))
                raise UserError(
                    f"parallel.zero = {self.zero}: no dim of {path} ({dims}) "
                    f"divides by {sizes} (x its tensor split); use sizes that do, or parallel.replica for part of data"
                )
            return compute  # a vector: whole everywhere, and the sharding report says so
        chosen = max(fits, key=lambda i: (axes[i] == "embed", shape[i]))
        groups[chosen] = (*groups[chosen], *extra)
        return _spec(groups)

    def placements(self, module: Tree) -> Tree:
        """A tree shaped like `module` (arrays or abstract) whose leaves are `Placement`s."""
        return jax.tree_util.tree_map_with_path(
            lambda path, v: v.replace(self.placement(v.axes, v.get_value().shape, _path_name(path))),
            module,
            is_leaf=_is_parameter,
        )

    def place(self, tree: Tree, placements: Any, spec: Callable[[Placement], P]) -> Tree:
        """`tree` (gradients, say) with every leaf constrained to the `spec` of its `Placement`; inside jit."""
        return jax.tree.map(
            lambda leaf, placed: jax.lax.with_sharding_constraint(leaf, self.sharding(spec(placed))),
            tree,
            placements,
            is_leaf=lambda node: isinstance(node, Placement),
        )

    def sharding(self, spec: P) -> NamedSharding:
        """A `NamedSharding` on this mesh."""
        return NamedSharding(self.mesh, spec)

    @property
    def batch(self) -> NamedSharding:
        """Sharding of every [B, T] array of a batch."""
        return self.sharding(self.rules.spec(("batch", "seq")))

    @property
    def whole(self) -> NamedSharding:
        """Sharding of what every device holds."""
        return self.sharding(P())


def make_layout(config: Config, mesh: Mesh, compute_dtype: DTypeLike) -> Layout:
    """The layout that a config asks for on a mesh. Raises `UserError` for head counts that cannot be split."""
    heads, kv_heads, tensor = config.model.num_heads, config.model.kv_heads, mesh.shape["tensor"]
    kv_repeat = 1
    if kv_heads % tensor:
        if tensor % kv_heads:
            raise UserError(
                f"model.num_kv_heads = {kv_heads} and parallel.tensor = {tensor}: one must divide the other"
            )
        kv_repeat = tensor // kv_heads
        log.info("%d KV heads on %d tensor shards: each is computed on %d of them", kv_heads, tensor, kv_repeat)
    if heads % tensor:
        raise UserError(f"model.num_heads = {heads} does not divide by parallel.tensor = {tensor}")
    sizes = {axis: mesh.shape[axis] for axis in ("context", "tensor", "stage")}
    plan = context.choose(config, **sizes)
    if plan is not None:
        log.info("context parallelism: %s (%s)", plan.mode, plan.reason)
    return Layout(
        mesh,
        default_rules(config.parallel, kv_heads_split=kv_repeat == 1),
        zero=config.parallel.zero,
        zero_axes=("data", "context", "expert"),
        kv_repeat=kv_repeat,
        compute_dtype=compute_dtype,
        context=plan,
    )


def map_parameters(function: Any, module: Tree) -> Tree:
    """`module` with `function` applied to every parameter (an `nnx.Variable`, not its array)."""
    return jax.tree.map(function, module, is_leaf=_is_parameter)


def named_parameters(module: Any) -> list[tuple[str, nnx.Variable]]:
    """(path, parameter) pairs in tree order; paths read like "blocks/attention/q"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=_is_parameter)
    return [(_path_name(path), leaf) for path, leaf in leaves]


def _is_parameter(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _path_name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "name", getattr(key, "key", key))) for key in path)


def shard_bytes(shape: tuple[int, ...], dtype: DTypeLike, spec: P, mesh: Mesh) -> int:
    """Bytes that one device holds of an array."""
    parts = math.prod(_size(mesh, entry_axes(group)) for group in spec)
    return math.prod(shape) * jnp.dtype(dtype).itemsize // parts


def _spec(groups: Iterable[tuple[str, ...]]) -> P:
    return P(*(None if not group else group[0] if len(group) == 1 else group for group in groups))


def _size(mesh: Mesh, axes: Iterable[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _constrain(x: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    # Inside a partly manual shard_map the constraint must name that context's mesh, where `stage` is manual.
    context = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh if context.empty else context, spec))


def _gather(x: jax.Array, dtype: DTypeLike, placed: Placement, mesh: Mesh, *, reduce_first: bool) -> jax.Array:
    """`x` in the compute mapping, its gradient in the gradient mapping: ZeRO-2 and 3 reduce inside the layer.

    One primitive, so that a checkpoint policy can tell the result from activations and not keep it.

    `reduce_first`: the gradient is summed in the compute mapping and then sliced. For one that comes from a scatter of
    rows, which the partitioner can only split along the embedding by replicating the batch.
    """
    forward, backward = placed.compute, placed.gradient

    def place(_: tuple[()], x: jax.Array) -> jax.Array:
        return _constrain(x.astype(dtype), forward, mesh)

    def back(_: tuple[()], cotangent: jax.Array) -> jax.Array:
        if reduce_first:
            cotangent = _constrain(cotangent, forward, mesh)
        return _constrain(cotangent, backward, mesh).astype(x.dtype)

    return linear_call(place, back, (), x)
