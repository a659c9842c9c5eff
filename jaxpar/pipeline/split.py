"""One stage's forward, input gradient and weight gradient, cut out of the trace of its gradient.

The stage function is traced once together with its gradient. Equations that do not depend on the incoming gradient
are the forward (F); those that lead to the gradient of the input are the backward (B), and those that remain are the
weight gradient (W) where a schedule wants it apart. What F hands to B is what the stage function's own
`jax.checkpoint` policy keeps; a value that does not depend on the stage's input (a cast weight, a rotary table, an
attention mask, a dropout mask) is computed again instead of stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.errors import UserError


class StageOut(NamedTuple):
    """What a stage function may return instead of the activation alone.

    y: the activation, of the type of the input. loss: float32 scalar that is added to the objective (an auxiliary
    loss of its layers). totals: a tree of arrays that are summed over chunks and microbatches, not differentiated.
    """

    y: jax.Array
    loss: jax.Array
    totals: Any = ()


_CHECKPOINT = ("checkpoint", "remat2")  # names of the primitive behind jax.checkpoint
_INLINED = ("jit", "pjit", *_CHECKPOINT)
StageFn = Callable[[Any, jax.Array, Any], StageOut]


class Pieces:
    """F, B and W of one chunk; `params`, `side` are trees, `x` and `dy` are of the type of the activation.

    forward(params, x, side) -> StageOut, fb, fw
    backward(params, side, fb, fw, dy) -> dx, and the list of weight gradients (or bw, when they are split off)
    weight(params, side, fw, bw) -> the list of weight gradients

    `fb`, `fw` and `bw` are lists of arrays that the caller keeps between the calls; `saved_*` are their types. Values
    that both B and W read are in `fw` only.
    """

    def __init__(self, stage_fn: StageFn, params: Any, x: Any, side: Any, *, split_weights: bool) -> None:
        trace = _Trace(stage_fn, params, x, side, inline=split_weights)
        self._out_tree = trace.out_tree
        num_out = trace.out_tree.num_leaves
        outs, dx, dparams = trace.outs[:num_out], trace.outs[num_out : num_out + 1], trace.outs[num_out + 1 :]
        always = {*trace.params, *trace.side}
        reads_b = _cut(trace, dx if split_weights else [*dx, *dparams], always | {trace.dy}, produced=set())
        made_by_b = {v for equation in reads_b.equations for v in equation.outvars} | {trace.dy}
        cut_w = _cut(trace, dparams, always, produced=made_by_b) if split_weights else _Cut([], [], [])
        fw = cut_w.saved
        fb = [v for v in reads_b.saved if v not in set(fw)]
        bw = cut_w.crossing
        forward_outs = [*outs, *fb, *fw]
        f = _cut(trace, forward_outs, {*always, trace.x}, produced=set(), save=False)
        inputs = [*trace.params, *trace.side]
        self._f = _function(trace.jaxpr, [*inputs, trace.x], f.equations, forward_outs)
        self._b = _function(
            trace.jaxpr, [*inputs, *fb, *fw, trace.dy], reads_b.equations, [*dx, *(bw if split_weights else dparams)]
        )
        self._w = _function(trace.jaxpr, [*inputs, *fw, *bw], cut_w.equations, dparams if split_weights else [])
        self.saved_fb, self.saved_fw, self.saved_bw = ([_type_of(v) for v in group] for group in (fb, fw, bw))
        self._num_out, self._consts = num_out, trace.consts

    def forward(self, params: Any, x: jax.Array, side: Any) -> tuple[StageOut, list[jax.Array], list[jax.Array]]:
        """F: the chunk's output and what B and W need of it."""
        values = self._f(*self._inputs(params, side), x)
        out = jax.tree.unflatten(self._out_tree, values[: self._num_out])
        middle = self._num_out + len(self.saved_fb)
        return out, values[self._num_out : middle], values[middle:]

    def backward(
        self, params: Any, side: Any, fb: list[jax.Array], fw: list[jax.Array], dy: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """B: the gradient of the input, and the weight gradients or what W needs."""
        dx, *rest = self._b(*self._inputs(params, side), *fb, *fw, dy)
        return dx, rest

    def weight(self, params: Any, side: Any, fw: list[jax.Array], bw: list[jax.Array]) -> list[jax.Array]:
        """W: the weight gradients, in the order of the leaves of `params`."""
        return self._w(*self._inputs(params, side), *fw, *bw)

    def _inputs(self, params: Any, side: Any) -> list[jax.Array]:
        return [*jax.tree.leaves(params), *jax.tree.leaves(side), *self._consts]


class _Trace:
    """The equations of a stage and its gradient, with their variables by role."""

    def __init__(self, stage_fn: StageFn, params: Any, x: Any, side: Any, *, inline: bool) -> None:
        param_leaves, param_tree = jax.tree.flatten(params)
        side_leaves, side_tree = jax.tree.flatten(side)
        trees: list[Any] = []

        def everything(param_leaves: list, side_leaves: list, x: jax.Array, dy: jax.Array) -> list[jax.Array]:
            """Outputs and gradients of the stage, for one incoming gradient."""
            side = jax.tree.unflatten(side_tree, side_leaves)

            def run(params: Any, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
                out = stage_fn(params, x, side)
                return (out.y, out.loss), out.totals

            (y, loss), pullback, totals = jax.vjp(run, jax.tree.unflatten(param_tree, param_leaves), x, has_aux=True)
            _check_same_type(x, y)
            dparams, dx = pullback((dy, jax.numpy.ones_like(loss)))
            outs, tree = jax.tree.flatten(StageOut(y, loss, totals))
            trees.append(tree)
            return [*outs, dx, *jax.tree.leaves(dparams)]

        closed = jax.make_jaxpr(everything)(param_leaves, side_leaves, x, x)
        self.jaxpr = jaxpr = closed.jaxpr
        self.out_tree, self.consts = trees[0], list(closed.consts)
        self.params = jaxpr.invars[: len(param_leaves)]
        # consts are there in every call, like the side inputs
        self.side = [*jaxpr.invars[len(param_leaves) : -2], *jaxpr.constvars]
        self.x, self.dy = jaxpr.invars[-2:]
        self.outs = list(jaxpr.outvars)
        self.recomputing: set[core.Var] = set()  # results of a checkpoint's second forward
        self.equations = _inlined(self, jaxpr.eqns) if inline else list(jaxpr.eqns)
        self.of_x = _reached(self.equations, {self.x})
        self.of_dy = _reached(self.equations, {self.dy})


class _Cut(NamedTuple):
    """Equations that compute some outputs, and the values they read: from F, and from B."""

    equations: list[core.JaxprEqn]
    saved: list[core.Var]
    crossing: list[core.Var]


def _cut(
    trace: _Trace, outs: Sequence[Any], available: set[core.Var], *, produced: set[core.Var], save: bool = True
) -> _Cut:
    """Walk back from `outs` to values that are there already.

    `available` values are inputs of every call; `produced` ones were computed by B; any other that depends on x but
    not on dy is saved by F, unless it belongs to a checkpoint's recomputation or `save` is off.
    """
    needed, equations = set(), []
    saved: dict[core.Var, None] = {}
    crossing: dict[core.Var, None] = {}

    def want(atom: Any) -> None:
        """Sort one value into available, crossing, saved or to be computed."""
        if isinstance(atom, core.Literal) or atom in available:
            return
        if atom in produced and (atom in trace.of_dy or atom in trace.recomputing):
            crossing[atom] = None
        elif save and atom in trace.of_x and atom not in trace.of_dy and atom not in trace.recomputing:
            saved[atom] = None
        else:
            needed.add(atom)

    for atom in outs:
        want(atom)
    for equation in reversed(trace.equations):
        if any(v in needed for v in equation.outvars):
            equations.append(equation)
            for atom in equation.invars:
                want(atom)
    return _Cut(equations[::-1], list(saved), list(crossing))


def _reached(equations: Sequence[core.JaxprEqn], sources: set[core.Var]) -> set[core.Var]:
    """All variables that depend on one of `sources`, themselves included."""
    reached = set(sources)
    for equation in equations:
        if any(not isinstance(atom, core.Literal) and atom in reached for atom in equation.invars):
            reached.update(equation.outvars)
    return reached


def _inlined(trace: _Trace, equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """The equations with calls of jit and checkpoint replaced by their bodies, so that B and W can be told apart."""
    of_dy = _reached(equations, {trace.dy})
    out: list[core.JaxprEqn] = []

    def emit(equations: Sequence[core.JaxprEqn], names: dict, recomputing: bool) -> None:
        """Append equations with their variables renamed by `names`, which gains the results."""
        rename = lambda atom: atom if isinstance(atom, core.Literal) else names.get(atom, atom)  # noqa: E731
        for equation in equations:
            invars = [rename(atom) for atom in equation.invars]
            if equation.primitive.name in _INLINED:
                body, consts = _body(equation)
                inner = dict(zip(body.constvars, consts)) | dict(zip(body.invars, invars))
                again = equation.primitive.name in ("checkpoint", "remat2") and any(
                    v in of_dy for v in equation.outvars
                )
                emit(body.eqns, inner, recomputing or again)
                results = [atom if isinstance(atom, core.Literal) else inner[atom] for atom in body.outvars]
                names.update(zip(equation.outvars, results))
                continue
            fresh = [core.Var(v.aval) for v in equation.outvars]
            names.update(zip(equation.outvars, fresh))
            out.append(equation.replace(invars=invars, outvars=fresh))
            if recomputing:
                trace.recomputing.update(fresh)

    names: dict = {}
    emit(equations, names, False)
    trace.outs = [atom if isinstance(atom, core.Literal) else names.get(atom, atom) for atom in trace.outs]
    return out


def _body(equation: core.JaxprEqn) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that a call runs, and the values of its constants (none in the calls that are inlined)."""
    body = equation.params["jaxpr"]
    body, consts = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
    assert not consts, "a staged call has no constants of its own"
    return body, consts


def _function(whole: Any, inputs: list, equations: list, outs: list) -> Callable[..., list[jax.Array]]:
    """A part of a trace as a function of arrays."""
    part = whole.replace(constvars=[], invars=inputs, eqns=equations, outvars=outs)
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))


def _type_of(variable: core.Var) -> jax.ShapeDtypeStruct:
    aval: Any = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _check_same_type(x: jax.Array, y: jax.Array) -> None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise UserError(
            f"a stage must return an activation of its input's type: got {y.dtype}{list(y.shape)} "
            f"for {x.dtype}{list(x.shape)}"
        )
