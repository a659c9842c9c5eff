"""Documents to rows: nothing lost, nothing seen twice, no document sees another, targets shifted once."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxpar.config import Config, DataConfig
from jaxpar.data import open_data
from jaxpar.data.packing import best_fit
from jaxpar.errors import UserError

SEQ = 16


def write_documents(path, lengths, seed=0):
    """A JSONL file of ASCII documents of the given lengths; returns the texts."""
    rng = np.random.default_rng(seed)
    texts = ["".join(chr(c) for c in rng.integers(97, 123, n)) for n in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def rows_of(tmp_path, lengths, **settings):
    texts = write_documents(tmp_path / "a.jsonl", lengths)
    defaults = {"source": "files", "files": (f"{tmp_path}/a.jsonl",), "eval_fraction": 0.0}
    data = open_data(Config(seq_len=SEQ, data=DataConfig(**{**defaults, **settings})), tmp_path)
    return texts, [data.train.row(i) for i in range(len(data.train))], data


def trained_pairs(rows):
    """Every (document prefix in the row, target) that is trained, as (tokens of the segment so far, target)."""
    pairs = []
    for row in rows:
        for t in np.flatnonzero(row["weights"]):
            segment = row["segment_ids"][t]
            assert segment > 0
            seen = row["tokens"][: t + 1][row["segment_ids"][: t + 1] == segment]
            pairs.append((tuple(seen.tolist()), int(row["targets"][t])))
    return pairs


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("lengths", [[3, 50, 1, 64, 20, 64, 7], [10 * SEQ + 3, 2, 5], [1, 1, 1, 1]])
def test_every_token_is_trained_once_in_its_own_document(tmp_path, packing, lengths):
    texts, rows, _ = rows_of(tmp_path, lengths, packing=packing)
    documents = [[*text.encode(), 258] for text in texts]
    targets = sorted(target for _, target in trained_pairs(rows))
    assert targets == sorted(token for document in documents for token in document[1:])
    runs = {tuple(d[i : j + 1]) for d in documents for i in range(len(d)) for j in range(i, len(d))}
    assert all((*seen, target) in runs for seen, target in trained_pairs(rows))


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_positions_restart_and_segments_count_from_one(tmp_path, packing):
    _, rows, _ = rows_of(tmp_path, [3, 50, 1, 64, 20, 64, 7], packing=packing)
    for row in rows:
        used = int((row["segment_ids"] > 0).sum())
        segments = row["segment_ids"][:used]
        assert np.all(row["segment_ids"][used:] == 0)
        assert np.all(row["weights"][used:] == 0)
        assert segments[0] == 1
        assert set(np.diff(segments).tolist()) <= {0, 1}
        for segment in range(1, segments[-1] + 1):
            positions = row["positions"][:used][segments == segment]
            assert positions.tolist() == list(range(len(positions)))
        assert {key: value.dtype for key, value in row.items()} == {
            "tokens": np.int32,
            "targets": np.int32,
            "weights": np.float32,
            "positions": np.int32,
            "segment_ids": np.int32,
        }


def test_targets_are_the_next_tokens_once(tmp_path):
    _, rows, _ = rows_of(tmp_path, [200])
    stream = np.concatenate([row["tokens"] for row in rows[:-1]])
    targets = np.concatenate([row["targets"] for row in rows[:-1]])
    assert np.array_equal(stream[1:], targets[:-1])


def test_document_starts_are_masked_only_when_asked(tmp_path):
    texts, rows, _ = rows_of(tmp_path, [5, 6, 30])
    _, unmasked, _ = rows_of(tmp_path, [5, 6, 30], mask_document_starts=False)
    total = sum(len(text) + 1 for text in texts)
    assert sum(row["weights"].sum() for row in rows) == total - 3
    assert sum(row["weights"].sum() for row in unmasked) == total - 1
    with pytest.raises(UserError, match=r"mask_document_starts=false needs data.packing=concat"):
        rows_of(tmp_path, [5], mask_document_starts=False, packing="best_fit")


def test_end_tokens_are_trained_even_where_padding_has_their_id(tmp_path):
    """The loss mask never comes from comparing ids with the padding id."""
    from jaxpar.data.rows import PieceRows

    _, _, data = rows_of(tmp_path, [5, 40], packing="none")
    rows = data.train
    assert isinstance(rows, PieceRows)
    same = PieceRows(rows.store, rows.plan, SEQ, "x", "x", pad_id=258)
    row = same.row(0)
    assert row["targets"][4] == 258
    assert row["weights"].tolist() == [1.0] * 5 + [0.0] * (SEQ - 5)
    assert np.all(row["tokens"][5:] == 258)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("how", ["split", "truncate", "drop"])
def test_account_of_long_documents(tmp_path, packing, how, caplog):
    lengths = [10 * SEQ + 3, 4, SEQ, SEQ + 1, 9]
    _, rows, data = rows_of(tmp_path, lengths, packing=packing, long_documents=how)
    stats = data.train.plan.stats
    assert stats.documents == 5
    assert stats.tokens == sum(n + 1 for n in lengths) == stats.packed_tokens + stats.dropped_tokens
    # With its end token a document of SEQ characters fills a row exactly.
    cut = {"split": (0, 0, 0), "truncate": (0, 2, 9 * SEQ + 3 + 1), "drop": (2, 0, 11 * SEQ + 6)}[how]
    assert (stats.dropped_documents, stats.truncated_documents, stats.dropped_tokens) == cut
    assert sum(row["weights"].sum() for row in rows) == stats.trained_targets
    assert bool(cut[2]) == ("tokens lost" in caplog.text)


def test_best_fit_fills_rows_and_never_cuts_short_documents():
    rng = np.random.default_rng(0)
    capacity = 1024
    sizes = np.minimum(rng.lognormal(5.5, 1.0, 20_000).astype(int) + 1, capacity)
    order, ends = best_fit(sizes, capacity)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    loads = np.add.reduceat(sizes[order], np.concatenate([[0], ends[:-1]]))
    assert ends[-1] == len(sizes)
    assert loads.max() <= capacity
    assert sizes.sum() / (len(ends) * capacity) >= 0.97


@pytest.mark.parametrize("sizes", [[7], [7, 7, 7], [10, 1, 9, 2, 8, 3], [1] * 25, [5, 5, 5, 5], [10, 10]])
def test_best_fit_of_small_cases(sizes):
    sizes = np.array(sizes)
    order, ends = best_fit(sizes, 10)
    starts = [0, *ends[:-1].tolist()]
    rows = [order[a:b].tolist() for a, b in zip(starts, ends.tolist())]
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(sizes[row].sum() <= 10 for row in rows)
    assert len(rows) == max(-(-sizes.sum() // 10), (sizes > 5).sum())
    assert [min(row) for row in rows] == sorted(min(row) for row in rows)


def test_best_fit_of_nothing():
    order, ends = best_fit(np.zeros((0,), np.int64), 8)
    assert len(order) == len(ends) == 0


def test_held_out_documents_are_the_same_however_rows_are_made(tmp_path):
    lengths = [20] * 400
    texts = write_documents(tmp_path / "a.jsonl", lengths)
    found = {}
    for packing, seq_len in [("none", 32), ("none", 64), ("best_fit", 32)]:
        settings = DataConfig(source="files", files=(f"{tmp_path}/a.jsonl",), eval_fraction=0.2, packing=packing)
        data = open_data(Config(seq_len=seq_len, data=settings), tmp_path)
        for part, rows in (("train", data.train), ("evaluation", data.evaluation)):
            pieces = []
            for i in range(len(rows)):
                row = rows.row(i)
                for segment in range(1, row["segment_ids"].max() + 1):
                    pieces.append(bytes(row["tokens"][row["segment_ids"] == segment].astype(np.uint8)).decode())
            found.setdefault(part, []).append(set(pieces))
    for part in ("train", "evaluation"):
        assert found[part][0] == found[part][1] == found[part][2]
    assert found["train"][0] | found["evaluation"][0] == set(texts)
    assert not found["train"][0] & found["evaluation"][0]
    assert 40 < len(found["evaluation"][0]) < 120


def test_bytes_per_token_is_exact(tmp_path):
    texts, rows, data = rows_of(tmp_path, [30, 40, 50])
    trained = sum(row["weights"].sum() for row in rows)
    assert data.bytes_per_token == sum(map(len, texts)) / trained


def test_no_row_is_an_error_that_says_why(tmp_path):
    with pytest.raises(UserError, match=r"no training row of 16 tokens"):
        rows_of(tmp_path, [40, 50], long_documents="drop")
    with pytest.raises(UserError, match=r"eval_fraction"):
        rows_of(tmp_path, [5], eval_fraction=1.0)


def test_nothing_held_out_is_said_where_an_evaluation_is_asked_for(tmp_path, caplog):
    _, _, data = rows_of(tmp_path, [30], eval_fraction=1e-9)
    assert data.evaluation is None
    assert "there is no evaluation" not in caplog.text
    settings = DataConfig(source="files", files=(f"{tmp_path}/a.jsonl",), eval_fraction=1e-9)
    open_data(Config(seq_len=SEQ, data=settings, eval_interval=5), tmp_path)
    assert "there is no evaluation; raise data.eval_fraction" in caplog.text
    none = dataclasses.replace(settings, eval_fraction=0.0)
    open_data(Config(seq_len=SEQ, data=none, eval_interval=5), tmp_path)
    assert "data.eval_fraction = 0 and data.eval_files is empty: there is no evaluation" in caplog.text


def test_ids_outside_the_model_vocabulary_are_refused(tmp_path):
    from jaxpar.config import ModelConfig

    write_documents(tmp_path / "a.jsonl", [30])
    settings = DataConfig(source="files", files=(f"{tmp_path}/a.jsonl",), eval_fraction=0.0)
    with pytest.raises(UserError, match=r"holds the id 258, but the vocabulary has 258 ids"):
        open_data(Config(seq_len=SEQ, model=ModelConfig(vocab_size=258), data=settings), tmp_path)
    with pytest.raises(UserError, match=r"16-bit ids, but model.vocab_size is 65537"):
        open_data(Config(seq_len=SEQ, model=ModelConfig(vocab_size=65537), data=settings), tmp_path)
    assert (
        open_data(Config(seq_len=SEQ, model=ModelConfig(vocab_size=65536), data=settings), tmp_path).vocab_size == 259
    )
