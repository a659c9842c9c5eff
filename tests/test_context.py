"""Attention over split rows: exact in every mode, even work, the textbook's bytes, and clear refusals."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import HEAD_DIM, LENGTH, ROWS, Case, cases, exchange, inputs, mesh_of, plain, value_and_gradients
from jax.sharding import PartitionSpec as P
from layouts import References, assert_same, tiny

from jaxpar import context, sharding
from jaxpar.build import build
from jaxpar.config import LossConfig
from jaxpar.context.ring import _own_pairs, _pairs
from jaxpar.context.rotation import PairedRing, Ring
from jaxpar.context.tiles import tile_length
from jaxpar.errors import UserError
from jaxpar.layout_check import put, random_batch, shrunk
from jaxpar.models.attention import Mask, ScoreRules, attend

CASES = cases()
QUICK = [
    Case("ring", 2, 8, 2, packed=True, tile=4),
    Case("ring", 4, 8, 2, packed=True, window=24, soft_cap=2.0),
    Case("all_to_all", 8, 8, 2, packed=True),
    Case("all_gather", 4, 8, 2, packed=True, tile=4),
    Case("ring_all_to_all", 8, 4, 2, packed=True),
    Case("ring", 4, 8, 2, packed=True, window=24, stage=2),
    Case("ring_all_to_all", 8, 2, 2, packed=True, stage=2),
]


def check(case: Case) -> None:
    wanted = value_and_gradients(plain(case), case)
    got = value_and_gradients(exchange(case, mesh_of(case.size)), case)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_attention(case: Case):
    check(case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_in_every_mode(case: Case):
    check(case)


MODELS = {
    "ring": ({"context": 4, "data": 2, "context_mode": "ring"}, {"num_kv_heads": 2, "window": 20}, {}),
    "all to all, tensor, ZeRO": (
        {"context": 2, "tensor": 2, "data": 2, "zero": 3, "sequence_parallel": True, "context_mode": "all_to_all"},
        {"num_kv_heads": 1, "dropout": 0.1}, {"accumulation": 2},
    ),
    "pipeline": ({"stage": 2, "context": 2, "data": 2, "context_mode": "all_gather"}, {}, {}),
}  # fmt: skip
WIDE = {
    f"{mode}-{size}-{name}": (parallel | {"context": size, "context_mode": mode}, model, settings)
    for mode in ("ring", "all_to_all", "all_gather")
    for size in (2, 4, 8)
    for name, (parallel, model, settings) in {
        "data": ({"data": 8 // size}, {"num_kv_heads": 4}, {}),
        "zero3": ({"data": 8 // size, "zero": 3}, {"window": 20}, {"remat": "full"}),
        "dropout": ({"replica": 8 // size, "zero": 1}, {"dropout": 0.3}, {"remat": "attention"}),
        "caps": ({"data": 8 // size, "zero": 2},
                 {"attention_soft_cap": 5.0, "window": 16, "window_pattern": (True, False)}, {"remat": "dots"}),
    }.items()
} | {
    f"{mode}-tensor{tensor}-sequence{sequence}-zero{zero}": (
        {"context": 2, "context_mode": mode, "tensor": tensor, "data": 4 // tensor, "zero": zero,
         "sequence_parallel": sequence}, {"num_kv_heads": 2}, {},
    )
    for mode in ("ring", "all_to_all", "all_gather") for tensor in (2, 4) for sequence in (False, True)
    for zero in ((0, 2, 3) if tensor == 2 else (0,))
} | {
    f"stages-{mode}-{size}-zero{zero}": (
        {"stage": 2, "context": size, "data": 4 // size, "zero": zero, "context_mode": mode}, {"num_kv_heads": 4}, {},
    )
    for mode in ("all_to_all", "all_gather", "ring", "auto") for size in (2, 4) for zero in (0, 3)
} | {
    f"stages-ring_all_to_all-4-zero{zero}": (
        {"stage": 2, "context": 4, "zero": zero, "context_mode": "ring_all_to_all"},
        {"num_heads": 2, "num_kv_heads": 2}, {},
    )
    for zero in (0, 3)
} | {
    "ring_all_to_all-8": ({"context": 8, "context_mode": "ring_all_to_all"}, {"num_heads": 4, "num_kv_heads": 2}, {}),
    "ring_all_to_all-4-tensor": (
        {"context": 4, "tensor": 2, "context_mode": "ring_all_to_all", "sequence_parallel": True},
        {"num_heads": 4, "num_kv_heads": 2, "dropout": 0.2}, {},
    ),
    "chunked loss": ({"context": 4, "data": 2, "context_mode": "ring"}, {},
                     {"accumulation": 2, "loss": LossConfig(chunk_tokens=16, z_loss=1e-3, label_smoothing=0.1)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def references():
    return References()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ring" else pytest.mark.sweep) for name in MODELS]
)
def test_model(name: str, references: References):
    parallel, model, settings = MODELS[name]
    assert_same(tiny(parallel=parallel, model=model, **settings), references)


@pytest.mark.sweep
@pytest.mark.parametrize("name", WIDE)
def test_every_layout(name: str, references: References):
    parallel, model, settings = WIDE[name]
    assert_same(tiny(parallel=parallel, model=model, **settings), references)


def test_sweep_is_wide():
    assert len(WIDE) >= 60
    assert {(case.mode, case.size) for case in CASES} >= {
        (mode, size) for mode in ("ring", "all_to_all", "all_gather") for size in (2, 4, 8)
    }


@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_documents_do_not_see_each_other_across_shards(mode: str):
    case = Case(mode, 4, packed=True)
    q, k, v, segments = inputs(case)
    run = jax.jit(exchange(case, mesh_of(4)))
    out = np.asarray(run(q, k, v, segments))
    first = np.asarray(segments)[0] == 1
    noise = jnp.where(jnp.asarray(first)[None, :, None, None], 7.0, 0.0)
    other = np.asarray(run(q + noise, k + noise, v - noise, segments))
    assert np.abs(other[0, first] - out[0, first]).max() > 0.1
    np.testing.assert_array_equal(other[0, ~first], out[0, ~first])


def test_logits_come_in_the_order_of_the_row():
    config = tiny(parallel={"context": 4, "data": 2, "context_mode": "ring"}, model={"num_layers": 1})
    built = build(config)
    params = built.init(jax.random.key(0)).params
    batch = random_batch(config)
    found = jax.jit(functools.partial(type(params).logits, sharder=built.layout))(params, put(built, batch))
    wanted = jax.device_get(params).logits(batch)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("places", [2, 4, 8])
def test_zigzag_is_a_permutation_with_even_causal_work(places: int):
    order = context.stream_order(LENGTH, places)
    assert sorted(order) == list(range(LENGTH))
    work = [int((piece + 1).sum()) for piece in np.split(order, places)]
    assert max(work) == min(work)
    natural = [int((piece + 1).sum()) for piece in np.split(np.arange(LENGTH), places)]
    assert max(natural) / min(natural) > places  # what it would be in order: at least 3 for two places


@pytest.mark.parametrize("places", [2, 4, 8])
def test_the_ring_meets_every_visible_pair_of_pieces_once(places: int):
    met = set()
    for own in range(places):
        pieces = (own, 2 * places - 1 - own)
        pairs = [(int(a.number), pieces[int(b.number)]) for a, b in _own_pairs()]
        for source in range(places):
            if source != own:
                theirs = (source, 2 * places - 1 - source)
                pairs += [
                    (int(a.number), theirs[int(b.number)]) for a, b in _pairs(jnp.asarray(source), jnp.asarray(own))
                ]
        assert len(pairs) == 2 * places + 1  # the same number on every place
        found = {(pieces[mine], theirs) for mine, theirs in pairs}
        assert len(found) == len(pairs)
        met |= found
    assert met == {(i, j) for i in range(2 * places) for j in range(i + 1)}


@pytest.mark.parametrize("kind", [Ring, PairedRing])
@pytest.mark.parametrize(("places", "stride"), [(2, 1), (2, 4), (4, 2), (8, 1)])
def test_every_block_visits_every_place_and_comes_home(kind: type[Ring], places: int, stride: int):
    ring, devices = kind("context", places, stride), np.arange(places * stride)

    def travel(block: jax.Array) -> jax.Array:
        """[1, hops, 2]: what is here after every hop, and the place that it is said to be from."""
        found = []
        for hop in range(1, places + 1):
            block = ring.pass_on(block, hop)
            found.append(jnp.stack([block[0], ring.source(hop)]))
        return jnp.stack(found)[None]

    spec = P("context")
    mapped = jax.shard_map(travel, mesh=mesh_of(devices.size), in_specs=spec, out_specs=spec, check_vma=False)
    here, said = np.moveaxis(np.asarray(jax.jit(mapped)(jnp.asarray(devices))), -1, 0)
    np.testing.assert_array_equal(here, said * stride + devices[:, None] % stride)
    assert all(sorted(row) == list(range(places)) for row in said)
    np.testing.assert_array_equal(here[:, -1], devices)


def exchanged(case: Case, kind: str) -> list[tuple[int, int]]:
    """(features, times) of the collectives of a kind in one layer's forward pass, as the program states them."""
    q, k, v, segments = inputs(case)
    run = exchange(case, mesh_of(case.size))
    text = jax.jit(lambda q, k, v: run(q, k, v, segments)).lower(q, k, v).as_text()
    calls = re.findall(rf"stablehlo\.{kind}\b.*?-> tensor<([0-9x]+)xf32>", text, re.DOTALL)
    sizes = [math.prod(int(dim) for dim in shape.split("x")) for shape in calls]
    return sorted(collections.Counter(sizes).items())


