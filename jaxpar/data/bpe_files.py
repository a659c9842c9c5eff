"""Tokenizers that come as other files than tokenizer.json: SentencePiece, GPT-2 pairs, tiktoken ranks, tekken.

Rank files are read here and not by tiktoken's own loader, which keeps a copy by path and would serve a stale one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.compression import missing_library
from jaxpar.data.sources import decode_utf8
from jaxpar.data.tokenizers import (
    END_NAMES,
    START_NAMES,
    FileTokenizer,
    HuggingFaceTokenizer,
    SpecialIds,
    Tokenizer,
    find_token,
    read_settings,
)
from jaxpar.errors import UserError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


class Ranks(NamedTuple):
    """A byte-pair vocabulary: bytes to merge rank, the splitting pattern, special tokens, and the ids before rank 0."""

    ranks: dict[bytes, int]
    pattern: str
    special: dict[str, int]
    offset: int = 0


# Number of ranks -> pattern and special tokens, for the published files that tell neither.
KNOWN_RANKS: dict[int, tuple[str, dict[str, int]]] = {
    50256: (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    50280: (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    100256: (CL100K_PATTERN, {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    128000: (CL100K_PATTERN, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009}),
    199998: (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def load(path: Path, bos_token: str | None, eos_token: str | None, *, threads: int | None) -> Tokenizer:
    """The tokenizer of a file that is not a tokenizer.json, by its name and its first bytes."""
    if path.name in ("encoder.json", "vocab.json", "vocab.bpe", "merges.txt"):
        return _load_gpt2(path, bos_token, eos_token)
    if "tekken" in path.name:
        return TiktokenTokenizer([path], _read_tekken(path), bos_token, eos_token, threads=threads)
    with path.open("rb") as stream:
        head = stream.readline(4096)
    if _rank_line(head) is not None:
        beside = path.with_suffix(".json")
        files = [path, beside] if beside.is_file() else [path]
        return TiktokenTokenizer(files, _read_ranks(path, beside), bos_token, eos_token, threads=threads)
    if ".model" in path.suffixes:
        return SentencePieceTokenizer(path, bos_token, eos_token, threads=threads)
    raise UserError(
        f"{path}: no tokenizer of a known kind; want tokenizer.json, *.model (SentencePiece), encoder.json + vocab.bpe,"
        " *.tiktoken or tekken.json"
    )


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model."""

    kind = "sentencepiece"

    def __init__(self, path: Path, bos_token: str | None, eos_token: str | None, *, threads: int | None) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise missing_library("sentencepiece", str(path)) from error
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: not a SentencePiece model ({error})") from error
        self._model = model
        self._threads = threads or -1
        pieces = {model.id_to_piece(i): i for i in range(model.get_piece_size())} if bos_token or eos_token else {}
        special = SpecialIds(
            bos=find_token(pieces, bos_token, None, (), path, "bos_token") if bos_token else _known(model.bos_id()),
            eos=find_token(pieces, eos_token, None, (), path, "eos_token") if eos_token else _known(model.eos_id()),
            pad=_known(model.pad_id()),
        )
        super().__init__([path], model.get_piece_size(), special)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (uint32) of every text, with nothing added."""
        ids = self._model.encode(list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=self._threads)
        return [np.array(one, np.uint32) for one in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids."""
        return self._model.decode([int(i) for i in ids])


