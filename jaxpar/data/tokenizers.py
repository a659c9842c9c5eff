"""Text to token ids and back: bytes, Hugging Face, SentencePiece, GPT-2 and tiktoken files.

Owns what a tokenizer is for the rest of the data code: batch encoding without any added token, the size of
the id space (added tokens included), the ids of the start, end and padding tokens, and a hash of its content.
Adding start and end tokens is the business of the writer, never of the tokenizer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.json_files import read_json
from jaxpar.errors import UserError

# What the published families call their end and start tokens, tried in this order when nothing else tells.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "[SEP]")
START_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>", "<|startoftext|>", "[CLS]")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>")


# Beside a tokenizer.json; the later one wins.
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the data code needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Short name for logs and errors."""
        ...

    @property
    def kind(self) -> str:
        """One of bytes, huggingface, sentencepiece, tiktoken."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it was read from."""
        ...

    @property
    def sha256(self) -> str:
        """Hash of everything that decides the ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id that can occur, plus one."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Start token."""
        ...

    @property
    def eos_id(self) -> int | None:
        """End token."""
        ...

    @property
    def pad_id(self) -> int | None:
        """Padding token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (uint32) of every text, with nothing added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids."""
        ...


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens that structure a row; None where the tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


class ByteTokenizer:
    """UTF-8 bytes are the ids 0 to 255; 256, 257 and 258 are padding, start and end."""

    name = "bytes"
    kind = "bytes"
    files: tuple[Path, ...] = ()
    sha256 = hashlib.sha256(b"jaxpar bytes: 0-255, pad 256, bos 257, eos 258").hexdigest()
    vocab_size = 259
    pad_id = 256
    bos_id = 257
    eos_id = 258

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (uint8) of every text, with nothing added."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special ids vanish, broken UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """What the tokenizers that are read from files share: name, hash, special ids."""

    kind = ""

    def __init__(self, files: Sequence[Path], vocab_size: int, special: SpecialIds) -> None:
        self.files = tuple(files)
        self.name = str(files[0])
        self.vocab_size = vocab_size
        self.bos_id = special.bos
        self.eos_id = special.eos
        self.pad_id = special.pad
        self.sha256 = _tokenizer_hash(self.kind, files, special.bos, special.eos)


class HuggingFaceTokenizer(FileTokenizer):
    """The `tokenizers` package; a tokenizer_config.json beside the file names the special tokens."""

    kind = "huggingface"

    def __init__(self, files: Sequence[Path], tokenizer: Any, bos_token: str | None, eos_token: str | None) -> None:
        """Wrap a `tokenizers.Tokenizer` that was made from `files`."""
        # A file may ask for truncation or padding; both would lose or invent tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        path = files[0]
        named = _special_names(path.parent)
        special = SpecialIds(
            bos=find_token(vocabulary, bos_token, named.get("bos_token"), START_NAMES, path, "bos_token"),
            eos=find_token(vocabulary, eos_token, named.get("eos_token"), END_NAMES, path, "eos_token"),
            pad=find_token(vocabulary, None, named.get("pad_token"), PAD_NAMES, path, "pad_token"),
        )
        super().__init__(files, max(vocabulary.values(), default=-1) + 1, special)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (uint32) of every text, with nothing added."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(
    spec: str, *, bos_token: str | None = None, eos_token: str | None = None, threads: int | None = None
) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a file, or a folder that holds one.

    Files: tokenizer.json (Hugging Face), *.model (SentencePiece), encoder.json + vocab.bpe (GPT-2), *.tiktoken,
    tekken.json. `bos_token` and `eos_token` are the texts of the start and end token where the file does not tell;
    `threads` limits the threads of one batch (Hugging Face: the TOKENIZERS_PARALLELISM variable does).
    """
    if spec == "bytes":
        if bos_token or eos_token:
            raise UserError("data.bos_token and data.eos_token mean nothing with the byte tokenizer; leave them unset")
        return ByteTokenizer()
    path = _tokenizer_path(Path(spec).expanduser())
    if path.suffix == ".json" and path.name not in ("encoder.json", "vocab.json") and "tekken" not in path.name:
        return _load_huggingface(path, bos_token, eos_token)
    from jaxpar.data import bpe_files

    return bpe_files.load(path, bos_token, eos_token, threads=threads)


def _load_huggingface(path: Path, bos_token: str | None, eos_token: str | None) -> HuggingFaceTokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises the bare class
        raise UserError(f"{path}: not a tokenizer.json that the tokenizers package can read ({error})") from error
    return HuggingFaceTokenizer([path], tokenizer, bos_token, eos_token)


def _tokenizer_path(path: Path) -> Path:
    """The tokenizer file behind `path`, which may be a folder."""
    if path.is_dir():
        known = ("tokenizer.json", "tokenizer.model", "encoder.json", "vocab.json", "tekken.json")  # in this order
        found = [path / name for name in known if (path / name).is_file()]
        found += sorted([*path.glob("*.model*"), *path.glob("*.tiktoken"), *path.glob("*tekken*.json")])
        if not found:
            raise UserError(
                f"{path}: no tokenizer in this folder; looked for {', '.join(known)}, *.model, *.tiktoken, *.json"
            )
        return found[0]
    if not path.is_file():
        raise UserError(f'data.tokenizer: {path} does not exist; want "bytes" or the path of a tokenizer file')
    return path


def copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Copy the files of a tokenizer, and those that name its special tokens, so that `load_tokenizer` finds them.

    Returns their names and hashes.
    """
    if not tokenizer.files:
        return {}
    beside = [tokenizer.files[0].parent / name for name in SETTINGS_FILES]
    folder.mkdir(exist_ok=True)
    for path in [*tokenizer.files, *(path for path in beside if path.is_file())]:
        # The one name by which a folder tells a Hugging Face tokenizer.
        renamed = tokenizer.kind == "huggingface" and len(tokenizer.files) == 1 and path == tokenizer.files[0]
        shutil.copyfile(path, folder / ("tokenizer.json" if renamed else path.name))
    return {path.name: hash_files([path]) for path in sorted(folder.iterdir())}


def load_copy(
    folder: Path, facts: Mapping[str, Any], bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer that was copied to `folder`, which the `facts` of a manifest describe; refuses any other.

    `bos_token` and `eos_token` as it was written with, where the facts (of an older set) do not tell.
    """
    wrong = damaged_copy(folder, facts)
    if wrong or not folder.is_dir():
        raise UserError(
            f"{', '.join(wrong) or folder}: the copy of the tokenizer is damaged or missing; put it back, or set"
            " data.tokenizer to the one that the tokens were written with"
        )
    bos_token, eos_token = bos_token or facts.get("bos_token"), eos_token or facts.get("eos_token")
    copy = load_tokenizer(str(folder), bos_token=bos_token, eos_token=eos_token)
    if copy.sha256 != facts["sha256"]:
        raise UserError(
            f"{folder}: its start and end tokens have the ids {copy.bos_id} and {copy.eos_id}, but the tokens were"
            f" written with {facts.get('bos_id')} and {facts.get('eos_id')}; data.bos_token and data.eos_token must be"
            " those that they were written with"
        )
    return copy


def damaged_copy(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Files of a tokenizer's copy that are missing or not as the `facts` of the manifest tell."""
    hashes = facts.get("files")
    if hashes is not None:
        paths = {folder / name: digest for name, digest in hashes.items()}
        return [str(path) for path, digest in paths.items() if not path.is_file() or hash_files([path]) != digest]
    if facts["kind"] == "bytes" or not folder.is_dir():
        return []
    copy = load_tokenizer(str(folder))  # of an older manifest, which tells no hash of each file
    same = _tokenizer_hash(copy.kind, copy.files, facts.get("bos_id"), facts.get("eos_id")) == facts["sha256"]
    return [] if same else [copy.name]


def _tokenizer_hash(kind: str, files: Sequence[Path], bos_id: int | None, eos_id: int | None) -> str:
    return hash_files(files, json.dumps([kind, bos_id, eos_id]))


def hash_files(files: Sequence[Path], extra: str = "") -> str:
    """SHA-256 (hex) over the content of `files` in order, and `extra`."""
    digest = hashlib.sha256(extra.encode())
    for path in files:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _special_names(folder: Path) -> dict[str, str]:
    """Names of the special tokens that the files beside a tokenizer.json tell."""
    names: dict[str, str] = {}
    for file_name in SETTINGS_FILES:
        path = folder / file_name
        if not path.is_file():
            continue
        settings = read_settings(path)
        for key in ("bos_token", "eos_token", "pad_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[key] = value
    return names


def read_settings(path: Path) -> dict[str, Any]:
    """The object of a JSON file, or an error that names it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: a JSON {type(found).__name__}; want an object")
    return found


def find_token(
    vocabulary: dict[str, int], asked: str | None, told: str | None, usual: Sequence[str], path: Path, key: str
) -> int | None:
    """Id of a special token: the one asked for, else the one told beside the file, else a usual name.

    An end token that is told but not there is refused, since another one in its place would train another end; a start
    token is then none, as many tokenizers name one that nothing uses.
    """
    if asked is not None:
        if asked not in vocabulary:
            raise UserError(f"data.{key}: {asked!r} is not in the vocabulary of {path}")
        return vocabulary[asked]
    if told is not None and told in vocabulary:
        return vocabulary[told]
    if told is not None and key == "eos_token":
        raise UserError(
            f"{path}: has no token {told!r}, which a file beside it ({' or '.join(SETTINGS_FILES)}) names as its"
            f" {key}; mend that file, or set data.{key} to a token of the vocabulary"
        )
    if told is not None and key == "bos_token":
        return None
    return next((vocabulary[name] for name in usual if name in vocabulary), None)


def require_special(tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> tuple[int | None, int | None]:
    """(start id, end id) to put around every document; None where none is asked for."""
    if add_bos and tokenizer.bos_id is None:
        raise UserError(
            f"data.add_bos: {tokenizer.name} names no start token; set data.bos_token to its text or data.add_bos=false"
        )
    if add_eos and tokenizer.eos_id is None:
        raise UserError(
            f"data.add_eos: {tokenizer.name} names no end token; set data.eos_token to its text or data.add_eos=false"
        )
    return (tokenizer.bos_id if add_bos else None), (tokenizer.eos_id if add_eos else None)