def test_exchanges_are_those_of_the_textbook():
    """Keys and values go round unrepeated; q, k, v and the output are swapped once; c devices hold T / c tokens."""
    tokens = ROWS * LENGTH // 4
    # Keys and values: asked for once before the loop and once in it (which runs twice), so 3 times in all; and all
    # that again for the second of two KV heads, as each is a share that goes round by itself, in an outer loop.
    assert exchanged(Case("ring", 4, 8, 2), "collective_permute") == [(tokens * HEAD_DIM, 4)]
    # In a pipeline each swap gathers two blocks, one of them the device's own; the loop has two hops and runs once.
    in_stages = Case("ring", 4, 8, 2, stage=2)
    assert exchanged(in_stages, "all_gather") == [(2 * tokens * HEAD_DIM, 6)]
    assert exchanged(in_stages, "collective_permute") == []
    assert exchanged(Case("all_to_all", 4, 8, 4), "all_to_all") == [
        (tokens * 4 * HEAD_DIM, 2),
        (tokens * 8 * HEAD_DIM, 2),
    ]
    # Two KV heads on four devices: each goes to the two devices whose queries use it.
    assert exchanged(Case("all_to_all", 4, 8, 2), "all_to_all") == [
        (tokens * 4 * HEAD_DIM, 2),
        (tokens * 8 * HEAD_DIM, 2),
    ]
    assert exchanged(Case("all_gather", 4, 8, 2), "all_gather") == [(4 * tokens * 2 * HEAD_DIM, 2)]


