"""Config files and overrides: precedence, types, and one clear message for every mistake."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxpar import config_file
from jaxpar.config import Config
from jaxpar.errors import UserError


def write(folder: Path, body: str, name: str = "run.py") -> Path:
    path = folder / name
    path.write_text(body, encoding="utf-8")
    return path


def get_config(values: str) -> str:
    return f"import ml_collections\n\ndef get_config():\n    return ml_collections.ConfigDict({values})\n"


def test_later_wins(tmp_path: Path):
    path = write(tmp_path, get_config('{"steps": 5, "model": {"family": "gemma", "norm_eps": 1e-3, "embed_dim": 64}}'))
    config = config_file.load(path, ["steps=7"])
    assert config.steps == 7  # override over file
    assert config.model.norm_eps == 1e-3  # file over preset
    assert config.model.tied  # preset over default
    assert config.model.embed_scale == 8.0
    assert config.seq_len == Config().seq_len
    assert config_file.load(path, ["model.family=gpt2"]).model.norm == "layer"


def test_a_plain_dict_and_a_config_dict_agree(tmp_path: Path):
    one = write(tmp_path, get_config('{"data": {"files": ["a", "b"]}}'), "one.py")
    two = write(tmp_path, 'def get_config():\n    return {"data": {"files": ("a", "b")}}\n', "two.py")
    assert config_file.load(one) == config_file.load(two)


def test_resolved_config_round_trips(tmp_path: Path):
    overrides = [
        "model.family=gemma3",
        "data.sources=({'name': 'a', 'files': ('x',), 'weight': '2'},)",
        "data.phases=((0, (1,)), (5, (0.5,)))",
        "optimizer.clip_norm=None",
    ]
    config = config_file.load(None, overrides)
    path = write(tmp_path, config_file.to_json(config), "config.json")
    assert config_file.load(path) == config
    assert config_file.from_dict(config_file.to_dict(config)) == config
    assert json.loads(path.read_text())["optimizer"]["clip_norm"] is None


ACCEPTED = [
    ("optimizer.learning_rate", "1e-4", 1e-4),
    ("optimizer.learning_rate", "1E-4", 1e-4),
    ("optimizer.learning_rate", "1.e-4", 1e-4),
    ("optimizer.learning_rate", ".0001", 1e-4),
    ("optimizer.learning_rate", '"0.1"', 0.1),
    ("optimizer.learning_rate", "1", 1.0),
    ("optimizer.clip_norm", "null", None),
    ("optimizer.clip_norm", "None", None),
    ("steps", "3e5", 300_000),
    ("steps", "1e4", 10_000),
    ("steps", "1_000", 1000),
    ("steps", "300000.0", 300_000),
    ("steps", "'12'", 12),
    ("parallel.data", "-1", -1),
    ("model.num_kv_heads", "none", None),
    ("model.tied", "off", False),
    ("model.tied", "yes", True),
    ("model.tied", "1", True),
    ("model.gated", "False", False),
    ("remat", "none", "none"),
    ("parallel.zero", "3", 3),
    ("model.window_pattern", "true,off", (True, False)),
    ("model.window_pattern", "(1, 0)", (True, False)),
    ("data.files", "a.txt,b.txt", ("a.txt", "b.txt")),
    ("data.files", '"a.txt"', ("a.txt",)),
    ("data.files", "()", ()),
    ("data.phases", "((0, (1, 2)), (5, (3, 4)))", ((0, (1.0, 2.0)), (5, (3.0, 4.0)))),
]

REFUSED = [
    ("optimizer.learning_rate", "nan"),
    ("optimizer.learning_rate", "inf"),
    ("optimizer.learning_rate", "1e400"),
    ("optimizer.learning_rate", "off"),
    ("optimizer.learning_rate", "null"),
    ("optimizer.learning_rate", ""),
    ("steps", "3.5"),
    ("steps", "1e30"),
    ("steps", "1e999999999"),
    ("steps", "ten"),
    ("steps", "true"),
    ("steps", "None"),
    ("model.tied", "2"),
    ("model.tied", "null"),
    ("remat", "None"),
    ("remat", "ful"),
    ("parallel.zero", "4"),
    ("parallel.zero", "on"),
    ("data.tokenizer", "null"),
    ("data.phases", "((0,),)"),
    ("data.phases", "3"),
    ("model.window_pattern", "maybe"),
]


def resolve(key: str, value: object) -> object:
    found: object = config_file.from_dict({}, {key: value})
    for name in key.split("."):
        found = getattr(found, name)
    return found


def nested(key: str, value: object) -> dict[str, object]:
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("key", "text", "wanted"), ACCEPTED)
def test_text_becomes_the_annotated_type_in_file_and_on_the_command_line(key: str, text: str, wanted: object):
    from_line = config_file.load(None, [f"{key}={text}"])
    assert from_line == config_file.from_dict(nested(key, text)) == config_file.from_dict(nested(key, wanted))
    got = resolve(key, text)
    assert got == wanted
    assert type(got) is type(wanted)


@pytest.mark.parametrize(("key", "text"), REFUSED)
def test_wrong_text_is_refused_alike_in_file_and_on_the_command_line(key: str, text: str):
    for attempt in (
        lambda: config_file.load(None, [f"{key}={text}"]),
        lambda: config_file.from_dict(nested(key, text)),
    ):
        with pytest.raises(UserError, match=key) as caught:
            attempt()
        assert "wanted" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.learning_rate", math.nan),
        ("optimizer.learning_rate", math.inf),
        ("optimizer.learning_rate", True),
        ("optimizer.learning_rate", None),
        ("steps", True),
        ("steps", 2.5),
        ("steps", None),
        ("steps", [1]),
        ("model.tied", 2),
        ("model.tied", 1.0),
        ("remat", None),
        ("data.text_key", False),
        ("data.sources", ({"name": "a", "wieght": 1},)),
        ("data.sources", ({"files": ("a",)},)),
        ("data.sources", (3,)),
    ],
)
def test_wrong_python_values_are_refused(key: str, value: object):
    with pytest.raises(UserError, match=key):
        config_file.from_dict(nested(key, value))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optimzer", "optimizer"),
        ("optimzer.learning_rate", "optimizer.learning_rate"),
        ("optimizer.learningrate", "optimizer.learning_rate"),
        ("optimizer.learning-rate", "optimizer.learning_rate"),
        ("optimizer.learningRate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("model.learning_rate", "optimizer.learning_rate"),
        ("model.steps", "steps"),
        ("num-steps", "steps"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("parallel.tp", "parallel.tensor"),
        ("model.rope.bse", "model.rope.base"),
        ("model.base", "model.rope.base"),
        ("moe.num_experts", "model.moe.num_experts"),
        ("steps.x", "steps"),
    ],
)
def test_unknown_keys_get_a_hint_in_file_and_on_the_command_line(key: str, hint: str):
    with pytest.raises(UserError, match=rf"no such setting; did you mean [^?]*\b{hint}\b"):
        config_file.load(None, [f"{key}=1"])
    if key != "steps.x":
        # A file names a mistaken section once, not each key inside it.
        wanted = hint.rpartition(".")[0] if key.startswith(("optimzer.", "moe.")) else hint
        with pytest.raises(UserError, match=rf"did you mean [^?]*\b{wanted}\b"):
            config_file.from_dict(nested(key, 1))


def test_all_mistakes_come_together(tmp_path: Path):
    path = write(tmp_path, get_config('{"stpes": 3, "optimizer": {"b1": "x"}, "model": {"family": "gemma9"}}'))
    with pytest.raises(UserError) as caught:
        config_file.load(path, ["seq_len=1.5", "model=3"])
    assert len(caught.value.problems) == 5
    for part in (f"{path}: stpes", "optimizer.b1", "gemma9", "--config.seq_len", "--config.model: is a section"):
        assert part in str(caught.value)


@pytest.mark.parametrize("overrides", [[3], [("steps", 3)], {3: 4}, 3, None])
def test_what_is_no_override_is_told_with_an_example(overrides: Any):
    with pytest.raises(UserError, match=r'^overrides: got .*, wanted text such as "parallel.tensor=4"'):
        config_file.load(None, overrides)


def test_a_section_cannot_be_replaced_by_a_value():
    for value in (None, 3, "x"):
        with pytest.raises(UserError, match="optimizer: is a section"):
            config_file.from_dict({"optimizer": value})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def get_config(:\n    pass\n", r"run.py, line 1: syntax error"),
        ("import nowhere_to_be_found\n", r"run.py, line 1: ModuleNotFoundError"),
        ("def get_config():\n    x = {}\n    return x['a']\n", r"run.py, line 3: KeyError: 'a'"),
        ("def get_config():\n    raise SystemExit(3)\n", r"run.py, line 2: SystemExit"),
        ("def make_config():\n    return {}\n", r"run.py: has no function get_config"),
        ("def get_config():\n    return 3\n", r"run.py: get_config\(\) returned int"),
        ("def get_config():\n    pass\n", r"run.py: get_config\(\) returned NoneType"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, body: str, message: str):
    with pytest.raises(UserError, match=message):
        config_file.load(write(tmp_path, body))


def test_missing_files_get_a_hint(tmp_path: Path):
    write(tmp_path, "", "llama3_8b.py")
    with pytest.raises(UserError, match=r"llama_8b.py: no such config file; did you mean .*llama3_8b.py"):
        config_file.load(tmp_path / "llama_8b.py")
    with pytest.raises(UserError, match="is a directory"):
        config_file.load(tmp_path)
    with pytest.raises(UserError, match="a config file is Python"):
        config_file.load(write(tmp_path, "a: 1", "run.yaml"))
    with pytest.raises(UserError, match="line 1: not JSON"):
        config_file.load(write(tmp_path, "{", "run.json"))


def test_environment_variables_set_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPAR_CONFIG_STEPS", "3")
    monkeypatch.setenv("JAXPAR_STEPS", "3")
    assert config_file.load(None) == config_file.from_dict({})


def test_apply_changes_a_loaded_config_but_not_its_family():
    config = config_file.from_dict({"model": {"family": "gpt2"}})
    changed = config_file.apply(config, {"parallel.tensor": 2, "model.family": "gpt2"})
    assert changed.parallel.tensor == 2
    assert changed.model == config.model
    with pytest.raises(UserError, match=r"model.family: cannot change gpt2 to llama"):
        config_file.apply(config, {"model.family": "llama"})


def test_a_number_with_a_typo_is_answered_with_one_that_works():
    with pytest.raises(UserError, match=r"got '1e-4x', wanted a float \(such as 0\.1 or 1e-4\)$"):
        config_file.from_dict({}, ["optimizer.learning_rate=1e-4x"])
    assert config_file.from_dict({}, ["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 1e-4
