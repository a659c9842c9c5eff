"""GPT-3 175B, 175 billion parameters, context 2048.

    python scripts/dryrun.py --config=configs/gpt3_175b.py --gpu=a100 --gpus=1024
    python scripts/train.py --config=configs/gpt3_175b.py --workdir=runs/gpt3_175b \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 1024 A100 (80 GB): tensor 8, 8 pipeline stages of 12 layers, data 16.
Expect: 3.1 million tokens a step. Megatron-LM reports about 140 TFLOP/s per GPU, 45 % of the peak, for this model on
1024 A100.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=95_000,
            global_batch=1536,
            seq_len=2048,
            remat="full",
            model=dict(
                family="gpt2",
                num_layers=96,
                embed_dim=12_288,
                num_heads=96,
                mlp_dim=49_152,
                vocab_size=50_257,
                max_position=2048,
            ),
            parallel=dict(stage=8, tensor=8, zero=1, sequence_parallel=True),
            pipeline=dict(microbatches=96),
            optimizer=dict(learning_rate=6e-5, warmup_steps=120),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
