"""Stores by the name of a source: the standard library, text files, token sets, Megatron and headerless files."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import Config, DataConfig
from jaxpar.data import sources
from jaxpar.data.build import Inputs, build_token_set
from jaxpar.data.cache import cached
from jaxpar.data.encode import Recipe
from jaxpar.data.foreign import open_megatron, open_raw
from jaxpar.data.hashing import content_identity
from jaxpar.data.manifest import open_manifest
from jaxpar.data.store import TokenStore, join_stores, open_store
from jaxpar.data.tokenizers import Tokenizer, hash_files, load_copy, load_tokenizer
from jaxpar.errors import UserError, raise_together

log = logging.getLogger(__name__)


def tokenizer_of(settings: DataConfig) -> Tokenizer | None:
    """The tokenizer of the config; None where the default is set and the tokens were made elsewhere."""
    if _made_elsewhere(settings):
        return None
    return load_tokenizer(settings.tokenizer, bos_token=settings.bos_token, eos_token=settings.eos_token)


def tokenizer_spec(settings: DataConfig) -> str | None:
    """What `data.tokenizer` must be to read and write the ids of these settings; None where nothing tells it."""
    if not _made_elsewhere(settings):
        return settings.tokenizer
    try:
        stores = [open_store(folder) for folder in _named_token_sets(settings)]
    except UserError:  # the token sets have gone
        return None
    if stores and stores[0].tokenizer_sha256 == load_tokenizer("bytes").sha256:
        return "bytes"
    copies = [store.tokenizer_dir for store in stores if store.tokenizer_dir is not None]
    return next((str(folder) for folder in copies if folder.is_dir()), None)


def _made_elsewhere(settings: DataConfig) -> bool:
    kinds = {source.source for source in settings.sources} if settings.source == "mixture" else {settings.source}
    return settings.tokenizer == "bytes" and not kinds & {"python_stdlib", "files", "chat"}


def _named_token_sets(settings: DataConfig) -> list[Path]:
    named = [(settings.source, settings.files, "data.files")]
    if settings.source == "mixture":
        named = [(one.source, one.files, f"data.sources[{i}].files") for i, one in enumerate(settings.sources)]
    return [folder for kind, files, key in named if kind == "tokens" for folder in _token_sets(files, key)]


def required_vocab(config: Config) -> int:
    """The vocabulary that the ids of a config's data need, without reading the data: what its tokenizer can give.

    Token sets tell it in their manifest. Refuses where nothing tells it: model.vocab_size must be set then.
    """
    settings = config.data
    tokenizer = tokenizer_of(settings)
    if tokenizer is not None:
        return tokenizer.vocab_size
    sizes = [open_manifest(folder)["tokenizer"]["vocab_size"] for folder in _named_token_sets(settings)]
    if not sizes:
        raise UserError(
            f"model.vocab_size is not set, and data.source = {settings.source} does not tell it; set it, or"
            " data.tokenizer to the tokenizer that the tokens were made with"
        )
    return max(sizes)


def open_source(
    kind: str,
    files: Sequence[str],
    settings: DataConfig,
    cache_dir: Path,
    tokenizer: Tokenizer | None,
    key: str,
) -> TokenStore:
    """The store of one source."""
    if kind in ("python_stdlib", "files"):
        assert tokenizer is not None
        paths = _text_files(kind, files, key)
        return _tokenized(paths, settings, cache_dir, tokenizer)
    if kind == "tokens":
        return join_stores([open_store(folder) for folder in _token_sets(files, key)], key)
    if kind == "megatron":
        return join_stores([open_megatron(prefix, cache_dir) for prefix in _megatron_prefixes(files, key)], key)
    assert kind == "raw", kind
    assert settings.raw_dtype is not None
    paths = sources.expand_files(files, key)
    end = settings.raw_document_end
    return join_stores([open_raw(path, settings.raw_dtype, end, cache_dir) for path in paths], key)


def store_tokenizer(store: TokenStore, tokenizer: Tokenizer | None, settings: DataConfig) -> Tokenizer | None:
    """The tokenizer of a run once `store` is known; refuses a store that was written with another one."""
    if store.tokenizer_sha256 is None:
        return tokenizer
    if tokenizer is None:
        return _own_tokenizer(store, settings)
    if store.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{store.name}: was written with another tokenizer than {tokenizer.name}; set data.tokenizer to the one it"
            " was written with, or write the tokens again"
        )
    return tokenizer


def _own_tokenizer(store: TokenStore, settings: DataConfig) -> Tokenizer:
    """The tokenizer that a token set was written with: bytes, or the copy that lies in it."""
    if store.tokenizer_dir is None or store.tokenizer_facts is None:
        return load_tokenizer("bytes")
    return load_copy(store.tokenizer_dir, store.tokenizer_facts, settings.bos_token, settings.eos_token)


def _text_files(kind: str, files: Sequence[str], key: str) -> list[Path]:
    if kind == "files":
        return sources.expand_files(files, key)
    paths, skipped = sources.stdlib_files()
    if skipped:
        log.info("python_stdlib: %d files left out, they are not UTF-8 text", skipped)
    return paths


def _tokenized(paths: list[Path], settings: DataConfig, cache_dir: Path, tokenizer: Tokenizer) -> TokenStore:
    """The token set of text files, from the cache where nothing changed."""
    recipe = Recipe(
        tokenizer=settings.tokenizer,
        bos_token=settings.bos_token,
        eos_token=settings.eos_token,
        add_bos=settings.add_bos,
        add_eos=settings.add_eos,
        text_key=settings.text_key,
    )
    key = _files_key(paths, recipe, tokenizer)

    def build(folder: Path) -> None:
        counts = build_token_set(folder, Inputs(tuple(paths)), recipe)
        log.info("tokenized %d files: %s", len(paths), counts)
        if counts["empty_documents"]:
            log.warning("%d empty documents were left out", counts["empty_documents"])

    return cached(cache_dir, f"tokens-{key}", build, open_store)


def _files_key(paths: list[Path], recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Hash of the content of the files in order, their formats, and of everything that decides the ids."""
    parts: list[object] = [1, recipe.facts(tokenizer)]
    for path in paths:
        try:
            parts.append([sources.plain_suffix(str(path)), path.suffix, hash_files([path])])
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return content_identity(parts)


