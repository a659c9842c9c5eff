"""What a folder may be, and what is refused by name: configs of both generations, files that do not match the model."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from hf_models import DATA, built_for, model_of, params_of

from jaxpar.config import ModelConfig
from jaxpar.errors import UserError
from jaxpar.hf import export, load_params, read_model
from jaxpar.hf.convert import abstract_params, export_folder, import_folder
from jaxpar.hf.family import family_for
from jaxpar.hf.load import leaf_axes
from jaxpar.models import families
from jaxpar.models.count import parameter_count
from jaxpar.tree import named_leaves
from jaxpar.weights import check_same_model, open_weights

LLAMA = {
    "model_type": "llama", "vocab_size": 53, "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def model_from(tmp_path, **changes) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_model(tmp_path)


def test_both_generations_of_config_mean_the_same(tmp_path):
    new = json.loads((DATA / "llama" / "config.json").read_text())
    old = dict(new)
    rope = old.pop("rope_parameters")
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    old |= {"torch_dtype": old.pop("dtype"), "transformers_version": "4.44.0"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_model(tmp_path) == read_model(DATA / "llama")
    assert read_model(tmp_path).rope.base == 5e5


def test_gemma3_of_the_older_generation(tmp_path):
    old = json.loads((DATA / "gemma3" / "config.json").read_text())
    del old["rope_parameters"], old["layer_types"]
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    old["sliding_window_pattern"] = 2
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_model(tmp_path) == read_model(DATA / "gemma3")


def test_what_a_file_leaves_out_is_what_transformers_assumes(tmp_path):
    model = model_from(tmp_path)
    assert (model.rope.base, model.norm_eps, model.tied, model.activation) == (10_000.0, 1e-6, False, "silu")
    assert model_from(tmp_path, num_key_value_heads=None).kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, r"model_type: 't5' is not supported; jaxpar has gpt2, llama"),
        ({"model_type": "gemma3"}, r"text model alone is gemma3_text"),
        ({"hidden_act": "quick_gelu"}, r"hidden_act: 'quick_gelu' is not supported; jaxpar has silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope type 'dynamic' is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
            r"rope type 'longrope' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "warp": 3}},
            r"'linear': warp = 3 is not supported",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "warp": False}}, r"'yarn': warp = False is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"rope type 'linear': factor is missing"),
        ({"residual_multiplier": 0.2}, r"residual_multiplier: 0.2; jaxpar does not know this key of llama"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: .* is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config\(dequantize=True\).*import that folder"),
        ({"hidden_size": None}, r"hidden_size: missing; a model needs it"),
        ({"hidden_size": -1}, r"config.json: hidden_size: got -1, wanted at least 1$"),
        ({"hidden_size": "wide"}, r"config.json: hidden_size: got 'wide', wanted an int$"),
        ({"rms_norm_eps": 0}, r"config.json: rms_norm_eps: got 0, wanted more than 0$"),
        ({"rope_scaling": 5}, r"config.json: rope_scaling: got 5, wanted an object such as"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling: model.rope.factor: got -2, wanted"),
        ({"rope_theta": "far"}, r"config.json: rope_theta = 'far': cannot be read .*; wanted values as transformers"),
        ({"tie_word_embeddings": 7}, r"tie_word_embeddings: got 7, wanted true or false"),
        ({"model_type": ["llama"]}, r"model_type: \['llama'\] is not supported"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        model_from(tmp_path, **changes)


def changed_config(tmp_path, name, changes) -> ModelConfig:
    raw = json.loads((DATA / name / "config.json").read_text()) | changes
    left = {key: value for key, value in raw.items() if value != ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(left))
    return read_model(tmp_path)


ABSENT = "absent"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, r"num_key_value_heads: 2 is not supported; latent attention .* has 4"),
        ({"head_dim": 8}, r"head_dim: 8 is not supported; latent attention of this file has 4"),
        ({"scoring_func": "softmax"}, r"scoring_func: 'softmax' is not supported; jaxpar has 'sigmoid'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq: 2 is not supported"),
        ({"first_k_dense_replace": 3}, r"first_k_dense_replace: 3 of 3 layers is not supported; at least one layer"),
        ({"index_topk": 64}, r"index_topk: 64; jaxpar does not know this key of deepseek_v3"),
    ],
)
def test_what_changes_the_maths_of_deepseek_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        changed_config(tmp_path, "deepseek_v3", changes)


def test_deepseek_of_the_older_generation(tmp_path):
    """The keys of the released files: no `rope_interleave`, no derived widths, and some of serving and training."""
    new = read_model(DATA / "deepseek_v3")
    rope = {"type": "yarn", "factor": 4, "mscale": 0.7, "mscale_all_dim": 1.1, "original_max_position_embeddings": 16}
    changes = dict.fromkeys(("rope_parameters", "rope_interleave", "head_dim", "qk_head_dim", "dtype"), ABSENT)
    changes |= {"rope_scaling": rope, "rope_theta": 10000, "torch_dtype": "bfloat16", "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "num_nextn_predict_layers": 1,
                "aux_loss_alpha": 0.001, "seq_aux": True}  # fmt: skip
    assert changed_config(tmp_path, "deepseek_v3", changes) == new
    assert new.query_scale == pytest.approx(10**-0.5 * (0.11 * math.log(4) + 1) ** 2)
    assert new.rope.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.11 * math.log(4) + 1))


def test_gpt_oss_of_the_older_generation(tmp_path):
    changes = dict.fromkeys(("rope_parameters", "layer_types", "swiglu_alpha", "sliding_window"), ABSENT)
    changes |= {"num_experts_per_tok": 2, "experts_per_token": 2, "initial_context_length": 4096}
    model = changed_config(tmp_path, "gpt_oss", changes)
    assert (model.rope.base, model.rope.factor, model.rope.original_max_position) == (150_000.0, 32.0, 4096)
    assert (model.rope.scaling, model.rope.truncate) == ("yarn", False)
    assert (model.window, model.window_pattern) == (128, (True, False))
    assert (model.swiglu_alpha, model.swiglu_limit) == (1.702, 1.0)


@pytest.mark.parametrize(("layers", "experts", "total"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)])
def test_gpt_oss_has_its_published_size(tmp_path, layers, experts, total):
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "hidden_size": 2880, "intermediate_size": 2880,
             "vocab_size": 201_088, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}  # fmt: skip
    left = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok"), ABSENT)
    model = changed_config(tmp_path, "gpt_oss", sizes | left | {"num_attention_heads": 64})
    assert parameter_count(model) == total


def test_all_problems_of_a_config_are_told_at_once_and_can_be_passed_over(tmp_path):
    changes = {"hidden_act": "gelu_10", "logit_scale": 2.0, "rope_scaling": {"type": "dynamic"}}
    with pytest.raises(UserError) as caught:
        model_from(tmp_path, **changes)
    assert len(caught.value.problems) == 3
    model_from(tmp_path, logit_scale=None)  # null changes nothing
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"note": "mine"}))
    with pytest.raises(UserError, match="note: 'mine'"):
        read_model(tmp_path)
    assert read_model(tmp_path, ignore=["note"]) == model_from(tmp_path)


# --- tensors ---------------------------------------------------------------------------------------------------------


def rewritten(tmp_path, name, change):
    """A copy of a reference whose {tensor name: array} went through `change`."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(DATA / name, tmp_path / name)
    tensors = load_file(DATA / name / "model.safetensors")
    save_file(change(tensors), tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / name


def load(folder, name):
    return load_params(folder, model_of(DATA / name), built_for(name).abstract_state.params)


def same(params, name) -> bool:
    wanted = named_leaves(params_of(name))
    return all(np.array_equal(leaf, wanted[key]) for key, leaf in named_leaves(params).items())


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
        return tensors

    with pytest.raises(UserError) as caught:
        load(rewritten(tmp_path, "llama", change), "llama")
    assert [text.split(": ", 1)[1] for text in caught.value.problems] == [
        "1 tensors are missing: model.layers.1.mlp.up_proj.weight",
        "1 tensors are not part of this model: model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.weight has shape (8, 32), wanted (16, 32)",
    ]


def test_layers_that_predict_further_tokens_are_left_out_and_told(tmp_path, caplog):
    def deeper(tensors):
        more = {name.replace(".2.", ".3."): tensors[name] for name in tensors if name.startswith("model.layers.2.")}
        return tensors | more | {"model.layers.3.eh_proj.weight": np.zeros((24, 48), np.float32)}

    assert same(load(rewritten(tmp_path, "deepseek_v3", deeper), "deepseek_v3"), "deepseek_v3")
    assert "layers beyond the 3 of the model are left out" in caplog.text

    def gap(tensors):
        return {name: value for name, value in tensors.items() if not name.startswith("model.layers.1.mlp.gate.")}

    with pytest.raises(UserError, match=r"2 tensors are missing: model.layers.1.mlp.gate.e_score_correction_bias"):
        load(rewritten(tmp_path / "b", "deepseek_v3", gap), "deepseek_v3")


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_all_experts_of_a_layer_may_lie_in_one_tensor(tmp_path, name):
    def stacked(tensors):
        short = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
        parts, kept = {}, {}
        for key, value in tensors.items():
            key = key.replace("block_sparse_moe", "mlp")
            found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", key)
            if found:
                parts.setdefault((found[1], short[found[3]]), {})[int(found[2])] = value
            else:
                kept[key] = value
        arrays = {key: np.stack([one[e] for e in range(len(one))]) for key, one in parts.items()}
        for layer in {layer for layer, _ in arrays}:
            kept[f"{layer}.gate_up_proj"] = np.concatenate([arrays[layer, "gate"], arrays[layer, "up"]], 1)
            kept[f"{layer}.down_proj"] = arrays[layer, "down"]
        return kept

    assert same(load(rewritten(tmp_path, name, stacked), name), name)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    def redundant(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}

    assert same(load(rewritten(tmp_path / "a", "gemma", redundant), "gemma"), "gemma")

    def other(tensors):
        head = tensors["model.embed_tokens.weight"].copy()
        head[52, 31] += 1
        return tensors | {"lm_head.weight": head}

    with pytest.raises(UserError, match=r"tie_word_embeddings is true, but lm_head.weight differs from model.embed"):
        load(rewritten(tmp_path / "b", "gemma", other), "gemma")


def test_an_untied_head_must_be_there(tmp_path):
    def headless(tensors):
        del tensors["lm_head.weight"]
        return tensors

    with pytest.raises(UserError, match=r"1 tensors are missing: lm_head.weight"):
        load(rewritten(tmp_path, "llama", headless), "llama")


def test_older_names_buffers_and_missing_prefixes_are_understood(tmp_path):
    def older(tensors):
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return tensors | {"h.0.attn.bias": np.ones((1, 1, 32, 32), np.float32)}

    assert same(load(rewritten(tmp_path, "gpt2", older), "gpt2"), "gpt2")

    def renamed(tensors):
        return tensors | {"lm_head.weight": tensors.pop("embed_out.weight")}

    assert same(load(rewritten(tmp_path, "gpt_neox", renamed), "gpt_neox"), "gpt_neox")


def test_an_absent_shard_is_named_with_what_it_holds(tmp_path):
    values = {name: np.asarray(leaf) for name, leaf in named_leaves(params_of("llama")).items()}
    model = built_for("llama").config.model
    export(tmp_path / "out", model, leaf_axes(params_of("llama")), values.__getitem__, max_file_bytes=30_000)
    assert same(load(tmp_path / "out", "llama"), "llama")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    victim = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=rf"{victim.name}: no such file; .* says it holds \d+ tensors"):
        load(tmp_path / "out", "llama")
    victim.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=rf"{victim.name}: cannot be read"):
        load(tmp_path / "out", "llama")