def test_auto_says_why():
    base = Case("auto", 4)

    def mode_of(case: Case, *, seq_len: int = LENGTH, stage: int = 1) -> context.ContextPlan:
        config = dataclasses.replace(case.config(), seq_len=seq_len)
        plan = context.choose(config, context=case.size, tensor=1, stage=stage)
        assert plan is not None
        assert plan.reason
        return plan

    assert mode_of(base).mode == "all_to_all"
    assert "divide" in mode_of(base).reason
    assert mode_of(base, seq_len=1 << 18).mode == "ring"  # a hop hides behind 65 536 tokens of work
    assert "hides" in mode_of(base, seq_len=1 << 18).reason
    assert mode_of(dataclasses.replace(base, heads=3, kv_heads=1)).mode == "ring"
    both = mode_of(dataclasses.replace(base, heads=6, kv_heads=2))
    assert (both.mode, both.ring, both.groups) == ("ring_all_to_all", 2, 2)
    assert mode_of(base, seq_len=1 << 18, stage=2).mode == "all_to_all"
    assert "pipeline" in mode_of(base, seq_len=1 << 18, stage=2).reason
    assert mode_of(dataclasses.replace(base, heads=3, kv_heads=1), stage=2).mode == "ring"
    odd = dataclasses.replace(base, size=3)
    assert mode_of(odd, seq_len=48, stage=2).mode == "all_gather"
    assert "no ring of 3 places" in mode_of(odd, seq_len=48, stage=2).reason
    assert context.choose(base.config(), context=1, tensor=1, stage=1) is None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("all_to_all", 8, 6, 2), "6 query heads"),
        (Case("ring_all_to_all", 4, 8, 2), 'use "all_to_all"'),
        (Case("ring_all_to_all", 4, 8, 2, stage=2), 'use "all_to_all"'),
        (Case("ring_all_to_all", 4, 3, 1), 'use "ring"'),
        (Case("ring", 3, stage=2), '3 places is an odd number; use "all_gather"'),
        (Case("ring_all_to_all", 6, 4, stage=2), '3 places is an odd number; use "all_gather"'),
    ],
    ids=str,
)
def test_refusals_name_what_would_work(case: Case, words: str):
    config = dataclasses.replace(case.config(), seq_len=48)
    with pytest.raises(UserError, match=words):
        context.choose(config, context=case.size, tensor=1, stage=case.stage)


