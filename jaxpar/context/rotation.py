"""How blocks travel round a ring of places: passed on by a permute, or swapped in pairs.

A permute is the plain way, but XLA rendezvous for one over the whole mesh, so it waits for ever in a branch that some
devices do not take, as the stages of a pipeline are. Collectives of groups wait for their group alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.context.tiles import loop

Tree = TypeVar("Tree")
Block = TypeVar("Block")
# (result, block that has arrived, number of the hop, the same up to `turns`) -> (result, block that arrives next)
Hop = Callable[[Tree, Block, jax.Array, int], tuple[Tree, Block]]


@dataclasses.dataclass(frozen=True)
class Ring:
    """`places` on the mesh axis `axis`, `stride` apart; every hop each place gives its block to the next one."""

    axis: str
    places: int
    stride: int
    turns: ClassVar[int] = 1  # hops of different programs; they take turns

    def own(self) -> jax.Array:
        """This device's place."""
        return jax.lax.axis_index(self.axis) // self.stride

    def source(self, hop: int | jax.Array) -> jax.Array:
        """The place whose block is here after so many hops."""
        return (self.own() - hop) % self.places

    def pass_on(self, block: Tree, hop: int) -> Tree:
        """What arrives here when every place passes on its block, a pytree; `hop` counts from 1."""
        del hop
        size = self.places * self.stride
        pairs = [(device, (device + self.stride) % size) for device in range(size)]
        return jax.tree.map(lambda a: jax.lax.ppermute(a, self.axis, pairs), block)

    def between(self, hop: Hop, result: Tree, block: Block) -> tuple[Tree, Block]:
        """(result, block) after all hops but the first and the last, in a loop."""

        def body(carry: tuple[Tree, Block], number: jax.Array) -> tuple[Tree, Block]:
            for turn in range(self.turns):
                result, block = carry
                carry = hop(result, self.later(block, result), 1 + number * self.turns + turn, 1 + turn)
            return carry

        return loop((self.places - 2) // self.turns, body, (result, block))

    def later(self, block: Block, result: Any) -> Block:
        """`block`, but not before `result` is computed; here the loop sees to that."""
        del result
        return block


class PairedRing(Ring):
    """A ring of an even number of places in which neighbours swap blocks; usable in branches.

    Place 0 swaps with 1, 2 with 3 and so on; in the next hop 1 with 2, ..., the last with 0; and so in turns. Blocks
    of even places therefore travel upwards and those of odd places downwards, and after as many hops as there are
    places every block has been everywhere and is home. A hop sends what it does on a plain ring: one block per place.
    """

    turns: ClassVar[int] = 2

    def source(self, hop: int | jax.Array) -> jax.Array:
        """The place whose block is here after so many hops."""
        own = self.own()
        return jnp.where((own - hop) % 2 == 0, own - hop, own + hop) % self.places

    def pass_on(self, block: Tree, hop: int) -> Tree:
        """What arrives here when the pairs of this hop swap their blocks, a pytree; `hop` counts from 1."""
        pairs = [(place, (place + 1) % self.places) for place in range((hop + 1) % 2, self.places, 2)]
        groups = [[place * self.stride + i for place in pair] for pair in pairs for i in range(self.stride)]
        lower = (self.own() + hop) % 2 == 1

        def swap(a: jax.Array) -> jax.Array:
            of_lower, of_upper = jax.lax.all_gather(a, self.axis, axis_index_groups=groups)
            return jnp.where(lower, of_upper, of_lower)

        return jax.tree.map(swap, block)

    def later(self, block: Block, result: Any) -> Block:
        """`block`, but not before `result` is computed.

        An iteration of the loop has two hops, and nothing else keeps the compiler from making all exchanges first,
        which would hide none and hold every block. A barrier is gone before it schedules, so `block` depends on data
        of the result; where that is not a number, nothing is lost by spoiling the block.
        """
        last = jax.tree.leaves(result)[0]
        last = last[(-1,) * last.ndim]  # of the late half, to which every hop adds
        wait = lambda a: jnp.where(last != last, last.astype(a.dtype), a)  # noqa: E731
        return jax.tree.map(lambda a: wait(a) if jnp.issubdtype(a.dtype, jnp.floating) else a, block)
