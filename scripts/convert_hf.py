"""Convert between Hugging Face checkpoints and the folders of runs.

    python scripts/convert_hf.py import HF_FOLDER RUN_FOLDER
    python scripts/convert_hf.py export RUN_FOLDER HF_FOLDER [--step=N] [--dtype=bfloat16] [--like=HF_FOLDER]

`import` writes RUN_FOLDER/checkpoints/0 and RUN_FOLDER/config.json, which trains on with

    python scripts/train.py --config=RUN_FOLDER/config.json --config.init_from=RUN_FOLDER --workdir=OTHER

`export` writes safetensors, config.json and the tokenizer; `transformers` loads the folder. The adapter of a run is
merged, or written alone with --adapter.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True)
    into = actions.add_parser("import", help="Hugging Face folder to the folder of a run")
    into.add_argument("source", type=Path, help="folder with config.json and safetensors")
    into.add_argument("target", type=Path, help="folder to write")
    into.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="unknown keys of config.json to pass over")
    into.add_argument("--vocab-multiple", type=int, metavar="N", help="pad the vocabulary to a multiple of N (128)")
    out = actions.add_parser("export", help="checkpoint of a run to a Hugging Face folder")
    out.add_argument("source", type=Path, help="workdir of a run, or one checkpoint in it")
    out.add_argument("target", type=Path, help="folder to write")
    out.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    out.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the imported folder")
    out.add_argument("--like", type=Path, metavar="DIR", help="Hugging Face folder to take tokenizer and ids from")
    out.add_argument("--adapter", action="store_true", help="write the adapter alone, as a PEFT folder")
    out.add_argument("--max-file-gb", type=float, default=5.0, help="size of one file (default: 5)")
    args = parser.parse_args(argv)
    import jax

    jax.config.update("jax_platforms", "cpu")  # a conversion needs no accelerator, and leaves those there are alone
    try:
        return _import(args) if args.action == "import" else _export(args)
    except OSError as error:
        raise UserError(f"{error.filename or args.target}: {error.strerror or error}") from error


def _import(args: argparse.Namespace) -> int:
    from jaxpar.hf.convert import import_folder

    config = import_folder(args.source, args.target, ignore=args.ignore, vocab_multiple=args.vocab_multiple)
    print(f"{args.target}: {config.model.family}, {config.model.num_layers} layers; train on with")
    print(f"  --config={args.target / 'config.json'} --config.init_from={args.target}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from jaxpar.hf.convert import export_adapter_folder, export_folder

    if args.adapter:
        export_adapter_folder(args.source, args.target, step=args.step)
        print(f"{args.target}: written")
        return 0
    if not 0 < args.max_file_gb < math.inf:
        raise UserError(f"--max-file-gb={args.max_file_gb:g}: want more than 0")
    size = int(args.max_file_gb * 1e9)
    missing = export_folder(
        args.source, args.target, step=args.step, dtype=args.dtype, like=args.like, max_file_bytes=size
    )
    print(f"{args.target}: written" + (f"; no tokenizer was written ({missing})" if missing else ""))
    return 0


if __name__ == "__main__":
    cli.run_script(main)
