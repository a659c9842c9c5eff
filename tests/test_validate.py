"""Every size that does not divide is refused with keys, values and a fix that works; what must work passes."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from jaxpar import config_file, validate
from jaxpar.config import ParallelConfig
from jaxpar.errors import UserError
from jaxpar.unused import unused_settings

# A small model that fits 8 devices in many ways; a case changes some keys of it.
BASE: dict[str, Any] = {
    "global_batch": 16,
    "seq_len": 64,
    "model.num_layers": 4,
    "model.embed_dim": 64,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.mlp_dim": 128,
}
EXPERTS = {"model.moe.num_experts": 4, "model.moe.experts_per_token": 2}

# (settings, parts of the message, settings that the message suggests)
REFUSED: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    (
        {"model.activation": "clamped_swiglu", "model.gated": False},
        ["model.activation = clamped_swiglu", "use model.gated = True"],
        {"model.gated": True},
    ),
    (
        {"model.attention_sinks": True, "model.attention": "cudnn"},
        ["that kernel has no sinks", 'use model.attention = "xla", or "auto"'],
        {"model.attention": "auto"},
    ),
    (
        {"model.attention_soft_cap": 30.0, "model.attention": "cudnn"},
        ["model.attention_soft_cap = 30.0", "that kernel has no soft cap", 'use model.attention = "xla", or "auto"'],
        {"model.attention": "auto"},
    ),
    (
        {"model.attention_sinks": True, "model.latent.kv_rank": 16},
        ["model.attention_sinks = True", "latent attention has none; use False"],
        {"model.attention_sinks": False},
    ),
    (
        {"model.latent.kv_rank": 16, "model.latent.rope_dim": 7},
        ["model.latent.rope_dim = 7", "use model.latent.rope_dim = 8"],
        {"model.latent.rope_dim": 8},
    ),
    (
        {"model.latent.kv_rank": 16, "model.num_kv_heads": 4},
        ["model.num_kv_heads = 4 with model.latent.kv_rank", "use model.num_kv_heads = 8, or None"],
        {"model.num_kv_heads": None},
    ),
    (
        {"model.latent.kv_rank": 16, "model.qk_norm": "head"},
        ["model.qk_norm = head with model.latent.kv_rank", 'use "none"'],
        {"model.qk_norm": "none"},
    ),
    (
        {**EXPERTS, "model.moe.first_dense": 4},
        ["model.moe.first_dense = 4 = model.num_layers leaves no layer with experts", "at most 3"],
        {"model.moe.first_dense": 3},
    ),
    (
        {"lora.targets": ("q", "foo")},
        ["lora.targets: 'foo' is no weight; choose from q, k, v, out, gate, up, down"],
        {"lora.targets": ("q",)},
    ),
    (
        {"data.source": "mixture", "data.sources": ({"name": "a", "source": "foo"},)},
        ["data.sources: 'a' has the source 'foo'; want one of files, tokens"],
        {"data.sources": ({"name": "a"},)},
    ),
    ({"global_batch": 12}, ["global_batch = 12", "parallel.data = 8", "use 8 or 16"], {"global_batch": 8}),
    (
        {"global_batch": 20, "accumulation": 4},
        ["global_batch = 20", "parallel.data x accumulation = 8 x 4 = 32", "use 32"],
        {"global_batch": 32},
    ),
    (
        {"global_batch": 4, "parallel.replica": 2},
        ["parallel.replica x parallel.data = 2 x 4 = 8"],
        {"global_batch": 8},
    ),
    (
        {"parallel.stage": 2, "pipeline.microbatches": 3},
        ["global_batch = 16", "parallel.data x pipeline.microbatches = 4 x 3 = 12", "use 12 or 24"],
        {"global_batch": 24},
    ),
    (
        {"parallel.stage": 2, "accumulation": 2},
        ["accumulation = 2 with parallel.stage = 2", "pipeline.microbatches = 8"],
        {"accumulation": 1, "pipeline.microbatches": 8, "global_batch": 32},
    ),
    (
        {"model.num_heads": 6, "model.num_kv_heads": 6, "model.embed_dim": 96, "parallel.tensor": 4},
        ["model.num_heads = 6", "parallel.tensor = 4", "use 4 or 8, or parallel.tensor = 2"],
        {"parallel.tensor": 2},
    ),
    (
        {"model.num_heads": 12, "model.num_kv_heads": 3, "model.head_dim": 8, "parallel.tensor": 2},
        ["model.num_kv_heads = 3 and parallel.tensor = 2", "use parallel.tensor = 1"],
        {"parallel.tensor": 1},
    ),
    ({"model.num_kv_heads": 3}, ["model.num_kv_heads = 3", "model.num_heads = 8", "use 2"], {"model.num_kv_heads": 2}),
    ({"model.embed_dim": 60}, ["model.embed_dim = 60", "num_heads = 8", "48 or 64"], {"model.embed_dim": 64}),
    ({"model.embed_dim": 60}, ["48 or 64"], {"model.embed_dim": 48}),  # 56 has heads of 7, which are not rotated
    (
        {"model.embed_dim": 130, "model.num_heads": 4, "model.num_kv_heads": 4, "parallel.tensor": 4},
        ["parallel.tensor = 4; use 128 or 136", "model.num_heads = 4; use 128 or 136"],
        {"model.embed_dim": 136},
    ),
    (
        {"model.embed_dim": 128, "model.num_heads": 5, "model.num_kv_heads": 5, "parallel.tensor": 2},
        ["model.num_heads = 5", "use 4 or 8", "model.embed_dim = 128 is not divisible", "use 120 or 130"],
        {"model.num_heads": 8, "model.num_kv_heads": 8},
    ),
    (
        {"model.embed_dim": 96, "model.num_heads": 9, "model.num_kv_heads": 3},
        ["use 90 or 108"],
        {"model.embed_dim": 108},
    ),
    ({"seed": 2**32}, ["seed = 4294967296: wanted 0 to 4294967295"], {"seed": 2**32 - 1}),
    ({"seed": -1}, ["seed = -1: wanted 0 to 4294967295"], {"seed": 0}),
    ({"model.head_dim": 7}, ["model.head_dim = 7", "pairs", "use model.head_dim = 8"], {"model.head_dim": 8}),
    (
        {"model.head_dim": 12, "model.rope.fraction": 0.25},
        ["rotates 3 values", "use model.head_dim = 16"],
        {"model.head_dim": 16},
    ),
    (
        {"model.mlp_dim": 100, "parallel.tensor": 8},
        ["model.mlp_dim = 100", "parallel.tensor = 8", "use 96 or 104"],
        {"model.mlp_dim": 104},
    ),
    (
        {"model.embed_dim": 100, "model.head_dim": 8, "parallel.tensor": 8},
        ["model.embed_dim = 100", "use 96 or 104, or parallel.tensor = 4"],
        {"parallel.tensor": 4},
    ),
    (
        {"seq_len": 66, "parallel.tensor": 4, "parallel.sequence_parallel": True},
        ["seq_len = 66", "parallel.tensor (sequence_parallel) = 4", "use 64 or 68"],
        {"seq_len": 68},
    ),
    (
        {"seq_len": 68, "parallel.context": 8, "parallel.context_mode": "all_gather"},
        ["seq_len = 68", "parallel.context x 2", "= 8 x 2 = 16", "use 64 or 80"],
        {"seq_len": 64},
    ),
    (
        {"seq_len": 72, "parallel.context": 8, "parallel.context_mode": "ring"},
        ["seq_len = 72", "parallel.context x 2", "= 8 x 2 = 16", "use 64 or 80"],
        {"seq_len": 80},
    ),
    (
        {"parallel.context": 4, "parallel.tensor": 4, "parallel.context_mode": "all_to_all", "parallel.data": 1},
        ["2 query heads per tensor shard", "parallel.context = 4; use parallel.context = 2", "16 devices"],
        {"parallel.context": 2},
    ),
    (
        {"parallel.context": 4, "parallel.context_mode": "ring_all_to_all"},
        ['parallel.context_mode = "ring_all_to_all"', "8 query heads per tensor shard", 'use "all_to_all"'],
        {"parallel.context_mode": "all_to_all"},
    ),
    (
        {"seq_len": 65 * 8, "parallel.context": 8, "parallel.context_mode": "all_gather"},
        ["seq_len = 520", "8 x 2 = 16", "use 512 or 528"],
        {"seq_len": 528},
    ),
    (
        {"parallel.stage": 4, "model.num_layers": 3},
        ["model.num_layers = 3", "empty stages", "parallel.stage = 4"],
        {"model.num_layers": 4},
    ),
    (
        {"parallel.stage": 2, "pipeline.chunks": 4},
        ["model.num_layers = 4", "parallel.stage x pipeline.chunks = 2 x 4 = 8"],
        {"pipeline.chunks": 2},
    ),
    (
        {"parallel.stage": 4, "pipeline.microbatches": 2},
        ["pipeline.microbatches = 2", "parallel.stage = 4", "at least 4"],
        {"pipeline.microbatches": 4},
    ),
    *(
        (
            {"parallel.stage": 2, "pipeline.chunks": 2, "pipeline.schedule": name},
            ["has one chunk a stage", "pipeline.chunks = 2"],
            {"pipeline.schedule": "interleaved"},
        )
        for name in ("gpipe", "1f1b", "zb_h1", "zero_bubble")
    ),
    (
        {"parallel.stage": 2, "pipeline.schedule": "zb-h1x"},
        ["pipeline.schedule", "did you mean zb_h1"],
        {"pipeline.schedule": "zb_h1"},
    ),
    (
        {"parallel.stage": 2, "pipeline.schedule": "nowhere.csv"},
        ["nowhere.csv: no such file"],
        {"pipeline.schedule": "gpipe"},
    ),
    (
        {**EXPERTS, "model.moe.first_dense": 1, "parallel.stage": 2, "remat": "dots"},
        ['remat = "dots" with parallel.stage = 2 and model.moe.first_dense = 1', 'use remat = "full"'],
        {"remat": "full"},
    ),
    (
        {**EXPERTS, "model.moe.first_dense": 1, "parallel.stage": 2, "remat": "full", "pipeline.schedule": "zb_h1"},
        ["pipeline.schedule = zb_h1", "model.moe.first_dense = 1", 'use "fused" or "1f1b"'],
        {"pipeline.schedule": "fused"},
    ),
    (
        {**EXPERTS, "model.moe.num_experts": 6, "parallel.expert": 4},
        ["model.moe.num_experts = 6", "parallel.expert = 4", "use 4 or 8, or parallel.expert = 2"],
        {"model.moe.num_experts": 8},
    ),
    ({"parallel.expert": 2}, ["parallel.expert = 2", "no experts"], {"parallel.expert": 1}),
    ({**EXPERTS, "model.moe.experts_per_token": 5}, ["experts_per_token = 5"], {"model.moe.experts_per_token": 4}),
    ({**EXPERTS, "model.moe.num_groups": 3}, ["num_groups = 3"], {"model.moe.num_groups": 2}),
    (
        {**EXPERTS, "model.moe.num_groups": 4},
        ["experts_per_token = 2 is more than the 1 experts", "use at most 1"],
        {"model.moe.groups_per_token": 2},
    ),
    (
        {"model.rope.scaling": "llama3", "model.rope.low_freq_factor": 4},
        ["model.rope.low_freq_factor = 4.0 must be less", "high_freq_factor = 4.0"],
        {"model.rope.low_freq_factor": 1},
    ),
    (
        {"parallel.data": 3},
        ["parallel.data = 3 uses 3 of 8 devices", "use parallel.data = 8"],
        {"parallel.data": 8},
    ),
    (
        {"parallel.data": 4, "parallel.tensor": 4},
        ["parallel.data x parallel.tensor = 4 x 4 = 16 needs 16 devices, but there are 8", "use parallel.data = 2"],
        {"parallel.data": 2},
    ),
    (
        {"parallel.replica": 3},
        ["parallel.replica = 3 does not divide the 8 devices", "use parallel.replica = 1"],
        {"parallel.replica": 1},
    ),
    (
        {"parallel.data": 1, "parallel.stage": -1, "parallel.tensor": 16},
        ["parallel.tensor = 16 does not divide the 8 devices", "use parallel.tensor = 8"],
        {"parallel.tensor": 8},
    ),
    ({"parallel.tensor": 0}, ["parallel.tensor = 0", "at least 1, or -1"], {"parallel.tensor": 1}),
    ({"parallel.data": -2}, ["parallel.data = -2", "at least 1, or -1"], {"parallel.data": -1}),
    (
        {"parallel.tensor": -1},
        ["parallel.data and parallel.tensor are all -1"],
        {"parallel.tensor": 1},
    ),
    (
        {"parallel.tensor": 4, "model.vocab_multiple": 2},
        ["model.vocab_multiple = 2", "parallel.tensor = 4", "use 4"],
        {"model.vocab_multiple": 4},
    ),
    (
        {"model.positions": "learned", "model.max_position": 32},
        ["model.max_position = 32", "seq_len = 64"],
        {"model.max_position": 64},
    ),
    (
        {"optimizer.warmup_steps": 2000},
        ["optimizer.warmup_steps = 2000", "steps = 1000"],
        {"optimizer.warmup_steps": 1000},
    ),
    (
        {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 600, "optimizer.decay_steps": 500},
        ["600 + 500", "use decay_steps = 400"],
        {"optimizer.decay_steps": 400},
    ),
    (
        {"loss.chunk_tokens": 2, "parallel.context": 4, "parallel.data": 2},
        ["loss.chunk_tokens = 2", "parallel.context = 4"],
        {"loss.chunk_tokens": 4},
    ),
    (
        {"optimizer.learning_rate": 1e39},
        ["optimizer.learning_rate = 1e+39", "infinite in float32"],
        {"optimizer.learning_rate": 1e-3},
    ),
    ({"loss.chunk_tokens": 48}, ["seq_len = 64", "chunk_tokens = 48"], {"loss.chunk_tokens": 32}),
    ({"optimizer.momentum": 0.5}, ["optimizer.momentum"], {"optimizer.momentum": None}),
    ({"data.source": "files"}, ["data.files is empty"], {"data.files": ("a",)}),
    (
        {"data.source": "raw", "data.files": ("a",)},
        ["data.raw_dtype"],
        {"data.raw_dtype": "uint16"},
    ),
    ({"data.source": "mixture"}, ["data.sources is empty"], {"data.sources": ({"name": "a"},)}),
    (
        {"data.source": "mixture", "data.sources": ({"name": "a"},), "data.phases": ((5, (1,)), (5, (1,)))},
        ["first steps [5, 5] must rise"],
        {"data.phases": ()},
    ),
    (
        {"data.source": "mixture", "data.sources": ({"name": "a"},), "data.phases": ((5, (1, 2)),)},
        ["step 5 has weights [1.0, 2.0]"],
        {"data.phases": ()},
    ),
    *(
        ({key: -1}, [f"{key} = -1"], {key: 8})
        for key in ("steps", "seed", "global_batch", "seq_len", "model.num_layers", "model.window")
    ),
    *(
        ({key: 0}, [f"{key} = 0"], {key: 1})
        for key in (
            "log_interval",
            "eval_interval",
            "checkpoint.keep",
            "checkpoint.max_failed_saves",
            "model.latent.query_rank",
            "model.latent.value_dim",
        )
    ),
    ({"model.latent.kv_rank": -1}, ["model.latent.kv_rank = -1: wanted at least 0"], {"model.latent.kv_rank": 0}),
    ({"model.dropout": 1.0}, ["model.dropout = 1.0: wanted less than 1"], {"model.dropout": 0.5}),
    ({"model.rope.fraction": 1.5}, ["model.rope.fraction = 1.5: wanted at most 1"], {"model.rope.fraction": 1}),
    ({"optimizer.clip_norm": 0}, ["optimizer.clip_norm = 0.0: wanted more than 0"], {"optimizer.clip_norm": None}),
    ({"model.window_pattern": ()}, ["model.window_pattern is empty"], {"model.window_pattern": (True,)}),
]


def config(changes: dict[str, Any]):
    return config_file.from_dict({}, BASE | changes)


@pytest.mark.parametrize(("settings", "parts", "fix"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_a_fix_that_works(settings: dict[str, Any], parts: list[str], fix: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        validate.check(config(settings), 8)
    for part in parts:
        assert part in str(caught.value)
    assert validate.problems(config(settings | fix), 8) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel.tensor": 8, "model.num_kv_heads": 2},  # KV heads copied in groups
        {"parallel.tensor": 8, "model.num_kv_heads": 1},
        {"parallel.tensor": 2, "model.num_kv_heads": 4},
        {"parallel.stage": 4, "model.num_layers": 30},  # uneven layers
        {"parallel.stage": 2, "model.num_layers": 5, "pipeline.chunks": 2},
        {"parallel.stage": 2, "pipeline.chunks": 2, "pipeline.schedule": "circular"},
        {"model.vocab_size": 97, "parallel.tensor": 8},  # rows are padded
        {"parallel.context": 4, "parallel.context_mode": "all_to_all", "parallel.tensor": 2},
        {"model.head_dim": 24, "model.num_heads": 4, "model.num_kv_heads": 4},  # not embed_dim / num_heads
        {"model.head_dim": 7, "model.positions": "none"},
        {"model.positions": "learned", "model.max_position": 128},
        {"model.family": "gpt_neox", "model.head_dim": 8},
        {**EXPERTS, "parallel.expert": 4},
        {"loss.chunk_tokens": 100_000},  # more than a row: no chunks
        {"parallel.data": 1, "parallel.replica": -1},
        {"parallel.data": 2, "parallel.tensor": 2, "parallel.context": 2},
    ],
)
def test_what_must_work_passes(settings: dict[str, Any]):
    assert validate.problems(config(settings), 8) == []


def test_several_are_reported_together():
    wrong = config({"global_batch": 3, "parallel.tensor": 3, "optimizer.warmup_steps": 10**6, "model.num_kv_heads": 5})
    found = validate.problems(wrong, 8)
    for key in ("num_heads", "embed_dim", "num_kv_heads", "warmup_steps", "parallel.tensor = 3 does not divide"):
        assert any(key in problem for problem in found), key


def test_without_a_device_count_the_rest_is_still_checked():
    assert validate.problems(config({}), None) == []
    assert validate.problems(config({"parallel.data": 100, "global_batch": 100}), None) == []
    assert len(validate.problems(config({"parallel.data": 3, "parallel.tensor": 16}), None)) == 2


def test_unknown_family_and_small_vocabulary():
    import dataclasses

    base = config({})
    wrong = dataclasses.replace(base, model=dataclasses.replace(base.model, family="lama", vocab_size=100))
    first, second = validate.problems(wrong, 8, vocab_size=257)
    assert "did you mean llama" in first
    assert "model.vocab_size = 100" in second
    assert "use 257" in second


def test_resolved_degrees_use_every_device():
    for devices in (1, 2, 6, 8, 512):
        for tensor in (1, 2, 4):
            if devices % tensor:
                with pytest.raises(UserError):
                    validate.resolved_degrees(ParallelConfig(tensor=tensor), devices)
                continue
            sizes = validate.resolved_degrees(ParallelConfig(tensor=tensor), devices)
            assert tuple(sizes) == ("stage", "replica", "data", "expert", "context", "tensor")
            assert math.prod(sizes.values()) == devices
            assert sizes["data"] == devices // tensor


def test_the_suggested_mesh_fits():
    for devices in (1, 6, 8, 12):
        for data in (-1, 1, 3, 5):
            for tensor in (1, 2, 4, 7):
                for stage in (1, 3):
                    asked = {"data": data, "tensor": tensor, "stage": stage}
                    try:
                        validate.resolved_degrees(ParallelConfig(**asked), devices)
                    except UserError as error:
                        advice = str(error).rpartition(": use ")[2].split(" and ")
                        fixed = {
                            key.removeprefix("parallel."): int(size) for key, size in (a.split(" = ") for a in advice)
                        }
                        sizes = validate.resolved_degrees(ParallelConfig(**(asked | fixed)), devices)
                        assert math.prod(sizes.values()) == devices


def test_no_jax_is_imported():
    code = "import sys; from jaxpar import cli, config_file, validate; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"parallel": {"stage": 1}, "pipeline": {"chunks": 2, "schedule": "fused"}},
         "pipeline.schedule, pipeline.chunks have no effect: parallel.stage = 1"),
        ({"model": {"moe": {"num_shared": 1}}}, "model.moe.num_shared has no effect: model.moe.num_experts = 0"),
        ({"lora": {"alpha": 8.0}}, "lora.alpha has no effect: lora.rank = 0"),
        ({"optimizer": {"decay_steps": 5}}, "optimizer.decay_steps has no effect: optimizer.schedule = 'cosine'"),
        ({"parallel": {"context_mode": "ring"}}, "parallel.context_mode has no effect: parallel.context = 1"),
    ],
)  # fmt: skip
def test_settings_of_a_part_that_is_off_are_named(settings, note):
    assert unused_settings(config_file.from_dict(settings)) == [note]


def test_defaults_and_parts_that_are_on_have_no_note():
    on = {"parallel": {"stage": 2, "context": 2, "context_mode": "ring"}, "pipeline": {"chunks": 2}}
    assert unused_settings(config_file.from_dict({})) == []
    assert unused_settings(config_file.from_dict(on)) == []


def test_auto_takes_a_length_that_only_a_ring_cannot():
    settings = {"seq_len": 68, "parallel.context": 4, "parallel.context_mode": "auto"}
    assert validate.problems(config(settings), 8) == []
    assert validate.problems(config(settings | {"parallel.context_mode": "ring"}), 8) != []
