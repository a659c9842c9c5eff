"""Continue prompts with a trained or imported model.

    python scripts/generate.py --model=runs/quickstart --prompt='def main(' --max-new=100
    python scripts/generate.py --model=HF_FOLDER --prompts=FILE --temperature=0.8 --top-p=0.95 --json

A single prompt streams to the terminal. --prompts has one prompt per line; `-` reads standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    prompts = _prompts(args)
    if args.devices is not None:
        from jaxpar.mesh import simulate_devices

        simulate_devices(args.devices)
    from jaxpar.config import DataConfig
    from jaxpar.data import load_tokenizer
    from jaxpar.generate import Sampling, load_generator
    from jaxpar.text import Streamer, encode_prompts, starts_with_bos
    from jaxpar.weights import open_weights

    weights = open_weights(args.model, args.step)
    spec = args.tokenizer or weights.tokenizer
    if spec is None:
        raise UserError(f"{args.model}: has no tokenizer; name one with --tokenizer")
    told = weights.config.data if weights.config is not None and args.tokenizer is None else DataConfig()
    tokenizer = load_tokenizer(spec, bos_token=told.bos_token, eos_token=told.eos_token)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    add_bos = starts_with_bos(weights) if args.add_bos is None else args.add_bos
    stop = _stop_ids(args.stop, tokenizer)
    if args.chat:
        from jaxpar.chat import chat_prompts, load_template

        told = weights.config.chat.template if weights.config is not None else None
        template = load_template(args.chat_template or told, Path(spec), tokenizer)
        ids = chat_prompts(tokenizer, template, prompts)
    else:
        ids = encode_prompts(tokenizer, prompts, add_bos=add_bos)
    generator = load_generator(_config(args), weights)
    streamer = Streamer(tokenizer) if len(prompts) == 1 and not args.json else None

    def show(tokens: list[int | None]) -> None:
        if streamer is not None and tokens[0] is not None:
            print(streamer.add(tokens[0]), end="", flush=True)

    new = generator(ids, args.max_new, sampling, stop=stop, on_tokens=show)
    if streamer is not None:
        print(streamer.rest())
        return 0
    for prompt, tokens in zip(prompts, new):
        row = {"prompt": prompt, "text": tokenizer.decode(tokens), "tokens": tokens}
        print(json.dumps(row, ensure_ascii=False) if args.json else f"{prompt}{row['text']}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="workdir of a run, or a Hugging Face folder")
    parser.add_argument("--step", type=int, help="checkpoint of the run (default: the newest)")
    parser.add_argument("--tokenizer", help='"bytes", or a tokenizer file or folder (default: that of the model)')
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line; - is standard input")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message of a chat")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: that of the tokenizer)")
    parser.add_argument("--max-new", type=int, default=128, help="new tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together reach p")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="token to end at (default: the end token)")
    parser.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help="start token (default: as trained)")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a row; the others take other rows")
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on the CPU")
    return parser


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts == "-":
        prompts += sys.stdin.read().splitlines()
    elif args.prompts is not None:
        path = Path(args.prompts)
        if not path.is_file():
            raise UserError(f"--prompts={path}: no such file")
        try:
            prompts += path.read_text("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise UserError(f"--prompts={path}: not UTF-8 text ({error})") from error
    if not prompts:
        raise UserError("nothing to continue: give --prompt=TEXT or --prompts=FILE")
    return prompts


def _stop_ids(texts: list[str] | None, tokenizer: Any) -> set[int]:
    if texts is None:
        return set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    stop = set()
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        if len(ids) != 1:
            raise UserError(f"--stop={text!r} is {len(ids)} tokens of {tokenizer.name}; give the text of one token")
        stop.add(int(ids[0]))
    return stop


def _config(args: argparse.Namespace) -> Any:
    from jaxpar.config import Config, ParallelConfig

    return Config(precision=args.precision, parallel=ParallelConfig(data=-1, tensor=args.tensor))


if __name__ == "__main__":
    cli.run_script(main)
