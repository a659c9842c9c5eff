"""From a config file and `--config.a.b=c` overrides to a `Config`, with every mistake in one message.

A config file is Python with `get_config()`, returning a `ConfigDict` or dict that holds only what differs from the
defaults; the `config.json` that a run writes is read too. Later wins: dataclass defaults, preset of the model family,
file, overrides. Environment variables set nothing. Types come from the annotations in config.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import runpy
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.config import Config
from jaxpar.config_values import convert, plain
from jaxpar.errors import UserError, collect, raise_together
from jaxpar.models import families

COMMAND_LINE = "--config."
OVERRIDE_EXAMPLE = '"parallel.tensor=4", or a dict {"parallel.tensor": 4}'

# Names that other systems use, so that the hint can be right where spelling does not help.
OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "peak_lr": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.clip_norm",
    "grad_clip": "optimizer.clip_norm",
    "warmup": "optimizer.warmup_steps",
    "batch_size": "global_batch",
    "global_batch_size": "global_batch",
    "max_steps": "steps",
    "train_steps": "steps",
    "gradient_accumulation_steps": "accumulation",
    "max_seq_len": "seq_len",
    "context_length": "seq_len",
    "max_position_embeddings": "model.max_position",
    "d_model": "model.embed_dim",
    "hidden_size": "model.embed_dim",
    "d_ff": "model.mlp_dim",
    "intermediate_size": "model.mlp_dim",
    "n_layer": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "n_head": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "rope_theta": "model.rope.base",
    "tie_word_embeddings": "model.tied",
    "sliding_window": "model.window",
    "dp": "parallel.data",
    "tp": "parallel.tensor",
    "pp": "parallel.stage",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "fsdp": "parallel.zero",
    "num_microbatches": "pipeline.microbatches",
    "save_interval": "checkpoint.interval",
    "dtype": "precision",
}


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A value as it was given, and where, for messages."""

    value: Any
    place: str


def load(path: str | Path | None, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The config of a file (None: the defaults) with overrides such as `"parallel.tensor=4"`."""
    config, problems = read(path, overrides)
    raise_together(problems)
    return config


def read(path: str | Path | None, overrides: Iterable[str] | Mapping[str, Any] = ()) -> tuple[Config, list[str]]:
    """As `load`, but with the problems as a list; settings that are wrong have their defaults in the config."""
    problems: list[str] = []
    values: Mapping[str, Any] = {}
    if path is not None:
        with collect(problems):
            values = _read(Path(path))
    return _assemble(values, overrides, place=str(path or "config"), problems=problems), problems


def independent(found: Iterable[str], wrong: Iterable[str]) -> list[str]:
    """Those of the `found` problems that do not speak of a section in which a setting is `wrong`.

    A check that saw a default in the place of a wrong setting would tell of a problem that is not there. A wrong
    thing that names no setting, such as an unreadable file, leaves nothing to check.
    """
    named = [_sections_named(problem) for problem in wrong]
    if not all(named):
        return []
    doubtful = set().union(*named)
    return [problem for problem in found if not doubtful & _sections_named(problem)]


def _sections_named(problem: str) -> set[str]:
    words = re.findall(r"[a-z_][a-z_0-9.]*[a-z_0-9]", problem.replace(COMMAND_LINE, " "))
    return {word.split(".")[0] for word in words if word in known_keys() or word in _sections()}


def from_dict(values: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The config of nested settings, as a config file would return them; the notebook's way to write one."""
    problems: list[str] = []
    config = _assemble(values, overrides, place="config", problems=problems)
    raise_together(problems)
    return config


def apply(config: Config, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
    """`config` with overrides; the family stays, as its preset belongs under the settings of the file."""
    problems: list[str] = []
    settings = _override_settings(overrides, problems)
    family = settings.get("model.family")
    if family is not None and family.value != config.model.family:
        problems.append(
            f"{family.place}model.family: cannot change {config.model.family} to {family.value} in a loaded config, "
            "whose preset is already in; load the file with this override instead"
        )
    values = _converted(settings, problems)
    raise_together(problems)
    return _replaced(config, values)


def to_dict(config: Config) -> dict[str, Any]:
    """Every setting, nested, as plain Python; `from_dict` gives the same config back."""
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    """The resolved config as indented JSON; a file of it is a valid `--config`."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"


@functools.cache
def known_keys() -> dict[str, Any]:
    """Every dotted key with its annotation, in the order of config.py."""
    return dict(_walk(Config, ""))


def _walk(section: type, prefix: str) -> Iterable[tuple[str, Any]]:
    for name, annotation in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(annotation):
            yield from _walk(typing.cast("type", annotation), f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


def _sections() -> set[str]:
    return {key[:dot] for key in known_keys() for dot in range(len(key)) if key[dot] == "."}


# --- reading ---------------------------------------------------------------------------------------------------------


class _BlameFile:
    """Turns whatever the config file raises inside the block into one message with its file and line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if isinstance(error, UserError) or not isinstance(error, Exception | SystemExit):
            return
        if isinstance(error, SyntaxError):
            raise UserError(f"{error.filename}, line {error.lineno}: syntax error: {error.msg}") from error
        lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == str(self.path)]
        place = f"{self.path}, line {lines[-1]}" if lines else str(self.path)
        raise UserError(f"{place}: {type(error).__name__}: {error}") from error


def _read(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        raise UserError(f"{path}: is a directory, not a config file" + _similar_file(path / "config"))
    if not path.is_file():
        raise UserError(f"{path}: no such config file" + _similar_file(path))
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix != ".py":
        raise UserError(f"{path}: a config file is Python (.py) with get_config(), or the config.json of a run")
    with _BlameFile(path):
        get_config = runpy.run_path(str(path)).get("get_config")
    if not callable(get_config):
        raise UserError(f"{path}: has no function get_config(); it must return a ConfigDict or dict of settings")
    with _BlameFile(path):
        values = plain(get_config())
    if not isinstance(values, dict):
        raise UserError(f"{path}: get_config() returned {type(values).__name__}, wanted a ConfigDict or dict")
    return values


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}, wanted an object of settings")
    return values


def _similar_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    names = sorted(file.name for file in folder.glob("*.py")) if folder.is_dir() else []
    close = difflib.get_close_matches(path.with_suffix(".py").name, names, n=1)
    return f"; did you mean {folder / close[0]}?" if close else ""


# --- merging ---------------------------------------------------------------------------------------------------------


def _assemble(
    values: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any], *, place: str, problems: list[str]
) -> Config:
    """Defaults, preset, file and overrides merged; what cannot be used is added to `problems`."""
    settings: dict[str, _Setting] = {}
    _flatten(values, "", f"{place}: ", settings, problems)
    settings |= _override_settings(overrides, problems)
    given = _converted(settings, problems)
    model = Config().model
    family = given.get("model.family", model.family)
    if family not in families.PRESETS:
        problems.append(f"{settings['model.family'].place}model.family: {families.unknown(family)}")
        return Config()
    preset = families.preset(family, embed_dim=given.get("model.embed_dim", model.embed_dim))
    presets: dict[str, _Setting] = {}
    _flatten({"model": preset}, "", f"preset {family}: ", presets, problems)
    return _replaced(Config(), _converted(presets, problems) | given)


