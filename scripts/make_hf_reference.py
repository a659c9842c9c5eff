"""Make the small reference checkpoints of tests/hf_data with `transformers`, prove them current, or check an export.

    python scripts/make_hf_reference.py make tests/hf_data             write all variants (or --only NAME ...)
    python scripts/make_hf_reference.py check tests/hf_data            make them anew and compare
    python scripts/make_hf_reference.py peft tests/hf_data tests/peft_data      adapters by the PEFT package
    python scripts/make_hf_reference.py verify EXPORTED tests/hf_data/llama
                                        load an exported folder with transformers: its logits must be the reference's

Needs the extra `oracle` (torch on the CPU and transformers); works offline. A variant is a folder with what
`save_pretrained` writes and reference.npz: a packed batch [2, 24] with padding, and the float32 logits, mean loss,
gradients by tensor name and greedy continuation that transformers computes from the files.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

BATCH, LENGTH, PROMPT, NEW = 2, 24, 10, 8
DOCUMENTS = ((24,), (11, 8, 5))  # lengths in each row; the last of row 1 is padding
VOCAB = 53
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 7}
LOCAL_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, **WINDOW}


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


ABSENT = "absent"  # a key of COMMON that a family does not have
# Small, as there are many parts: each of the two below stays under 150 KB.
LATENT = {"hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 4, "kv_lora_rank": 10,
          "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "moe_intermediate_size": 8,
          "n_routed_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5}  # fmt: skip
OSS = {"hidden_size": 24, "intermediate_size": 12, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
# name: (model type, settings, stored dtype)
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 36,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        "float32",
    ),
    "llama": ("llama", {**_rope(5e5, "llama3", **LLAMA3), "rms_norm_eps": 1e-5}, "float32"),
    "llama_bias": ("llama", {**_rope(2e4, "linear", factor=4.0), "attention_bias": True, "mlp_bias": True,
                             "num_attention_heads": 6, "head_dim": 8, "hidden_size": 36,
                             "num_key_value_heads": 3, "tie_word_embeddings": True}, "float16"),
    "mistral": ("mistral", {**_rope(1e4), **WINDOW, "head_dim": 12}, "bfloat16"),
    "qwen2": ("qwen2", {**_rope(1e6), **WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "bfloat16"),
    "qwen3": ("qwen3", {**_rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=16), "head_dim": 12},
              "bfloat16"),
    "gemma": ("gemma", {**_rope(1e4), "head_dim": 12, "num_key_value_heads": 1}, "bfloat16"),
    "gemma2": ("gemma2", {**_rope(1e4), **GEMMA, **LOCAL_FIRST, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 8.0}, "bfloat16"),
    "gemma3": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}, **GEMMA, **LOCAL_FIRST},
        "bfloat16",
    ),
    "olmo2": ("olmo2", {**_rope(5e5), "pad_token_id": 0, "eos_token_id": 2}, "bfloat16"),
    "phi3": ("phi3", {**_rope(1e4, partial_rotary_factor=0.5), **WINDOW}, "bfloat16"),
    "gpt_neox": ("gpt_neox", {**_rope(1e4, partial_rotary_factor=0.25), "num_key_value_heads": ABSENT}, "bfloat16"),
    "smollm3": ("smollm3", {**_rope(5e6), "no_rope_layers": [1, 0]}, "bfloat16"),
    "mixtral": ("mixtral", {**_rope(1e6), "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
                "bfloat16"),
    "qwen3_moe": ("qwen3_moe", {**_rope(1e6), "head_dim": 12, "moe_intermediate_size": 8, "num_experts": 4,
                                "num_experts_per_tok": 2, "norm_topk_prob": False}, "bfloat16"),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, **_rope(1e4, "yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.1,
                           original_max_position_embeddings=16),
         "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 4, "q_lora_rank": 12,
         "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2},
        "bfloat16",
    ),
    "deepseek_v3_plain": (
        "deepseek_v3",
        {**LATENT, **_rope(1e4), "rope_interleave": False, "first_k_dense_replace": 0, "q_lora_rank": None,
         "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False, "attention_bias": True,
         "routed_scaling_factor": 1.5},
        "float16",
    ),
    "gpt_oss": (
        "gpt_oss",
        {**OSS, **_rope(1.5e5, "yarn", factor=4.0, truncate=False, original_max_position_embeddings=16), **WINDOW,
         **LOCAL_FIRST, "swiglu_limit": 1.0},
        "bfloat16",
    ),
    "gpt_oss_tied": (
        "gpt_oss",
        {**OSS, **_rope(1e4), "sliding_window": 5, "num_hidden_layers": 3,
         "layer_types": ["full_attention", "full_attention", "sliding_attention"],
         "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": False,
         "swiglu_limit": 0.5, "swiglu_alpha": 1.1},
        "bfloat16",
    ),
}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "check", "peft", "verify"))
    parser.add_argument("folder", type=Path, help="tests/hf_data; for verify, the exported folder")
    parser.add_argument(
        "reference", type=Path, nargs="?", help="for verify: folder of the variant; for peft: folder to write"
    )
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help=f"of {', '.join(VARIANTS)}")
    args = parser.parse_args(argv)
    if (args.action in ("verify", "peft")) != (args.reference is not None):
        parser.error("verify and peft want two folders; the other actions one")
    _quiet()
    if args.action == "verify":
        return verify(args.folder, args.reference)
    if args.action == "peft":
        make_adapter(args.folder / "qwen2", args.reference / "qwen2")
        return 0
    failures = 0
    for name in args.only or VARIANTS:
        if args.action == "make":
            make(name, args.folder / name)
            size = sum(path.stat().st_size for path in (args.folder / name).iterdir())
            print(f"{name}: {size // 1024} KiB", flush=True)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                make(name, Path(scratch))
                problems = differences(Path(scratch), args.folder / name)
            print(f"{name}: {'; '.join(problems) or 'current'}", flush=True)
            failures += bool(problems)
    return 1 if failures else 0


def _quiet() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums, so that runs repeat


def make(name: str, folder: Path) -> None:
    """Write one variant."""
    import numpy as np
    import torch

    model_type, settings, dtype = VARIANTS[name]
    model = build(model_type, settings, name)
    model.config.dtype = dtype
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for key, value in _values(model):
        if not any(part in key for part in strict):
            value.data = value.data.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = load(folder)
    batch, prompt, new = batch_and_greedy(model, name)
    np.savez_compressed(folder / "reference.npz", **batch, **run(model, batch), prompt=prompt, new=new)


def build(model_type: str, settings: dict[str, Any], name: str) -> Any:
    """A model of random weights; norms and biases too, and no two alike."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(settings) if model_type == "gpt2" else {**COMMON, **settings}
    settings = {key: value for key, value in settings.items() if value != ABSENT}
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    gemma = model_type.startswith("gemma")
    with torch.no_grad():
        for key, parameter in _values(model):
            noise = np.random.RandomState(zlib.crc32(f"{name}/{key}".encode())).standard_normal(tuple(parameter.shape))
            if parameter.ndim == 1:
                start = 1.0 if "norm" in key or "ln_" in key or "sinks" in key else 0.0
                start = 0.0 if key.endswith("bias") or gemma else start
                value = start + 0.3 * noise
                if model.config.tie_word_embeddings and key.endswith(("model.norm.weight", "ln_f.weight")):
                    value = 3 * value + 2 * gemma  # small embeddings, or the input token would decide the logits
            elif "embed" in key or "wte" in key or "wpe" in key:
                value = (0.1 if model.config.tie_word_embeddings else 0.5) * noise
            else:
                inputs = 0 if "c_" in key else -2 if model_type == "gpt_oss" and parameter.ndim == 3 else -1
                value = 1.2 * noise / np.sqrt(parameter.shape[inputs])
            parameter.copy_(torch.from_numpy(value))
    return model


