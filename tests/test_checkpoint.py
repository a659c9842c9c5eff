"""Save then restore is the identity, in any layout; a bit-exact resume; retention."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import Checkpoints, load_arrays
from jaxpar.config import CheckpointConfig
from jaxpar.errors import UserError

EMBED, MLP, LAYERS = 16, 32, 4


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(rngs.params.normal((LAYERS, EMBED, MLP)) * 0.1, axes=("layer", "embed", "mlp"))
        self.down = nnx.Param(rngs.params.normal((LAYERS, MLP, EMBED)) * 0.1, axes=("layer", "mlp", "embed"))
        self.scale = nnx.Param(jnp.ones((EMBED,), jnp.bfloat16), axes=("embed",))


class State(NamedTuple):
    step: jax.Array
    params: Net
    opt_state: optax.OptState


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))


def init(key):
    params = Net(nnx.Rngs(key))
    return State(jnp.zeros((), jnp.int32), params, TX.init(params))


def mesh_of(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("data", "tensor")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def abstract_on(mesh, layer_axis=None):
    """Abstract state: matrices split over the last mesh axis, or the layer dim over `layer_axis`."""

    def place(leaf):
        spec = P()
        if leaf.ndim == 3:
            spec = (
                P(layer_axis) if layer_axis else P(None, *(mesh.axis_names if len(mesh.axis_names) == 2 else ("data",)))
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, jax.eval_shape(init, jax.random.key(0)))


def make(abstract):
    """A state whose every leaf is random, optimizer included."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        values = rng.standard_normal(leaf.shape) * 0.1 if leaf.ndim else np.zeros(())
        return jax.device_put(np.abs(values).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract)


def train_step(state, index):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(3), index), (8, EMBED))

    def loss_fn(params):
        h = x + jnp.einsum("LBF,LFE->BE", jnp.tanh(jnp.einsum("BE,LEF->LBF", x, params.up[...])), params.down[...])
        return jnp.mean((h * params.scale[...].astype(jnp.float32) - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), loss


STEP = jax.jit(train_step, donate_argnums=0)


def equal_bits(a, b):
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves_a) == len(leaves_b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(leaves_a, leaves_b)
    )


@pytest.fixture
def lines():
    return []


@pytest.fixture
def open_at(tmp_path, lines):
    def opener(**settings):
        return Checkpoints(tmp_path / "checkpoints", CheckpointConfig(**settings), report=lines.append)

    return opener


@pytest.fixture(scope="module")
def abstract():
    return abstract_on(mesh_of(2, 4))


@pytest.fixture(scope="module")
def state(abstract):
    return make(abstract)


def test_save_then_restore_is_the_identity(open_at, abstract, state, lines):
    extra = {"data": {"seed": 1, "next_index": 64}, "config": "abc"}
    with open_at() as checkpoints:
        checkpoints.save(5, state, extra)
    restored = open_at().restore_latest(abstract)
    assert restored is not None
    assert (restored.step, restored.extra, restored.skipped) == (5, extra, [])
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert equal_bits(restored.state, state)
    assert all(
        leaf.sharding == wanted.sharding
        for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract))
    )
    assert lines == []


@pytest.mark.parametrize(
    ("sizes", "layer_axis"),
    [((1, 1), None), ((8,), None), ((8, 1), None), ((2, 2), "data")],
    ids=["one device", "fsdp 8", "data 8", "layers over stages"],
)
def test_restore_into_another_mesh(open_at, abstract, state, sizes, layer_axis):
    with open_at() as checkpoints:
        checkpoints.save(1, state, {})
    target = abstract_on(mesh_of(*sizes), layer_axis)
    restored = open_at().restore_latest(target)
    assert equal_bits(restored.state, state)
    assert restored.state.params.up[...].sharding == target.params.up.get_value().sharding


