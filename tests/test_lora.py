"""Adapters: nothing at step 0, alpha / rank afterwards, a frozen base, and the same model merged or not."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import DATA, batch_of, model_of

from jaxpar import validate
from jaxpar.build import model_maker
from jaxpar.config import Config, LoraConfig, MoeConfig, OptimizerConfig, ParallelConfig, PipelineConfig
from jaxpar.errors import UserError
from jaxpar.hf import load_params
from jaxpar.hf.convert import abstract_params
from jaxpar.hf.peft import export_adapter, load_adapter, read_adapter_config
from jaxpar.layout_check import put
from jaxpar.lora import TARGETS, Tuning, make_adapter, make_tuning, merge, merged, merging, with_adapter
from jaxpar.models.sharder import UNSHARDED
from jaxpar.precision import precision
from jaxpar.tree import from_named, named_leaves

NAME = "qwen2"
LORA = LoraConfig(rank=8, alpha=16.0, targets=("q", "v", "out", "gate", "down"))


def config_of(**settings) -> Config:
    parallel = settings.pop("parallel", {"data": 1})
    return Config(
        model=model_of(DATA / NAME),
        precision="float32",
        seq_len=24,
        global_batch=2,
        steps=10,
        init_from=str(DATA / NAME),
        lora=LORA,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.1),
        **settings,
    )


@functools.cache
def tuning_of(tensor: int) -> Tuning:
    return make_tuning(config_of(parallel={"data": 1, "tensor": tensor}), jax.devices()[:tensor])


@functools.cache
def base():
    return load_params(DATA / NAME, model_of(DATA / NAME), abstract_params(model_of(DATA / NAME)))


def random_adapter():
    """An adapter whose B is not zero."""
    fresh = make_adapter(jax.random.key(0), LORA, base())
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda a: 0.2 * jax.random.normal(next(keys), a.shape), fresh)


@functools.cache
def functions():
    """Jitted: logits of the base, with the adapter on the side, and merged."""
    batch = batch_of(NAME)
    return (
        jax.jit(lambda m: m.logits(batch)),
        jax.jit(lambda m, a: with_adapter(m, a).logits(batch, merging(UNSHARDED))),
    )


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_is_the_same_model():
    plain, adapted = functions()
    fresh = make_adapter(jax.random.key(0), LORA, base())
    assert np.array_equal(plain(base()), adapted(base(), fresh))
    adapter = random_adapter()
    on_the_side, whole = adapted(base(), adapter), plain(jax.jit(merge)(base(), adapter))
    assert np.abs(np.asarray(on_the_side) - np.asarray(whole)).max() < 1e-5
    assert np.abs(np.asarray(on_the_side) - np.asarray(plain(base()))).max() > 0.1


def test_the_update_is_alpha_over_rank_times_a_b():
    adapter = random_adapter()
    block, first = jax.tree.map(lambda a: a[0], (base().blocks, adapter))
    got = merged(block, first)
    q = np.tensordot(first.q.a[...], first.q.b[...], 1) * 2.0  # alpha 16, rank 8
    np.testing.assert_allclose(got.attention.q[...] - block.attention.q[...], q, atol=1e-5)
    out = np.tensordot(first.out.a[...], first.out.b[...], 1) * 2.0
    assert out.shape == (4, 8, 32)
    np.testing.assert_allclose(got.attention.out[...] - block.attention.out[...], out, atol=1e-5)
    assert np.array_equal(got.attention.k[...], block.attention.k[...])


@pytest.mark.parametrize("tensor", [1, 2])
def test_training_moves_the_adapter_alone(tensor):
    """The base keeps its bits and has no optimizer state; losses are the same for every tensor degree."""
    tuning = tuning_of(tensor)
    frozen = jax.device_put(base(), jax.tree.map(lambda a: a.sharding, tuning.abstract_base))
    before = {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(frozen).items()}
    state = tuning.built.init(jax.random.key(0))
    names = set(named_leaves(state.params))
    assert names == {f"{target}/{part}" for target in LORA.targets for part in "ab"}
    arrays = [name for name in named_leaves(state.opt_state) if not name.endswith("count")]
    assert {name.split("/", 2)[2] for name in arrays} == names
    step, built = tuning.bind(frozen, tuning.built.step)
    losses = []
    for _ in range(4):
        state, metrics = step(state, put(built, batch_of(NAME)))
        losses.append(float(metrics["loss"]))
    evaluated = built.evaluate(state.params, put(built, batch_of(NAME)))
    losses.append(float(evaluated.loss / evaluated.tokens))
    assert losses[-1] < losses[0] - 0.1
    assert {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(frozen).items()} == before
    np.testing.assert_allclose(losses, first_losses(losses), rtol=1e-4)


@functools.cache
def _seen() -> list:
    return []


def first_losses(losses: list[float]) -> list[float]:
    """The losses of the first layout that was run."""
    _seen().append(losses)
    return _seen()[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("q", "query")}, "'query' matches no weight of this model; choose from q, k, v, out, gate"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"targets": ("q", "q")}, "names a weight twice"),
    ],
)
def test_targets_that_match_nothing_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        make_adapter(jax.random.key(0), dataclasses.replace(LORA, **change), abstract_params(model_of(DATA / NAME)))


def test_the_check_of_a_config_knows_all_targets():
    assert tuple(TARGETS) == validate.LORA_TARGETS


PIPELINES = [
    pytest.param("1f1b", 1, {"stage": 2}, "none", "float32", marks=pytest.mark.sweep),
    pytest.param("interleaved", 2, {"stage": 2, "tensor": 2}, "full", "nf4", marks=pytest.mark.sweep),
    pytest.param("zb_h1", 1, {"stage": 2, "data": 2, "zero": 2}, "none", "float32", marks=pytest.mark.sweep),
    ("fused", 1, {"stage": 2, "data": 2}, "full", "nf4"),
    pytest.param("fused", 1, {"stage": 2, "tensor": 2}, "full", "int8", marks=pytest.mark.sweep, id="leading-layer"),
]


@pytest.mark.parametrize(("schedule", "chunks", "parallel", "remat", "base_kind"), PIPELINES)
def test_a_pipeline_trains_the_adapter_of_one_device(schedule, chunks, parallel, remat, base_kind, request):
    """Same losses and the same adapter, in natural order; the frozen stages keep their bits."""
    found, special = [], {}
    lora = LORA
    if "leading-layer" in request.node.name:  # and three with experts, which have no adapter
        special = {"moe": MoeConfig(num_experts=4, expert_dim=16, first_dense=1)}
        lora = dataclasses.replace(LORA, targets=("q", "v", "out"))
    for degrees in ({}, parallel):
        config = config_of(parallel={"data": 1} | degrees, remat=remat, seed=3)
        model = dataclasses.replace(config.model, num_layers=4, window=None, **special)
        settings = PipelineConfig(schedule=schedule, chunks=chunks, microbatches=2) if degrees else PipelineConfig()
        config = dataclasses.replace(
            config, model=model, lora=dataclasses.replace(lora, base=base_kind), global_batch=4, pipeline=settings
        )
        count = degrees.get("stage", 1) * degrees.get("data", 1) * degrees.get("tensor", 1)
        tuning = make_tuning(config, jax.devices()[:count])
        frozen = tuning.load(Fresh(config))
        before = {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(frozen).items()}
        step, built = tuning.bind(frozen, tuning.built.step)
        state = built.init(jax.random.key(0))
        batch = {name: np.concatenate([a, a[::-1]]) for name, a in batch_of(NAME).items()}
        losses = []
        for _ in range(3):
            state, metrics = step(state, put(built, batch))
            losses.append(float(metrics["loss"]))
        sums = built.evaluate(state.params, put(built, batch))
        losses.append(float(sums.loss / sums.tokens))
        assert {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(frozen).items()} == before
        found.append((losses, named_leaves(jax.jit(built.to_natural)(state.params))))
    (one, one_adapter), (many, adapter) = found
    assert one[-1] < one[0] - 0.05
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert adapter.keys() == one_adapter.keys()
    for name, leaf in adapter.items():
        np.testing.assert_allclose(leaf, one_adapter[name], atol=2e-4, err_msg=name)


@dataclasses.dataclass
class Fresh:
    """Random weights behind the interface of `jaxpar.weights.Weights`."""

    config: Config

    def load(self, abstract):
        make = model_maker(dataclasses.replace(self.config, lora=LoraConfig()), precision("float32"))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return jax.jit(make, out_shardings=shardings)(jax.random.key(5))

    def each(self, abstract):
        return iter(named_leaves(self.load(abstract)).items())


def test_peft_folders_keep_rank_alpha_targets_and_values(tmp_path):
    adapter, model = random_adapter(), model_of(DATA / NAME)
    values = named_leaves(adapter)
    export_adapter(tmp_path / "out", model, LORA, values, base="somewhere")
    assert read_adapter_config(tmp_path / "out", model) == LORA
    again = load_adapter(tmp_path / "out", model, values)
    assert set(again) == set(values)
    assert all(np.array_equal(again[name], values[name]) for name in values)
    restored = from_named(adapter, {name: jnp.asarray(value) for name, value in again.items()})
    assert np.array_equal(functions()[1](base(), restored), functions()[1](base(), adapter))


def test_an_adapter_made_by_peft_gives_the_logits_of_peft():
    folder = DATA.with_name("peft_data") / NAME
    model = model_of(DATA / NAME)
    config = read_adapter_config(folder, model)
    assert (config.rank, config.alpha, config.targets) == (4, 6.0, ("q", "v", "down"))
    fresh = jax.eval_shape(lambda: make_adapter(jax.random.key(0), config, base()))
    values = load_adapter(folder, model, named_leaves(fresh))
    adapter = from_named(fresh, {name: jnp.asarray(value) for name, value in values.items()})
    got = np.asarray(functions()[0](jax.jit(merge)(base(), adapter)))[..., : model.true_vocab]
    wanted = np.load(folder / "reference.npz")["logits"]
    assert np.abs(got - wanted)[batch_of(NAME)["segment_ids"] > 0].max() <= 1e-4


def test_fused_layers_have_no_peft_form(tmp_path):
    with pytest.raises(UserError, match=r"'q' is no linear layer of its own in a phi3"):
        export_adapter(tmp_path / "out", model_of(DATA / "phi3"), LoraConfig(rank=2, targets=("q",)), {})