def _flatten(
    values: Mapping[Any, Any], prefix: str, place: str, settings: dict[str, _Setting], problems: list[str]
) -> None:
    sections = _sections()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in sections:
            inner = plain(value)
            if isinstance(inner, dict):
                _flatten(inner, f"{key}.", place, settings, problems)
            else:
                problems.append(f"{place}{key}: is a section of settings, got {value!r}, wanted a dict")
        elif key in known_keys():
            settings[key] = _Setting(value, place)
        else:
            problems.append(f"{place}{key}: no such setting; {suggest(key)}")


def _override_settings(overrides: Iterable[str] | Mapping[str, Any], problems: list[str]) -> dict[str, _Setting]:
    settings: dict[str, _Setting] = {}
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        overrides = (overrides,)
    items = overrides.items() if isinstance(overrides, Mapping) else ((item, None) for item in overrides)
    for item, mapped in items:
        if not isinstance(item, str):
            problems.append(f"overrides: got {item!r}, wanted text such as {OVERRIDE_EXAMPLE}")
            continue
        key, value = (item, mapped) if isinstance(overrides, Mapping) else item.partition("=")[::2]
        if key in known_keys():
            settings[key] = _Setting(value, COMMAND_LINE)
        elif key in _sections():
            example = next(known for known in known_keys() if known.startswith(f"{key}."))
            problems.append(f"{COMMAND_LINE}{key}: is a section; set its keys one by one, such as {example}=...")
        else:
            problems.append(f"{COMMAND_LINE}{key}: no such setting; {suggest(key)}")
    return settings


def _converted(settings: Mapping[str, _Setting], problems: list[str]) -> dict[str, Any]:
    values = {}
    for key, setting in settings.items():
        wrong: list[str] = []
        with collect(wrong):
            values[key] = convert(setting.value, known_keys()[key])
        problems.extend(f"{setting.place}{key}: {problem}" for problem in wrong)
    return values


def _replaced(section: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass with the values of dotted keys put in."""
    changes = {}
    for field in dataclasses.fields(section):
        key = prefix + field.name
        current = getattr(section, field.name)
        if key in values:
            changes[field.name] = values[key]
        elif dataclasses.is_dataclass(current):
            changes[field.name] = _replaced(current, values, f"{key}.")
    return dataclasses.replace(section, **changes)


# --- hints -----------------------------------------------------------------------------------------------------------


def suggest(key: str) -> str:
    """What an unknown dotted key most likely meant: spelling, another section, or another system's name."""
    known = [*known_keys(), *sorted(_sections())]
    # "numLayers" and "num-layers" are num_layers.
    wanted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
    section, _, name = wanted.rpartition(".")
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == section]
    found = [candidate for candidate in known if candidate == wanted] or elsewhere
    if not found and name in OTHER_NAMES:
        found = [OTHER_NAMES[name]]
    if not found:
        names = {candidate.rpartition(".")[2]: candidate for candidate in siblings}
        found = [names[close] for close in difflib.get_close_matches(name, names, n=1)]
    if not found:
        found = difflib.get_close_matches(wanted, known, n=2, cutoff=0.75)
    if not found:
        by_name = {candidate.rpartition(".")[2]: candidate for candidate in known}
        found = [by_name[close] for close in difflib.get_close_matches(name, by_name, n=2, cutoff=0.75)]
    if not found and any(candidate.startswith(f"{section}.") for candidate in known) and section:
        return f"{section} has {', '.join(candidate.rpartition('.')[2] for candidate in siblings)}"
    return f"did you mean {' or '.join(found[:3])}?" if found else "--help lists all settings"
