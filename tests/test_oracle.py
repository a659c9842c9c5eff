"""What transformers and PEFT themselves make of exported folders, and whether committed adapters are current.

Runs where the extra `oracle` is installed (a part of .ci/run); everywhere else the committed references stand in.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_models import DATA, NAMES, batch_of, model_of

from jaxpar.config import LoraConfig
from jaxpar.hf.convert import abstract_params, export_folder, import_folder
from jaxpar.hf.peft import export_adapter
from jaxpar.lora import make_adapter, merge
from jaxpar.tree import named_leaves
from jaxpar.weights import open_weights

PEFT_DATA = DATA.with_name("peft_data")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")),
    reason="needs the extra oracle; a part of .ci/run has it",
)


@pytest.fixture(scope="module")
def maker():
    """scripts/make_hf_reference.py as a module."""
    path = Path(__file__).parents[1] / "scripts" / "make_hf_reference.py"
    spec = importlib.util.spec_from_file_location("make_hf_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["make_hf_reference"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._quiet()
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_folder_gives_the_logits_of_the_original(maker, tmp_path, name):
    """Through a run's folder and back; transformers reports no missing, unexpected or mis-shaped tensor."""
    import_folder(DATA / name, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert maker.verify(tmp_path / "out", DATA / name) == 0


def test_the_committed_adapters_are_what_peft_makes_now(maker, tmp_path):
    from safetensors.numpy import load_file

    for committed in sorted(PEFT_DATA.iterdir()):
        maker.make_adapter(DATA / committed.name, tmp_path / committed.name)
        made = tmp_path / committed.name
        new, old = (load_file(folder / "adapter_model.safetensors") for folder in (made, committed))
        assert new.keys() == old.keys()
        assert all(np.array_equal(new[key], old[key]) for key in new)
        new_config, old_config = (json.loads((f / "adapter_config.json").read_text()) for f in (made, committed))
        assert {k: v for k, v in new_config.items() if k != "target_modules"} == {
            k: v for k, v in old_config.items() if k != "target_modules"
        }
        assert sorted(new_config["target_modules"]) == sorted(old_config["target_modules"])  # PEFT keeps a set
        with np.load(made / "reference.npz") as a, np.load(committed / "reference.npz") as b:
            np.testing.assert_allclose(a["logits"], b["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma2"])
def test_peft_loads_an_exported_adapter_and_gives_the_same_logits(maker, tmp_path, name):
    import jax
    import torch
    from peft import PeftModel

    model, config = model_of(DATA / name), LoraConfig(rank=4, alpha=6.0, targets=("q", "out", "up", "down"))
    base = open_weights(DATA / name).load(abstract_params(model))
    keys = iter(jax.random.split(jax.random.key(1), 20))
    fresh = make_adapter(jax.random.key(0), config, base)
    adapter = jax.tree.map(lambda a: 0.2 * jax.random.normal(next(keys), a.shape), fresh)
    export_adapter(tmp_path / "adapter", model, config, named_leaves(adapter), base=str(DATA / name))
    theirs = PeftModel.from_pretrained(maker.load(DATA / name), tmp_path / "adapter").eval()
    assert theirs.peft_config["default"].r == 4
    assert theirs.peft_config["default"].lora_alpha == 6
    batch = batch_of(name)
    tokens, positions = (torch.from_numpy(batch[key]).long() for key in ("tokens", "positions"))
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, position_ids=positions, use_cache=False).logits.numpy()
    got = jax.jit(lambda m, a: merge(m, a).logits(batch))(base, adapter)[..., : model.true_vocab]
    assert np.abs(np.asarray(got) - wanted)[batch["segment_ids"] > 0].max() <= 1e-4
