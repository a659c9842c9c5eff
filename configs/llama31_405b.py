"""Llama 3.1 405B, 405 853 388 800 parameters, context 8192 (the first stage of its training).

    python scripts/dryrun.py --config=configs/llama31_405b.py --gpu=h100 --gpus=16384
    python scripts/train.py --config=configs/llama31_405b.py --workdir=runs/llama31_405b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 16 384 H100 as published: tensor 8, 16 pipeline stages, data 128. The 126 layers do not divide by 16 stages,
which hold 7 or 8 each.
Expect: 16.8 million tokens a step; the published run reports 400 TFLOP/s per GPU, 41 % MFU.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=1_000_000,
            global_batch=2048,
            seq_len=8192,
            remat="full",
            model=dict(
                family="llama",
                num_layers=126,
                embed_dim=16_384,
                num_heads=128,
                num_kv_heads=8,
                mlp_dim=53_248,
                vocab_size=128_256,
                rope=dict(base=500_000.0, scaling="llama3", factor=8.0, original_max_position=8192),
            ),
            parallel=dict(stage=16, tensor=8, zero=1, sequence_parallel=True),
            pipeline=dict(microbatches=16),
            optimizer=dict(learning_rate=8e-5, warmup_steps=8000, final_fraction=0.01),
            loss=dict(chunk_tokens=1024),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
