"""Conversations as training rows: the tokenizer's chat template, and weights that train the answers alone.

What precedes an answer is tokenized by itself, as it is when the model is used; the answer, its end included, follows.
So training sees the very ids that generation will.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import Config
from jaxpar.data import Data, compression, load_tokenizer
from jaxpar.data.hashing import content_identity
from jaxpar.data.rows import Row, empty_row
from jaxpar.data.sources import UTF8_MARK, decode_utf8, expand_files, line_blocks
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import UserError

log = logging.getLogger(__name__)
Message = dict[str, Any]
SHOWN_PROBLEMS = 5


class Template:
    """A Jinja chat template with the names of the special tokens."""

    def __init__(self, source: str, name: str, special: dict[str, str]) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        self.name, self._special, self._error = name, special, TemplateError
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{name}: not a Jinja template ({error})") from error

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """Text of a conversation; `ask` adds what comes before an answer."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=ask, **self._special)
        except (self._error, TypeError) as error:  # TypeError: as from null + "text"
            raise UserError(f"{self.name}: {error}") from error

    def parts(self, messages: Sequence[Message], roles: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """(text, whether it is learned) in order; together they are the rendered conversation.

        Raises `UserError` for a template that renders a beginning differently than the same part of the whole.
        """
        whole, at = self.render(messages), 0
        for i, message in enumerate(messages):
            if message["role"] not in roles:
                continue
            asked = self.render(messages[:i], ask=True)
            through = self.render(messages[: i + 1])
            if not whole.startswith(through) or not through.startswith(asked) or len(asked) < at:
                raise UserError(
                    f"{self.name}: message {i + 1} is rendered differently when others follow it, so the answer "
                    f"cannot be told from the rest; use a template that keeps earlier messages as they are"
                )
            yield whole[at : len(asked)], False
            yield whole[len(asked) : len(through)], True
            at = len(through)
        if at < len(whole):
            yield whole[at:], False


@dataclasses.dataclass(frozen=True)
class ChatRows:
    """Rows of whole conversations, each with its own segment; `rows` lists the conversations of each row."""

    conversations: tuple[tuple[np.ndarray, np.ndarray], ...]  # (ids int32, learned bool) [N]
    rows: tuple[tuple[int, ...], ...]
    seq_len: int
    identity: str
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        """The arrays of one row."""
        row, at = empty_row(self.seq_len, self.pad_id), 0
        for segment, number in enumerate(self.rows[index], 1):
            ids, learned = self.conversations[number]
            here = slice(at, at + len(ids) - 1)
            row["tokens"][here], row["targets"][here] = ids[:-1], ids[1:]
            row["weights"][here] = learned[1:]
            row["positions"][here] = np.arange(len(ids) - 1)
            row["segment_ids"][here] = segment
            at = here.stop
        return row

    def sample_id(self, index: int) -> str:
        """The numbers of the row's conversations."""
        return "chat:" + "+".join(map(str, self.rows[index]))


def open_chat(config: Config) -> Data:
    """The data of `data.source = "chat"`: JSONL files with one conversation per line.

    A conversation longer than a row is cut at its end; one without anything left to learn is left out, and counted.
    """
    settings = config.data
    tokenizer = load_tokenizer(settings.tokenizer, bos_token=settings.bos_token, eos_token=settings.eos_token)
    template = load_template(config.chat.template, Path(settings.tokenizer), tokenizer)
    train = _conversations(config, settings.files, template, tokenizer, "data.files")
    held: list[Any] = []
    if settings.eval_files:
        held = _conversations(config, settings.eval_files, template, tokenizer, "data.eval_files")
    elif settings.eval_fraction:
        every = max(round(1 / settings.eval_fraction), 2)
        held, train = train[every - 1 :: every], [c for i, c in enumerate(train) if i % every != every - 1]
    if not train:
        raise UserError(
            f"data.files: no conversation has a message of chat.train_on = {config.chat.train_on} within seq_len = "
            f"{config.seq_len} tokens"
        )
    rows = _rows(config, train, tokenizer)
    description = (
        f"chat: {len(train)} conversations in {len(rows)} rows, {sum(int(m.sum()) for _, m in train)} learned tokens"
    )
    return Data(
        train=rows,
        evaluation=_rows(config, held, tokenizer) if held else None,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=description,
        bytes_per_token=None,
    )


def load_template(path: str | None, tokenizer_path: Path, tokenizer: Tokenizer) -> Template:
    """The template file, else the one beside the tokenizer (chat_template.jinja, or in tokenizer_config.json)."""
    folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text("utf-8")) if settings_path.is_file() else {}
    special = {key: _content(settings[key]) for key in ("bos_token", "eos_token", "pad_token") if settings.get(key)}
    if path is not None:
        if not Path(path).is_file():
            raise UserError(f"chat.template = {path}: no such file")
        return Template(decode_utf8(Path(path).read_bytes(), path), path, special)
    if (folder / "chat_template.jinja").is_file():
        return Template(
            (folder / "chat_template.jinja").read_text("utf-8"), str(folder / "chat_template.jinja"), special
        )
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    if not isinstance(source, str):
        raise UserError(f"{tokenizer.name}: has no chat template; set chat.template to the file of one")
    return Template(source, str(settings_path), special)


