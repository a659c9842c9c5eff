"""Qwen3 8B, 8 190 735 360 parameters, context 4096 (the first stage of its training).

    python scripts/dryrun.py --config=configs/qwen3_8b.py --gpu=h100 --gpus=256
    python scripts/train.py --config=configs/qwen3_8b.py --workdir=runs/qwen3_8b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 256 H100 with four rows each, ZeRO-3; 64 H100 with --config.accumulation=4.
Expect: 4.2 million tokens a step. To continue from released weights add --config.init_from=FOLDER.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=100_000,
            global_batch=1024,
            seq_len=4096,
            remat="full",
            model=dict(
                family="qwen3",
                num_layers=36,
                embed_dim=4096,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                mlp_dim=12_288,
                vocab_size=151_936,
            ),
            parallel=dict(zero=3),
            optimizer=dict(learning_rate=3e-4, warmup_steps=2000),
            loss=dict(chunk_tokens=1024),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
