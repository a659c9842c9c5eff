"""Makes a config ready for a dry run: the vocabulary filled in, and the checks of a real run."""

from __future__ import annotations

import dataclasses

from jaxpar import validate
from jaxpar.config import Config
from jaxpar.errors import UserError


def prepare(config: Config, num_gpus: int, *, automatic: bool = False) -> Config:
    """The config as the trainer would build it on `num_gpus`.

    `automatic`: the layout is still to be chosen, so only what does not depend on it is checked.

    Raises:
        UserError: what a real run would refuse too, with the same words.
    """
    if num_gpus < 1:
        raise UserError(f"--gpus={num_gpus}: wanted at least 1")
    if config.model.vocab_size is None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=_vocab_size(config)))
    if automatic:
        config = dataclasses.replace(config, parallel=type(config.parallel)(), accumulation=1)
        validate.check(config, None)
    else:
        validate.check(config, num_gpus)
    return config


def _vocab_size(config: Config) -> int:
    """What the tokenizer of the config needs."""
    if config.data.tokenizer == "bytes":
        from jaxpar.data.tokenizers import load_tokenizer

        return load_tokenizer(config.data.tokenizer).vocab_size
    raise UserError(
        f"model.vocab_size is not set and data.tokenizer = {config.data.tokenizer!r} may not be here; "
        "a dry run needs --config.model.vocab_size=N"
    )
