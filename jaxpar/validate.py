"""Checks of a config that need no model and no jax: sizes that divide, meshes that fit, ranges.

Owns the arithmetic of the parallel degrees. Every message names keys, values and a value that would work; the real run
and the dry run call the same `check`, so they give the same verdict.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxpar.config import Config, ModelConfig, ParallelConfig
from jaxpar.context_plan import choose
from jaxpar.errors import UserError, raise_together
from jaxpar.models import families

AXES = ("stage", "replica", "data", "expert", "context", "tensor")  # of the mesh, outermost first
BATCH_AXES = ("replica", "data", "expert")
ONE_CHUNK_SCHEDULES = ("gpipe", "1f1b", "zb_h1")
SCHEDULES = ("auto", *ONE_CHUNK_SCHEDULES, "fused", "interleaved")
LORA_TARGETS = ("q", "k", "v", "out", "gate", "up", "down")  # weights of a layer that an adapter can have
MIXTURE_KINDS = ("files", "tokens", "megatron", "raw", "python_stdlib")
SCHEDULE_ALIASES = {"one_f_one_b": "1f1b", "zero_bubble": "zb_h1", "circular": "interleaved"}

# Lowest value of a key; None as a value is always allowed where its type is.
AT_LEAST = {
    1: """steps global_batch seq_len accumulation log_interval eval_interval eval_steps
        model.num_layers model.embed_dim model.num_heads model.num_kv_heads model.head_dim model.mlp_dim
        model.vocab_size model.vocab_multiple model.max_position model.window model.rope.factor
        model.rope.original_max_position model.moe.experts_per_token model.moe.expert_dim model.moe.num_groups
        model.moe.groups_per_token pipeline.chunks pipeline.microbatches loss.chunk_tokens optimizer.max_skipped
        model.latent.query_rank model.latent.rope_dim model.latent.value_dim
        checkpoint.interval checkpoint.keep checkpoint.keep_every checkpoint.keep_best checkpoint.max_failed_saves
        runtime.heartbeat_s""",
    0: """model.dropout model.moe.num_experts model.moe.num_shared model.moe.first_dense model.moe.balance_loss
        model.moe.router_z_loss model.moe.bias_update_rate model.latent.kv_rank optimizer.learning_rate
        optimizer.warmup_steps optimizer.decay_steps optimizer.final_fraction optimizer.weight_decay optimizer.b1
        optimizer.b2 optimizer.momentum optimizer.eps loss.z_loss loss.label_smoothing data.eval_fraction lora.rank""",
}
MORE_THAN_ZERO = """model.norm_eps model.rope.base model.rope.local_base model.rope.attention_factor
    model.rope.fraction model.rope.low_freq_factor model.rope.high_freq_factor model.rope.beta_fast
    model.rope.beta_slow model.attention_soft_cap model.logit_soft_cap model.query_scale model.embed_scale
    model.init_std model.swiglu_alpha model.swiglu_limit model.latent.norm_eps model.moe.weight_scale
    model.moe.capacity_factor optimizer.clip_norm runtime.step_timeout_s metrics.peak_tflops lora.alpha"""
LARGEST_SEED = 2**32 - 1  # jax takes the lower 32 bits of larger ones
LESS_THAN_ONE = "model.dropout optimizer.b1 optimizer.b2 optimizer.momentum loss.label_smoothing data.eval_fraction"
AT_MOST_ONE = "model.rope.fraction optimizer.final_fraction"


def check(config: Config, num_devices: int | None, vocab_size: int | None = None) -> None:
    """Raise one `UserError` with everything that `problems` finds."""
    raise_together(problems(config, num_devices, vocab_size))


def problems(config: Config, num_devices: int | None, vocab_size: int | None = None) -> list[str]:
    """Everything wrong with a config.

    `num_devices` None: the mesh is checked as far as it can be. `vocab_size`: ids that the tokenizer can give.
    """
    found = list(_ranges(config))
    sizes, mesh_problems = _degrees(config.parallel, num_devices)
    if not found:  # these divide by numbers that are positive now
        for rule in (_batch, _sequence, _width, _attention, _options, _experts, _vocabulary, _pipeline):
            found += rule(config, sizes)
    found += mesh_problems
    for rule in (_family, _training, _data):
        found += rule(config)
    if vocab_size is not None and config.model.vocab_size is not None and config.model.vocab_size < vocab_size:
        found.append(
            f"model.vocab_size = {config.model.vocab_size}, but data.tokenizer gives ids up to {vocab_size - 1}; "
            f"use {vocab_size}, or None to follow the tokenizer"
        )
    return found


def resolved_degrees(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Size of every mesh axis, outermost first, with -1 resolved; raises `UserError`."""
    sizes, found = _degrees(parallel, num_devices)
    raise_together(found)
    return {axis: size for axis, size in sizes.items() if size is not None}