class TiktokenTokenizer(FileTokenizer):
    """Byte-pair ranks through tiktoken. Special tokens that occur in a text are read as plain text."""

    kind = "tiktoken"

    def __init__(
        self,
        files: Sequence[Path],
        ranks: Ranks,
        bos_token: str | None,
        eos_token: str | None,
        *,
        threads: int | None,
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise missing_library("tiktoken", str(files[0])) from error
        _check_ranks(files, ranks)
        try:
            self._encoding = tiktoken.Encoding(
                str(files[0]), pat_str=ranks.pattern, mergeable_ranks=ranks.ranks, special_tokens={}
            )
        except ValueError as error:
            raise UserError(f"{files[-1]}: its splitting pattern cannot be used ({error})") from error
        self._offset = ranks.offset
        self._special = {i: name for name, i in ranks.special.items()}
        self._threads = threads or 8
        special = SpecialIds(
            bos=find_token(ranks.special, bos_token, None, START_NAMES, files[0], "bos_token"),
            eos=find_token(ranks.special, eos_token, None, END_NAMES, files[0], "eos_token"),
            pad=ranks.special.get("<pad>"),
        )
        largest = max(max(ranks.ranks.values()) + ranks.offset, max(ranks.special.values(), default=0))
        super().__init__(files, largest + 1, special)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (uint32) of every text, with nothing added."""
        if self._threads == 1 or len(texts) == 1:
            ids = [self._encoding.encode_ordinary(text) for text in texts]
        else:
            ids = self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)
        return [np.array(one, np.uint32) + np.uint32(self._offset) for one in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included."""
        parts: list[str] = []
        run: list[int] = []
        for one in map(int, ids):
            if one in self._special:
                parts += [self._encoding.decode(run), self._special[one]]
                run = []
            else:
                run.append(one - self._offset)
        return "".join([*parts, self._encoding.decode(run)])


def _check_ranks(files: Sequence[Path], ranks: Ranks) -> None:
    """Refuse a vocabulary that tiktoken would fail on, now or at some later text, or that gives an id two meanings."""
    missing = [f"0x{byte:02x}" for byte in range(256) if bytes([byte]) not in ranks.ranks]
    if missing:
        raise UserError(
            f"{files[0]}: no rank for {len(missing)} single bytes ({', '.join(missing[:4])}); a text that holds one"
            " could not be encoded; want all 256"
        )
    taken = {rank + ranks.offset: token for token, rank in ranks.ranks.items()}
    for name, number in ranks.special.items():
        if number in taken:
            raise UserError(
                f"{files[-1]}: the special token {name!r} has the id {number}, which {files[0].name} gives to"
                f" {taken[number]!r}; want an id of its own"
            )


def _distinct_ranks(entries: Iterable[tuple[str, bytes, int]]) -> dict[bytes, int]:
    """Token to rank of (place, token, rank); refuses a token or a rank that comes twice."""
    ranks: dict[bytes, int] = {}
    places: dict[int, str] = {}
    for place, token, rank in entries:
        if rank in places:
            raise UserError(f"{place}: the rank {rank} was given before ({places[rank]}); want each once")
        if token in ranks:
            raise UserError(f"{place}: {token!r} has the rank {ranks[token]} already; want each token once")
        if not 0 <= rank < 1 << 31:
            raise UserError(f"{place}: the rank {rank}; want 0 to 2^31 - 1")
        ranks[token], places[rank] = rank, place
    return ranks


def _special_ids(path: Path, found: Any) -> dict[str, int]:
    """Special tokens by their text."""
    if isinstance(found, dict) and all(type(number) is int and 0 <= number < 1 << 31 for number in found.values()):
        return dict(found)
    raise UserError(f"{path}: 'special_tokens' is {found!r:.60}; want {{text: id}}")


def _known(special_id: int) -> int | None:
    """SentencePiece says -1 for "none"."""
    return special_id if special_id >= 0 else None


def _load_gpt2(path: Path, bos_token: str | None, eos_token: str | None) -> Tokenizer:
    """GPT-2's two files, in one folder, under the names of either of its releases."""
    import tokenizers

    pairs = [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")]
    names = next(pair for pair in pairs if path.name in pair)
    vocabulary_path, merges_path = (path.parent / name for name in names)
    for file in (vocabulary_path, merges_path):
        if not file.is_file():
            raise UserError(f"{file}: missing; {path.name} needs it beside it")
    vocabulary: dict[str, int] = read_settings(vocabulary_path)
    lines = decode_utf8(merges_path.read_bytes(), str(merges_path)).splitlines()
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"{merges_path}, line {number}: {line!r}; want two symbols and a blank between them")
        merges.append((pair[0], pair[1]))
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the package raises the bare class
        raise UserError(f"{vocabulary_path} and {merges_path} do not fit together ({error})") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return HuggingFaceTokenizer([vocabulary_path, merges_path], tokenizer, bos_token, eos_token)


def _rank_line(line: bytes) -> tuple[bytes, int] | None:
    """Token and rank of a line of a tiktoken file; None when it is none."""
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        return None
    try:
        return base64.b64decode(fields[0], validate=True), int(fields[1])
    except ValueError:
        return None


def _rank_lines(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """(place, token, rank) of the lines of a tiktoken file."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        pair = _rank_line(line)
        if pair is None:
            raise UserError(f"{path}, line {number}: want a base64 token, a blank and its rank")
        yield f"{path}, line {number}", *pair


def _read_ranks(path: Path, beside: Path) -> Ranks:
    """A tiktoken file; pattern and special tokens come from the JSON file beside it or from the number of ranks."""
    ranks = _distinct_ranks(_rank_lines(path))
    if beside.is_file():
        settings: Any = read_settings(beside)
        if not isinstance(settings.get("pattern"), str):
            raise UserError(f"{beside}: no 'pattern'; want {{'pattern': regex, 'special_tokens': {{text: id}}}}")
        return Ranks(ranks, settings["pattern"], _special_ids(beside, settings.get("special_tokens", {})))
    if len(ranks) not in KNOWN_RANKS:
        raise UserError(
            f"{path}: {len(ranks)} ranks, no known vocabulary; put its splitting pattern and special tokens into"
            f" {beside.name} beside it: {{'pattern': regex, 'special_tokens': {{text: id}}}}"
        )
    pattern, special = KNOWN_RANKS[len(ranks)]
    return Ranks(ranks, pattern, special)


def _read_tekken(path: Path) -> Ranks:
    """A tekken.json: more entries may be listed than are in use, and special tokens come before rank 0."""
    content: Any = read_settings(path)
    try:
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        in_use = int(config["default_vocab_size"]) - num_special
        entries = content["vocab"][:in_use]
        ranks = _distinct_ranks(
            (f"{path}, entry {number} of vocab", base64.b64decode(entry["token_bytes"]), int(entry["rank"]))
            for number, entry in enumerate(entries)
        )
        listed = content.get("special_tokens") or [
            {"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
        ]
        special = {entry["token_str"]: int(entry["rank"]) for entry in listed}
        return Ranks(ranks, config["pattern"], special, num_special)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a tekken.json ({error!r})") from error
