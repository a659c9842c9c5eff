"""Names of leaves follow structure, not classes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpar.tree import from_named, named_leaves, nested


class Block(nnx.Module):
    def __init__(self):
        self.up = nnx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))
        self.down = nnx.Param(jnp.zeros((3, 2)), axes=("mlp", "embed"))


class Model(nnx.Module):
    def __init__(self):
        self.blocks = Block()
        self.head = nnx.Param(jnp.ones(4), axes=("embed",))


class State(NamedTuple):
    step: jax.Array
    params: Model
    opt_state: optax.OptState


def test_names_of_a_module_carry_no_box():
    assert sorted(named_leaves(Model())) == ["blocks/down", "blocks/up", "head"]


def test_a_module_and_a_plain_dict_have_the_same_names():
    plain = {"blocks": {"up": 1, "down": 2}, "head": 3}
    assert set(named_leaves(plain)) == set(named_leaves(Model()))


def test_a_dict_key_called_value_is_kept():
    assert list(named_leaves({"a": {"value": 1}})) == ["a/value"]


def test_stateless_links_of_an_optimizer_chain_rename_nothing():
    params = Model()
    with_clip = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_schedule(lambda _: 1.0)
    )
    without = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda _: 1.0))
    names = list(named_leaves(with_clip.init(params)))
    assert names == list(named_leaves(without.init(params)))
    assert "0/mu/blocks/up" in names
    assert "1/count" in names


def test_from_named_inverts_named_leaves():
    model = Model()
    state = State(jnp.int32(7), model, optax.adamw(1e-3).init(model))
    named = named_leaves(state)
    rebuilt = from_named(jax.eval_shape(lambda: state), named)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(state)))


def test_nested_splits_at_the_separator():
    assert nested({"a/b": 1, "a/c/d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_names_that_could_collide_are_refused():
    with pytest.raises(ValueError, match="cannot be part of a name"):
        named_leaves({"a/b": 1})
