"""What is wrong with prepared data is found and placed; what only looks odd is a hint."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from embark.data.check import check
from embark.data.column_report import auc
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared import MANIFEST, Feature, Layout, Manifest, PartWriter, Rows
from embark.spec import resolve

NUM = 2_000
LAYOUT = Layout(
    ("price", "weight"),
    (Feature("user", 1_000), Feature("shop", 70_000), Feature("pair", 50, 2), Feature("tags", 30, 3, is_ragged=True)),
)
FIXED = Layout(("price",), (Feature("user", 1_000), Feature("shop", 70_000)))


def some_rows(draw, num=NUM):
    lengths = draw.integers(0, 4, num)
    return Rows(
        label=(draw.random(num) < 0.3).astype(np.uint8), dense=draw.normal(size=(num, 2)).astype(np.float32),
        ids=(draw.integers(0, 200, (num, 1)), draw.integers(0, 300, (num, 1)), draw.integers(0, 50, (num, 2)),
             draw.integers(0, 30, lengths.sum())),
        lengths=(None, None, None, lengths),
    )


def write(directory, layout, train, validation):
    parts = {}
    for split, rows in (("train", train), ("validation", validation)):
        writer = PartWriter(directory, f"{split}/0", layout, block_rows=512, part_bytes=10_000)
        writer.add(rows)
        parts[split] = tuple(writer.close())
    manifest = Manifest(layout, parts, block_rows=512)
    (directory / MANIFEST).write_text(manifest.to_text())
    return manifest


def looked(directory, manifest):
    (directory / MANIFEST).write_text(manifest.to_text())
    return check(str(directory))


@pytest.fixture
def written(tmp_path):
    draw = np.random.default_rng(2)
    rows = some_rows(draw)
    return tmp_path, write(tmp_path, LAYOUT, rows, some_rows(draw, 1_000)), rows


def test_sound_data_has_neither_problems_nor_hints(written):
    directory, manifest, _ = written
    reports = []
    report = check(str(directory), on_progress=reports.append)
    assert report.problems == ()
    assert report.hints == ()
    reading = [p for p in reports if p.stage == "reading"]
    assert reading[-1].done == reading[-1].total == manifest.size_bytes


def test_a_changed_byte_a_cut_and_a_missing_file_are_each_found(written):
    directory, manifest, _ = written
    first, second, third, *_ = manifest.parts["train"]
    damaged = bytearray((directory / first.file).read_bytes())
    damaged[-1] ^= 1
    (directory / first.file).write_bytes(damaged)
    with (directory / second.file).open("r+b") as file:
        file.truncate(100)
    (directory / third.file).unlink()
    problems = {p.where: p.what for p in looked(directory, manifest).problems}
    assert set(problems) == {first.file, second.file, third.file}
    assert "checksum" in problems[first.file]
    assert "has 100 bytes" in problems[second.file]
    assert "is missing" in problems[third.file]


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda rows: rows.label.__setitem__(700, 2), "label", "neither 0 nor 1: 1, the first in row 700 of train/0-"),
        (lambda rows: rows.dense.__setitem__((5, 1), np.nan), "weight", "not finite: 1, the first in row 5 of"),
        (lambda rows: rows.ids[0].__setitem__(slice(600, 603), 1_000), "user",
         "ids outside 0 to 999: 3, the first in row 600"),
        (lambda rows: rows.ids[1].__setitem__(7, -1), "shop", "ids outside 0 to 69,999: 1, the first in row 7"),
        (lambda rows: rows.ids[2].__setitem__((9, 1), 50), "pair", "ids outside 0 to 49: 1, the first in row 9"),
        (lambda rows: rows.ids[3].__setitem__(rows.lengths[3][:12].sum(), 30), "tags", "ids outside 0 to 29: 1"),
    ],
)
def test_a_value_that_must_not_be_is_named_with_its_row(tmp_path, monkeypatch, change, where, what):
    """The checksum is right: it was written so."""
    draw = np.random.default_rng(2)
    rows = some_rows(draw)
    change(rows)
    writer = PartWriter(tmp_path, "train/0", LAYOUT, block_rows=512)
    writer.add(rows)
    manifest = Manifest(LAYOUT, {"train": tuple(writer.close())}, block_rows=512)
    (problem,) = looked(tmp_path, manifest).problems
    assert problem.where == where
    assert what in problem.what


def test_lengths_that_cannot_be_are_found(tmp_path, written):
    directory, manifest, _ = written
    part = manifest.parts["train"][0]
    data = np.fromfile(directory / part.file, np.uint8)
    where = manifest.layout.map(512, data[: 8 * len(manifest.layout.ragged)].view("<i8").tolist())
    lengths = where.ragged[0][0].of(data)
    lengths[3] += 7
    data.tofile(directory / part.file)
    changed = replace(part, sha256=hashlib.sha256(data.tobytes()).hexdigest())
    parts = {**manifest.parts, "train": (changed, *manifest.parts["train"][1:])}
    problems = looked(directory, replace(manifest, parts=parts)).problems
    assert {p.where for p in problems} == {"tags"}
    assert {p.what.partition(":")[0] for p in problems} == {"rows of more than 3 ids",
                                                          "blocks whose lengths are not those of its ids"}


def test_a_block_that_gives_itself_another_size_is_found(written):
    directory, manifest, _ = written
    part = manifest.parts["train"][0]
    data = np.fromfile(directory / part.file, np.uint8)
    for count in (-5, 1 << 60, 1):
        data[:8].view("<i8")[0] = count
        data.tofile(directory / part.file)
        assert any("is not as long as its rows" in p.what for p in looked(directory, manifest).problems)


def fixed_rows(draw, num, label):
    return Rows(label, draw.normal(size=(num, 1)).astype(np.float32),
                (draw.integers(0, 200, (num, 1)), draw.integers(0, 300, (num, 1))), (None, None))


def hints_of(tmp_path, change):
    draw = np.random.default_rng(3)
    both = []
    for num in (NUM, 1_000):
        label = (draw.random(num) < 0.3).astype(np.uint8)
        rows = fixed_rows(draw, num, label)
        change(rows, draw)
        both.append(rows)
    report = looked(tmp_path, write(tmp_path, FIXED, *both))
    assert report.problems == ()
    return {h.where: h.what for h in report.hints}, report


def test_a_dense_column_that_is_the_label_is_reported(tmp_path):
    hints, _ = hints_of(tmp_path, lambda rows, _: rows.dense.__setitem__((slice(None), 0), rows.label))
    assert "it is the label, or derived from it" in hints["price"]


def test_ids_that_give_the_label_away_are_reported_and_honest_ones_are_not(tmp_path):
    def leak(rows, draw):
        is_kept = draw.random(len(rows)) < 0.95
        rows.ids[0][:, 0] = np.where(is_kept, rows.label, 1 - rows.label) * 100 + draw.integers(0, 100, len(rows))

    hints, report = hints_of(tmp_path, leak)
    assert "alone predicts the label, with AUC 0.9" in hints["user"]
    assert set(hints) == {"user"}
    assert {one.column: one.auc_alone for one in report.columns}["shop"] < 0.6


def test_a_constant_column_is_reported(tmp_path):
    def still(rows, _):
        rows.dense[:] = 4
        rows.ids[1][:] = 17

    hints, _ = hints_of(tmp_path, still)
    assert all("is the same in every training row" in hints[column] for column in ("price", "shop"))


def test_columns_that_hold_the_same_are_reported(tmp_path):
    layout = Layout(("a", "b"), (Feature("user", 1_000), Feature("buyer", 1_000)))
    draw = np.random.default_rng(3)

    def rows(num):
        ids, dense = draw.integers(0, 200, (num, 1)), draw.normal(size=(num, 1)).astype(np.float32)
        label = (draw.random(num) < 0.3).astype(np.uint8)
        return Rows(label, np.concatenate([dense, dense], 1), (ids, ids), (None, None))

    report = looked(tmp_path, write(tmp_path, layout, rows(NUM), rows(1_000)))
    assert {h.where: h.what.split(" in ")[0] for h in report.hints} == {"b": "holds the same as a",
                                                                       "buyer": "holds the same as user"}


def test_files_that_a_broken_writer_left_are_reported(written):
    directory, manifest, _ = written
    (directory / "train" / "9-00000.bin.part").write_bytes(b"x")
    (hint,) = looked(directory, manifest).hints
    assert hint.where == "train/9-00000.bin.part"


def test_data_without_held_out_rows_is_checked_as_far_as_it_goes(tmp_path):
    draw = np.random.default_rng(2)
    writer = PartWriter(tmp_path, "train/0", LAYOUT)
    writer.add(some_rows(draw))
    manifest = Manifest(LAYOUT, {"train": tuple(writer.close())})
    report = looked(tmp_path, manifest)
    assert (report.problems, report.hints) == ((), ())
    assert not any(one.auc_alone for one in report.columns)


def test_data_without_training_rows_is_checked_as_far_as_it_goes(tmp_path):
    writer = PartWriter(tmp_path, "test/0", LAYOUT)
    writer.add(some_rows(np.random.default_rng(2)))
    manifest = Manifest(LAYOUT, {"test": tuple(writer.close())})
    report = looked(tmp_path, manifest)
    assert report.problems == ()
    hints = [(hint.where, hint.what) for hint in report.hints]
    assert hints == [("train", "has no rows, so there is nothing to learn")]
    assert report.columns == ()


def test_the_area_is_that_of_all_pairs():
    draw = np.random.default_rng(1)
    scores, label = draw.integers(0, 9, 200).astype(float), draw.integers(0, 2, 200)
    pairs = [(a > b) + (a == b) / 2 for a in scores[label == 1] for b in scores[label == 0]]
    assert auc(scores, label) == pytest.approx(max(np.mean(pairs), 1 - np.mean(pairs)))
    assert auc(scores[:15], np.r_[np.ones(5), np.zeros(10)]) is None


def test_every_column_is_described(written):
    directory, manifest, rows = written
    found = {one.column: one for one in looked(directory, manifest).columns}
    assert list(found) == ["label", "price", "weight", "user", "shop", "pair", "tags"]
    assert (found["label"].num_values, found["label"].zero_share) == (2, (rows.label == 0).mean())
    assert found["price"].spread == f"{rows.dense[:, 0].min():.4g} … {rows.dense[:, 0].max():.4g}"
    ids = rows.ids[0].ravel()
    counts = np.unique(ids, return_counts=True)[1]
    assert (found["user"].rows, found["user"].num_values) == (1_000, len(counts))
    assert (found["user"].top_share, found["user"].zero_share) == (counts.max() / NUM, (ids == 0).mean())
    assert (found["user"].kind, found["pair"].spread, found["tags"].kind) == ("ids", "2 each", "list")
    assert found["tags"].spread == "0 … 3 ids"


def test_preparation_and_check_say_that_held_out_ids_are_new(tmp_path):
    lines = [f"{i % 2},{i % 5},visit {i if i % 4 else ''}" for i in range(600)]
    (tmp_path / "rows.csv").write_text("label,shop,visit\n" + "\n".join(lines) + "\n")
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "out"), "prepare": {
        "input": str(tmp_path / "rows.csv"), "sparse_columns": ["shop", "visit"], "num_workers": 1}}})
    result = prepare_from_spec(spec, tmp_path / "out")
    (hint,) = result.hints
    assert hint.where == "visit"
    assert "of its ids in validation rows occur in no training row" in hint.what
    assert hint in check(str(tmp_path / "out")).hints
