"""Conversations: the answers are learned and nothing else, and a run on them goes from a folder to a tuned model."""

from __future__ import annotations

import dataclasses
import gzip
import json

import jax
import numpy as np
import pytest

from jaxpar import config_file
from jaxpar.chat import Template, load_template, open_chat
from jaxpar.config import Config, LoraConfig, ModelConfig
from jaxpar.data import load_tokenizer
from jaxpar.errors import UserError
from jaxpar.hf import export, load_params
from jaxpar.hf.convert import abstract_params, export_adapter_folder, export_folder, import_folder
from jaxpar.hf.load import leaf_axes
from jaxpar.lora import merge
from jaxpar.trainer import train
from jaxpar.tree import named_leaves
from jaxpar.weights import open_weights

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
LONGER = [*ASKED, {"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "it is 4"}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    lines = [json.dumps({"messages": messages}) for messages in (ASKED, LONGER, ASKED)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def config_for(folder, **changes) -> Config:
    values = {
        "seq_len": 64,
        "global_batch": 2,
        "precision": "float32",
        "data": {"source": "chat", "files": (str(folder / "chat.jsonl"),), "eval_fraction": 0.0},
        "chat": {"template": str(folder / "template.jinja")},
    }
    return config_file.from_dict(values | changes)


def learned_text(row) -> list[str]:
    """The targets that count, as runs of text."""
    texts, before = [], False
    for target, weight in zip(row["targets"], row["weights"]):
        if weight and not before:
            texts.append("")
        if weight:
            texts[-1] += chr(target)
        before = bool(weight)
    return texts


def test_answers_are_learned_with_their_end_and_nothing_else(folder):
    data = {"source": "chat", "files": (str(folder / "chat.jsonl"),), "packing": "none", "eval_fraction": 0.0}
    rows = open_chat(config_for(folder, data=data)).train
    assert [learned_text(rows.row(i)) for i in range(3)] == [["2\n", "it is 4\n"], ["2\n"], ["2\n"]]
    row = rows.row(0)
    assert bytes(row["tokens"][: len(rows.conversations[1][0]) - 1].tolist()).startswith(
        b"<user>1+1?\n<assistant>2\n<user>"
    )
    assert row["segment_ids"].sum() == len(rows.conversations[1][0]) - 1


def test_packed_conversations_do_not_see_each_other(folder):
    rows = open_chat(config_for(folder)).train
    assert [sorted(numbers) for numbers in rows.rows] == [[1], [0, 2]]
    row = rows.row(1)
    assert learned_text(row) == ["2\n", "2\n"]
    starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
    assert row["segment_ids"].max() == 2
    assert (row["positions"][starts] == 0).all()
    assert bytes(row["tokens"][starts[1] :][:6].tolist()) == b"<user>"


def test_an_end_token_that_is_also_padding_is_learned(tmp_path):
    """Weights follow places in the text, never ids: with pad = eos = 0 the real ends count and the padding does not."""
    import tokenizers

    words = {"<eos>": 0, "ask": 1, "yes": 2, "no": 3, "user": 4, "assistant": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="no"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    settings = {"eos_token": {"content": "<eos>"}, "pad_token": "<eos>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    files = (str(tmp_path / "chat.jsonl"),)
    data = {"source": "chat", "files": files, "tokenizer": str(tmp_path), "eval_fraction": 0.0}
    rows = open_chat(config_file.from_dict({"seq_len": 8, "data": data})).train
    row = rows.row(0)
    assert row["tokens"].tolist() == [4, 1, 0, 5, 2, 0, 0, 0]
    assert row["targets"].tolist() == [1, 0, 5, 2, 0, 0, 0, 0]
    assert row["weights"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_a_template_that_rewrites_earlier_messages_is_refused(folder):
    last_only = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="message 2 is rendered differently when others follow"):
        list(Template(last_only, "a.jinja", {}).parts(LONGER, ("assistant",)))


def test_a_template_may_refuse_a_conversation(folder):
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('needs a system message') }}{% endif %}"
    with pytest.raises(UserError, match=r"a.jinja: needs a system message"):
        Template(strict, "a.jinja", {}).render(ASKED)


def test_no_template_and_broken_lines_are_told(folder):
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(UserError, match=r"bytes: has no chat template; set chat.template"):
        load_template(None, folder / "nothing", tokenizer)
    (folder / "chat.jsonl").write_text('{"messages": []}\nnonsense\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(UserError) as caught:
        open_chat(config_for(folder))
    assert [problem.split(": ")[0].rsplit(", ", 1)[-1] for problem in caught.value.problems] == [
        "line 1", "line 2", "line 3",
    ]  # fmt: skip
    for line, words in (
        (b"\xff", "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    ):
        (folder / "chat.jsonl").write_bytes(b"\n" + line)
        with pytest.raises(UserError, match=rf"chat.jsonl, line 2: .*{words}"):
            open_chat(config_for(folder))


def test_null_for_a_content_is_refused_where_the_template_writes_it(folder):
    null = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": []}]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in (ASKED, null)))
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: message 2 has the content null, which .*template.jinja"):
        open_chat(config_for(folder))
    (folder / "template.jinja").write_text(TEMPLATE.replace("{{ m.content }}", "{{ m.role + m.content }}"))
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: .*template.jinja: can only concatenate str"):
        open_chat(config_for(folder))
    (folder / "template.jinja").write_text(TEMPLATE.replace("{{ m.content }}", "{{ m.content or 'call' }}"))
    texts = [learned_text(row) for row in map(open_chat(config_for(folder)).train.row, range(1))]
    assert "call\n" in texts[0]


def test_oddities_of_files_change_nothing(folder):
    """A byte-order mark, line ends and blank lines, compression."""
    text = (folder / "chat.jsonl").read_bytes()
    wanted = open_chat(config_for(folder)).train.row(0)
    (folder / "chat.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\r\n"))
    (folder / "chat.jsonl.gz").write_bytes(gzip.compress(text))
    plain = config_for(folder)
    data = dataclasses.replace(plain.data, files=(str(folder / "chat.jsonl.gz"),))
    for config in (plain, dataclasses.replace(plain, data=data)):
        found = open_chat(config).train.row(0)
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_from_a_folder_over_training_to_a_merged_folder_and_an_adapter(folder, base):
    """init_from, adapter training through the trainer, resume, then generate, export and PEFT see the tuned model."""
    model = ModelConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, vocab_size=259, vocab_multiple=8)
    leaves = leaf_axes(abstract_params(model))
    rng = np.random.default_rng(0)
    values = {name: 0.3 * rng.standard_normal(like.shape, np.float32) for name, (_, like) in leaves.items()}
    export(folder / "base", model, leaves, values.__getitem__, max_position=64)
    start = folder / "base"
    if base == "nf4":  # a run's folder serves as well
        import_folder(folder / "base", start := folder / "imported", vocab_multiple=8)
    config = config_for(
        folder,
        steps=4, init_from=str(start), log_interval=1, parallel={"data": 4, "tensor": 2}, global_batch=4,
        model={"num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 24, "vocab_size": 259, "vocab_multiple": 8},
        lora={"rank": 2, "alpha": 8.0, "targets": ("q", "down"), "base": base}, remat="full",
        optimizer={"learning_rate": 0.03, "schedule": "constant"},
        metrics={"tensorboard": False, "progress": False},
    )  # fmt: skip
    result = train(config, folder / "run")
    losses = [row["loss"] for row in result.history]
    assert losses[-1] < losses[0]
    train(dataclasses.replace(config, steps=2), folder / "parts")
    resumed = train(config, folder / "parts")
    assert [row["loss"] for row in resumed.history] == losses[2:]
    for name, leaf in named_leaves(result.state).items():
        assert np.array_equal(leaf, named_leaves(resumed.state)[name]), name
    weights = open_weights(folder / "run")
    assert weights.step == 4
    assert weights.config is not None
    assert weights.config.lora == LoraConfig(2, 8.0, ("q", "down"), base)
    loaded = weights.load(abstract_params(weights.model))
    frozen = load_params(folder / "base", weights.model, abstract_params(weights.model))
    wanted = jax.jit(lambda m, a: merge(m, a, base))(frozen, jax.device_get(result.state.params))
    for name, leaf in named_leaves(loaded).items():
        np.testing.assert_allclose(leaf, named_leaves(wanted)[name], atol=1e-6, err_msg=name)
    export_folder(folder / "run", folder / "tuned")
    tuned = load_params(folder / "tuned", weights.model, abstract_params(weights.model))
    assert all(np.array_equal(leaf, named_leaves(loaded)[name]) for name, leaf in named_leaves(tuned).items())
    export_adapter_folder(folder / "run", folder / "adapter")
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 8
