"""The closed-form model: exact state bytes, directions, FLOPs, links, energy, calibration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from dryrun_cases import COUNTERS, GPUS

from jaxpar import config_file
from jaxpar.build import build
from jaxpar.dryrun.assumptions import Assumptions, default_assumptions, override
from jaxpar.dryrun.calibrate import (
    FAMILIES,
    Comparison,
    fit,
    load_runs,
    mean_absolute_error,
    rank_correlation,
)
from jaxpar.dryrun.compile import missing_plugin
from jaxpar.dryrun.energy import EnergyAssumptions, run_cost
from jaxpar.dryrun.links import collective_time_s, exposed_time_s
from jaxpar.dryrun.memory import in_flight, memory_by_class, state_bytes
from jaxpar.dryrun.shape import Layout, ModelShape, group_span, layout_of, model_shape, stage_layers
from jaxpar.dryrun.speed import estimate_step
from jaxpar.dryrun.targets import find_target
from jaxpar.dryrun.work import flops_per_gpu, layer_matmuls, model_flops_per_token
from jaxpar.errors import UserError
from jaxpar.models.count import flops_per_token, matmul_parameters, parameter_count

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ModelShape(
    num_layers=32, embed_dim=4096, num_heads=32, kv_heads=8, head_dim=128, mlp_dim=14336, vocab=128256, seq_len=4096
)
H100 = find_target("h100")

# Builds every config at every ZeRO level for absent GPUs, without compiling, in one process.
SIZES = """
import dataclasses, json, sys
from jaxpar import config_file
from jaxpar.build import build
from jaxpar.dryrun.child import absent_devices, state_sizes
from jaxpar.dryrun.compile import topology
from jaxpar.dryrun.targets import find_target
out = {}
for name, gpus in json.loads(sys.argv[1]).items():
    devices = absent_devices(find_target("h100").target_config(), topology(gpus, 8))
    for zero in range(4):
        given = ["model.vocab_size=259"] if name == "quickstart" else []
        config = config_file.load(f"configs/{name}.py", [f"parallel.zero={zero}", *given])
        out[f"{name} {zero}"] = state_sizes(build(config, devices))
print("RESULT" + json.dumps(out))
"""


@pytest.fixture(scope="module")
def built_sizes():
    if missing_plugin():
        pytest.skip("the compiler plugin is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SIZES, json.dumps(GPUS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("name", GPUS)
def test_state_bytes_are_exact(built_sizes, name, zero):
    """Parameters, gradients and moments of every config at every ZeRO level equal those of the built run."""
    given = ["model.vocab_size=259"] if name == "quickstart" else []
    config = config_file.load(ROOT / f"configs/{name}.py", [f"parallel.zero={zero}", *given])
    state = state_bytes(model_shape(config), layout_of(config, GPUS[name]))
    sizes = built_sizes[f"{name} {zero}"]
    counters = 8  # two int32 counts of the optimizer
    assert state.parameters == sizes["parameters"]
    assert state.optimizer + counters == sizes["optimizer"]
    assert state.gradients == sizes["gradients"]


def test_parameter_count_of_a_known_model():
    assert SHAPE.num_parameters() == 8_030_261_248


def test_flops_of_a_known_step():
    """8B, 512 tokens per GPU of a 64-way step: 6 x 7.505e9 x 512, remat of all but the last matmul, attention."""
    layout = Layout(data=8, tensor=8, remat="full", microbatch_rows=1)
    matmul_parameters = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    again = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 * 14336)
    attention = 32 * 4 * 2048 * 4096 * (1 + 2.5 + 1)
    expected = 512 * (6 * matmul_parameters + 2 * again + attention)
    assert flops_per_gpu(SHAPE, layout) == pytest.approx(expected, rel=1e-12)


def test_mfu_counts_no_recomputation():
    assert model_flops_per_token(SHAPE) == pytest.approx(6 * 7_504_658_432 + 3 * 32 * 4 * 2048 * 4096, rel=1e-9)


@pytest.mark.parametrize("name", GPUS)
def test_matmuls_and_parameters_are_those_of_the_model(name):
    """The matmuls of the dry run have the weights that MFU counts, and its parameters are the model's."""
    given = ["model.vocab_size=259"] if name == "quickstart" else []
    config = config_file.load(ROOT / f"configs/{name}.py", given)
    shape = model_shape(config)
    matmuls = sum(
        one.flops_per_token / 2 * count for kind, count in shape.kinds for one in layer_matmuls(kind, Layout())
    )
    model = dataclasses.replace(config.model, max_position=shape.positions or None)
    assert matmuls + model.true_vocab * model.embed_dim == matmul_parameters(model)
    assert model_flops_per_token(shape) == flops_per_token(model, config.seq_len)
    padding = shape.padding_rows * shape.embed_dim * (1 if shape.tied else 2)
    assert shape.num_parameters() - padding == parameter_count(model)


