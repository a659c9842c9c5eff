"""Turn texts into token files that a run reads with data.source=tokens.

Reads text, JSONL and Parquet files, each also as .gz or .zst, or standard input (INPUT "-"; an opening brace at its
start means JSONL). Writes a folder with memory-mapped ids, the bounds of the documents, and a manifest with counts
and checksums. Started again after a kill it goes on where it was; started on a finished output it does nothing.

    python scripts/prepare_data.py 'corpus/*.jsonl.gz' --tokenizer=tokenizer.json --output=tokens/corpus
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", metavar="INPUT", nargs="*", help="files or globs, or - for standard input")
    parser.add_argument("--output", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", default="bytes", help='"bytes", or a tokenizer file or folder (default: bytes)')
    parser.add_argument("--text-key", default="text", help="key or column of the text (default: text)")
    parser.add_argument("--bos-token", help="text of the start token, where the tokenizer does not tell")
    parser.add_argument("--eos-token", help="text of the end token, where the tokenizer does not tell")
    parser.add_argument("--add-bos", action=argparse.BooleanOptionalAction, default=False, help="before each document")
    parser.add_argument("--add-eos", action=argparse.BooleanOptionalAction, default=True, help="after each document")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="worker processes (default: cores)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 30, help="tokens of one file (default: 2^30)")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="check the checksums of a token set instead")
    arguments = parser.parse_args()
    if arguments.verify is None and (not arguments.inputs or arguments.output is None):
        parser.error("want INPUT and --output, or --verify=DIR")
    if arguments.processes < 1 or arguments.shard_tokens < 1:
        parser.error("--processes and --shard-tokens must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    from jaxpar.data.encode import Recipe
    from jaxpar.data.prepare import PrepareOptions, in_flags, prepare, verify
    from jaxpar.errors import UserError

    try:
        if arguments.verify is not None:
            verify(arguments.verify)
            return 0
        recipe = Recipe(
            tokenizer=arguments.tokenizer,
            bos_token=arguments.bos_token,
            eos_token=arguments.eos_token,
            add_bos=arguments.add_bos,
            add_eos=arguments.add_eos,
            text_key=arguments.text_key,
        )
        options = PrepareOptions(
            inputs=arguments.inputs,
            output=arguments.output,
            recipe=recipe,
            processes=arguments.processes,
            shard_tokens=arguments.shard_tokens,
        )
        prepare(options)
    except UserError as error:
        print(f"prepare_data.py: error: {in_flags(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted; start again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
