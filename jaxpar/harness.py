"""The model that lm-evaluation-harness asks: scores of continuations and texts, and generated text.

Needs the extra `lm-eval`. Batching and meshes are those of `jaxpar.score` and `jaxpar.generate`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from jaxpar.chat import Template
from jaxpar.config import Config
from jaxpar.data.tokenizers import Tokenizer
from jaxpar.errors import UserError
from jaxpar.generate import Generator, Sampling, built_for_generation
from jaxpar.score import Request, Scorer, check_length, padded_length, rolling
from jaxpar.weights import Weights

KNOWN = {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p", "seed"}


class _AllStopped(Exception):  # noqa: N818 (ends a batch, no error)
    """Every row of a batch has reached a text that ends it."""


class HarnessModel(TemplateLM):
    """A jaxpar model behind the three questions of the harness."""

    backend = "causal"

    def __init__(
        self, scorer: Scorer, generator: Generator, tokenizer: Tokenizer, *, add_bos: bool, template: Template | None
    ) -> None:
        super().__init__()
        self.scorer, self.generator, self.tokenizer_of_model = scorer, generator, tokenizer
        self.add_bos, self.template = add_bos, template

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return _need(self.tokenizer_of_model.eos_id, self.tokenizer_of_model, "end")

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        if self.add_bos:
            return _need(self.tokenizer_of_model.bos_id, self.tokenizer_of_model, "start")
        return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, after a start token where the model was trained with one."""
        del kwargs
        ids = self.tokenizer_of_model.encode_batch([string])[0].tolist()
        add = self.add_bos if add_special_tokens is None else add_special_tokens and self.add_bos
        return [self.prefix_token_id, *ids] if add and ids[:1] != [self.prefix_token_id] else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        scores = self.scorer([Request(context, continuation) for _, context, continuation in requests])
        for (texts, _, _), score in zip(requests, scores):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; every token is predicted once."""
        del disable_tqdm
        windows = [
            rolling(self.tok_encode(request.args[0], False), self.prefix_token_id, self.scorer.max_length)
            for request in requests
        ]
        scores = iter(self.scorer([window for text in windows for window in text]))
        totals = [sum(next(scores).logprob for _ in text) for text in windows]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text after every prompt, up to the first of the request's stop texts."""
        del disable_tqdm
        wanted = [_Wish.read(request.args[1], self.scorer.max_length) for request in requests]
        prompts = [self.tok_encode(request.args[0])[-wish.room :] for request, wish in zip(requests, wanted)]
        texts: dict[int, str] = {}
        for wish in dict.fromkeys(wanted):
            numbers = [i for i, own in enumerate(wanted) if own == wish]
            numbers.sort(key=lambda i: -len(prompts[i]))
            rows = max(self.scorer.batch - 1, 1)
            for start in range(0, len(numbers), rows):
                batch = numbers[start : start + rows]
                texts |= zip(batch, self._generate([prompts[i] for i in batch], wish))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[i])
        return [texts[i] for i in range(len(requests))]

    def _generate(self, prompts: list[list[int]], wish: _Wish) -> list[str]:
        tokenizer, count = self.tokenizer_of_model, len(prompts)
        new: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(count))

        def see(tokens: list[int | None]) -> None:
            """Take one new token per open row, and end the rows that are done."""
            for row in list(open_rows):
                token = tokens[row]
                if token is not None:
                    new[row].append(token)
                if token is None or any(text in tokenizer.decode(new[row]) for text in wish.until):
                    open_rows.discard(row)
            if not open_rows:
                raise _AllStopped

        # More rows make every batch as wide, and as long as a power of two: few shapes are compiled.
        filler = [prompts[0][0]]
        fillers = [filler * padded_length(max(map(len, prompts)), wish.room)]
        fillers += [filler] * (self.scorer.batch - count - 1)
        stop = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        with contextlib.suppress(_AllStopped):
            self.generator([*prompts, *fillers], wish.max_new, wish.sampling, stop=stop, on_tokens=see)
        return [postprocess_generated_text(tokenizer.decode(ids), list(wish.until), None) for ids in new]

    @property
    def tokenizer_name(self) -> str:
        """Name for caches of requests."""
        return self.tokenizer_of_model.sha256[:16]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's name, for the record of a run."""
        return self.template.name if chat_template and self.template is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's template renders it."""
        if self.template is None:
            raise UserError(f"{self.tokenizer_of_model.name}: has no chat template; name one with --chat-template")
        return self.template.render(chat_history, ask=add_generation_prompt)


@dataclasses.dataclass(frozen=True)
class _Wish:
    """How a request wants to be generated."""

    until: tuple[str, ...]
    max_new: int
    sampling: Sampling
    room: int  # longest prompt

    @staticmethod
    def read(raw: dict[str, Any], max_length: int) -> _Wish:
        """One request's settings; raises `UserError` for those that are not supported."""
        settings = dict(normalize_gen_kwargs(dict(raw), 256))
        if unknown := sorted(set(settings) - KNOWN):
            raise UserError(f"generation setting {unknown[0]} = {settings[unknown[0]]!r} of a task is not supported")
        max_new = min(int(settings["max_gen_toks"]), max_length - 1)
        sampling = Sampling(
            temperature=float(settings.get("temperature") or 0.0),
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            seed=int(settings.get("seed", 0)),
        )
        return _Wish(tuple(text for text in settings["until"] if text), max_new, sampling, max_length - max_new)


def load_harness_model(
    config: Config, weights: Weights, tokenizer: Tokenizer, *, add_bos: bool, template: Template | None = None
) -> HarnessModel:
    """The model of `config.model` with weights in their shards; `config.seq_len` positions, `global_batch` rows."""
    check_length(weights.model, config.seq_len)
    built = built_for_generation(dataclasses.replace(config, model=weights.model))
    params = weights.load(built.abstract_state.params)
    scorer = Scorer(built, params, max_length=config.seq_len, batch=config.global_batch)
    return HarnessModel(scorer, Generator(built, params), tokenizer, add_bos=add_bos, template=template)


def find_tasks(tasks: Iterable[str], folders: Sequence[Path] = ()) -> TaskManager:
    """The harness's index of tasks; `folders` hold tasks of your own, as YAML files.

    Raises `UserError` for a task that is nowhere.
    """
    tasks, paths = set(tasks), [str(folder) for folder in folders]
    manager = TaskManager(include_path=paths or None, include_defaults=not paths)
    if paths and not tasks <= set(manager.all_tasks):
        manager = TaskManager(include_path=paths)  # tasks of the harness too, which takes a while to read
    if unknown := sorted(tasks - set(manager.all_tasks)):
        raise UserError(f"--tasks: {', '.join(unknown)} is no task of the harness{_also(paths)}")
    return manager


def run_tasks(
    model: HarnessModel,
    tasks: Iterable[str],
    manager: TaskManager,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, Any]]:
    """Results by task: the harness's numbers and their errors."""
    found = simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot, limit=limit,
        apply_chat_template=chat, log_samples=False,
    )  # fmt: skip
    assert found is not None
    return found["results"]


def _also(paths: Sequence[str]) -> str:
    return f" or of {', '.join(paths)}" if paths else "; name the folder of your own with --task-folder"


def _need(token: int | None, tokenizer: Tokenizer, what: str) -> int:
    if token is None:
        raise UserError(f"{tokenizer.name} names no {what} token, which the harness needs to begin a text with")
    return token