VARIANTS = {
    "biases": ["model.qkv_bias=True", "model.out_bias=True", "model.mlp_bias=True", "model.norm=layer"],
    "tied, four norms": ["model.tied=True", "model.norm_placement=both", "model.qk_norm=full", "model.num_kv_heads=2"],
    "learned positions": ["model.positions=learned", "model.max_position=512", "model.qk_norm=head"],
    "gpt-oss": [
        "model.attention_sinks=True", "model.mlp_bias=True", "model.moe.num_experts=8", "model.moe.router_bias=True",
        "model.moe.expert_dim=64",
    ],
    "deepseek": [
        "model.latent.kv_rank=32", "model.latent.query_rank=48", "model.latent.rope_dim=16", "model.head_dim=32",
        "model.latent.value_dim=24", "model.qkv_bias=True", "model.out_bias=True", "model.moe.num_experts=4",
        "model.moe.num_shared=2", "model.moe.first_dense=1", "model.moe.choice_bias=True",
    ],
    "deepseek without query rank": ["model.latent.kv_rank=32", "model.latent.rope_dim=16"],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_of_every_kind_of_model(name):
    config = config_file.from_dict({"model": {"vocab_size": 256}}, VARIANTS[name])
    shape = model_shape(config)
    assert shape.num_parameters() == parameter_count(config.model)
    assert model_flops_per_token(shape) == flops_per_token(config.model, config.seq_len)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "slots"), [(9, 4, 1, (2, 3)), (11, 2, 2, (6, 6)), (10, 8, 1, (1, 2))]
)
def test_state_of_stages_with_dense_and_expert_layers(layers, stages, chunks, slots):
    """Three dense layers in front; the bytes are those of the arrays of a run."""
    given = [
        "model.vocab_size=256", "model.embed_dim=64", "model.num_heads=4", "model.mlp_dim=128", "remat=full",
        f"model.num_layers={layers}", "model.moe.num_experts=4", "model.moe.expert_dim=64", "model.moe.first_dense=3",
        f"parallel.stage={stages}", f"pipeline.chunks={chunks}", "pipeline.microbatches=8", "global_batch=64",
        "parallel.zero=1",
    ]  # fmt: skip
    config = config_file.from_dict({}, given)
    shape, layout = model_shape(config), layout_of(config, 8)
    held = stage_layers(shape, layout)
    assert (held.slots, held.leading_slots) == slots
    assert held.average <= held.pacing <= held.all_slots
    arrays = jax.tree.leaves(build(config).abstract_state)
    state = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
    assert memory_by_class(shape, layout).state + COUNTERS == state


BASE = Layout(data=64, zero=1, remat="attention", microbatch_rows=2, num_microbatches=2)


def peak(shape: ModelShape = SHAPE, **changes) -> float:
    return memory_by_class(shape, dataclasses.replace(BASE, **changes)).peak


def test_memory_reacts_in_the_right_direction():
    assert peak(microbatch_rows=4) > peak()
    assert peak(dataclasses.replace(SHAPE, seq_len=8192)) > peak()
    assert peak(dataclasses.replace(SHAPE, vocab=256512)) > peak()
    assert peak(remat="none") >= peak() > peak(remat="dots") > peak(remat="full")
    assert peak(zero=0) > peak(zero=1) > peak(zero=2) > peak(zero=3)
    assert peak(optimizer_floats=1) < peak()
    assert peak(tensor=2, data=32) < peak()
    assert peak(tensor=2, data=32, sequence_parallel=True) < peak(tensor=2, data=32)
    assert peak(context=2, data=32) < peak()
    assert peak(stage=4, data=16, num_microbatches=4) < peak()
    assert peak(remat="full", zero=3, loss_chunk_tokens=512) < peak(remat="full", zero=3)
    assert peak(fused_attention=False, remat="none") > peak(remat="none")


def test_classes_add_up_to_the_peak():
    memory = memory_by_class(SHAPE, BASE)
    assert sum(dataclasses.asdict(memory).values()) == memory.peak


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"), [("gpipe", 1, 32), ("1f1b", 1, 4), ("fused", 1, 7), ("fused", 2, 11 / 2)]
)
def test_microbatches_in_flight(schedule, chunks, expected):
    layout = Layout(stage=4, num_microbatches=32, schedule=schedule, chunks=chunks)
    assert in_flight(layout) == expected


def test_groups_on_nodes():
    sizes = Layout(stage=2, data=4, tensor=4).sizes
    assert group_span(sizes, ("tensor",), 8) == (1, 4)
    assert group_span(sizes, ("data",), 8) == (2, 2)
    assert group_span(sizes, ("stage",), 8) == (2, 1)
    assert group_span(sizes, ("data", "tensor"), 8) == (2, 8)


