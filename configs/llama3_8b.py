"""Llama 3 8B, 8 030 261 248 parameters, context 8192.

    python scripts/dryrun.py --config=configs/llama3_8b.py --gpu=h100 --gpus=512
    python scripts/train.py --config=configs/llama3_8b.py --workdir=runs/llama3_8b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 512 H100 with one row each; 64 H100 with --config.accumulation=8. ZeRO-3 alone, no tensor parallelism: within
one row of 8192 tokens there is enough arithmetic to hide the gathering of parameters.
Expect: about 0.13 TB of parameters and optimizer state over all GPUs; 4.2 million tokens a step.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=100_000,
            global_batch=512,
            seq_len=8192,
            remat="full",
            model=dict(
                family="llama",
                num_layers=32,
                embed_dim=4096,
                num_heads=32,
                num_kv_heads=8,
                mlp_dim=14_336,
                vocab_size=128_256,
                rope=dict(base=500_000.0),
            ),
            parallel=dict(zero=3),
            optimizer=dict(learning_rate=3e-4, warmup_steps=2000),
            loss=dict(chunk_tokens=1024),  # logits of 128 256 words are the largest array
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
