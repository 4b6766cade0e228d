"""What is reported of a column is what a plain count gives, in any amount of memory, by any number of workers."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from embark.data import statistics
from embark.data.prepared import Feature, Layout, Manifest, Part, PartWriter, Rows
from embark.data.progress import ProgressReporter
from embark.data.statistics import compute_statistics

NUM_ROWS = 3_000
LAYOUT = Layout(
    dense=("price", "same", "few"),
    features=(Feature("user", 300_000), Feature("shop", 300), Feature("colour", 5), Feature("pair", 40, 2),
              Feature("tags", 1_000, 6, is_ragged=True)),
)


def rows(draw, num_rows):
    lengths = draw.integers(0, 7, num_rows).clip(0, 6)
    return Rows(
        label=(draw.random(num_rows) < 0.3).astype(np.uint8),
        dense=np.stack([draw.normal(3, 10, num_rows), np.full(num_rows, 7.0), draw.integers(0, 3, num_rows)],
                       axis=1).astype(np.float32),
        ids=((draw.zipf(1.3, num_rows) % 300_000)[:, None], draw.integers(0, 100, (num_rows, 1)),
             draw.integers(1, 3, (num_rows, 1)), draw.integers(0, 40, (num_rows, 2)),
             draw.integers(0, 50, lengths.sum())),
        lengths=(None, None, None, None, lengths),
    )


@pytest.fixture
def data(tmp_path):
    """The rows, and the folder and manifest they are in: three parts of blocks of 256 rows."""
    draw = np.random.default_rng(1)
    made = {"train": rows(draw, NUM_ROWS), "validation": rows(draw, 500)}
    parts = {}
    for split, some in made.items():
        writer = PartWriter(tmp_path, f"{split}/0", LAYOUT, block_rows=256, part_bytes=20_000)
        writer.add(some)
        parts[split] = tuple(writer.close())
    assert len(parts["train"]) >= 3
    return made, tmp_path, Manifest(LAYOUT, parts, block_rows=256)


def test_ids_are_counted_as_a_plain_count_does(data):
    made, directory, manifest = data
    found = compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1)[0]["sparse"]
    train = made["train"]
    for position, feature in enumerate(LAYOUT.features):
        per_row = train.ids[position]
        if feature.is_ragged:
            labels = np.repeat(train.label, train.lengths[position])
        else:
            labels = np.repeat(train.label, feature.multi_hot)
        ids = per_row.reshape(-1).tolist()
        counts = Counter(ids)
        positive = Counter(i for i, y in zip(ids, labels, strict=True) if y)
        falling = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        result = found[feature.name]
        assert result["rows"] == feature.rows
        assert result["num_ids"] == len(ids)
        assert result["num_used"] == len(counts)
        assert result["id_0_share"] == counts[0] / len(ids)
        assert result["top"] == [{"id": i, "count": n, "label_rate": positive[i] / n} for i, n in falling[:20]]
        for rank, share in result["top_share"].items():
            assert share == sum(n for _, n in falling[: int(rank)]) / len(ids)
        assert list(result["top_share"])[-1] == str(len(counts))
        for percent in (1, 10):
            num = -(-feature.rows * percent // 100)
            assert result[f"share_of_top_{percent}_percent_rows"] == sum(n for _, n in falling[:num]) / len(ids)
    lengths = train.lengths[4]
    assert found["tags"]["lengths"] == {"min": 0, "mean": lengths.mean(), "max": 6,
                                        "empty_share": (lengths == 0).mean()}
    assert "lengths" not in found["user"]


def test_counts_of_more_than_sixteen_bits_are_exact(tmp_path):
    layout = Layout((), (Feature("one", 3),))
    writer = PartWriter(tmp_path, "train/0", layout)
    ids = np.repeat([2, 0, 1], [70_000, 65_535, 65_534])[:, None]
    writer.add(Rows(np.ones(len(ids)), np.zeros((len(ids), 0), np.float32), (ids,), (None,)))
    result = compute_statistics(tmp_path, Manifest(layout, {"train": tuple(writer.close())}), memory_bytes=1 << 30,
                              num_workers=1)[0]["sparse"]["one"]
    assert [(t["id"], t["count"]) for t in result["top"]] == [(2, 70_000), (0, 65_535), (1, 65_534)]
    assert result["num_ids"] == len(ids)


def test_dense_values_are_summed_exactly_and_spread_to_a_part_in_256(data):
    made, directory, manifest = data
    found = compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1)[0]["dense"]
    price = made["train"].dense[:, 0].astype(np.float64)
    result = found["price"]
    assert (result["min"], result["max"]) == (price.min(), price.max())
    assert result["mean"] == pytest.approx(price.mean(), rel=1e-9)
    assert result["std"] == pytest.approx(price.std(), rel=1e-6)
    assert sum(result["histogram"]) == NUM_ROWS
    expected, _ = np.histogram(price, 20)
    assert np.abs(np.array(result["histogram"]) - expected).sum() < NUM_ROWS / 50
    for q, value in result["quantiles"].items():
        assert (price <= value).mean() == pytest.approx(float(q), abs=0.004)
    assert found["same"]["std"] == 0
    assert found["same"]["histogram"] == [NUM_ROWS] + [0] * 19
    assert found["few"]["zero_share"] == (made["train"].dense[:, 2] == 0).mean()
    assert found["few"]["quantiles"]["0.01"] == 0


def test_values_that_are_not_finite_are_counted_and_left_out(tmp_path):
    layout = Layout(("x",), (Feature("a", 2),))
    writer = PartWriter(tmp_path, "train/0", layout)
    x = np.array([[1.0], [np.nan], [-np.inf], [3.0], [np.inf]], np.float32)
    writer.add(Rows(np.zeros(5), x, (np.zeros((5, 1), int),), (None,)))
    result = compute_statistics(tmp_path, Manifest(layout, {"train": tuple(writer.close())}), memory_bytes=1 << 30,
                              num_workers=1)[0]["dense"]["x"]
    assert (result["num_not_finite"], result["min"], result["max"], result["mean"], result["std"]) == (3, 1, 3, 2, 1)


def test_label_rates_are_of_every_split(data):
    made, directory, manifest = data
    found = compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1)[0]
    assert found["rows"] == {"train": NUM_ROWS, "validation": 500, "test": 0}
    assert found["label_rate"] == {"train": made["train"].label.mean(), "validation": made["validation"].label.mean(),
                                   "test": None}


def test_a_table_with_far_more_rows_than_lookups_is_counted_the_same(data, monkeypatch):
    _, directory, manifest = data
    assert [f.name for f in LAYOUT.features if statistics.is_sparse(manifest, f)] == ["user"]

    def count():
        return compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1, with_scores=True)

    expected = count()
    for is_sparse in (False, True):
        monkeypatch.setattr(statistics, "is_sparse", lambda *_, found=is_sparse: found)
        assert count() == expected


def test_neither_the_memory_nor_the_workers_change_a_byte(data, monkeypatch):
    _, directory, manifest = data
    complete = json.dumps(compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1)[0])
    monkeypatch.setattr(statistics, "MIN_VALUES_TO_SHARE", 0)
    reports = []
    shared, _ = compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=2,
                                   progress=ProgressReporter(reports.append))
    assert json.dumps(shared) == complete
    assert [p.done for p in reports] == sorted(p.done for p in reports)
    assert reports[-1].done == reports[-1].total
    monkeypatch.setattr(statistics, "is_sparse", lambda *_: False)
    monkeypatch.setattr(statistics, "WORKER_BYTES", (1 << 30) - 8_000)
    tasks = statistics._tasks(directory, manifest, 1, 1 << 30)
    assert min(task.ids_at_a_time for task in tasks if task.features) < 300_000 // 2
    assert json.dumps(compute_statistics(directory, manifest, memory_bytes=1 << 30, num_workers=1)[0]) == complete


def test_a_worker_s_share_of_the_memory_holds_its_counts(tmp_path):
    sizes = (40_000_000, 7, 40_000_000, 3_000_000)
    layout = Layout((), tuple(Feature(f"cat_{i}", rows) for i, rows in enumerate(sizes)))
    for num_workers in (1, 2, 8):
        part = Part("x", 40_000_000, 1, "")
        for task in statistics._tasks(tmp_path, Manifest(layout, {"train": (part,)}), num_workers, 2 << 30):
            rows_at_once = sum(min(layout.features[i].rows, task.ids_at_a_time) for i in task.features)
            assert rows_at_once * 8 <= (2 << 30) // num_workers - statistics.WORKER_BYTES
