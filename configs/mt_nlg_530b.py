"""Megatron-Turing NLG 530B, 530 billion parameters, context 2048.

    python scripts/dryrun.py --config=configs/mt_nlg_530b.py --gpu=a100 --gpus=2240
    python scripts/train.py --config=configs/mt_nlg_530b.py --workdir=runs/mt_nlg_530b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 2240 A100 (80 GB) as published: tensor 8, 35 pipeline stages of 3 layers, data 8.
Expect: 3.9 million tokens a step; the published run took 60.1 s a step, 126 TFLOP/s per GPU.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=69_000,
            global_batch=1920,
            seq_len=2048,
            remat="full",
            model=dict(
                family="gpt2",
                num_layers=105,
                embed_dim=20_480,
                num_heads=128,
                mlp_dim=81_920,
                vocab_size=50_257,
                vocab_multiple=280,  # stage x tensor
                max_position=2048,
                init_std=0.004,  # sqrt(1 / (3 embed_dim)), arXiv:2201.11990
            ),
            parallel=dict(stage=35, tensor=8, zero=1, sequence_parallel=True),
            pipeline=dict(microbatches=240),
            optimizer=dict(learning_rate=5e-5, warmup_steps=256),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
