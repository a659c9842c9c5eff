"""Weights to start from, wherever they are: a Hugging Face folder, a run's folder, or one checkpoint of a run.

Whoever trains, generates or evaluates asks for parameters in the layout it wants and need not know the source.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar import config_file
from jaxpar.checkpoint import Checkpoints, folders
from jaxpar.config import CheckpointConfig, Config, ModelConfig
from jaxpar.errors import UserError, raise_together
from jaxpar.hf import files
from jaxpar.hf.family import differences
from jaxpar.hf.load import each_param, load_params, read_model
from jaxpar.tree import named_leaves

if TYPE_CHECKING:
    from jaxpar.build import Built
    from jaxpar.state import TrainState

CHECKPOINTS = "checkpoints"
ORIGIN = "hf"  # folder of an imported run that keeps config.json and tokenizer of where it came from


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights on a disk. `config` is that of the run that wrote them, None for a Hugging Face folder."""

    folder: Path
    model: ModelConfig
    config: Config | None = None
    step: int | None = None

    @property
    def tokenizer(self) -> str | None:
        """What `data.tokenizer` should be; None where the source does not tell."""
        if self.config is not None:
            from jaxpar.data.readers import tokenizer_spec

            unknown = self.like is not None and self.config.data.tokenizer == "bytes"  # came without a tokenizer
            return None if unknown else tokenizer_spec(self.config.data)
        names = ("tokenizer.json", "tokenizer.model", "tekken.json")
        return str(self.folder) if any((self.folder / name).is_file() for name in names) else None

    @property
    def like(self) -> Path | None:
        """The Hugging Face folder whose config keys and tokenizer belong to these weights."""
        origin = self.folder if self.config is None else self.folder / ORIGIN
        return origin if (origin / files.CONFIG).is_file() else None

    def load(self, abstract: Any) -> Any:
        """Parameters in natural order, shaped and sharded like `abstract`; raises `UserError` for what does not fit."""
        if self.config is None:
            return load_params(self.folder, self.model, abstract)
        if not self.config.lora.rank:
            return self._restore(abstract)
        import jax

        from jaxpar import lora

        base = jax.tree.map(jax.numpy.asarray, self.base.load(abstract))  # of a run's folder they may be NumPy's
        shardings = jax.tree.map(lambda leaf: leaf.sharding, base)
        merge = functools.partial(lora.merge, base=self.config.lora.base)
        return jax.jit(merge, out_shardings=shardings, donate_argnums=0)(base, self.load_adapter())

    def each(self, abstract: Any) -> Iterator[tuple[str, Any]]:
        """(name, array) of what `load` gives, one after the other: those of a Hugging Face folder as they are read."""
        if self.config is None:
            yield from each_param(self.folder, self.model, abstract)
        else:
            yield from named_leaves(self.load(abstract)).items()

    @property
    def base(self) -> Weights:
        """The weights that a run with adapters started from."""
        assert self.config is not None
        assert self.config.init_from is not None
        return open_weights(self.config.init_from)

    def load_adapter(self) -> Any:
        """The adapter of a run that trained one, on this process."""
        import jax

        from jaxpar import lora
        from jaxpar.hf.convert import abstract_params

        assert self.config is not None
        key = jax.random.key(0)
        abstract = jax.eval_shape(
            lambda: lora.make_adapter(key, self.config.lora, abstract_params(self.model))  # type: ignore[union-attr]
        )
        return self._restore(abstract)

    def _restore(self, abstract: Any) -> Any:
        settings = CheckpointConfig(cast=True)
        with Checkpoints(self.folder / CHECKPOINTS, settings, is_main=_is_main()) as checkpoints:
            assert self.step is not None
            return checkpoints.restore(self.step, {"params": abstract}, subset=True).state["params"]


def open_weights(path: str | Path, step: int | None = None) -> Weights:
    """Find the weights at `path`; `step` None takes a run's newest checkpoint.

    Raises `UserError` when there is nothing to read, or a model that jaxpar cannot compute.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a Hugging Face checkpoint, or the workdir of a run")
    if files.is_checkpoint(path):
        return Weights(path, read_model(path))
    if path.parent.name == CHECKPOINTS and path.name.isascii() and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    elif path.name == CHECKPOINTS:
        path = path.parent
    present = folders.steps(path / CHECKPOINTS)
    if not (path / "config.json").is_file() or not present:
        raise UserError(
            f"{path}: neither a Hugging Face checkpoint (config.json with model_type, safetensors) nor the workdir of "
            f"a run (config.json and {CHECKPOINTS}/)"
        )
    step = max(present) if step is None else step
    if step not in present:
        raise UserError(f"{path}: no checkpoint of step {step}; there are {', '.join(map(str, present))}")
    config = config_file.load(path / "config.json")
    return Weights(path, config.model, config, step)


def check_same_model(weights: Weights, model: ModelConfig) -> None:
    """Raise one `UserError` with every setting of `model` that computes something else than the weights are for."""
    known = model if model.vocab_size is not None else dataclasses.replace(model, vocab_size=weights.model.vocab_size)
    raise_together(
        f"init_from = {weights.folder}: {difference}; set it to that, or start from "
        f"the config.json that scripts/convert_hf.py import writes"
        for difference in differences(known, weights.model)
    )


def load_arranged(built: Built, weights: Weights) -> Any:
    """Parameters in the layout of a run, pipelines included."""
    import jax

    from jaxpar.checkpoint import leaves

    abstract = built.abstract_state.params
    if built.pipeline is None:
        return weights.load(abstract)
    natural = weights.load(leaves.disk_abstract(built.to_natural, abstract))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(built.from_natural, out_shardings=shardings, donate_argnums=0)(natural)


def start_state(built: Built, weights: Weights) -> TrainState:
    """A fresh train state whose parameters are the weights; the random ones are never made."""
    import jax

    from jaxpar.build import FIRST_LOSS_SCALE
    from jaxpar.precision import precision
    from jaxpar.state import init_state

    scale = FIRST_LOSS_SCALE if precision(built.config.precision).loss_scaling else 1.0

    def begin(params: Any) -> TrainState:
        return init_state(jax.random.key(0), lambda _: params, built.optimizer, scale)

    return jax.jit(begin, out_shardings=built.shardings, donate_argnums=0)(load_arranged(built, weights))


def _is_main() -> bool:
    import jax

    return jax.process_index() == 0
