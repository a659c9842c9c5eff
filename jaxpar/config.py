"""Every setting of a run: its name, type, default and meaning.

These frozen dataclasses are the single home of defaults. `config_file.py` fills them from a config file and
`--config.a.b=c` overrides, `validate.py` checks what can be checked without a model. Nothing here imports jax.
`None` always means "not set": either off, or derived as the comment says.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    base: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0  # context extension factor of every scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn: context length before the extension
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: the blend begins and ends at whole pairs of features
    fraction: float = 1.0  # part of head_dim that is rotated
    local_base: float | None = None  # base of layers with a sliding window; None: as `base`, with scaling
    interleaved: bool = False  # features 2i and 2i + 1 are a pair, instead of i and i + half of them (DeepSeek)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts; `num_experts` 0 means a dense model."""

    num_experts: int = 0
    experts_per_token: int = 2
    expert_dim: int | None = None  # hidden size of one expert; None: model.mlp_dim
    num_shared: int = 0  # experts that every token uses
    first_dense: int = 0  # leading layers with a dense MLP instead
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False  # added to the router's logits
    choice_bias: bool = False  # added to the scores for the choice alone; bias_update_rate > 0 has it too, and moves it
    normalize_weights: bool = True  # chosen weights sum to one
    weight_scale: float = 1.0
    num_groups: int = 1  # group-limited choice
    groups_per_token: int = 1
    balance_loss: float = 0.0  # coefficient of the load-balancing loss
    router_z_loss: float = 0.0
    bias_update_rate: float = 0.0  # auxiliary-loss-free balance
    dispatch: Literal["dropless", "capacity"] = "dropless"
    capacity_factor: float = 1.25


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek); `kv_rank` 0 means ordinary attention."""

    kv_rank: int = 0  # features of the vector that keys and values of all heads are made from
    query_rank: int | None = None  # the same for queries; None: straight from the residual stream
    rope_dim: int = 64  # rotary features of a head, besides model.head_dim without position
    value_dim: int | None = None  # features of a head's values; None: model.head_dim
    norm_eps: float | None = None  # of the norms on compressed vectors; None: model.norm_eps


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder for every family; `family` presets what the file does not set (models/families.py)."""

    family: str = "llama"
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: embed_dim / num_heads
    mlp_dim: int = 1024
    vocab_size: int | None = None  # None: what the tokenizer needs
    vocab_multiple: int = 128  # rows of the table are padded up to this multiple, whatever the mesh
    max_position: int | None = None  # learned positions; None: seq_len
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False  # the scale is 1 + weight (Gemma)
    norm_placement: Literal["pre", "post", "both"] = "pre"
    positions: Literal["rope", "learned", "none"] = "rope"
    rope: RopeConfig = RopeConfig()
    rope_pattern: tuple[bool, ...] = (True,)  # repeated over the layers; False: no position embedding
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"] = "silu"
    swiglu_alpha: float = 1.702  # clamped_swiglu: g sigmoid(alpha g) (u + 1) of gate g and up u
    swiglu_limit: float = 7.0  # clamped_swiglu: g is clamped from above, u to both sides
    gated: bool = True
    qkv_bias: bool = False  # with latent attention: on the projections to compressed vectors
    out_bias: bool = False
    mlp_bias: bool = False  # of experts too
    qk_norm: Literal["none", "head", "full"] = "none"  # per head, or over all heads at once
    parallel_residual: bool = False  # attention and MLP read the same input (GPT-NeoX)
    window: int | None = None  # sliding window: a token sees itself and window - 1 before it
    window_pattern: tuple[bool, ...] = (True,)  # repeated over the layers; False: full attention there
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    attention_sinks: bool = False  # a learned score per head that takes part in every softmax and has no value
    query_scale: float | None = None  # None: head_dim ** -0.5; latent attention: (head_dim + rope_dim) ** -0.5
    embed_scale: float | None = None  # the embedding is multiplied by this (Gemma: sqrt(embed_dim))
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    dropout: float = 0.0  # after the embedding and on both residual branches
    init_std: float = 0.02
    init_scaled_residual: bool = True  # projections into the residual stream: std / sqrt(2 layers)
    scan_layers: bool = True  # False: unrolled, for debugging
    moe: MoeConfig = MoeConfig()
    latent: LatentConfig = LatentConfig()

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        width = self.head_size + (self.latent.rope_dim if self.latent.kv_rank else 0)
        return self.query_scale or width**-0.5

    @property
    def value_size(self) -> int:
        """Features of one head's values."""
        return self.head_size if self.latent.value_dim is None else self.latent.value_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def true_vocab(self) -> int:
        """Entries of the vocabulary, once it is known."""
        assert self.vocab_size is not None, "model.vocab_size is filled in from the tokenizer before a model is made"
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: the vocabulary padded to a multiple that no mesh changes."""
        return -(-self.true_vocab // self.vocab_multiple) * self.vocab_multiple


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the mesh axes, outermost first; -1 on one of them takes the devices that are left."""

    stage: int = 1
    replica: int = 1
    data: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    context_mode: Literal["auto", "ring", "all_to_all", "all_gather", "ring_all_to_all"] = "auto"


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Used when parallel.stage > 1."""

    schedule: str = "auto"  # gpipe | 1f1b | fused | interleaved | zb_h1 | auto | path of a CSV table
    chunks: int = 1
    microbatches: int | None = None  # None: 2 x stage


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule, learning-rate schedule and clipping."""

    name: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd: length of the final decay; None: a fifth of the run
    final_fraction: float = 0.1  # of the peak, reached at the end of the run
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0  # None: no clipping
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float | None = None  # sgd (None: 0) and muon (None: 0.95)
    max_skipped: int = 10  # stop after this many non-finite steps in a row


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Extras of the cross entropy."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None  # positions whose logits exist at one time; None, or seq_len and more: all


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """One source of data.source = "mixture"."""

    name: str
    source: str = "tokens"
    files: tuple[str, ...] = ()
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read and how it becomes rows of seq_len tokens."""

    source: Literal["python_stdlib", "files", "tokens", "megatron", "raw", "mixture", "chat"] = "python_stdlib"
    files: tuple[str, ...] = ()  # globs; text, .jsonl, .parquet, each also .gz or .zst; or token files
    text_key: str = "text"  # of JSONL and Parquet rows
    tokenizer: str = "bytes"  # "bytes", or the path of a tokenizer file
    bos_token: str | None = None  # text of the start token, where the tokenizer file does not tell
    eos_token: str | None = None  # text of the end token, likewise
    raw_dtype: Literal["uint16", "uint32"] | None = None  # source "raw": the width of the headerless file
    raw_document_end: int | None = None  # source "raw": id that ends a document; None: a file is one document
    add_bos: bool = False
    add_eos: bool = True
    packing: Literal["concat", "best_fit", "none"] = "concat"
    long_documents: Literal["split", "truncate", "drop"] = "split"
    mask_document_starts: bool = True  # never train on the first token of a document given the one before
    shuffle: bool = True
    repeat: bool = True  # False: stop when every row was seen once
    eval_fraction: float = 0.01  # of the documents, held out
    eval_files: tuple[str, ...] = ()  # instead of a fraction
    sources: tuple[MixtureSource, ...] = ()  # source "mixture"
    phases: tuple[tuple[int, tuple[float, ...]], ...] = ()  # (first step, weights): weights that change
    exhausted: Literal["repeat", "stop_first", "stop_all"] = "repeat"
    cache_dir: str | None = None  # where prepared token files go; None: a "cache" folder in the workdir
    log_samples: bool = False  # write the sample ids of every batch to DIR/samples.jsonl


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    interval: int | None = 1000  # steps; None: only at the end
    keep: int = 2  # newest ones
    keep_every: int | None = None  # and every multiple of this many steps
    keep_best: int | None = None  # and the best by evaluation loss
    asynchronous: bool = True
    strict: bool = False  # True: a damaged newest step refuses instead of falling back to an older one
    cast: bool = False  # True: stored arrays of another float type are cast on restore
    max_failed_saves: int = 2  # in a row; then the run stops with exit code 75


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """Processes, watchdog and compile cache."""

    step_timeout_s: float = 600.0  # longest time without a finished step
    heartbeat_s: int = 60  # after so long without one, jax takes a process for lost
    compile_cache: str | None = None  # folder of the persistent compile cache; None: "compile_cache" in the workdir


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    peak_tflops: float | None = None  # of one device; None: by the table of GPUs in metrics.py


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights, which `init_from` names; rank 0 trains all weights."""

    rank: int = 0
    alpha: float = 16.0  # the update is scaled by alpha / rank
    targets: tuple[str, ...] = ("q", "k", "v", "out")  # q | k | v | out | gate | up | down
    base: Literal["float32", "int8", "nf4"] = "float32"  # how the frozen weights are held


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """data.source = "chat": conversations in JSONL, trained on the answers alone."""

    template: str | None = None  # file of a Jinja chat template; None: that of the tokenizer
    messages_key: str = "messages"  # of a row: a list of {"role": ..., "content": ...}
    train_on: tuple[str, ...] = ("assistant",)  # roles whose messages are learned


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    steps: int = 1000
    seed: int = 0
    global_batch: int = 8  # rows per optimizer step
    seq_len: int = 1024
    accumulation: int = 1  # sequential parts of the global batch
    log_interval: int = 10
    eval_interval: int | None = None
    eval_steps: int | None = None  # batches of one evaluation; None: the whole held-out split
    init_from: str | None = None  # start from this checkpoint or Hugging Face directory
    precision: Literal["bf16", "float32", "fp16", "fp8"] = "bf16"
    remat: Literal["none", "dots", "attention", "full"] = "none"
    allow_fewer_steps: bool = False  # exit 0 although the data ended before `steps`
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    metrics: MetricsConfig = MetricsConfig()
    lora: LoraConfig = LoraConfig()
    chat: ChatConfig = ChatConfig()
