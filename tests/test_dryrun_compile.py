"""The compiled train step of small runs on absent H100s, against hand-made numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from dryrun_cases import CASES, COUNTERS, GPUS, NUM_GPUS, Case, compiled_cases

from jaxpar import config_file
from jaxpar.dryrun.assumptions import Assumptions
from jaxpar.dryrun.checks import all_warnings, large_copies, zero_contract
from jaxpar.dryrun.classes import CLASSES, bytes_by_class, live_buffers
from jaxpar.dryrun.compile import compile_step, missing_plugin
from jaxpar.dryrun.memory import memory_by_class, state_bytes
from jaxpar.dryrun.run import analytic_report, report_of
from jaxpar.dryrun.shape import layout_of, model_shape
from jaxpar.dryrun.targets import find_target
from jaxpar.dryrun.work import flops_per_gpu


@pytest.fixture(scope="module", params=list(CASES))
def case(request) -> Case:
    return compiled_cases()[request.param]


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return compiled_cases()


def test_arguments_and_donation_are_exact(case):
    """What the program is given is the state and the batch, to the byte; all of the state is updated in place."""
    state = memory_by_class(case.shape, case.layout).state
    rows = case.layout.microbatch_rows * case.layout.num_microbatches
    batch = 5 * 4 * rows * case.shape.seq_len
    assert case.step.argument_bytes == state + COUNTERS + batch
    assert case.step.alias_bytes == state + COUNTERS


# A ZeRO level per config, all four in turn.
LEVELS = [(name, number % 4) for number, name in enumerate(GPUS)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "zero"), LEVELS)
def test_arguments_and_donation_of_every_config_are_exact(name, zero):
    if missing_plugin():
        pytest.skip("the compiler plugin is not installed")
    given = ["model.vocab_size=259"] if name == "quickstart" else []
    path = Path(__file__).resolve().parents[1] / f"configs/{name}.py"
    config = config_file.load(path, [f"parallel.zero={zero}", *given])
    layout = layout_of(config, GPUS[name])
    step = compile_step(config, find_target("h100"), GPUS[name], timeout_s=900)
    state = memory_by_class(model_shape(config), layout).state
    rows = layout.microbatch_rows * layout.num_microbatches
    assert step.argument_bytes == state + COUNTERS + 5 * 4 * rows * config.seq_len
    assert step.alias_bytes == state + COUNTERS


def test_gradient_bytes_are_exact(case):
    assert case.step.state["gradients"] == state_bytes(case.shape, case.layout).gradients


def test_flops_equal_the_formula(case):
    """Forward, backward, recomputation and fused attention, within 1 %."""
    assert case.timeline.flops == pytest.approx(flops_per_gpu(case.shape, case.layout), rel=0.01)


def test_closed_form_memory_is_near_the_compilers(case):
    assert memory_by_class(case.shape, case.layout).peak == pytest.approx(case.step.peak_bytes, rel=0.20)


def test_classes_add_up(case):
    sizes = bytes_by_class(case.step, live_buffers(case.step, case.shape, case.layout))
    assert list(sizes) == list(CLASSES)
    assert sum(sizes.values()) == pytest.approx(case.step.peak_bytes)
    assert all(size >= 0 for size in sizes.values())


def test_activations_are_found(cases):
    """Full remat keeps the input of every layer: layers x tokens x width in bf16."""
    for name in ("zero3", "tensor"):
        case = cases[name]
        sizes = bytes_by_class(case.step, live_buffers(case.step, case.shape, case.layout))
        tokens = case.layout.microbatch_rows * case.shape.seq_len
        assert sizes["activations"] == pytest.approx(16 * tokens * 512 * 2, rel=0.05)


def test_zero_0_all_reduces_gradients(cases):
    case = cases["zero0"]
    assert case.payload("all-reduce", "data") == pytest.approx(case.matrix_bytes(), rel=0.05)
    assert case.payload("reduce-scatter", "data") == 0
    assert case.payload("all-gather", "data") == 0


def test_zero_1_hands_out_parameters(cases):
    """All-gather of the updated parameters in float32."""
    case = cases["zero1"]
    assert case.payload("all-gather", "data") == pytest.approx(4 * case.shape.num_parameters(), rel=0.05)


def test_zero_2_scatters_the_gradients_of_every_pass(cases):
    case = cases["zero2"]
    assert case.payload("reduce-scatter", "data") == pytest.approx(2 * case.matrix_bytes(), rel=0.05)


def test_zero_3_gathers_twice_and_scatters_once(cases):
    """Weights in bf16 for the forward and again for the backward pass; gradients reduce-scattered once."""
    case = cases["zero3"]
    assert case.payload("all-gather", "data") == pytest.approx(2 * case.matrix_bytes(), rel=0.05)
    assert case.payload("reduce-scatter", "data") == pytest.approx(case.matrix_bytes(), rel=0.05)


@pytest.mark.parametrize("name", ["zero2", "zero3", "tied", "sequence"])
def test_gradients_keep_the_zero_contract(cases, name):
    case = cases[name]
    assert not zero_contract(case.step, case.timeline, case.layout)


def test_copies_are_noticed(cases):
    """Judged as if its copies took a fifth of the step, a program is warned about; as it is, it is not."""
    timeline = cases["zero3"].timeline
    assert not large_copies(timeline)
    copying = dataclasses.replace(timeline, top_operations=[("copy copy", 0.2 * timeline.step_s, 10.0)])
    (line,) = large_copies(copying)
    assert "20%" in line


def test_contract_notices_an_all_reduce(cases):
    """The ZeRO-0 program, judged as if it had promised ZeRO-2, breaks it."""
    case = cases["zero0"]
    promised = dataclasses.replace(case.layout, zero=2)
    broken = zero_contract(case.step, case.timeline, promised)
    assert any("there is none" in line for line in broken)


def test_tensor_parallel_volume(cases):
    """Two all-reduces forward, two backward and one of the recomputed attention, per layer."""
    case = cases["tensor"]
    tokens = case.layout.microbatch_rows * case.shape.seq_len
    textbook = 16 * 5 * tokens * 512 * 2
    assert case.payload("all-reduce", "tensor") == pytest.approx(textbook, rel=0.05)


def test_sequence_parallel_volume(cases):
    """Reduce-scatters: two forward, two backward, one recomputed; each all-reduce has become one and a gather."""
    case = cases["sequence"]
    unit = case.layout.microbatch_rows * case.shape.seq_len * 512 * 2
    assert case.payload("reduce-scatter", "tensor") == pytest.approx(16 * 5 * unit, rel=0.05)
    gathers = sum(
        count
        for total in case.timeline.collectives
        if total.kind == "all-gather" and total.axis == "tensor"
        for array, count in total.arrays.items()
        if len(array.dims) == 3
    )
    assert gathers == pytest.approx(16 * 6, rel=0.05)
    assert case.payload("all-reduce", "tensor") < 0.05 * 16 * 5 * unit


def test_pipeline_moves_every_microbatch_once_each_way(cases):
    """One exchange per tick: activations forward and their gradients back."""
    case = cases["pipeline"]
    ticks = 8 + 2 * 2 - 1
    one = case.layout.microbatch_rows * case.shape.seq_len * 512 * 2
    assert case.payload("collective-permute", "stage") == pytest.approx(2 * ticks * one, rel=0.05)


def test_time_line_adds_up(case):
    timeline = case.timeline
    if case.layout.stage == 1:
        assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.exposed_s, rel=0.02)
    for total in timeline.collectives:
        assert 0 <= total.exposed_s <= total.time_s * (1 + 1e-9) + 1e-9
    assert not timeline.warnings


def test_spans_fill_the_step(case):
    """Within the step, in order, none of a stream over another; compute is what the time line counted."""
    spans = case.timeline.spans
    assert len(spans) > 20
    for stream in ("compute", "communication"):
        ours = [span for span in spans if span.stream == stream]
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in itertools.pairwise(ours))
        assert ours[-1].end_s <= case.timeline.step_s + 1e-9
    if case.layout.stage == 1:
        busy = sum(span.end_s - span.start_s for span in spans if span.stream == "compute")
        assert busy == pytest.approx(case.timeline.compute_s, rel=0.02)


def test_own_estimates_of_the_compiler_are_read(case):
    """XLA's cost model has a figure for nearly all communication, within two orders of magnitude of ours."""
    totals = [total for total in case.timeline.collectives if total.group_size > 1]
    assert totals
    theirs = sum(total.sol_s for total in totals)
    assert 0.01 * case.timeline.communication_s < theirs < 100 * case.timeline.communication_s
    assert case.timeline.sol_compute_s > 0


