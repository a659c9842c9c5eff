"""Speed of the data code on this machine, as ratios from one run.

Compares prepare_data with a plain Python loop over the same tokenizer, and measures packing and reading rows. The text
is the Python standard library as JSONL; the tokenizer a byte-pair vocabulary trained on it, or --tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path


def write_corpus(path: Path, size_bytes: int) -> None:
    """JSONL documents of up to 60 lines of source code."""
    from jaxpar.data.sources import stdlib_files

    with path.open("w", encoding="utf-8") as stream:
        for file in stdlib_files()[0]:
            lines = file.read_text("utf-8").split("\n")
            for first in range(0, len(lines), 60):
                stream.write(json.dumps({"text": "\n".join(lines[first : first + 60])}) + "\n")
            if stream.tell() > size_bytes:
                return


def train_tokenizer(corpus: Path, path: Path) -> None:
    """A byte-level BPE of 8192 entries from the first rows."""
    import tokenizers

    rows = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")][:2000]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(rows, trainer)
    tokenizer.save(str(path))


def plain_loop(corpus: Path, tokenizer: str, output: Path) -> float:
    """Seconds of the loop that one would write first."""
    import numpy as np
    import tokenizers

    encode = tokenizers.Tokenizer.from_file(tokenizer).encode if tokenizer != "bytes" else None
    started = time.perf_counter()
    with corpus.open(encoding="utf-8") as rows, output.open("wb") as stream:
        for row in rows:
            text = json.loads(row)["text"]
            ids = encode(text, add_special_tokens=False).ids if encode else list(text.encode())
            stream.write(np.array(ids, np.uint16).tobytes())
    return time.perf_counter() - started


def prepared(corpus: Path, tokenizer: str, output: Path, processes: int) -> float:
    """Seconds of prepare_data, start of the workers included."""
    from jaxpar.data.encode import Recipe
    from jaxpar.data.prepare import PrepareOptions, prepare

    started = time.perf_counter()
    prepare(PrepareOptions((str(corpus),), output, Recipe(tokenizer, add_eos=False), processes))
    return time.perf_counter() - started


def measure_rows(tokens: Path, workdir: Path) -> None:
    """Fill and speed of both packings."""
    from jaxpar.config import Config, DataConfig
    from jaxpar.data import open_data

    for packing in ("concat", "best_fit"):
        settings = DataConfig(source="tokens", files=(str(tokens),), packing=packing, eval_fraction=0.0)
        started = time.perf_counter()
        rows = open_data(Config(seq_len=1024, data=settings), workdir).train
        opened = time.perf_counter() - started
        count = min(len(rows), 2000)
        started = time.perf_counter()
        weight = sum(float(rows.row(index)["weights"].sum()) for index in range(count))
        seconds = time.perf_counter() - started
        print(
            f"{packing}: planned in {opened:.2f} s, {weight / (1024 * count):.4f} of the slots trained,"
            f" {1024 * count / seconds / 1e6:.1f} million tokens read per second"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help='"bytes" or a tokenizer.json (default: trained here)')
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the text (default: 10)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        write_corpus(corpus, int(arguments.megabytes * 1e6))
        tokenizer = arguments.tokenizer or str(folder / "tokenizer.json")
        if arguments.tokenizer is None:
            train_tokenizer(corpus, folder / "tokenizer.json")
        # Workers first: their fork wants a process in which no library has started threads.
        fast = prepared(corpus, tokenizer, folder / "tokens", arguments.processes)
        plain = plain_loop(corpus, tokenizer, folder / "plain.bin")
        print(f"plain loop {plain:.2f} s, prepare_data {fast:.2f} s with {arguments.processes} processes")
        print(f"ratio {plain / fast:.2f}")
        measure_rows(folder / "tokens", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