def microbatches(config: Config) -> int:
    """Microbatches of the pipeline schedule; 1 without a pipeline."""
    if config.parallel.stage == 1:
        return 1
    return config.pipeline.microbatches or 2 * config.parallel.stage


# --- the mesh --------------------------------------------------------------------------------------------------------

Sizes = dict[str, int | None]  # None: -1 that cannot be resolved without the number of devices


def _degrees(parallel: ParallelConfig, num_devices: int | None) -> tuple[Sizes, list[str]]:
    asked = {axis: getattr(parallel, axis) for axis in AXES}
    found = [
        f"parallel.{axis} = {size}: an axis size is at least 1, or -1 to take the devices that are left"
        for axis, size in asked.items()
        if size == 0 or size < -1
    ]
    free = [axis for axis, size in asked.items() if size == -1]
    if len(free) > 1:
        keys = " and ".join(f"parallel.{axis}" for axis in free)
        found.append(f"{keys} are all -1; only one can take the devices that are left: set the others, 1 for off")
    sizes: Sizes = {axis: size if size > 0 else None for axis, size in asked.items()}
    if found or num_devices is None:
        return sizes, found
    fixed = {axis: size for axis, size in asked.items() if size != -1}
    product = math.prod(fixed.values())
    if free and num_devices % product == 0:
        sizes[free[0]] = num_devices // product
    elif free or product != num_devices:
        found.append(_misfit(fixed, product, free, num_devices))
    return sizes, found


def _misfit(fixed: dict[str, int], product: int, free: list[str], num_devices: int) -> str:
    used = {f"parallel.{axis}": size for axis, size in fixed.items() if size != 1} or {"parallel.data": 1}
    named = f"{' x '.join(used)} = {' x '.join(map(str, used.values()))}"
    if len(used) > 1:
        named += f" = {product}"
    if free:
        verdict = f"does not divide the {num_devices} devices, so parallel.{free[0]} = -1 cannot take the rest"
    elif product > num_devices:
        verdict = f"needs {product} devices, but there are {num_devices}"
    else:
        verdict = f"uses {product} of {num_devices} devices; all must be used"
    return f"{named} {verdict}: use {_fitting(fixed, free, num_devices)}"


def _fitting(fixed: dict[str, int], free: list[str], num_devices: int) -> str:
    """Degrees near the asked ones that use every device: what is left goes to the free axis, else to `data`."""
    left, changed = num_devices, {}
    for axis in reversed(AXES):  # tensor first: it is the degree people mean most
        if axis in fixed and (free or axis != "data"):
            size = math.gcd(left, fixed[axis])
            left //= size
            if size != fixed[axis]:
                changed[axis] = size
    if not free:
        changed["data"] = left
    return " and ".join(f"parallel.{axis} = {size}" for axis, size in changed.items())


# --- sizes that divide -----------------------------------------------------------------------------------------------


Works = Callable[[int], bool]


def _near(value: int, multiple: int, works: Works | None = None) -> str:
    """The next multiples on both sides of a value that work, as "8 or 12"; if none does, the next multiples."""
    first = value // multiple * multiple
    below, above = range(first, 0, -multiple), range(first + multiple, first + 1024 * multiple, multiple)
    found = [next((n for n in side if works is None or works(n)), None) for side in (below, above)]
    return " or ".join(str(n) for n in found if n) or _near(value, multiple)


def _indivisible(
    key: str, value: int, divisor: int, why: str, axis: str | None = None, works: Works | None = None
) -> Iterator[str]:
    """A problem if the value does not divide; `axis` is the degree that could be lowered instead."""
    if value % divisor:
        instead = f", or parallel.{axis} = {math.gcd(value, divisor)}" if axis else ""
        yield f"{key} = {value} is not divisible by {why}; use {_near(value, divisor, works)}{instead}"