# --- export ----------------------------------------------------------------------------------------------------------


def exported(tmp_path, model, **options):
    leaves = leaf_axes(abstract_params(model))
    export(tmp_path / "out", model, leaves, lambda name: np.ones(leaves[name][1].shape, np.float32), **options)


def test_a_model_that_the_family_cannot_express_is_refused(tmp_path):
    model = ModelConfig(family="qwen2", embed_dim=16, num_heads=2, mlp_dim=8, num_layers=1, vocab_size=9, norm="layer")
    with pytest.raises(UserError) as caught:
        exported(tmp_path, model)
    assert {problem.split(" = ")[0] for problem in caught.value.problems} == {"model.qkv_bias", "model.norm"}
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_leaves_nothing(tmp_path):
    model = ModelConfig(embed_dim=16, num_heads=2, mlp_dim=8, num_layers=1, vocab_size=9, norm_eps=1e-6)
    leaves = leaf_axes(abstract_params(model))

    def value(name):
        if name == "blocks/mlp/up":
            raise RuntimeError("stopped")
        return np.ones(leaves[name][1].shape, np.float32)

    with pytest.raises(RuntimeError, match="stopped"):
        export(tmp_path / "out", model, leaves, value, max_file_bytes=100)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"overflow float16; export as bfloat16"):
        export(tmp_path / "out", model, leaves, lambda n: np.full(leaves[n][1].shape, 7e4, np.float32), dtype="float16")
    exported(tmp_path, model)
    with pytest.raises(UserError, match="exists already"):
        exported(tmp_path, model)


