"""Perplexity and bits per byte of a trained or imported model on files.

    python scripts/evaluate.py --model=runs/quickstart 'texts/*.txt'
    python scripts/evaluate.py --model=HF_FOLDER held_out.jsonl --seq-len=2048 --json

Every document is read once, in rows of --seq-len that do not overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from jaxpar import cli
from jaxpar.errors import UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="text, JSONL or Parquet files or globs, or token sets")
    parser.add_argument("--model", required=True, metavar="DIR", help="workdir of a run, or a Hugging Face folder")
    parser.add_argument("--step", type=int, help="checkpoint of the run (default: the newest)")
    parser.add_argument("--tokenizer", help='"bytes", or a tokenizer file or folder (default: that of the model)')
    parser.add_argument("--tokens", action="store_true", help="FILEs are token sets of scripts/prepare_data.py")
    parser.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--seq-len", type=int, help="length of a row (default: that of the run, else 1024)")
    parser.add_argument("--batch", type=int, default=8, help="rows at a time (default: 8)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the prepared tokens here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a row; the others take other rows")
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on the CPU")
    args = parser.parse_args(argv)
    if args.devices is not None:
        from jaxpar.mesh import simulate_devices

        simulate_devices(args.devices)
    from jaxpar.config import Config, DataConfig, ParallelConfig
    from jaxpar.evaluate import evaluate_files
    from jaxpar.weights import open_weights

    weights = open_weights(args.model, args.step)
    run = weights.config or Config(model=weights.model)
    spec = args.tokenizer or weights.tokenizer
    if spec is None and not args.tokens:
        raise UserError(f"{args.model}: has no tokenizer; name one with --tokenizer")
    data = DataConfig(
        source="tokens" if args.tokens else "files",
        files=tuple(args.files),
        tokenizer=spec or "bytes",
        text_key=args.text_key,
        add_bos=run.data.add_bos,
        add_eos=run.data.add_eos,
    )
    config = dataclasses.replace(
        run,
        data=data,
        seq_len=args.seq_len or run.seq_len,
        global_batch=args.batch,
        accumulation=1,
        precision=args.precision,
        parallel=ParallelConfig(data=-1, tensor=args.tensor),
    )
    with tempfile.TemporaryDirectory() as scratch:
        values = evaluate_files(config, weights, args.cache or Path(scratch))
    print(json.dumps(values) if args.json else "  ".join(f"{key} {value:.6g}" for key, value in values.items()))
    return 0


if __name__ == "__main__":
    cli.run_script(main)