def test_the_state_may_be_donated_at_once(open_at, abstract):
    state, saved = make(abstract), make(abstract)
    checkpoints = open_at()
    checkpoints.save(0, state, {})
    for index in range(3):
        state, _ = STEP(state, index)
    checkpoints.close()
    assert equal_bits(checkpoints.restore(0, abstract).state, saved)
    assert not equal_bits(state, saved)


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["sharded", "replicated"])
def test_a_step_that_overwrites_the_state_at_once_does_not_reach_the_disk(tmp_path, open_at, spec):
    """With arrays so large that the save still reads them while steps run in their memory; with hooks too."""
    sharding = NamedSharding(mesh_of(8), spec)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * -3, tree), donate_argnums=0)
    state = {f"w{i}": jax.device_put(jnp.arange(2.0**20).reshape(1024, -1) + i, sharding) for i in range(4)}
    saved = {name: np.array(leaf) for name, leaf in state.items()}

    def half(tree):  # one array passes through the hook untouched
        return {name: leaf if name == "w0" else leaf * 2 for name, leaf in tree.items()}

    with open_at() as plain, Checkpoints(tmp_path / "hooked", CheckpointConfig(), to_disk=half) as hooked:
        plain.save(1, state, {})
        hooked.save(1, state, {})
        for _ in range(5):
            state = overwrite(state)
        numbers = {"n": np.arange(4)}
        plain.save(2, numbers, {})
        numbers["n"] += 7
    arrays = load_arrays(tmp_path / "checkpoints", 1)[1]
    assert all(np.array_equal(arrays[name], saved[name]) for name in saved)
    arrays = load_arrays(tmp_path / "hooked", 1)[1]
    assert all(np.array_equal(arrays[name], saved[name] * (1 if name == "w0" else 2)) for name in saved)
    assert np.array_equal(load_arrays(tmp_path / "checkpoints", 2)[1]["n"], np.arange(4))


@pytest.mark.parametrize("killed_at", [1, 3, 5])
def test_resume_is_bit_exact(open_at, abstract, killed_at):
    losses, state = [], make(abstract)
    for index in range(6):
        state, loss = STEP(state, index)
        losses.append(float(loss))

    resumed_losses, first = [], make(abstract)
    checkpoints = open_at()
    for index in range(killed_at):
        first, loss = STEP(first, index)
        resumed_losses.append(float(loss))
    checkpoints.save(killed_at, first, {"next": killed_at})
    checkpoints.close()
    restored = open_at().restore_latest(abstract)
    second = restored.state
    for index in range(restored.extra["next"], 6):
        second, loss = STEP(second, index)
        resumed_losses.append(float(loss))
    assert resumed_losses == losses
    assert equal_bits(second, state)
    assert int(second.opt_state[1][0].count) == 6


def test_a_restored_state_is_donated_like_any_other(open_at, abstract):
    """Else the first step after a resume would need a second copy of the state."""
    with open_at() as checkpoints:
        checkpoints.save(1, make(abstract), {})
    restored = open_at().restore_latest(abstract).state
    STEP(restored, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored.opt_state) if leaf.ndim == 3)


def test_names_and_layout_on_disk_are_natural(tmp_path, open_at, state):
    with open_at() as checkpoints:
        checkpoints.save(2, state, {})
    step, arrays = load_arrays(tmp_path / "checkpoints", prefix="params/")
    assert step == 2
    assert sorted(arrays) == ["down", "scale", "up"]
    assert arrays["up"].shape == (LAYERS, EMBED, MLP)
    np.testing.assert_array_equal(arrays["up"], np.asarray(state.params.up[...]))
    manifest = json.loads((tmp_path / "checkpoints" / "2" / "manifest.json").read_text())
    assert manifest["arrays"]["opt_state/0/0/mu/up"]["dtype"] == "float32"
    (checksum,) = manifest["arrays"]["params/scale"]["checksums"].split()
    wanted = {"shape": [EMBED], "dtype": "bfloat16", "grid": [1], "checksums": checksum}
    assert manifest["arrays"]["params/scale"] == wanted
    assert manifest["arrays"]["params/up"]["grid"] == [1, 2, 4]  # as the state is sharded


def test_hooks_store_the_natural_order(tmp_path, abstract, state):
    """A state kept in circular stage order is stored, and restored, through [layer, ...]."""
    order = jnp.array([0, 2, 1, 3])

    def permute(tree, by):
        return jax.tree.map(lambda x: x[by] if x.ndim == 3 else x, tree)

    def checkpoints():
        return Checkpoints(
            tmp_path,
            CheckpointConfig(),
            to_disk=lambda tree: permute(tree, jnp.argsort(order)),
            from_disk=lambda tree: permute(tree, order),
        )

    placed = permute(state, order)
    with checkpoints() as writer:
        writer.save(1, placed, {})
    restored = checkpoints().restore_latest(abstract)
    assert equal_bits(restored.state, placed)
    assert restored.state.params.up[...].sharding == abstract.params.up.get_value().sharding
    np.testing.assert_array_equal(load_arrays(tmp_path)[1]["params/up"], np.asarray(state.params.up[...]))