@pytest.mark.parametrize("family", sorted(families.PRESETS))
def test_every_preset_has_a_counterpart(family):
    """What models/families.py presets is what the family's own config says, so a new model of it can be exported."""
    from jaxpar import config_file

    settings: dict[str, Any] = {"family": family, "vocab_size": 97, "num_layers": 6}
    if family in ("deepseek_v3", "gpt_oss"):
        settings["moe"] = {"num_experts": 8}
    if family == "deepseek_v3":
        settings |= {"latent": {"kv_rank": 16}, "num_kv_heads": 4}
    model = config_file.from_dict({"model": settings}).model
    raw = family_for(model).write_config(model)
    assert raw["model_type"].removesuffix("_text") == family


# --- folders of runs -------------------------------------------------------------------------------------------------


def test_import_then_export_keeps_every_bit_and_the_tokenizer(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(DATA / "mistral", source)
    (source / "tokenizer.json").write_text('{"kept": true}')
    config = import_folder(source, tmp_path / "run")
    assert config.data.tokenizer == str(tmp_path / "run" / "hf")
    export_folder(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    from safetensors.numpy import load_file

    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {k: (v.dtype, v.tobytes()) for k, v in old.items()} == {k: (v.dtype, v.tobytes()) for k, v in new.items()}
    weights = open_weights(tmp_path / "run")
    check_same_model(weights, weights.model)
    with pytest.raises(UserError, match=r"init_from = .*: model.rope.base = 10000.0, but the checkpoint has"):
        check_same_model(open_weights(DATA / "llama"), weights.model)
    for taken in (tmp_path / "run", tmp_path / "run" / "config.json"):
        with pytest.raises(UserError, match="exists already and is not empty"):
            import_folder(source, taken)
    with pytest.raises(UserError, match="--vocab-multiple=0: want at least 1"):
        import_folder(source, tmp_path / "other", vocab_multiple=0)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["file", "bytes", "gone"])
def test_an_export_carries_the_tokenizer_file_of_a_run_or_says_why_not(tmp_path, kind):
    from tokenizers import Tokenizer, models

    run, file = tmp_path / "run", tmp_path / "words.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    import_folder(DATA / "llama", run)
    config = json.loads((run / "config.json").read_text())
    config["data"]["tokenizer"] = "bytes" if kind == "bytes" else str(file)
    (run / "config.json").write_text(json.dumps(config))
    wanted = file.read_bytes()
    if kind == "gone":
        file.unlink()
    shutil.rmtree(run / "hf")  # a run from scratch
    missing = export_folder(run, tmp_path / "out")
    if kind == "file":
        assert missing is None
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == wanted
    else:
        assert ("is bytes" if kind == "bytes" else "words.json does not exist") in str(missing)
        assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_target_below_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "scripts/convert_hf.py", "import", str(DATA / "llama"), str(tmp_path / "file" / "sub")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"convert_hf.py: error: .*file/sub.*: Not a directory\n", done.stderr)


def test_folders_that_are_no_weights_are_told(tmp_path):
    with pytest.raises(UserError, match=r"no such folder; give a Hugging Face checkpoint"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"neither a Hugging Face checkpoint .* nor the workdir"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, save the model as safetensors"):
        load(tmp_path, "llama")


@pytest.mark.parametrize("script", ["convert_hf", "generate", "evaluate", "make_hf_reference"])
def test_help_imports_no_jax(script):
    code = "import runpy, sys; sys.argv = ['x', '--help']\n"
    code += f"try: runpy.run_path('scripts/{script}.py', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