def _product(factors: dict[str, int]) -> str:
    """The text "a x b = 2 x 3 = 6", leaving out factors of one."""
    used = {key: size for key, size in factors.items() if size != 1}
    text = f"{' x '.join(used)} = {' x '.join(map(str, used.values()))}"
    return f"{text} = {math.prod(used.values())}" if len(used) > 1 else text


def _batch(config: Config, sizes: Sizes) -> Iterator[str]:
    factors = {f"parallel.{axis}": sizes[axis] or 1 for axis in BATCH_AXES}
    factors["accumulation"] = config.accumulation
    stage = sizes["stage"] or 1
    if stage > 1:
        factors["pipeline.microbatches"] = microbatches(config)
    divisor = math.prod(factors.values())
    yield from _indivisible("global_batch", config.global_batch, divisor, _product(factors))
    if stage > 1 and config.accumulation > 1:
        yield (
            f"accumulation = {config.accumulation} with parallel.stage = {stage}: a pipeline already splits the batch; "
            f"use accumulation = 1 and pipeline.microbatches = {config.accumulation * microbatches(config)}"
        )


def _sequence(config: Config, sizes: Sizes) -> Iterator[str]:
    context, tensor = sizes["context"] or 1, sizes["tensor"] or 1
    factors = {"parallel.context": context}
    if context > 1 and config.parallel.context_mode in ("ring", "ring_all_to_all", "all_gather"):
        factors["2 (an early and a late piece of the row each)"] = 2
    pieces = math.prod(factors.values())
    if config.parallel.sequence_parallel:
        factors["parallel.tensor (sequence_parallel)"] = tensor
    yield from _indivisible("seq_len", config.seq_len, math.prod(factors.values()), _product(factors))
    chunk = config.loss.chunk_tokens
    if chunk is not None and 0 < chunk < config.seq_len:  # a row that fits into one chunk has no others
        yield from _indivisible("seq_len", config.seq_len, chunk, f"loss.chunk_tokens = {chunk}")
        yield from _indivisible("loss.chunk_tokens", chunk, context, f"parallel.context = {context}")
    if config.seq_len % pieces or config.model.num_heads % tensor or config.model.num_heads % config.model.kv_heads:
        return  # said here or by `_attention`
    try:
        choose(config, context=context, tensor=tensor, stage=sizes["stage"] or 1)
    except UserError as error:
        yield str(error)


def _width(config: Config, sizes: Sizes) -> Iterator[str]:
    model, tensor = config.model, sizes["tensor"] or 1
    why, works = f"parallel.tensor = {tensor}", lambda width: _splits_into_heads(model, width, model.num_heads)
    yield from _indivisible("model.embed_dim", model.embed_dim, tensor, why, "tensor", works)
    yield from _indivisible("model.mlp_dim", model.mlp_dim, tensor, why, "tensor")


