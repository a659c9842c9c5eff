"""GPT-2 small, 124 439 808 parameters, on 10 billion tokens.

    python scripts/train.py --config=configs/gpt2_124m.py --workdir=runs/gpt2 \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: one server of 8 A100 or H100 (80 GB); plain data parallelism. On one GPU add --config.accumulation=32.
Expect: a validation loss near 3.3 on web text, which is where the released model stands too.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=19_560,
            global_batch=512,  # 0.5 million tokens
            seq_len=1024,
            accumulation=2,
            eval_interval=250,
            model=dict(
                family="gpt2",
                num_layers=12,
                embed_dim=768,
                num_heads=12,
                mlp_dim=3072,
                vocab_size=50_257,
                max_position=1024,
            ),
            parallel=dict(zero=1),
            optimizer=dict(learning_rate=6e-4, warmup_steps=700, final_fraction=0.0),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
