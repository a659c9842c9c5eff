"""A family: how its config.json and its tensors correspond to `ModelConfig` and to the parameters."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpar import config_file, validate
from jaxpar.config import ModelConfig
from jaxpar.config_values import convert
from jaxpar.errors import UserError, collect, raise_together
from jaxpar.hf.fields import Entry, Field, Raw, local_layers, repeated
from jaxpar.hf.tensors import Tensor

# model_type of a config.json -> module of jaxpar.hf.families
MODULES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "gpt_neox": "gpt_neox",
    "smollm3": "smollm3",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
}

# Keys that any config.json may have and that do not change what the model computes. Dropout is a matter of training:
# it is a setting of the run (model.dropout), not of the checkpoint.
NEUTRAL_KEYS = """
    architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path auto_map
    _attn_implementation _attn_implementation_autoset attn_implementation use_cache cache_implementation
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop classifier_dropout
    classifier_dropout_prob pretraining_tp bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id tokenizer_class prefix finetuning_task task_specific_params id2label label2id num_labels
    problem_type output_attentions output_hidden_states return_dict return_dict_in_generate use_return_dict
    chunk_size_feed_forward torchscript gradient_checkpointing n_ctx max_position_embeddings reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout is_decoder
    tie_encoder_decoder do_sample max_length min_length num_beams temperature top_k top_p unsloth_version unsloth_fixed
    base_model_tp_plan keys_to_ignore_at_inference
"""
NEUTRAL = frozenset(NEUTRAL_KEYS.split())
# Keys that must be false or absent.
UNWANTED = ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "quantization_config",
            "pruned_heads", "use_bidirectional_attention")  # fmt: skip

# Settings of `ModelConfig` that are the run's, not the checkpoint's.
OF_THE_RUN = frozenset({"family", "vocab_multiple", "attention", "dropout", "init_std", "init_scaled_residual",
                        "scan_layers", "max_position"})  # fmt: skip
# Settings of `model.rope` that each scaling reads.
SCALING_SETTINGS = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position", "attention_factor", "truncate"),
}
QUANTIZED = (
    "is not supported; jaxpar reads plain weights: load the model with transformers, dequantized to bfloat16 (by "
    "quantization_config=Mxfp4Config(dequantize=True) or FineGrainedFP8Config(dequantize=True)), save_pretrained it, "
    "and import that folder"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """`tensors(model)` lists the file's tensors; names matching `ignored` are buffers that hold no parameter.

    `head` is the name of the output table, absent from the file when tied, and `table` that of the embedding.
    `base` is the prefix that some files leave out of every name but the head's. `stacked(model)` lists the tensors of
    a file that keeps all experts of a layer in one tensor, where transformers writes such files too. Names matching
    `float32` are stored so in files of any dtype. `extra_layers`: a file may have layers beyond the model's, which
    predict further tokens and are left out.
    """

    preset: str
    model_type: str
    architecture: str
    entries: tuple[Entry, ...]
    tensors: Callable[[ModelConfig], Iterable[Tensor]]
    stacked: Callable[[ModelConfig], Iterable[Tensor]] | None = None
    float32: str = r"(?!)"
    neutral: frozenset[str] = frozenset()
    ignored: str = r"(?!)"
    table: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    base: str = "model."
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {older name: name} of tensors
    extra_layers: bool = False
    experts: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys for a new config.json

    def read_config(self, raw: Raw, ignore: Iterable[str] = ()) -> ModelConfig:
        """The model of a config.json; raises one `UserError` for every key that is unknown or not supported."""
        problems = list(self._unaccounted(raw, frozenset(ignore)))
        values: dict[str, Any] = {}
        unreadable: list[str] = []  # told where nothing else is wrong, which may be the reason
        for entry in self.entries:
            with collect(problems):
                try:
                    values |= _settings(entry, raw)
                except UserError:
                    raise
                except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                    given = ", ".join(f"{name} = {raw[name]!r}" for name in entry.names if name in raw)
                    unreadable.append(f"{given}: cannot be read ({error}); wanted values as transformers writes them")
        raise_together(problems or unreadable)
        settings: dict[str, Any] = {"family": self.preset}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            inner = settings.setdefault(section, {}) if section else settings
            inner[name] = value
        return config_file.from_dict({"model": settings}).model

    def _unaccounted(self, raw: Raw, ignore: frozenset[str]) -> Iterable[str]:
        known = {name for entry in self.entries for name in entry.names}
        known |= NEUTRAL | self.neutral | ignore
        for name, value in raw.items():
            if name in UNWANTED and name not in known:
                if value not in (None, False, {}, []):
                    why = QUANTIZED if name == "quantization_config" else "is not supported; jaxpar has decoders"
                    yield f"{name}: {value!r} {why}"
            elif name not in known and value is not None:
                yield f"{name}: {value!r}; jaxpar does not know this key of {self.model_type}; it may change the maths"

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The config.json of a model; raises `UserError` naming the settings that the family cannot express."""
        raw: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture], **self.defaults}
        for entry in self.entries:
            raw |= entry.write(model)
        try:
            back = canonical(self.read_config(raw))
        except UserError as error:
            raise UserError(*(f"model is no {self.model_type}: {problem}" for problem in error.problems)) from None
        wanted = canonical(model)
        raise_together(
            f"model.{name} = {wanted.get(name)!r}: a {self.model_type} of transformers would compute with "
            f"{back.get(name)!r}; "
            f"export as another family, or train with that value"
            for name in sorted(wanted.keys() | back.keys())
            if not _same(wanted.get(name), back.get(name))
        )
        return raw

    @functools.cached_property
    def ignores(self) -> re.Pattern[str]:
        """`ignored`, compiled."""
        return re.compile(self.ignored)


