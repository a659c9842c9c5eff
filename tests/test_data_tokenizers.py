"""Tokenizers: ids survive storage, special ids are found or asked for, broken files are refused by name."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from jaxpar.data import load_tokenizer
from jaxpar.data.build import Inputs, build_token_set
from jaxpar.data.encode import Recipe
from jaxpar.data.store import id_dtype, open_store
from jaxpar.errors import UserError


def save_word_tokenizer(path, words, added=()):
    """A tokenizer.json with one id per word, and added tokens after them."""
    import tokenizers

    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(added))
    tokenizer.enable_truncation(4)  # must be ignored: it would lose tokens
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))


@pytest.mark.parametrize(
    ("size", "added", "width"), [(65_536, 0, 2), (65_536, 1, 4), (128_000, 1283, 4), (65_500, 36, 2)]
)
def test_stored_width_follows_the_largest_id(tmp_path, size, added, width):
    path = tmp_path / "tokenizer.json"
    save_word_tokenizer(path, [f"w{i}" for i in range(size)], [f"added{i}" for i in range(added)])
    ids = sorted({0, 1, 65_535, 65_536, 127_999, size - 1} & set(range(size)))
    words = [f"w{i}" for i in ids] + ([f"added{added - 1}"] if added else [])
    ids += [size + added - 1] if added else []
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": " ".join(words)}))
    build_token_set(tmp_path / "set", Inputs((tmp_path / "a.jsonl",)), Recipe(str(path), add_eos=False))
    store = open_store(tmp_path / "set")
    assert store.width == width
    assert store.vocab_size == size + added
    assert store.read(0, len(ids)).tolist() == ids
    assert store.max_id == ids[-1]


def test_width_of_the_largest_vocabularies():
    assert [id_dtype(size).itemsize for size in (1, 65_536, 65_537, 1 << 32)] == [2, 2, 4, 4]
    with pytest.raises(UserError, match=r"does not fit 32 bits"):
        id_dtype((1 << 32) + 1)


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    text = "Grüße \U0001f600\n"
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([257, *ids, 258, 256]) == text
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_start_and_end_exactly_as_asked(tmp_path, bos, eos):
    path = tmp_path / "tokenizer.json"
    save_word_tokenizer(path, ["a", "b", "<s>", "</s>"])
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "b"}')
    build_token_set(tmp_path / "set", Inputs((tmp_path / "a.jsonl",)), Recipe(str(path), add_bos=bos, add_eos=eos))
    store = open_store(tmp_path / "set")
    found = [store.read(s, n).tolist() for d in store.documents() for s, n in zip(d.start, d.length)]
    assert found == [[2] * bos + ids + [3] * eos for ids in ([0, 1], [1])]


def test_special_tokens_come_from_the_config_the_files_beside_or_usual_names(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_word_tokenizer(path, ["a", "X", "<|endoftext|>", "E"])
    assert load_tokenizer(str(path)).eos_id == 2
    assert load_tokenizer(str(path)).bos_id is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "E"}, "bos_token": "X"}')
    assert (load_tokenizer(str(path)).bos_id, load_tokenizer(str(tmp_path)).eos_id) == (1, 3)
    assert load_tokenizer(str(path), eos_token="a").eos_id == 0
    with pytest.raises(UserError, match=r"data.eos_token: 'Z' is not in the vocabulary"):
        load_tokenizer(str(path), eos_token="Z")


def test_a_special_token_that_is_named_but_not_there_is_never_replaced(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_word_tokenizer(path, ["a", "<s>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(UserError, match=r"tokenizer.json: has no token '<\|im_end\|>', which .*tokenizer_config.json"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), eos_token="</s>").eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<start>"}')
    assert (load_tokenizer(str(path)).bos_id, load_tokenizer(str(path)).eos_id) == (None, 2)
    with pytest.raises(UserError, match=r"names no start token"):
        Recipe(str(path), add_bos=True).encoder()


def test_a_missing_special_token_is_an_error_only_when_asked_for(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_word_tokenizer(path, ["a"])
    Recipe(str(path), add_eos=False).encoder()
    with pytest.raises(UserError, match=r"names no end token"):
        Recipe(str(path)).encoder()
    with pytest.raises(UserError, match=r"names no start token"):
        Recipe(str(path), add_bos=True, add_eos=False).encoder()


def test_broken_and_missing_files_are_refused_by_name(tmp_path):
    for name, content, message in [
        ("tokenizer.json", b'{"half": ', "not a tokenizer.json"),
        ("x.model", b"no model", "not a SentencePiece model"),
        ("x.bin", b"???", "no tokenizer of a known kind"),
        ("encoder.json", b"{}", "vocab.bpe: missing"),
        ("tekken.json", b"{}", "not a tekken.json"),
    ]:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            load_tokenizer(str(folder / name))
        assert str(folder) in str(error.value)
    with pytest.raises(UserError, match=r"does not exist"):
        load_tokenizer(str(tmp_path / "nothing.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no tokenizer in this folder"):
        load_tokenizer(str(tmp_path / "empty"))


def byte_ranks(extra):
    return {**{bytes([i]): i for i in range(256)}, **{word: 256 + i for i, word in enumerate(extra)}}


def test_rank_files(tmp_path):
    path = tmp_path / "x.tiktoken"
    ranks = byte_ranks([b"ab", b"abc"])
    path.write_bytes(b"\n".join(base64.b64encode(word) + b" %d" % rank for word, rank in ranks.items()))
    with pytest.raises(UserError, match=r"258 ranks, no known vocabulary; put its splitting pattern"):
        load_tokenizer(str(path))
    settings = {"pattern": r"\S+|\s+", "special_tokens": {"<|endoftext|>": 300}}
    (tmp_path / "x.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (301, 300)
    texts = ["abcab c", "<|endoftext|>"]
    ids = tokenizer.encode_batch(texts)
    assert ids[0].tolist() == [257, 256, ord(" "), ord("c")]
    assert ids[1].tolist() == list(b"<|endoftext|>")  # text stays text
    assert [tokenizer.decode(one) for one in ids] == texts
    assert tokenizer.decode([300, 256]) == "<|endoftext|>ab"


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({b"cd": 256}, {}, r"x.tiktoken, line 258: the rank 256 was given before \(.*x.tiktoken, line 257\)"),
        ({b"ab2": 1 << 40}, {}, r"x.tiktoken, line 258: the rank 1099511627776; want 0 to"),
        ({b"a": None, b"b": None}, {}, r"x.tiktoken: no rank for 2 single bytes \(0x61, 0x62\)"),
        ({}, {"pattern": "("}, r"x.json: its splitting pattern cannot be used \(Parsing error"),
        ({}, {"special_tokens": {"<end>": 256}}, r"x.json: .* '<end>' has the id 256, which x.tiktoken gives to b'ab'"),
        ({}, {"special_tokens": {"<end>": "256"}}, r"x.json: 'special_tokens' is .* want {text: id}"),
        ({}, {"special_tokens": ["<end>"]}, r"x.json: 'special_tokens' is .* want {text: id}"),
    ],
)
def test_broken_rank_files_are_refused_by_name(tmp_path, change, settings, message):
    path = tmp_path / "x.tiktoken"
    ranks = {word: rank for word, rank in {**byte_ranks([b"ab"]), **change}.items() if rank is not None}
    path.write_bytes(b"\n".join(base64.b64encode(word) + b" %d" % rank for word, rank in ranks.items()))
    (tmp_path / "x.json").write_text(json.dumps({"pattern": r"\S+|\s+", **settings}))
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(path))


def test_a_token_with_two_ranks_is_refused(tmp_path):
    path = tmp_path / "x.tiktoken"
    lines = [base64.b64encode(word) + b" %d" % rank for word, rank in byte_ranks([b"ab"]).items()]
    path.write_bytes(b"\n".join([*lines, base64.b64encode(b"ab") + b" 257"]))
    with pytest.raises(UserError, match=r"x.tiktoken, line 258: b'ab' has the rank 256 already"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_settings_that_are_no_object_are_refused_by_name(tmp_path, name):
    save_word_tokenizer(tmp_path / "tokenizer.json", ["a"])
    for content, message in (
        ("[1]", "a JSON list; want an object"),
        ("[" * 200_000, "not valid JSON"),
        ("{", "not valid"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}: {message}"):
            load_tokenizer(str(tmp_path))


def test_tekken_files_list_more_than_is_in_use(tmp_path):
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
        for word, rank in byte_ranks([b"ab", b"abc", b"never"]).items()
    ]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 268, "default_num_special_tokens": 10}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": entries}))
    tokenizer = load_tokenizer(str(tmp_path / "tekken.json"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (268, 1, 2)
    (ids,) = tokenizer.encode_batch(["abc never"])
    assert ids[0] == 257 + 10
    assert ids.max() < 268
    assert tokenizer.decode(ids) == "abc never"


def test_gpt2_files(tmp_path):
    """Merges apply in their order; the two names of the release read alike."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "Ġ": 5, "<|endoftext|>": 6}
    merges = "#version: 0.2\na b\nab c\n"
    found = []
    for names in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / names[0]
        folder.mkdir()
        (folder / names[0]).write_text(json.dumps(vocabulary))
        (folder / names[1]).write_text(merges)
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer.vocab_size == 7
        assert tokenizer.eos_id == 6
        found.append(tokenizer.encode_batch(["abcab a"])[0].tolist())
        assert tokenizer.decode(found[-1]) == "abcab a"
    assert found[0] == found[1] == [4, 3, 5, 0]


def test_sentencepiece(tmp_path):
    import sentencepiece

    lines = [f"the cat number {i} sat on the mat" for i in range(200)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "m"), vocab_size=40, minloglevel=2
    )
    tokenizer = load_tokenizer(str(tmp_path / "m.model"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (40, 1, 2, None)
    ids = tokenizer.encode_batch(lines[:3])
    assert [tokenizer.decode(one) for one in ids] == lines[:3]
    assert all(one.dtype == np.uint32 and one.max() < 40 for one in ids)
    assert load_tokenizer(str(tmp_path)).sha256 == tokenizer.sha256