def test_ring_all_reduce_time():
    assumed = dataclasses.replace(Assumptions(), nvlink_latency_s=0.0, nvlink_hop_s=0.0, nvlink_efficiency=1.0)
    seconds = collective_time_s("all-reduce", 8e9, num_nodes=1, members_per_node=8, gpu=H100, assumed=assumed)
    assert seconds == pytest.approx(2 * 7 / 8 * 8e9 / 450e9)
    gather = collective_time_s("all-gather", 8e9, num_nodes=1, members_per_node=8, gpu=H100, assumed=assumed)
    assert gather == pytest.approx(seconds / 2)
    assert collective_time_s("all-gather", 8e9, num_nodes=1, members_per_node=1, gpu=H100, assumed=assumed) == 0


def test_overlap_hides_at_most_its_share():
    assumed = dataclasses.replace(Assumptions(), overlap=0.5, overlap_cost=0.0)
    assert exposed_time_s(1.0, 4.0, assumed) == 0
    assert exposed_time_s(3.0, 4.0, assumed) == pytest.approx(1.0)


def test_pipeline_bubble_of_fused_schedule():
    """(S - 1) / (V M + S - 1) of the time the stages work or wait."""
    shape = dataclasses.replace(SHAPE, seq_len=1024)
    layout = Layout(stage=4, microbatch_rows=1, num_microbatches=8, remat="full", chunks=2)
    estimate = estimate_step(shape, layout, H100, Assumptions())
    pipelined_s = estimate.step_s - estimate.optimizer_s - estimate.exposed_s
    assert estimate.bubble_fraction * estimate.step_s / pipelined_s == pytest.approx(3 / (2 * 8 + 3), rel=1e-3)


def test_energy_and_price_by_hand():
    assumed = EnergyAssumptions(gpu_watts=700, load=1.0, other_watts_per_gpu=300, pue=1.5, price_per_gpu_hour=2.0)
    cost = run_cost(H100, num_gpus=8, steps=3600, step_s=2.0, assumed=assumed)
    assert cost.hours == 2.0
    assert cost.gpu_hours == 16.0
    assert cost.energy_kwh == pytest.approx(16 * 1.0 * 1.5)
    assert cost.rent_usd == 32.0
    assert cost.energy_usd == pytest.approx(2.4)


def test_overrides_of_assumptions():
    assert override(Assumptions(), ["overlap=0.5", "launch_s=0"]).overlap == 0.5
    with pytest.raises(UserError, match="no such assumption") as caught:
        override(Assumptions(), ["speed=1", "overlap=fast"])
    assert len(caught.value.problems) == 2


# --- calibration ---


def runs_of(family: str, grade: str = "A"):
    return [run for run in load_runs() if run.grade == grade and FAMILIES.get(run.gpu.name, "h100") == family]


@pytest.mark.parametrize("family", ["h100", "a100-80g"])
def test_fitted_assumptions_match_published_runs(family):
    """The shipped set of a GPU kind predicts its published runs within 7 % on average, in the right order."""
    comparisons = [Comparison(run, run.predicted(default_assumptions(family))) for run in runs_of(family)]
    assert mean_absolute_error(comparisons) <= 0.07
    assert rank_correlation(comparisons) >= 0.95


def test_a_cluster_left_out_is_predicted():
    """Fitted without two clusters, their runs come out within 15 % on average."""
    runs = runs_of("a100-80g")
    left_out = {"titan-a100-2024", "llmfoundry-a100_80gb-13b"}
    assumed = fit([run for run in runs if run.cluster not in left_out])
    comparisons = [Comparison(run, run.predicted(assumed)) for run in runs if run.cluster in left_out]
    assert len(comparisons) >= 10
    assert mean_absolute_error(comparisons) <= 0.15


@pytest.mark.sweep
def test_every_cluster_left_out_is_predicted():
    from jaxpar.dryrun.calibrate import leave_one_cluster_out

    comparisons = [one for family in ("h100", "a100-80g") for one in leave_one_cluster_out(runs_of(family))]
    assert len(comparisons) >= 120
    assert mean_absolute_error(comparisons) <= 0.15
    assert rank_correlation(comparisons) >= 0.95


def test_fit_finds_the_numbers_that_made_the_data():
    """Runs made by the model itself are predicted by a fit that starts elsewhere."""
    truth = dataclasses.replace(Assumptions(), matmul_efficiency=0.6, hbm_efficiency=0.6)
    runs = [dataclasses.replace(run, tokens_per_s_per_gpu=run.predicted(truth)) for run in runs_of("a100-80g")[::6]]
    before = mean_absolute_error([Comparison(run, run.predicted(Assumptions())) for run in runs])
    found = fit(runs)
    after = mean_absolute_error([Comparison(run, run.predicted(found)) for run in runs])
    assert before > 0.1
    assert after < 0.02


@pytest.mark.parametrize("content", ["{", '[{"id": 1}]', '[{"id": 1, "gpu": "h100", "shape": {"layers": 1}}]'])
def test_bad_files_of_runs(tmp_path, content):
    file = tmp_path / "runs.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a list of measured runs"):
        load_runs(file)
