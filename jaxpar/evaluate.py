"""Perplexity and bits per byte of a model on files, on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.build import build
from jaxpar.config import Config
from jaxpar.data import Loader, open_data
from jaxpar.loop import evaluator
from jaxpar.weights import Weights, load_arranged


def evaluate_files(config: Config, weights: Weights, workdir: Path) -> dict[str, float]:
    """Token-weighted means over all rows of `config.data`: loss, perplexity, bits per byte where texts are known.

    Rows do not overlap: each token is predicted from those before it in its row. `workdir` keeps the prepared tokens.
    """
    data_settings = dataclasses.replace(config.data, eval_fraction=0.0, shuffle=False, repeat=False)
    config = dataclasses.replace(config, model=weights.model, data=data_settings)
    data = open_data(config, workdir)
    built = build(config)
    params = load_arranged(built, weights)

    def batches() -> Iterator[Any]:
        """Every row once; the last batch is filled up with empty rows."""
        loader = Loader(
            data.train, config.global_batch, seed=0, sharding=built.batch_sharding, shuffle=False, repeat=False
        )
        try:
            while True:
                try:
                    yield loader.next_batch()
                except StopIteration:
                    return
        finally:
            loader.close()

    @dataclasses.dataclass
    class State:
        params: Any

    return evaluator(built.evaluate, batches, data.bytes_per_token)(State(params))  # type: ignore[arg-type]