def _splits_into_heads(model: ModelConfig, width: int, heads: int) -> bool:
    """Whether heads of an even share of the width, where that is their size, are whole and can be rotated."""
    if model.head_dim is not None or width % heads:
        return model.head_dim is not None
    return model.positions != "rope" or bool(model.latent.kv_rank) or _rotates(width // heads, model.rope.fraction)


def _rotates(width: int, fraction: float) -> bool:
    """Whether rotary positions find pairs, at least one, in that fraction of a head."""
    return (rotated := int(width * fraction)) >= 2 and rotated % 2 == 0


def _attention(config: Config, sizes: Sizes) -> Iterator[str]:
    model, tensor = config.model, sizes["tensor"] or 1
    heads, kv_heads = model.num_heads, model.kv_heads
    grouped = kv_heads if kv_heads != heads else 1  # equal numbers of both are changed together
    works = lambda n: n % grouped == 0 and _splits_into_heads(model, model.embed_dim, n)  # noqa: E731
    yield from _indivisible("model.num_heads", heads, tensor, f"parallel.tensor = {tensor}", "tensor", works)
    if heads % kv_heads:
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        nearest = min(divisors, key=lambda count: abs(count - kv_heads))
        yield f"model.num_kv_heads = {kv_heads} does not divide model.num_heads = {heads}; use {nearest}"
    elif kv_heads % tensor and tensor % kv_heads and heads % tensor == 0:
        yield (
            f"model.num_kv_heads = {kv_heads} and parallel.tensor = {tensor}: one must divide the other, so that KV "
            f"heads are split or copied evenly; use parallel.tensor = {math.gcd(kv_heads, tensor)}"
        )
    if model.head_dim is None and model.embed_dim % heads:
        near = _near(model.embed_dim, heads, lambda n: n % tensor == 0 and _splits_into_heads(model, n, heads))
        yield (
            f"model.embed_dim = {model.embed_dim} is not divisible by model.num_heads = {heads}; use {near}, "
            "or set model.head_dim"
        )
    elif model.positions == "rope":
        key, width = "head_dim", model.head_size
        if model.latent.kv_rank:
            key, width = "latent.rope_dim", model.latent.rope_dim
        fraction = model.rope.fraction
        rotated = int(width * fraction)
        if not _rotates(width, fraction):
            even = next((n for n in range(2, 1025, 2) if _rotates(n, fraction) and int(n * fraction) >= rotated), None)
            use = f"model.{key} = {even}" if even else "a larger model.rope.fraction"
            yield (
                f"model.{key} = {width} with model.rope.fraction = {fraction} rotates {rotated} values, but they "
                f"come in pairs, at least one; use {use}"
            )
    if model.positions == "learned" and model.max_position is not None and model.max_position < config.seq_len:
        yield (
            f"model.max_position = {model.max_position} learned positions are fewer than seq_len = {config.seq_len}; "
            f"use model.max_position = {config.seq_len} (or None), or seq_len = {model.max_position}"
        )


def _options(config: Config, sizes: Sizes) -> Iterator[str]:
    """Options of the model that do not go together."""
    del sizes
    model = config.model
    rope = model.rope
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        yield (
            f"model.rope.low_freq_factor = {rope.low_freq_factor} must be less than model.rope.high_freq_factor = "
            f"{rope.high_freq_factor}; Llama 3 has 1 and 4"
        )
    if model.activation == "clamped_swiglu" and not model.gated:
        yield "model.activation = clamped_swiglu with model.gated = False: it has two inputs; use model.gated = True"
    lacking = {"attention_sinks": ("sinks", False), "attention_soft_cap": ("soft cap", None)}
    for key, (what, off) in lacking.items():
        if (value := getattr(model, key)) != off and model.attention == "cudnn":
            instead = 'use model.attention = "xla", or "auto", which takes it'
            yield f"model.{key} = {value} with model.attention = cudnn: that kernel has no {what}; {instead}"
    if model.latent.kv_rank:
        if model.attention_sinks:
            yield "model.attention_sinks = True with model.latent.kv_rank: latent attention has none; use False"
        if model.positions != "rope":
            yield f'model.positions = {model.positions} with model.latent.kv_rank: latent attention needs "rope"'
        if model.kv_heads != model.num_heads:
            yield (
                f"model.num_kv_heads = {model.num_kv_heads} with model.latent.kv_rank: in latent attention every head "
                f"has keys and values of its own; use model.num_kv_heads = {model.num_heads}, or None"
            )
        if model.qk_norm != "none":
            yield (
                f'model.qk_norm = {model.qk_norm} with model.latent.kv_rank: latent attention has none; use "none" '
                "(its compressed vectors have norms)"
            )


def _experts(config: Config, sizes: Sizes) -> Iterator[str]:
    moe, expert, tensor = config.model.moe, sizes["expert"] or 1, sizes["tensor"] or 1
    if moe.num_experts == 0:
        if expert > 1:
            yield (
                f"parallel.expert = {expert}, but the model has no experts (model.moe.num_experts = 0); "
                "use parallel.expert = 1 and a larger parallel.data"
            )
        return
    yield from _indivisible("model.moe.num_experts", moe.num_experts, expert, f"parallel.expert = {expert}", "expert")
    if moe.expert_dim is not None:
        yield from _indivisible("model.moe.expert_dim", moe.expert_dim, tensor, f"parallel.tensor = {tensor}", "tensor")
    yield from _indivisible("model.moe.num_experts", moe.num_experts, moe.num_groups, f"num_groups = {moe.num_groups}")
    for key, value, limit_key, limit in (
        ("experts_per_token", moe.experts_per_token, "moe.num_experts", moe.num_experts),
        ("groups_per_token", moe.groups_per_token, "moe.num_groups", moe.num_groups),
        ("first_dense", moe.first_dense, "num_layers", config.model.num_layers),
    ):
        if value > limit:
            yield f"model.moe.{key} = {value} is more than model.{limit_key} = {limit}; use at most {limit}"
    if moe.first_dense == config.model.num_layers:
        yield (
            f"model.moe.first_dense = {moe.first_dense} = model.num_layers leaves no layer with experts; use at most "
            f"{moe.first_dense - 1}, or model.moe.num_experts = 0"
        )
    choice = moe.num_experts // moe.num_groups * moe.groups_per_token
    if choice < moe.experts_per_token <= moe.num_experts:
        yield (
            f"model.moe.experts_per_token = {moe.experts_per_token} is more than the {choice} experts of "
            f"model.moe.groups_per_token = {moe.groups_per_token} groups; use at most {choice}, or more groups"
        )
    if config.precision == "fp8":
        yield 'precision = "fp8" with model.moe: experts have no products of 8-bit floats; use precision = "bf16"'


def _vocabulary(config: Config, sizes: Sizes) -> Iterator[str]:
    factors = {f"parallel.{axis}": sizes[axis] or 1 for axis in ("stage", "tensor")}
    multiple, divisor = config.model.vocab_multiple, math.prod(factors.values())
    if multiple % divisor:
        works = math.lcm(multiple, divisor)
        yield f"model.vocab_multiple = {multiple} is not divisible by {_product(factors)}; use {works}"


def mixed_stages(config: Config, *, splits_weights: bool) -> Iterator[str]:
    """What stages that hold layers of two kinds cannot do."""
    where = f"with parallel.stage = {config.parallel.stage} and model.moe.first_dense = {config.model.moe.first_dense}"
    if config.remat != "full":
        yield (
            f'remat = "{config.remat}" {where}: stages skip the slots of layers that they do not have, and keep only '
            'the inputs of those that they have; use remat = "full"'
        )
    if splits_weights:
        yield (
            f"pipeline.schedule = {config.pipeline.schedule} {where}: the two halves of the backward pass cannot be "
            'told apart in slots that may be skipped; use "fused" or "1f1b"'
        )


def _pipeline(config: Config, sizes: Sizes) -> Iterator[str]:
    stage, pipeline = sizes["stage"] or 1, config.pipeline
    if stage == 1:
        return
    parts, layers = stage * pipeline.chunks, config.model.num_layers
    if layers < parts:
        why = _product({"parallel.stage": stage, "pipeline.chunks": pipeline.chunks})
        yield f"model.num_layers = {layers} leaves empty stages with {why}; use parallel.stage x chunks <= {layers}"
    if pipeline.microbatches is not None and pipeline.microbatches < stage:
        yield (
            f"pipeline.microbatches = {pipeline.microbatches} is less than parallel.stage = {stage}, so stages would "
            f"always idle; use at least {stage}, better {2 * stage}"
        )
    schedule = SCHEDULE_ALIASES.get(pipeline.schedule, pipeline.schedule)
    if schedule in ONE_CHUNK_SCHEDULES and pipeline.chunks > 1:
        yield (
            f"pipeline.schedule = {schedule} has one chunk a stage, but pipeline.chunks = {pipeline.chunks}; "
            "use pipeline.chunks = 1, or pipeline.schedule = fused or interleaved"
        )
    if config.model.moe.num_experts and config.model.moe.first_dense:
        yield from mixed_stages(config, splits_weights=schedule == "zb_h1")
    if schedule in SCHEDULES:
        return
    if Path(pipeline.schedule).suffix != ".csv":
        close = difflib.get_close_matches(pipeline.schedule.lower().replace("-", "_"), SCHEDULES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"pipeline.schedule: got {pipeline.schedule!r}, wanted one of {', '.join(SCHEDULES)} or a .csv file{hint}"
    elif not Path(pipeline.schedule).is_file():
        yield f"pipeline.schedule = {pipeline.schedule}: no such file"


# --- single numbers and the rest -------------------------------------------------------------------------------------


def _value(config: Config, key: str) -> float | None:
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    assert found is None or isinstance(found, int | float), key
    return found


Limit = tuple[str, Callable[[float], bool], str]  # key, whether a value holds, what is wanted


@functools.cache
def _limits() -> tuple[Limit, ...]:
    limits: list[Limit] = [
        (key, lambda value, low=low: value >= low, f"at least {low}")
        for low in AT_LEAST
        for key in AT_LEAST[low].split()
    ]
    limits.append(("seed", lambda value: 0 <= value <= LARGEST_SEED, f"0 to {LARGEST_SEED}"))
    limits += [(key, lambda value: value > 0, "more than 0") for key in MORE_THAN_ZERO.split()]
    limits += [(key, lambda value: value < 1, "less than 1") for key in LESS_THAN_ONE.split()]
    limits += [(key, lambda value: value <= 1, "at most 1") for key in AT_MOST_ONE.split()]
    return tuple(limits)


def wanted_range(key: str, value: float | None) -> str | None:
    """What is wanted of the number at a dotted key, such as "at least 1", where `value` is none such; else None."""
    if value is None:
        return None
    return next((wanted for name, holds, wanted in _limits() if name == key and not holds(value)), None)


def _ranges(config: Config) -> Iterator[str]:
    for key, holds, wanted in _limits():
        value = _value(config, key)
        if value is not None and not holds(value):
            yield f"{key} = {value}: wanted {wanted}"
    for key in ("window_pattern", "rope_pattern"):
        if not getattr(config.model, key):
            yield f"model.{key} is empty; wanted at least one of true, false"


def _family(config: Config) -> Iterator[str]:
    if config.model.family not in families.PRESETS:
        yield f"model.family: {families.unknown(config.model.family)}"


def _training(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.warmup_steps > config.steps > 0:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than steps = {config.steps}; "
            f"use at most {config.steps}"
        )
    elif optimizer.schedule == "wsd" and optimizer.warmup_steps + (optimizer.decay_steps or 0) > config.steps:
        yield (
            f"optimizer.warmup_steps + decay_steps = {optimizer.warmup_steps} + {optimizer.decay_steps} is more than "
            f"steps = {config.steps}; use decay_steps = {config.steps - optimizer.warmup_steps} at most"
        )
    if optimizer.learning_rate > 3.4e38:
        yield f"optimizer.learning_rate = {optimizer.learning_rate:g} is infinite in float32; use a smaller one"
    if optimizer.momentum is not None and optimizer.name not in ("sgd", "muon"):
        yield f"optimizer.momentum = {optimizer.momentum} is for sgd, but optimizer.name = {optimizer.name}; use b1"
    if config.lora.base != "float32" and not config.lora.rank:
        yield (
            f"lora.base = {config.lora.base!r} is for frozen weights, but lora.rank = 0 trains all of them; "
            "set lora.rank, or lora.base to 'float32'"
        )
    if unknown := [target for target in config.lora.targets if target not in LORA_TARGETS]:
        yield f"lora.targets: {', '.join(map(repr, unknown))} is no weight; choose from {', '.join(LORA_TARGETS)}"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.source in ("files", "tokens", "megatron", "raw") and not data.files:
        yield f"data.files is empty, but data.source = {data.source} reads files; set data.files to paths or globs"
    if data.source == "raw" and data.raw_dtype is None:
        yield "data.raw_dtype is not set, but a headerless token file does not say its width; use uint16 or uint32"
    if data.source != "mixture":
        return
    if not data.sources:
        yield "data.sources is empty, but data.source = mixture; list sources with name, files and weight"
        return
    for source in data.sources:
        if source.source not in MIXTURE_KINDS:
            kinds = ", ".join(MIXTURE_KINDS)
            yield f"data.sources: {source.name!r} has the source {source.source!r}; want one of {kinds}"
    weights = [source.weight for source in data.sources]
    if min(weights) < 0 or sum(weights) == 0:
        yield f"data.sources: weights {weights} must be at least 0 and not all 0"
    starts = [start for start, _ in data.phases]
    if starts != sorted(set(starts)):
        yield f"data.phases: first steps {starts} must rise"
    for start, phase_weights in data.phases:
        if len(phase_weights) != len(weights) or min(phase_weights) < 0 or sum(phase_weights) == 0:
            yield (
                f"data.phases: step {start} has weights {list(phase_weights)}; wanted {len(weights)} of them, "
                "at least 0 and not all 0"
            )