def _values(model: Any) -> list[tuple[str, Any]]:
    """(name, tensor) of all that a file holds: parameters, and the buffers that are stored."""
    stored = model.state_dict()
    return [*model.named_parameters(), *((key, value) for key, value in model.named_buffers() if key in stored)]


def load(folder: Path) -> Any:
    """The model that transformers reads from a folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise SystemExit(f"{folder}: transformers reports {kind}: {sorted(map(str, info[kind]))}")
    return model.eval()


def batch_and_greedy(model: Any, name: str) -> tuple[dict[str, Any], Any, Any]:
    """A packed batch, and a prompt whose greedy continuation has no near-ties and is not one token repeated."""
    import numpy as np
    import torch

    for seed in range(200):
        rng = np.random.RandomState(zlib.crc32(f"{name}/batch/{seed}".encode()))
        ids = rng.randint(3, VOCAB, (BATCH, LENGTH))
        prompt = ids[:, :PROMPT]
        row, margin = torch.from_numpy(prompt), float("inf")
        for _ in range(NEW):
            with torch.no_grad():
                top = model(input_ids=row, use_cache=False).logits[:, -1].topk(2)
            margin = min(margin, float((top.values[:, 0] - top.values[:, 1]).min()))
            row = torch.cat([row, top.indices[:, :1]], 1)
        new = row[:, PROMPT:].numpy()
        if margin > 0.005 and min(len(set(tokens)) for tokens in new.tolist()) >= 4:
            return pack(ids), prompt.astype(np.int32), new.astype(np.int32)
    raise SystemExit(f"{name}: every prompt has near-ties")


def pack(ids: Any) -> dict[str, Any]:
    """The batch of the seam: targets are shifted inside each document, and weigh 0 where there is none."""
    import numpy as np

    batch: dict[str, Any] = {
        key: np.zeros((BATCH, LENGTH), np.int32) for key in ("tokens", "targets", "positions", "segment_ids")
    }
    batch["tokens"] = ids.astype(np.int32)
    batch["weights"] = np.zeros((BATCH, LENGTH), np.float32)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for number, length in enumerate(lengths, 1):
            stop, real = start + length, start + length < LENGTH or len(lengths) == 1
            batch["positions"][row, start:stop] = np.arange(length)
            batch["segment_ids"][row, start:stop] = number if real else 0
            batch["targets"][row, start : stop - 1] = ids[row, start + 1 : stop]
            batch["weights"][row, start : stop - 1] = float(real)
            start = stop
    return batch


def run(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Logits, mean loss and its gradients by the names of the file."""
    import numpy as np
    import torch

    model.zero_grad(set_to_none=True)
    tokens, positions = (torch.from_numpy(batch[key]).long() for key in ("tokens", "positions"))
    masks = _masks(model.config, batch["positions"]) if model.config.model_type == "gpt_oss" else None
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False).logits
    targets, weights = torch.from_numpy(batch["targets"]).long(), torch.from_numpy(batch["weights"])
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    loss = (nll * weights).sum() / weights.sum()
    loss.backward()
    grads = {}
    for key, parameter in model.named_parameters():
        grads |= {f"grad/{name}": grad.numpy() for name, grad in _stored(key, parameter.grad, model.config.model_type)}
    parameters = dict(model.named_parameters())
    fixed = {f"grad/{key}": np.zeros(value.shape, np.float32) for key, value in _values(model) if key not in parameters}
    grads |= fixed  # a bias that only takes part in choices has no gradient
    return {"logits": logits.detach().numpy(), "loss": np.float32(loss.item()), **grads}