def test_report_has_the_keys_other_tools_read(cases, tmp_path):
    case = cases["zero3"]
    gpu = find_target("h100")
    analytic = analytic_report(case.config, case.shape, case.layout, gpu, Assumptions(), gpus_per_node=8)
    warnings = all_warnings(case.step, case.timeline, case.shape, case.layout, gpus_per_node=8)
    report = report_of(case.config, analytic, case.step, case.timeline, case.shape, case.layout, warnings)
    report.write_json(tmp_path / "out.json")
    values = json.loads((tmp_path / "out.json").read_text())
    wanted = {"fits", "peak_bytes", "argument_bytes", "temp_bytes", "bytes_by_class", "flops_per_gpu", "collectives"}
    wanted |= {"bubble_fraction", "step_time_s", "tokens_per_s_per_gpu", "mfu", "warnings"}
    assert wanted <= set(values)
    assert {"kind", "axis", "bytes", "count", "exposed_s"} <= set(values["collectives"][0])
    assert {"parameters", "gradients", "optimizer"} <= set(values["bytes_by_class"])
    assert values["fits"] is True
    assert values["compiled"] is True
    assert values["gpus"] == NUM_GPUS
    tokens = case.config.global_batch * case.config.seq_len
    assert values["tokens_per_s_per_gpu"] == pytest.approx(tokens / values["step_time_s"] / NUM_GPUS)
