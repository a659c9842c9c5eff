"""Speed of the data code on this machine, as ratios from one run.

Compares prepare_data with a plain Python loop over the same tokenizer, and measures packing and reading rows. The text
is the Python standard library as JSONL; the tokenizer a byte-pair vocabulary trained on it.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BYTES_TIMES = 10  # more text for the byte tokenizer, which is as much faster: seconds of work for both


def write_corpus(path: Path, size_bytes: int) -> None:
    """JSONL documents of up to 60 lines of source code; all of it again where there is less than asked for."""
    from jaxpar.data.sources import stdlib_files

    with path.open("w", encoding="utf-8") as stream:
        for file in itertools.cycle(stdlib_files()[0]):
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


def packing_rows(tokens: Path, workdir: Path) -> Iterator[dict[str, Any]]:
    """Fill of both packings; the speed of reading goes into the detail."""
    from jaxpar.config import Config, DataConfig
    from jaxpar.data import open_data

    for packing in ("concat", "best_fit"):
        settings = DataConfig(source="tokens", files=(str(tokens),), packing=packing, eval_fraction=0.0)
        rows = open_data(Config(seq_len=1024, data=settings), workdir).train
        count = min(len(rows), 2000)
        started = time.perf_counter()
        filled = sum(float((rows.row(index)["segment_ids"] > 0).sum()) for index in range(count))
        per_s = 1024 * count / (time.perf_counter() - started)
        yield {
            "name": f"share of filled slots, {packing}",
            "found": filled / (1024 * count),
            "limit": 0.97,
            "at_most": False,
            "detail": f"{per_s / 1e6:.1f} million tokens read per second",
        }


def run(size_bytes: int = 20_000_000) -> list[dict[str, Any]]:
    """Print every row and return them; here `found` should be at least `limit`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = str(folder / "tokenizer.json")
        for label, spec, times in (("byte-pair", tokenizer, 1), ("bytes", "bytes", BYTES_TIMES)):
            corpus = folder / f"{label}.jsonl"
            write_corpus(corpus, times * size_bytes)
            if label == "byte-pair":
                train_tokenizer(corpus, Path(tokenizer))
            fast = prepared(corpus, spec, folder / f"tokens-{label}", os.cpu_count() or 1)
            plain = plain_loop(corpus, spec, folder / "plain.bin")
            detail = f"{fast:.2f} s against {plain:.2f} s"
            rows.append(
                {
                    "name": f"prepare_data / plain loop, {label}",
                    "found": plain / fast,
                    "limit": 1.5,
                    "at_most": False,
                    "detail": detail,
                }
            )
        rows += packing_rows(folder / "tokens-byte-pair", folder)
    for row in rows:
        mark = "ok" if row["found"] >= row["limit"] else "BELOW"
        print(f"{row['name']:58} {row['found']:8.3f}  at least {row['limit']:<6.3g} {mark:6} {row['detail']}")
    return rows