def test_a_subset_can_be_restored(open_at, abstract, state):
    with open_at() as checkpoints:
        checkpoints.save(1, state, {})
        restored = checkpoints.restore(1, {"params": abstract.params}, subset=True)
    assert equal_bits(restored.state["params"], state.params)


def test_numbers_keep_their_type(open_at):
    with open_at() as checkpoints:
        checkpoints.save(1, {"count": 2**40, "rate": 0.1, "on": True, "w": jnp.ones(3)}, {})
    restored = open_at().restore_latest({"count": 0, "rate": 0.0, "on": False, "w": np.zeros(3, np.float32)})
    assert restored.state["count"] == 2**40
    assert restored.state["rate"] == 0.1
    assert restored.state["on"] is True
    assert isinstance(restored.state["w"], np.ndarray)


def test_types_of_all_widths(open_at):
    split, other = NamedSharding(mesh_of(8), P("data")), NamedSharding(mesh_of(2, 2), P("tensor"))
    dtypes = [jnp.bool_, jnp.int4, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16, jnp.uint32]
    state = {str(np.dtype(dtype)): jax.device_put(jnp.arange(16).astype(dtype), split) for dtype in dtypes}
    with jax.enable_x64(True), open_at() as checkpoints:
        state |= {"float64": jax.device_put(jnp.linspace(0.0, 1.0, 16), split)}
        checkpoints.save(1, state, {})
        checkpoints.save(2, {"scalar": jnp.int32(7), "int64": np.arange(16) * 2**40}, {})
        checkpoints.wait()
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=other), state)
        assert equal_bits(checkpoints.restore(1, abstract).state, state)
        assert abstract["float64"].dtype == np.float64
    numbers = {"scalar": jnp.int32(0), "int64": np.zeros(16, np.int64)}
    assert equal_bits(open_at().restore(2, numbers).state, {"scalar": jnp.int32(7), "int64": np.arange(16) * 2**40})


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_state_in_host_memory(open_at, kind):
    sharding = NamedSharding(mesh_of(8), P("data"), memory_kind=kind)
    state = {"mu": jax.device_put(jnp.arange(64.0), sharding)}
    with open_at() as checkpoints:
        checkpoints.save(1, state, {})
    restored = open_at().restore_latest({"mu": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding)})
    assert restored.state["mu"].sharding == sharding
    assert equal_bits(restored.state, state)


def small(value):
    return {"w": jnp.full(4, value)}


def test_retention(open_at):
    with open_at(keep=2, keep_every=20, keep_best=1) as checkpoints:
        for step in range(0, 60, 5):
            checkpoints.save(step, small(step), {"metrics": {"eval_loss": abs(step - 15.0)}})
            checkpoints.wait()
            assert checkpoints.steps()
    assert checkpoints.steps() == [0, 15, 20, 40, 50, 55]


def test_an_older_run_that_goes_back_keeps_its_new_step(open_at):
    with open_at(keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, small(step), {})
        checkpoints.save(12, small(0), {})
    assert 12 in checkpoints.steps()


def test_the_same_step_can_be_saved_again(open_at):
    with open_at() as checkpoints:
        checkpoints.save(3, small(1.0), {})
        checkpoints.save(3, small(2.0), {})
        checkpoints.wait()
        assert checkpoints.restore_latest(jax.eval_shape(lambda: small(0.0))).state["w"][0] == 2.0


def test_nothing_to_restore(open_at):
    assert open_at().restore_latest(small(0.0)) is None


def test_an_unknown_step_is_named(open_at):
    with open_at() as checkpoints:
        checkpoints.save(3, small(1.0), {})
        checkpoints.wait()
        with pytest.raises(UserError, match=r"no checkpoint of step 4 .* there are: 3"):
            checkpoints.restore(4, small(0.0))