def _token_sets(patterns: Sequence[str], key: str) -> list[Path]:
    """Folders of token sets that the patterns name, each once."""
    if not patterns:
        raise UserError(f"{key}: empty; want the folders that scripts/prepare_data.py wrote")
    folders: dict[str, Path] = {}
    problems: list[str] = []
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
        found = [path.parent if path.name == "manifest.json" else path for path in matches]
        found = [path for path in found if (path / "manifest.json").is_file()]
        if not found:
            problems.append(f"{key}: {pattern!r} names no token set (a folder with a manifest.json)")
        for path in found:
            folders.setdefault(os.path.realpath(path), path)
    raise_together(problems)
    return list(folders.values())


def _megatron_prefixes(patterns: Sequence[str], key: str) -> list[Path]:
    """Prefixes of .bin/.idx pairs; a pattern may name either file, or the prefix."""
    if not patterns:
        raise UserError(f"{key}: empty; want prefixes of .bin/.idx pairs, such as 'corpus/part_*_text_document'")
    prefixes: dict[str, Path] = {}
    problems: list[str] = []
    for pattern in patterns:
        wanted = os.path.expanduser(pattern)
        suffixes = ("",) if wanted.endswith((".idx", ".bin")) else (".idx", ".bin")
        matches = sorted(match for suffix in suffixes for match in glob.glob(wanted + suffix, recursive=True))
        found = [Path(match).with_suffix("") for match in matches if match.endswith((".idx", ".bin"))]
        if not found:
            problems.append(f"{key}: {pattern!r} names no .bin/.idx pair")
        for path in found:
            prefixes.setdefault(os.path.realpath(path), path)
    raise_together(problems)
    return list(prefixes.values())
