"""What one stage does in one tick, and the scan over ticks; runs inside the `shard_map` of `executor`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.manual import entry_axes, sum_over
from jaxpar.pipeline.interface import STAGE, Params, Row, Side, Spec, Totals
from jaxpar.pipeline.slots import Program
from jaxpar.pipeline.split import Pieces, StageOut

Array = jax.Array
Ring = list[Array]  # arrays [slots, ...] that are written and read together


class _Carry(NamedTuple):
    """What lives from tick to tick; rings as in `slots`, gradients float32."""

    x: Ring
    g: Ring
    fb: Ring
    fw: Ring
    bw: Ring
    grads: Params
    totals: Totals


class Machine:
    """The program of one stage. Inside `shard_map`: `params.stages` and `constants` have leaves `[chunks, ...]`."""

    def __init__(self, spec: Spec, program: Program, params: Params, constants: Any, batch: Any) -> None:
        self.spec, self.program, self.params, self.constants, self.batch = spec, program, params, constants, batch
        self.schedule = spec.schedule
        self.stage = lax.axis_index(STAGE)
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.schedule.stages - 1
        x = jax.eval_shape(self._embed, jnp.int32(0))
        self.no_x = spec.constrain(jnp.zeros(x.shape, x.dtype))
        self.pieces = None
        if self.schedule.has_backward:
            self.pieces = Pieces(
                spec.stage_fn,
                self._chunk(jnp.int32(0)),
                x,
                self._side(jnp.int32(0), jnp.int32(0)),
                split_weights=self.schedule.splits_weights,
            )

    def run(self) -> tuple[Totals, Any]:
        """All ticks; returns totals that are the same everywhere, and complete gradients."""
        carry, _ = lax.scan(self._tick, self._start(), jax.tree.map(jnp.asarray, self.program.columns))
        axes = self.spec.batch_axes
        total = functools.partial(_psum, axes=(STAGE, *axes))
        at_last = lambda a: total(jnp.where(self.is_last, a, jnp.zeros_like(a)))  # noqa: E731
        loss, stage_loss, head, stages = carry.totals
        totals = Totals(at_last(loss), total(stage_loss), jax.tree.map(at_last, head), jax.tree.map(total, stages))
        if self.pieces is None:
            return totals, ()

        def finish_end(spec: P, grads: Any) -> Any:
            over = axes if any(STAGE in entry_axes(entry) for entry in spec) else (STAGE, *axes)
            return jax.tree.map(lambda g: _psum(g, axes=over), grads)

        ends = jax.tree.map(finish_end, self.spec.ends_specs, carry.grads.ends, is_leaf=lambda s: isinstance(s, P))
        stages = jax.tree.map(lambda g: _psum(g, axes=axes)[None], carry.grads.stages)
        return totals, Params(ends, stages)

    def _start(self) -> _Carry:
        sizes, pieces = self.program.sizes, self.pieces
        no_ring: Ring = []
        ring = lambda types, slots: [jnp.zeros((slots, *t.shape), t.dtype) for t in types]  # noqa: E731
        zeros32 = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
        out, head = jax.eval_shape(self._all_totals)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        totals = Totals(jnp.float32(0), jnp.float32(0), zeros(head), zeros(out.totals))
        x_ring = ring([self.no_x], sizes["x"] + 1)
        if pieces is None:
            return _Carry(x_ring, no_ring, no_ring, no_ring, no_ring, Params((), ()), totals)
        grads = self.spec.constrain_grads(Params(zeros32(self.params.ends), zeros32(self.params.stages)))
        return _Carry(
            x_ring,
            ring([self.no_x], sizes["g"] + 1),
            ring(pieces.saved_fb, sizes["fb"] + 1),
            ring(pieces.saved_fw, sizes["fw"] + 1),
            ring(pieces.saved_bw, sizes["bw"]),
            grads,
            totals,
        )

    def _all_totals(self) -> tuple[StageOut, Any]:
        """Only for its types: a stage's output and the head's totals."""
        m = jnp.int32(0)
        out = self.spec.stage_fn(self._chunk(m), self.no_x, self._side(m, m))
        return out, self.spec.head_fn(self.params.ends, self.no_x, self._microbatch(m))[1]

    def _tick(self, carry: _Carry, columns: Row) -> tuple[_Carry, None]:
        row = {name: column if column.ndim == 0 else column[self.stage] for name, column in columns.items()}
        dx = self.no_x
        embedded = lax.cond(row["embed"] >= 0, self._embed, lambda _: self.no_x, row["embed"])
        if self.pieces is not None:
            carry, dx = self._backward(carry, row, embedded)
            if self.schedule.splits_weights:
                carry, w_done = self._weight(carry, row)
                dx = _after(row, dx, [w_done])
        carry, y = self._forward(carry, row, embedded)
        # Nothing is sent before all actions of the tick are done, or a tick costs more than its dearest stage.
        y, dx = _after(row, y, [dx]), _after(row, dx, [y])
        num = self.schedule.stages
        y_in = lax.ppermute(y, STAGE, [(s, (s + 1) % num) for s in range(num)])
        carry = carry._replace(x=_put(carry.x, [y_in], row["x_put"]))
        if self.pieces is None:
            return self._head_loss(carry, row, y), None
        dx_in = lax.ppermute(dx, STAGE, [(s, (s - 1) % num) for s in range(num)])
        carry = carry._replace(g=_put(carry.g, [dx_in], row["g_put"]))
        carry = self._head(carry, row, y)
        return self._unembed(carry, row, dx), None

    def _backward(self, carry: _Carry, row: Row, embedded: Array) -> tuple[_Carry, Array]:
        """B: gradient of the chunk's input, and weight gradients unless they are split off.

        It waits for the embedding: every stage takes part in that one's sum, and a stage that has only an F in this
        tick would otherwise wait for the others' B before it.
        """
        pieces, split = self._pieces, self.schedule.splits_weights

        def act(carry: _Carry) -> tuple[Array, Ring, Any]:
            dy = self.spec.constrain(_after(row, _get(carry.g, row["g_get"])[0], [embedded]))
            fb, fw = _get(carry.fb, row["fb_get"]), _get(carry.fw, row["fw_peek"])
            side = self._side(row["b_microbatch"], row["b_chunk"])
            dx, rest = pieces.backward(self._chunk(row["b_chunk"]), side, fb, fw, dy)
            if split:
                return dx, _put(carry.bw, rest, row["bw_put"]), carry.grads.stages
            return dx, carry.bw, rest

        if split:
            idle = lambda carry: (self.no_x, carry.bw, carry.grads.stages)  # noqa: E731
            dx, bw, stages = lax.cond(row["b_microbatch"] >= 0, act, idle, carry)
            return carry._replace(bw=bw, grads=carry.grads._replace(stages=stages)), dx
        shapes = jax.eval_shape(act, carry)[2]
        idle = lambda carry: (self.no_x, carry.bw, [jnp.zeros(a.shape, a.dtype) for a in shapes])  # noqa: E731
        dx, bw, new = lax.cond(row["b_microbatch"] >= 0, act, idle, carry)
        stages = self._accumulate(carry.grads.stages, row["b_chunk"], new)
        return carry._replace(bw=bw, grads=carry.grads._replace(stages=stages)), dx

    def _weight(self, carry: _Carry, row: Row) -> tuple[_Carry, Array]:
        """W: weight gradients alone; also a number that is there when they are."""
        pieces = self._pieces

        def act(carry: _Carry) -> tuple[Any, Array]:
            side = self._side(row["w_microbatch"], row["w_chunk"])
            fw, bw = _get(carry.fw, row["fw_get"]), _get(carry.bw, row["bw_get"])
            grads = pieces.weight(self._chunk(row["w_chunk"]), side, fw, bw)
            return self._accumulate(carry.grads.stages, row["w_chunk"], grads), row["w_microbatch"]

        def idle(carry: _Carry) -> tuple[Any, Array]:
            return carry.grads.stages, row["w_chunk"]

        stages, done = lax.cond(row["w_microbatch"] >= 0, act, idle, carry)
        return carry._replace(grads=carry.grads._replace(stages=stages)), done

    def _forward(self, carry: _Carry, row: Row, embedded: Array) -> tuple[_Carry, Array]:
        """F: the chunk's output; its input is the embedding or what arrived from the stage before."""

        def act(carry: _Carry) -> tuple[Array, Ring, Ring, Array, Any]:
            """Run one forward and hand on its output and what backward needs."""
            new_fb: Ring = []
            new_fw: Ring = []
            arrived = _get(carry.x, jnp.maximum(row["x_get"], 0))[0]
            x = self.spec.constrain(jnp.where(row["x_get"] < 0, embedded, arrived))
            params, side = self._chunk(row["f_chunk"]), self._side(row["f_microbatch"], row["f_chunk"])
            if self.pieces is None:
                out = self.spec.stage_fn(params, x, side)
            else:
                out, new_fb, new_fw = self.pieces.forward(params, x, side)
            stages = jax.tree.map(jnp.add, carry.totals.stages, out.totals)
            return out.y, new_fb, new_fw, carry.totals.stage_loss + out.loss, stages

        def idle(carry: _Carry) -> tuple[Array, Ring, Ring, Array, Any]:
            empty = lambda ring: [jnp.zeros(a.shape[1:], a.dtype) for a in ring]  # noqa: E731
            return self.no_x, empty(carry.fb), empty(carry.fw), carry.totals.stage_loss, carry.totals.stages

        works = row["f_microbatch"] >= 0
        y, fb, fw, stage_loss, stages = lax.cond(works, act, idle, carry)
        # Written outside of the conditional: inside, XLA copies whole rings in every tick.
        if self.pieces is not None:
            fb = _put(carry.fb, fb, jnp.where(works, row["fb_put"], self.program.sizes["fb"]))
            fw = _put(carry.fw, fw, jnp.where(works, row["fw_put"], self.program.sizes["fw"]))
        totals = carry.totals._replace(stage_loss=stage_loss, stages=stages)
        return carry._replace(fb=fb, fw=fw, totals=totals), y

    def _head_loss(self, carry: _Carry, row: Row, y: Array) -> _Carry:
        """The loss of the microbatch that has left the last stage; on all stages."""

        def act(totals: Totals) -> Totals:
            loss, head = self._loss(self.params.ends, y, row["head"])
            return totals._replace(loss=totals.loss + loss, head=jax.tree.map(jnp.add, totals.head, head))

        return carry._replace(totals=lax.cond(row["head"] >= 0, act, lambda totals: totals, carry.totals))

    def _head(self, carry: _Carry, row: Row, y: Array) -> _Carry:
        """The loss of the microbatch that has left the last stage, its gradients, and dy into the last stage's ring."""

        def act(ends: Any, totals: Totals) -> tuple[Any, Totals, Array]:
            loss, pullback, head = jax.vjp(
                lambda ends, y: self._loss(ends, y, row["head"]), self.params.ends, y, has_aux=True
            )
            # the objective counts the last stage's copy of the loss
            dends, dy = pullback(jnp.where(self.is_last, 1.0, 0.0).astype(loss.dtype))
            head = jax.tree.map(jnp.add, totals.head, head)
            return _add32(ends, dends), totals._replace(loss=totals.loss + loss, head=head), dy

        idle = lambda ends, totals: (ends, totals, self.no_x)  # noqa: E731
        ends, totals, dy = lax.cond(row["head"] >= 0, act, idle, carry.grads.ends, carry.totals)
        g = _put(carry.g, [dy], row["head_put"])
        return carry._replace(g=g, totals=totals, grads=carry.grads._replace(ends=ends))

    def _unembed(self, carry: _Carry, row: Row, dx: Array) -> _Carry:
        """Gradients of the embedding from the dx that leaves the first stage; on all stages."""

        def act(ends: Any) -> Any:
            _, pullback = jax.vjp(lambda ends: self._embed(row["unembed"], ends), self.params.ends)
            return _add32(ends, pullback(jnp.where(self.is_first, dx, jnp.zeros_like(dx)))[0])

        ends = lax.cond(row["unembed"] >= 0, act, lambda ends: ends, carry.grads.ends)
        return carry._replace(grads=carry.grads._replace(ends=ends))

    def _loss(self, ends: Any, y: Array, microbatch: Array) -> tuple[Array, Any]:
        """The head on the last stage's y, which the sum sends to all stages."""
        y = sum_over(jnp.where(self.is_last, y, jnp.zeros_like(y)), STAGE)
        loss, totals = self.spec.head_fn(ends, self.spec.constrain(y), self._microbatch(microbatch))
        return loss.astype(jnp.float32), totals

    def _embed(self, microbatch: Array, ends: Any = None) -> Array:
        ends = self.params.ends if ends is None else ends
        return self.spec.constrain(self.spec.embed_fn(ends, self._microbatch(microbatch)))

    def _chunk(self, chunk: Array) -> Any:
        return jax.tree.map(functools.partial(self._pick_chunk, chunk=chunk), self.params.stages)

    def _pick_chunk(self, a: Array, chunk: Array) -> Array:
        return a[0] if self.schedule.chunks == 1 else lax.dynamic_index_in_dim(a, chunk, 0, keepdims=False)

    def _microbatch(self, microbatch: Array) -> Any:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, microbatch, 0, keepdims=False), self.batch)

    def _side(self, microbatch: Array, chunk: Array) -> Side:
        constants = jax.tree.map(functools.partial(self._pick_chunk, chunk=chunk), self.constants)
        return Side(self._microbatch(microbatch), constants)

    def _accumulate(self, grads: Any, chunk: Array, new: list[Array]) -> Any:
        """Add one chunk's weight gradients, in place."""
        leaves, tree = jax.tree.flatten(grads)
        if self.schedule.chunks == 1:
            return jax.tree.unflatten(tree, [g + d.astype(jnp.float32)[None] for g, d in zip(leaves, new)])
        added = [
            lax.dynamic_update_index_in_dim(g, self._pick_chunk(g, chunk) + d.astype(jnp.float32), chunk, 0)
            for g, d in zip(leaves, new)
        ]
        return jax.tree.unflatten(tree, added)

    @property
    def _pieces(self) -> Pieces:
        assert self.pieces is not None
        return self.pieces


def _after(row: Row, a: Array, others: list[Array]) -> Array:
    """`a`, but not before `others` are computed.

    An optimization barrier does not survive until instructions are scheduled. So `a` depends on the others' data as
    far as the compiler can know: no column holds a number below -1.
    """
    never = row["f_microbatch"] < -1
    for other in others:
        a = jnp.where(never, other.astype(a.dtype), a)
    return a


def _put(ring: Ring, values: list[Array], slot: Array) -> Ring:
    return [lax.dynamic_update_index_in_dim(r, v.astype(r.dtype), slot, 0) for r, v in zip(ring, values)]


def _get(ring: Ring, slot: Array) -> list[Array]:
    return [lax.dynamic_index_in_dim(r, slot, 0, keepdims=False) for r in ring]


def _add32(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, more)


def _psum(a: Array, *, axes: tuple[str, ...]) -> Array:
    return sum_over(a, axes) if axes else a