def test_odd_shards_cannot_be_zigzag():
    config = dataclasses.replace(Case("ring", 4).config(), seq_len=20)
    with pytest.raises(UserError, match=r"not divisible by parallel\.context x 2"):
        context.choose(config, context=4, tensor=1, stage=1)


@pytest.mark.parametrize(
    ("length", "wanted", "tile"),
    [(100, 512, 100), (512, 512, 512), (521, 512, 521), (1042, 512, 521), (1536, 512, 512), (4096, 512, 512),
     (8191, 512, 8191), (768, 512, 384), (6, 4, 3)],
)  # fmt: skip
def test_tiles_divide_a_length_and_are_never_tiny(length: int, wanted: int, tile: int):
    assert tile_length(length, wanted) == tile


def test_whole_rows_go_to_the_library_unless_its_mask_is_too_large(monkeypatch: pytest.MonkeyPatch):
    """Under all_to_all; the config's own word always holds."""
    config = tiny(parallel={"context": 2, "data": 4, "context_mode": "all_to_all"})
    layout = build(config).layout
    q = jax.random.normal(jax.random.key(0), (8, 64, 4, 8))
    segments = jnp.asarray(random_batch(config)["segment_ids"])
    called = []

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, rules: ScoreRules) -> jax.Array:
        called.append(q.shape)
        return attend(q, k, v, mask, scale=rules.scale, kernel="xla")

    def run(rules: ScoreRules) -> np.ndarray:
        called.clear()
        return np.asarray(jax.jit(lambda q: layout.attend(kernel, q, q, q, Mask(segments), rules))(q))

    wanted = np.asarray(attend(q, q, q, Mask(segments), scale=0.3, kernel="xla"))
    for limit, rules, is_called in (
        (1 << 30, ScoreRules(0.3, kernel="cudnn"), True),
        (1, ScoreRules(0.3, kernel="cudnn"), False),
        (1, ScoreRules(0.3, kernel="cudnn", asked=True), True),
        (1 << 30, ScoreRules(0.3, kernel="xla"), False),
    ):
        monkeypatch.setattr(sharding, "LARGEST_MASK_BYTES", limit)
        np.testing.assert_allclose(run(rules), wanted, atol=1e-5)
        assert bool(called) == is_called, (limit, rules)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "seq_len", "mode"),
    [
        (32, 32, 4, 4096, "all_to_all"), (32, 8, 16, 4096, "all_to_all"), (32, 8, 8, 1 << 20, "ring"),
        (12, 4, 8, 4096, "ring_all_to_all"), (6, 1, 4, 4096, "ring_all_to_all"),
    ],
)  # fmt: skip
def test_a_small_copy_crosses_the_axis_alike(heads: int, kv_heads: int, size: int, seq_len: int, mode: str):
    config = tiny(
        parallel={"context": size}, model={"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8}, seq_len=seq_len
    )
    plan = context.choose(config, context=size, tensor=1, stage=1)
    small = shrunk(config)
    copy = context.choose(small, context=size, tensor=1, stage=1)
    assert plan is not None
    assert copy is not None
    assert (plan.mode, plan.ring, plan.groups) == (mode, copy.ring, copy.groups)
    assert copy.mode == mode
    assert small.seq_len <= 128