def _settings(entry: Entry, raw: Raw) -> dict[str, Any]:
    """The settings of an entry, each of its type and within its range; raises `UserError` naming keys of the file."""
    settings: dict[str, Any] = {}
    place = ", ".join(name for name in entry.names if name in raw) or entry.names[0]
    for key, value in entry.read(raw).items():
        inner = "" if isinstance(entry, Field) else f"model.{key}: "
        try:
            settings[key] = convert(value, config_file.known_keys()[f"model.{key}"])
        except UserError as error:
            raise UserError(f"{place}: {inner}{error}") from None
        wanted = validate.wanted_range(f"model.{key}", settings[key]) if isinstance(value, int | float) else None
        if wanted is not None:
            raise UserError(f"{place}: {inner}got {value!r}, wanted {wanted}")
    return settings


def family_of(raw: Raw) -> Family:
    """The family of a config.json."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODULES:
        hint = "; its text model alone is gemma3_text" if model_type == "gemma3" else ""
        raise UserError(f"model_type: {model_type!r} is not supported{hint}; jaxpar has {', '.join(MODULES)}")
    return _load(MODULES[model_type])


def family_for(model: ModelConfig) -> Family:
    """The family to export a model as: the one that its config names."""
    for module in dict.fromkeys(MODULES.values()):
        family = _load(module)
        if family.preset == model.family and family.experts == bool(model.moe.num_experts):
            return family
    without = "" if model.moe.num_experts else " without experts"
    raise UserError(
        f"model.family = {model.family!r}{without} has no Hugging Face counterpart; jaxpar has {', '.join(MODULES)}"
    )


def _load(module: str) -> Family:
    return importlib.import_module(f"jaxpar.hf.families.{module}").FAMILY


def canonical(model: ModelConfig) -> dict[str, Any]:
    """What decides the maths, by dotted setting, with equal maths made equal: derived sizes, patterns, unused keys."""
    values = dataclasses.asdict(model)
    for name in OF_THE_RUN:
        del values[name]
    rope = values.pop("rope")
    if model.positions == "rope":
        values |= {f"rope.{name}": rope[name] for name in ("base", "scaling", "fraction", "interleaved")}
        values |= {f"rope.{name}": rope[name] for name in SCALING_SETTINGS[model.rope.scaling]}
        if model.window is not None and model.rope.local_base is not None:
            values["rope.local_base"] = model.rope.local_base
        values["rope_pattern"] = repeated(model.rope_pattern, model.num_layers)
    else:
        del values["rope_pattern"]
    values |= {"num_kv_heads": model.kv_heads, "head_dim": model.head_size, "window_pattern": local_layers(model)}
    values["query_scale"] = model.score_scale
    if model.activation != "clamped_swiglu":
        del values["swiglu_alpha"], values["swiglu_limit"]
    latent = values.pop("latent")
    if model.latent.kv_rank:
        latent |= {"value_dim": model.value_size, "norm_eps": model.latent.norm_eps or model.norm_eps}
        values |= {f"latent.{name}": value for name, value in latent.items()}
    moe = values.pop("moe")
    if model.moe.num_experts:
        for name in ("balance_loss", "router_z_loss", "bias_update_rate"):  # of training
            del moe[name]
        moe["choice_bias"] = model.moe.choice_bias or model.moe.bias_update_rate > 0
        if model.moe.dispatch == "dropless":
            del moe["capacity_factor"]
        moe["expert_dim"] = model.moe.expert_dim or model.mlp_dim
        values |= {f"moe.{name}": value for name, value in moe.items()}
        if not model.moe.first_dense:
            del values["mlp_dim"]
    return values


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return a == b


def differences(wanted: ModelConfig, found: ModelConfig) -> list[str]:
    """Settings in which two models compute differently, as "model.key = a, but b"."""
    first, second = canonical(wanted), canonical(found)
    return [
        f"model.{name} = {first.get(name)!r}, but the checkpoint has {second.get(name)!r}"
        for name in sorted(first.keys() | second.keys())
        if not _same(first.get(name), second.get(name))
    ]
