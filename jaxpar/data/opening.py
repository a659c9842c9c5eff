"""Config to data: finds the files, tokenizes or maps them, plans the rows, checks them against the model.

Everything that is built on the way is cached under a key of its content, so nothing stale is ever reused.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.config import Config, DataConfig
from jaxpar.data import mixture, readers
from jaxpar.data.cache import cached
from jaxpar.data.hashing import content_identity
from jaxpar.data.packing import Packing, check_packing, open_plan, packing_key, write_plan
from jaxpar.data.rows import JoinedRows, PieceRows, Rows, StreamRows
from jaxpar.data.store import TokenStore
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import UserError, raise_together

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on.

    `vocab_size` is what the ids need. `bytes_per_token` is the text bytes per trained token of the evaluation rows
    (of the training rows where there are none), for bits per byte; None where the texts are not known.
    """

    train: Rows
    evaluation: Rows | None
    vocab_size: int
    tokenizer: Tokenizer | None
    description: str
    bytes_per_token: float | None


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows of one source and one part, with the account of their plan."""

    rows: Rows
    description: str
    text_bytes: int | None
    trained_targets: int


def open_data(config: Config, workdir: Path) -> Data:
    """Open the data of a config, building what is missing in the cache of `workdir` (or data.cache_dir)."""
    settings = config.data
    _check_settings(settings)
    cache_dir = Path(settings.cache_dir).expanduser() if settings.cache_dir else workdir / "cache"
    tokenizer = readers.tokenizer_of(settings)
    names, stores, tokenizer = _open_sources(config, cache_dir, tokenizer)
    vocab_size = _check_ids([store for store in stores if store is not None], config, tokenizer)
    pad_id = tokenizer.pad_id if tokenizer is not None and tokenizer.pad_id is not None else 0
    held_out = 0.0 if settings.eval_files else settings.eval_fraction

    def plan(store: TokenStore, part: str, name: str) -> _Part | None:
        """The part of one store that belongs to training or evaluation."""
        packing = Packing(
            seq_len=config.seq_len,
            method=settings.packing,
            long_documents=settings.long_documents,
            mask_document_starts=settings.mask_document_starts,
            part=part,  # type: ignore[arg-type]
            eval_fraction=held_out if part != "all" else 0.0,
        )
        return _plan(store, packing, name, cache_dir, pad_id)

    opened = [(name, store) for name, store in zip(names, stores) if store is not None]
    train = [
        None if store is None else plan(store, "train" if held_out else "all", name)
        for name, store in zip(names, stores)
    ]
    if settings.eval_files:
        evaluation = [plan(_open_evaluation(config, cache_dir, tokenizer, vocab_size), "all", "evaluation")]
    elif held_out:
        evaluation = [plan(store, "evaluation", f"{name}/held-out") for name, store in opened]
    else:
        evaluation = []
    return _assemble(config, names, train, evaluation, vocab_size, tokenizer)


def _why_no_evaluation(settings: DataConfig) -> str:
    if settings.eval_files:
        return "data.eval_files hold no row: there is no evaluation"
    if settings.eval_fraction == 0:
        return "eval_interval is set, but data.eval_fraction = 0 and data.eval_files is empty: there is no evaluation"
    return "no document fell into the held-out part: there is no evaluation; raise data.eval_fraction"


def _assemble(
    config: Config,
    names: Sequence[str],
    train: Sequence[_Part | None],
    evaluation: Sequence[_Part | None],
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> Data:
    """Put the parts of all sources together."""
    settings = config.data
    if settings.source == "mixture":
        rows = mixture.mix(settings, [None if part is None else part.rows for part in train], config.seq_len)
    else:
        if train[0] is None:
            raise UserError(
                f"data: no training row of {config.seq_len} tokens can be made of {names[0]}; it needs at least two"
                " tokens outside the held-out part (data.eval_fraction) and documents that are not dropped"
            )
        rows = train[0].rows
    kept = [part for part in evaluation if part is not None]
    if config.eval_interval is not None and not kept:
        log.warning("%s", _why_no_evaluation(settings))
    held = [part.rows for part in kept]
    joined = held[0] if len(held) == 1 else None
    if len(held) > 1:
        joined = JoinedRows(tuple(held), config.seq_len, content_identity([one.identity for one in held]))
    trained = [part for part in train if part is not None]
    described = [part.description for part in [*trained, *kept]]
    return Data(
        train=rows,
        evaluation=joined,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        description="; ".join(described),
        bytes_per_token=_bytes_per_token(kept or trained),
    )


def _bytes_per_token(parts: Sequence[_Part]) -> float | None:
    text_bytes = [part.text_bytes for part in parts]
    targets = sum(part.trained_targets for part in parts)
    if None in text_bytes or not targets:
        return None
    return sum(size for size in text_bytes if size is not None) / targets


def _plan(store: TokenStore, packing: Packing, name: str, cache_dir: Path, pad_id: int) -> _Part | None:
    """Rows of one part of a store; None where it holds no row."""
    key = content_identity([packing_key(store, packing)])
    plan = cached(cache_dir, f"rows-{key}", lambda folder: write_plan(store, packing, folder), open_plan)
    stats = plan.stats
    if stats.dropped_documents or stats.truncated_documents:
        log.warning("%s: %s", name, stats.describe())
    if not stats.rows:
        return None
    if packing.method == "concat":
        rows: Rows = StreamRows(store, plan, packing.seq_len, packing.mask_document_starts, name, key, pad_id)
    else:
        rows = PieceRows(store, plan, packing.seq_len, name, key, pad_id)
    exact = store.knows_bytes and not stats.dropped_tokens
    return _Part(rows, f"{name}: {stats.describe()}", stats.text_bytes if exact else None, stats.trained_targets)


def _open_sources(
    config: Config, cache_dir: Path, tokenizer: Tokenizer | None
) -> tuple[list[str], list[TokenStore | None], Tokenizer | None]:
    """Names and stores of the sources (None for one that is never drawn), and the tokenizer, which may come along."""
    settings = config.data
    if settings.source != "mixture":
        store = readers.open_source(settings.source, settings.files, settings, cache_dir, tokenizer, "data.files")
        return [settings.source], [store], readers.store_tokenizer(store, tokenizer, settings)
    names = [source.name for source in settings.sources]
    stores: list[TokenStore | None] = []
    drawn = mixture.drawn(settings)
    for number, source in enumerate(settings.sources):
        if not drawn[number]:
            log.info("mixture source %s has weight 0 throughout and is not opened", source.name)
            stores.append(None)
            continue
        key = f"data.sources[{number}].files"
        store = readers.open_source(source.source, source.files, settings, cache_dir, tokenizer, key)
        tokenizer = readers.store_tokenizer(store, tokenizer, settings)
        stores.append(store)
    return names, stores, tokenizer


def _open_evaluation(config: Config, cache_dir: Path, tokenizer: Tokenizer | None, vocab_size: int) -> TokenStore:
    """The store of data.eval_files, in the format of the source."""
    settings = config.data
    kinds = {source.source for source in settings.sources} if settings.source == "mixture" else {settings.source}
    if len(kinds) > 1:
        raise UserError(f"data.eval_files: the sources of the mixture have different formats {sorted(kinds)}; want one")
    kind = kinds.pop()
    kind = "files" if kind == "python_stdlib" else kind
    store = readers.open_source(kind, settings.eval_files, settings, cache_dir, tokenizer, "data.eval_files")
    readers.store_tokenizer(store, tokenizer, settings)
    if store.max_id >= vocab_size:
        raise UserError(f"{store.name}: holds the id {store.max_id}, but the vocabulary has {vocab_size} ids")
    return store


def _check_settings(settings: DataConfig) -> None:
    """Refuse what contradicts itself, all problems at once."""
    problems: list[str] = []
    if not 0 <= settings.eval_fraction < 1:
        problems.append(f"data.eval_fraction: {settings.eval_fraction}; want 0 <= fraction < 1")
    if settings.source == "python_stdlib" and settings.files:
        problems.append('data.files: set, but data.source is "python_stdlib"; use data.source=files')
    if settings.source == "mixture" and settings.files:
        problems.append('data.files: set, but data.source is "mixture"; name the files in data.sources')
    if settings.source != "mixture" and settings.sources:
        problems.append(f'data.sources: set, but data.source is "{settings.source}"; use data.source=mixture')
    if settings.source != "mixture" and settings.phases:
        problems.append(f'data.phases: set, but data.source is "{settings.source}"; use data.source=mixture')
    if settings.source == "raw" and settings.raw_dtype is None:
        problems.append('data.raw_dtype: unset; a headerless file needs "uint16" or "uint32"')
    end, width = settings.raw_document_end, settings.raw_dtype
    if end is not None and width is not None and not 0 <= end <= np.iinfo(width).max:
        problems.append(f"data.raw_document_end: {end}, which no {width} id can be; want 0 to {np.iinfo(width).max}")
    if settings.source == "mixture":
        problems += mixture.problems(settings)
    raise_together(problems)
    check_packing(Packing(1, method=settings.packing, mask_document_starts=settings.mask_document_starts))


def _check_ids(stores: Sequence[TokenStore], config: Config, tokenizer: Tokenizer | None) -> int:
    """The vocabulary that the ids need; refuses ids outside the model's (a gather would clip them silently)."""
    wanted = config.model.vocab_size
    sizes = [store.vocab_size for store in stores if store.vocab_size is not None]
    if tokenizer is not None:
        sizes.append(tokenizer.vocab_size)
    largest = max(store.max_id for store in stores) + 1
    vocab_size = max(sizes, default=largest if wanted is None else wanted)
    problems: list[str] = []
    for store in stores:
        limit = vocab_size if wanted is None else wanted
        if store.max_id >= limit:
            problems.append(f"{store.name}: holds the id {store.max_id}, but the vocabulary has {limit} ids")
        if wanted is not None and wanted > 1 << 16 and store.width == 2:
            problems.append(
                f"{store.name}: stores 16-bit ids, but model.vocab_size is {wanted}: larger ids would have been"
                " wrapped; write the tokens again with this vocabulary"
            )
    raise_together(problems)
    return max(vocab_size, largest)
