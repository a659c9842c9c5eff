"""Llama 3 70B, 70 553 706 496 parameters, context 8192.

    python scripts/dryrun.py --config=configs/llama3_70b.py --gpu=h100 --gpus=512
    python scripts/train.py --config=configs/llama3_70b.py --workdir=runs/llama3_70b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 512 H100, tensor 8 inside a server, ZeRO-3 over the 64 servers, sequence parallelism. On 256 GPUs add
--config.accumulation=4.
Expect: 4.2 million tokens a step; state of 1.1 TB, 2.2 GB on each GPU.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=100_000,
            global_batch=512,
            seq_len=8192,
            accumulation=2,
            remat="full",
            model=dict(
                family="llama",
                num_layers=80,
                embed_dim=8192,
                num_heads=64,
                num_kv_heads=8,
                mlp_dim=28_672,
                vocab_size=128_256,
                rope=dict(base=500_000.0),
            ),
            parallel=dict(tensor=8, zero=3, sequence_parallel=True),
            optimizer=dict(learning_rate=1.5e-4, warmup_steps=2000),
            loss=dict(chunk_tokens=1024),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