def _masks(config: Any, positions: Any) -> dict[str, Any]:
    """Additive masks by kind of layer: this model does not find the documents of a row by its positions."""
    import numpy as np
    import torch

    documents = np.cumsum(positions == 0, 1)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    visible = (documents[:, :, None] == documents[:, None, :]) & (distance >= 0)
    near = visible & (distance < config.sliding_window)
    kinds = {"full_attention": visible, "sliding_attention": near}
    added = {kind: np.where(seen, 0.0, np.finfo(np.float32).min)[:, None] for kind, seen in kinds.items()}
    return {kind: torch.from_numpy(mask.astype(np.float32)) for kind, mask in added.items()}


def _stored(key: str, grad: Any, model_type: str) -> list[tuple[str, Any]]:
    """(name in the file, gradient) of a parameter, which transformers renames or fuses for a few families."""
    if model_type == "gpt_oss":
        return [(key, grad)]
    if model_type == "gpt_neox" and key == "lm_head.weight":
        return [("embed_out.weight", grad)]
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    if model_type == "mixtral":
        key = key.replace(".mlp.", ".block_sparse_moe.")
    else:
        names = {part: f"{part}_proj" for part in names}
    prefix, _, fused = key.rpartition(".")
    if fused == "down_proj":
        return [(f"{prefix}.{e}.{names['down']}.weight", grad[e]) for e in range(len(grad))]
    if fused == "gate_up_proj":
        half = grad.shape[1] // 2
        parts = {"gate": grad[:, :half], "up": grad[:, half:]}
        return [(f"{prefix}.{e}.{names[p]}.weight", part[e]) for p, part in parts.items() for e in range(len(grad))]
    return [(key, grad)]


def make_adapter(base: Path, folder: Path) -> None:
    """A random adapter on a variant, as the PEFT package writes it, and the logits with it."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load(base), config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                noise = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(0.3 * noise))
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = base.name  # not the folder of whoever made it
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    with np.load(base / "reference.npz") as arrays:
        tokens, positions = (torch.from_numpy(arrays[key]).long() for key in ("tokens", "positions"))
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits.numpy()
    np.savez_compressed(folder / "reference.npz", logits=logits)


def differences(made: Path, committed: Path) -> list[str]:
    """What of a committed variant is not what would be made now."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    if not committed.is_dir():
        return ["not there"]
    problems = []
    if (made / "config.json").read_text() != (committed / "config.json").read_text():
        problems.append("config.json differs")
    new, old = load_file(made / "model.safetensors"), load_file(committed / "model.safetensors")
    if new.keys() != old.keys() or not all(torch.equal(new[key], old[key]) for key in new):
        problems.append("weights differ")
    with np.load(made / "reference.npz") as new_arrays, np.load(committed / "reference.npz") as old_arrays:
        if set(new_arrays) != set(old_arrays):
            return [*problems, "arrays differ in name"]
        far = [key for key in new_arrays if not np.allclose(new_arrays[key], old_arrays[key], rtol=1e-4, atol=1e-5)]
    return problems + ([f"arrays differ: {', '.join(far)}"] if far else [])


def verify(exported: Path, reference: Path) -> int:
    """Whether transformers computes the reference's logits from an exported folder."""
    import numpy as np

    model = load(exported)
    with np.load(reference / "reference.npz") as arrays:
        got = run(model, {key: arrays[key] for key in ("tokens", "targets", "positions", "weights")})
        error = float(np.abs(got["logits"] - arrays["logits"]).max())
    print(f"{exported}: largest difference of a logit {error:.1e}")
    return 0 if error < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
