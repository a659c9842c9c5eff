"""Mixtral 8x7B, 46 702 792 704 parameters of which 12.9 billion act on a token, context 4096.

Published: 46.7B and 12.9B active. Ours, with embedding and head, is 12.88B.

    python scripts/dryrun.py --config=configs/mixtral_8x7b.py --gpu=h100 --gpus=64
    python scripts/train.py --config=configs/mixtral_8x7b.py --workdir=runs/mixtral_8x7b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 64 H100: experts over the 8 GPUs of a node, ZeRO-3 over the nodes, four rows each.
Expect: 1.0 million tokens a step; metrics show the balance of the experts (aux_router_balance, 1 when even).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=100_000,
            global_batch=256,
            seq_len=4096,
            remat="full",
            model=dict(
                family="llama",
                num_layers=32,
                embed_dim=4096,
                num_heads=32,
                num_kv_heads=8,
                mlp_dim=14_336,
                vocab_size=32_000,
                rope=dict(base=1_000_000.0),
                moe=dict(num_experts=8, experts_per_token=2, balance_loss=0.02),
            ),
            parallel=dict(expert=8, zero=3),
            optimizer=dict(learning_rate=2e-4, warmup_steps=2000),
            loss=dict(chunk_tokens=1024),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