def chat_prompts(tokenizer: Tokenizer, template: Template, texts: Sequence[str]) -> list[list[int]]:
    """Ids of a user's messages as the beginning of conversations, up to where the answer starts."""
    asked = [template.render([{"role": "user", "content": text}], ask=True) for text in texts]
    return [ids.tolist() for ids in tokenizer.encode_batch(asked)]


def encode(
    template: Template, tokenizer: Tokenizer, messages: Sequence[Message], roles: Iterable[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and learned bool [N] of one conversation."""
    _refuse_rendered_null(template, messages)
    parts = [(text, learned) for text, learned in template.parts(messages, tuple(roles)) if text]
    ids = tokenizer.encode_batch([text for text, _ in parts])
    learned = [np.full(len(part), flag) for part, (_, flag) in zip(ids, parts)]
    return np.concatenate(ids).astype(np.int32), np.concatenate(learned)


def _refuse_rendered_null(template: Template, messages: Sequence[Message]) -> None:
    """A message may have no content, as one that calls tools; a template that writes "None" there must not train."""
    empty = [i for i, message in enumerate(messages, 1) if message["content"] is None]
    if empty and template.render(messages) != template.render([{**m, "content": m["content"] or ""} for m in messages]):
        raise UserError(f"message {empty[0]} has the content null, which {template.name} writes as text; want a text")


def _conversations(
    config: Config, patterns: Sequence[str], template: Template, tokenizer: Tokenizer, key: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    found, cut, empty = [], 0, 0
    for place, messages in _read(expand_files(patterns, key), config.chat.messages_key):
        try:
            ids, learned = encode(template, tokenizer, messages, config.chat.train_on)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        if len(ids) > config.seq_len + 1:
            ids, learned, cut = ids[: config.seq_len + 1], learned[: config.seq_len + 1], cut + 1
        if learned[1:].any():
            found.append((ids, learned))
        else:
            empty += 1
    if cut or empty:
        log.warning(
            "%s: %d conversations are cut at %d tokens, %d have nothing to learn", key, cut, config.seq_len, empty
        )
    return found


def _read(paths: Iterable[Path], key: str) -> Iterator[tuple[str, list[Message]]]:
    """(place, messages) of every line; all of the first broken lines are told at once."""
    problems: list[str] = []
    for path in paths:
        for place, line in _lines(path):
            problem, messages = _parse(decode_utf8(line, place), key)
            if problem:
                problems.append(f"{place}: {problem}")
                if len(problems) >= SHOWN_PROBLEMS:
                    raise UserError(*problems)
            else:
                yield place, messages
    if problems:
        raise UserError(*problems)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, bytes) of every line that is not blank, of a plain or compressed file, without a byte-order mark."""
    with compression.open_plain(path) as (stream, _):
        for block in line_blocks(stream, str(path), 0, 1):
            for number, line in enumerate(block.data.split(b"\n"), block.first_line):
                line = line.removeprefix(UTF8_MARK) if number == 1 else line
                if line.strip():
                    yield f"{path}, line {number}", line


def _parse(line: str, key: str) -> tuple[str | None, list[Message]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})", []
    messages = row.get(key) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return f"has no list {key!r} of messages", []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f'a message is {message!r}, wanted {{"role": ..., "content": ...}}', []
    if re.search("[\ud800-\udfff]", json.dumps(messages, ensure_ascii=False)):
        return "holds a lone surrogate (half of a character), which has no UTF-8 form", []
    return None, messages


def _rows(config: Config, conversations: list[tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer) -> ChatRows:
    """One conversation a row with packing "none"; else as many as fit, longest first, deterministic."""
    order = sorted(range(len(conversations)), key=lambda i: (-len(conversations[i][0]), i))
    rows: list[list[int]] = []
    room: list[int] = []
    for number in order:
        needed = len(conversations[number][0]) - 1
        place = (
            next((i for i, left in enumerate(room) if left >= needed), None) if config.data.packing != "none" else None
        )
        if place is None:
            rows.append([])
            room.append(config.seq_len)
            place = len(rows) - 1
        rows[place].append(number)
        room[place] -= needed
    parts = [[ids.tobytes().hex(), learned.tobytes().hex()] for ids, learned in conversations]
    identity = content_identity([config.seq_len, config.data.packing, parts])
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else 0
    return ChatRows(tuple(conversations), tuple(map(tuple, rows)), config.seq_len, identity, pad)


def _content(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else value


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
