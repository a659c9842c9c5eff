"""The manifest of a token set: what it must hold, and what can be checked without reading another file."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.data.hashing import content_identity
from jaxpar.data.json_files import read_json
from jaxpar.errors import UserError, raise_together

FORMAT = "jaxpar-tokens"
FORMAT_VERSION = 1
DTYPES = ("<u2", "<u4")
FIELDS = {
    "dtype": str,
    "documents": int,
    "tokens": int,
    "max_id": int,
    "shards": list,
    "identity": str,
    "tokenizer": dict,
    "text_bytes": int,
    "empty_documents": int,
}
TOKENIZER_FIELDS = {"kind": str, "sha256": str, "vocab_size": int}
SHARD_FIELDS = {
    "tokens_file": str,
    "documents_file": str,
    "tokens": int,
    "documents": int,
    "tokens_crc32": int,
    "documents_crc32": int,
}


def open_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a token set; refuses a folder without one, one of another format, and one that was edited."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder}: no token set (no manifest.json); scripts/prepare_data.py writes one")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: not the manifest of a token set")
    if manifest.get("version") != FORMAT_VERSION:
        raise UserError(f"{path}: version {manifest.get('version')}; this jaxpar reads {FORMAT_VERSION}")
    problems = _wrong_fields(manifest) or _contradictions(manifest)
    raise_together(f"{path}: {problem}; restore the file or write the token set again" for problem in problems)
    return manifest


def shards_identity(dtype: str, shards: list[dict[str, Any]]) -> str:
    """What stands for the content of a token set: the sizes and checksums of its files."""
    return content_identity([FORMAT_VERSION, dtype, shards])


def _wrong_fields(manifest: Mapping[str, Any]) -> list[str]:
    problems = _wrong_types(manifest, FIELDS, "")
    if problems:
        return problems
    problems = _wrong_types(manifest["tokenizer"], TOKENIZER_FIELDS, "tokenizer.")
    for number, shard in enumerate(manifest["shards"]):
        if not isinstance(shard, dict):
            problems.append(f'"shards[{number}]" is {type(shard).__name__}, no object')
        else:
            problems += _wrong_types(shard, SHARD_FIELDS, f"shards[{number}].")
    return problems


def _wrong_types(found: Mapping[str, Any], fields: Mapping[str, type], where: str) -> list[str]:
    missing = [f'no "{where}{name}"' for name in fields if name not in found]
    return missing or [
        f'"{where}{name}" is {found[name]!r:.40}, no {kind.__name__}'
        for name, kind in fields.items()
        if not isinstance(found[name], kind)
    ]


def _contradictions(manifest: Mapping[str, Any]) -> list[str]:
    """Where the parts of a manifest do not fit together."""
    shards = manifest["shards"]
    if manifest["dtype"] not in DTYPES:
        return [f'"dtype" is {manifest["dtype"]!r}; want one of {", ".join(DTYPES)}']
    files = collections.Counter(shard[key] for shard in shards for key in ("tokens_file", "documents_file"))
    problems = [f"{name} is listed {count} times" for name, count in files.items() if count > 1]
    problems += [f"{name!r} is no name of a file in its folder" for name in files if Path(name).name != name]
    for key in ("documents", "tokens"):
        total = sum(shard[key] for shard in shards)
        if manifest[key] != total:
            problems.append(f'"{key}" is {manifest[key]}, but its shards hold {total}')
    if manifest["max_id"] >= manifest["tokenizer"]["vocab_size"]:
        problems.append(
            f'"max_id" is {manifest["max_id"]}, but the tokenizer has {manifest["tokenizer"]["vocab_size"]} ids'
        )
    if not problems and shards_identity(manifest["dtype"], shards) != manifest["identity"]:
        problems.append('"identity" is not that of its shards')
    return problems
