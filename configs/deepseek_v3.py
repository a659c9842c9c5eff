"""DeepSeek-V3, 671 billion parameters of which 37 billion act on a token, context 4096 (its pre-training).

Published: 671B and, in its README_WEIGHTS.md, 36.7B active. Ours are 671.03B and, with the output head but not the
embedding, 36.62B; with both, as that file says, 37.55B.

    python scripts/dryrun.py --config=configs/deepseek_v3.py --gpu=h100 --gpus=1024
    python scripts/train.py --config=configs/deepseek_v3.py --workdir=runs/deepseek_v3 \
        --config.data.files='data/*.jsonl' --config.data.tokenizer=data/tokenizer.json

Hardware: 1024 H100: 4 of the 256 experts on each GPU, ZeRO-3 over 512 GPUs, two copies. Multi-token prediction, which
the released model trains with besides, is left out.
Expect: 63 million tokens a step; the published run spent 2.66 million GPU hours on 14.8 trillion tokens.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        dict(
            steps=235_000,
            global_batch=15_360,
            seq_len=4096,
            accumulation=15,
            remat="full",
            model=dict(
                family="deepseek_v3",
                num_layers=61,
                embed_dim=7168,
                num_heads=128,
                head_dim=128,
                mlp_dim=18_432,
                vocab_size=129_280,
                norm_eps=1e-6,
                init_std=0.006,
                init_scaled_residual=False,
                latent=dict(kv_rank=512, query_rank=1536, rope_dim=64),
                moe=dict(
                    num_experts=256,
                    experts_per_token=8,
                    expert_dim=2048,
                    num_shared=1,
                    first_dense=3,
                    router="sigmoid",
                    weight_scale=2.5,
                    num_groups=8,
                    groups_per_token=4,
                    bias_update_rate=0.001,
                    balance_loss=0.0001,
                ),
            ),
            parallel=dict(replica=2, expert=64, zero=3),
            optimizer=dict(learning_rate=2.2e-4, warmup_steps=2000),
            loss=dict(chunk_tokens=1024),
            data=dict(source="files", files=("data/*.jsonl",), tokenizer="data/tokenizer.json"),
        )
    )
