"""Between Hugging Face folders and the folders of runs: what scripts/convert_hf.py does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar import config_file
from jaxpar.checkpoint import stream
from jaxpar.checkpoint.plain import load_arrays
from jaxpar.config import Config, DataConfig, ModelConfig
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.errors import UserError
from jaxpar.hf import files
from jaxpar.hf.load import leaf_axes, open_leaves, read_model
from jaxpar.hf.peft import export_adapter
from jaxpar.hf.save import export
from jaxpar.tree import named_leaves
from jaxpar.weights import CHECKPOINTS, ORIGIN, Weights, open_weights


def import_folder(
    source: Path, target: Path, *, ignore: Iterable[str] = (), vocab_multiple: int | None = None
) -> Config:
    """Write a run's folder from a Hugging Face one: checkpoint of step 0, config.json, and what is carried along.

    `config.json` is a valid `--config`, and the folder a valid `init_from`.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists already and is not empty; import into a new folder")
    if vocab_multiple is not None and vocab_multiple < 1:
        raise UserError(f"--vocab-multiple={vocab_multiple}: want at least 1")
    model = read_model(source, ignore)
    if vocab_multiple is not None:
        model = dataclasses.replace(model, vocab_multiple=vocab_multiple)
    with open_leaves(source, model, abstract_params(model)) as (likes, read, release):
        origin = target / ORIGIN
        origin.mkdir(parents=True, exist_ok=True)
        files.carry(source, origin)
        (origin / files.CONFIG).write_bytes((source / files.CONFIG).read_bytes())
        named = {
            f"params/{leaf}": stream.Parts(tuple(like.shape), np.dtype(like.dtype), _read_once(leaf, read, release))
            for leaf, like in likes.items()
        }
        stream.write(target / CHECKPOINTS, 0, named, {"imported": str(source)})
    config = _config(model, Weights(origin, model))
    (target / "config.json").write_text(config_file.to_json(config))
    return config


def _read_once(leaf: str, read: Callable[..., np.ndarray], release: Callable[[], None]) -> Callable[..., np.ndarray]:
    """Reads parts of a parameter; pages of the files that were mapped for it count as memory until released."""

    def run(index: tuple[slice, ...]) -> np.ndarray:
        part = read(leaf, index)
        release()
        return part

    return run


def _config(model: ModelConfig, weights: Weights) -> Config:
    tokenizer = weights.tokenizer
    data = DataConfig() if tokenizer is None else DataConfig(tokenizer=tokenizer)
    seq_len = Config.seq_len if model.max_position is None else min(Config.seq_len, model.max_position)
    return Config(model=model, seq_len=seq_len, data=data)


def export_folder(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    like: Path | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> str | None:
    """Write a Hugging Face folder from a checkpoint of a run (or from another Hugging Face folder).

    `dtype` None: that of `like`, else float32. `like` None: where the run was imported from, if it was. The tokenizer
    is that of `like`, else the run's; returns why none was written, None where one was.
    """
    weights = open_weights(source, step)
    like = origin_of(weights) if like is None else like
    dtype = dtype or (_dtype_of(like) if like is not None else "float32")
    leaves = leaf_axes(abstract_params(weights.model))
    if weights.config is None or weights.config.lora.rank:
        named = {name: leaf for name, (_, leaf) in leaf_axes(weights.load(abstract_params(weights.model))).items()}

        def value(leaf: str) -> Any:
            return named[leaf]
    else:

        def value(leaf: str) -> Any:
            name = f"params/{leaf}"
            return load_arrays(source_folder, weights.step, prefix=name)[1][""]

    source_folder = weights.folder / CHECKPOINTS
    tokenizer, missing = _tokenizer(weights, like)
    length = weights.config.seq_len if weights.config is not None else None
    export(
        target,
        weights.model,
        leaves,
        value,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        like=like,
        max_position=length,
        tokenizer=tokenizer,
    )
    return missing


def _tokenizer(weights: Weights, like: Path | None) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer to write besides what `like` has, and why there is none at all."""
    if like is not None and files.has_tokenizer(like):
        return None, None
    spec = weights.tokenizer
    if spec is None or spec == "bytes":
        return None, "which one the run has is not known" if spec is None else "that of the run is bytes, without files"
    try:
        return load_tokenizer(spec), None
    except UserError as error:
        return None, str(error)


def export_adapter_folder(source: Path, target: Path, *, step: int | None = None) -> None:
    """Write the adapter of a run as a PEFT folder."""
    weights = open_weights(source, step)
    if weights.config is None or not weights.config.lora.rank:
        raise UserError(f"{source}: is no run that trained an adapter (lora.rank is 0)")
    values = named_leaves(weights.load_adapter())
    export_adapter(target, weights.model, weights.config.lora, values, base=weights.config.init_from)


def origin_of(weights: Weights) -> Path | None:
    """The Hugging Face folder that the weights, or those that the run started from, once were."""
    while weights.like is None and weights.config is not None and weights.config.init_from is not None:
        weights = open_weights(weights.config.init_from)
    return weights.like


def abstract_params(model: ModelConfig) -> Any:
    """The parameters of a model as shapes and float32, without computing anything."""
    import jax

    from jaxpar.build import model_maker
    from jaxpar.precision import precision

    maker = model_maker(Config(model=model), precision("float32"))
    return jax.eval_shape(maker, jax.random.key(0))


def _dtype_of(folder: Path) -> str:
    raw = files.read_config(folder)
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
