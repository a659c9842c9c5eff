"""Perplexity and bits per byte of a trained or imported model on files, or the tasks of lm-evaluation-harness.

    python scripts/evaluate.py --model=runs/quickstart 'texts/*.txt'
    python scripts/evaluate.py --model=HF_FOLDER held_out.jsonl --seq-len=2048 --json
    python scripts/evaluate.py --model=HF_FOLDER --tasks=TASK,... [--task-folder=DIR] --seq-len=2048

Every document is read once, in rows of --seq-len that do not overlap. Tasks need the extra `lm-eval`; those of your own
are YAML files in --task-folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if bool(args.files) == bool(args.tasks):
        raise UserError("give either files or --tasks to evaluate on")
    if args.devices is not None:
        from jaxpar.mesh import simulate_devices

        simulate_devices(args.devices)
    from jaxpar.weights import open_weights

    weights = open_weights(args.model, args.step)
    spec = args.tokenizer or weights.tokenizer
    if spec is None and not args.tokens:
        raise UserError(f"{args.model}: has no tokenizer; name one with --tokenizer")
    config = _config(args, weights)
    if args.tasks:
        results = _on_tasks(args, config, weights, str(spec))
        print(json.dumps(results, default=str) if args.json else _table(results))
        return 0
    from jaxpar.data.prepare import in_flags
    from jaxpar.evaluate import evaluate_files

    data = dataclasses.replace(
        config.data,
        source="tokens" if args.tokens else "files",
        files=tuple(args.files),
        tokenizer=spec or "bytes",
    )
    with tempfile.TemporaryDirectory() as scratch:
        try:
            values = evaluate_files(dataclasses.replace(config, data=data), weights, args.cache or Path(scratch))
        except UserError as error:  # the data is named by flags here
            raise UserError(*map(in_flags, error.problems)) from error
    print(json.dumps(values) if args.json else "  ".join(f"{key} {value:.6g}" for key, value in values.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="text, JSONL or Parquet files or globs, or token sets")
    parser.add_argument("--model", required=True, metavar="DIR", help="workdir of a run, or a Hugging Face folder")
    parser.add_argument("--step", type=int, help="checkpoint of the run (default: the newest)")
    parser.add_argument("--tokenizer", help='"bytes", or a tokenizer file or folder (default: that of the model)')
    parser.add_argument("--eos-token", help="text of the end token, where the tokenizer does not tell")
    parser.add_argument(
        "--add-eos", action=argparse.BooleanOptionalAction, help="after a document (default: as trained)"
    )
    parser.add_argument("--tokens", action="store_true", help="FILEs are token sets of scripts/prepare_data.py")
    parser.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--seq-len", type=int, help="length of a row (default: that of the run, else 1024)")
    parser.add_argument("--batch", type=int, default=8, help="rows at a time (default: 8)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the prepared tokens here")
    tasks = parser.add_argument_group("lm-evaluation-harness")
    tasks.add_argument("--tasks", type=lambda text: text.split(","), metavar="NAME,...", help="instead of files")
    tasks.add_argument("--task-folder", type=Path, action="append", default=[], metavar="DIR", help="tasks of your own")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of a task")
    tasks.add_argument("--chat", action="store_true", help="render questions with the tokenizer's chat template")
    tasks.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: that of the tokenizer)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a row; the others take other rows")
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on the CPU")
    return parser


def _config(args: argparse.Namespace, weights: Any) -> Any:
    """The run's config, or a plain one, on the mesh that is asked for."""
    from jaxpar.config import Config, DataConfig, ParallelConfig

    run = weights.config or Config(model=weights.model)
    told = run.data if args.tokenizer is None else DataConfig()
    data = DataConfig(
        text_key=args.text_key,
        add_bos=run.data.add_bos,
        add_eos=run.data.add_eos if args.add_eos is None else args.add_eos,
        bos_token=told.bos_token,
        eos_token=args.eos_token or told.eos_token,
    )
    if args.seq_len is not None and args.seq_len < 1:
        raise UserError(f"--seq-len={args.seq_len}: want at least 1")
    return dataclasses.replace(
        run,
        data=data,
        seq_len=args.seq_len or run.seq_len,
        global_batch=_batch(args),
        accumulation=1,
        precision=args.precision,
        parallel=ParallelConfig(data=-1, tensor=args.tensor),
    )


def _batch(args: argparse.Namespace) -> int:
    """`--batch`, or the next number of rows that the devices can share; rows that are too many are padding."""
    import jax

    from jaxpar.config import ParallelConfig
    from jaxpar.validate import resolved_degrees

    if args.batch < 1:
        raise UserError(f"--batch={args.batch}: want at least 1")
    if args.tensor < 1:
        raise UserError(f"--tensor={args.tensor}: want at least 1")
    groups = resolved_degrees(ParallelConfig(data=-1, tensor=args.tensor), len(jax.devices()))["data"]
    batch = -(-args.batch // groups) * groups
    if batch != args.batch:
        shared = f"no multiple of the {groups} parts that the devices split it into"
        print(f"--batch={args.batch} is {shared}; taking {batch} rows at a time", file=sys.stderr)
    return batch


def _on_tasks(args: argparse.Namespace, config: Any, weights: Any, spec: str) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness: pip install 'jaxpar[lm-eval]'")
    from jaxpar.chat import load_template
    from jaxpar.data import load_tokenizer
    from jaxpar.harness import find_tasks, load_harness_model, run_tasks
    from jaxpar.text import starts_with_bos

    manager = find_tasks(args.tasks, args.task_folder)
    told = config.data
    tokenizer, template = load_tokenizer(spec, bos_token=told.bos_token, eos_token=told.eos_token), None
    if args.chat:
        told = weights.config.chat.template if weights.config is not None else None
        template = load_template(args.chat_template or told, Path(spec), tokenizer)
    model = load_harness_model(config, weights, tokenizer, add_bos=starts_with_bos(weights), template=template)
    return run_tasks(model, args.tasks, manager, num_fewshot=args.num_fewshot, limit=args.limit, chat=args.chat)


def _table(results: dict[str, dict[str, Any]]) -> str:
    """One line per number: task, metric and filter, value, standard error."""
    lines = []
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                spread = f" +- {error:.4g}" if isinstance(error, float) else ""
                lines.append(f"{task:<24} {metric} ({kind}) {value:.6g}{spread}")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run_script(main)
