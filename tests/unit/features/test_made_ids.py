"""Tables made of other cells (crosses, several hashes, words) and statistics of values: the same through every door."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from exported_runs import save_run, validation_rows

from embark import export_run
from embark.data import resolve_from_data
from embark.data.check import check
from embark.data.prepare import budget
from embark.data.prepare.inputs import open_inputs
from embark.data.prepare.later_rows import PreparedWith, schema_in, write_later_rows
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.data.prepare.tasks import open_reader
from embark.data.prepared.cache import read_manifest
from embark.data.prepared.parts import iter_blocks
from embark.data.stream.source import StreamSource
from embark.errors import EmbarkError
from embark.export.artifact import open_artifact
from embark.features.layout import Rows
from embark.features.rows import RawRows
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.serve.tensors import Tensor, tensor_columns
from embark.spec import RunSpec, resolve

COLUMNS = ("label", "at", "country", "device", "user", "title", "price")
FEATURES = {
    "columns": {
        "country": {"statistics": ["count", "label_rate"], "min_count": 2},
        "user": {"rows": 5_000, "num_hashes": 3, "statistics": ["label_rate"]},
        "title": {"words": True, "max_ids": 3}, "price": {"bucket_table": True, "num_buckets": 5},
    },
    "crosses": [{"columns": ["country", "device"]},
                {"columns": ["device", "price"], "buckets": {"price": [-1, 0.5]}},
                {"name": "who", "columns": ["user", "at_hour", "country"], "rows": 997}],
}


def draw_rows(num_rows: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = ["Red", "red", "SHOES", "ﬁne", "日本", "don't", "Größe", "é", "e\u0301", "x2"]
    return [{
        "label": str(draw.randrange(2)), "price": draw.choice(["", "1.5", "-3", str(draw.random())]),
        "at": f"2024-05-{draw.randrange(1, 29):02}T{draw.randrange(24):02}:00:00",
        "country": draw.choice(["", "NA", "no", "fr", " fr ", *(f"c{draw.randrange(60)}" for _ in range(3))]),
        "device": draw.choice(["", "phone", "tv"]), "user": draw.choice(["", str(draw.randrange(300)), "-7"]),
        "title": " - ".join(draw.choices(words, k=draw.randrange(6))),
    } for _ in range(num_rows)]


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def spec_of(folder: Path, files: list[Path], features: dict[str, Any] = FEATURES, **prepare: Any) -> RunSpec:
    return resolve({
        "name": "made", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {"kind": "prepared", "path": str(folder / "data"), "dense_columns": ["price"], "time_column": "at",
                 "prepare": {"input": list(map(str, files)), "split": "file", "validation_files": ["later.csv"],
                             "sparse_columns": ["country", "device", "user"], "time_columns": {"at": ["hour"]},
                             **prepare}},
        "features": features, "train": {"batch_size": 64, "precision": "fp32"}, "place": {"device": "cpu"},
        "store": {"root": str(folder)}, "stream": {"source": "files", "path": str(folder)},
    })


def prepared(folder: Path, train: list[dict[str, str]], later: list[dict[str, str]], **changes: Any) -> RunSpec:
    files = [write_csv(folder / "train.csv", train), write_csv(folder / "later.csv", later)]
    spec = spec_of(folder, files, **changes)
    prepare_from_spec(spec, folder / "data")
    return spec


def same(found: Rows, expected: Rows) -> bool:
    """Whether rows are the same, bit for bit."""
    def bits(rows: Rows) -> list[Any]:
        lengths = [None if one is None else one.astype(np.int64).tolist() for one in rows.lengths]
        ids = [np.asarray(one).reshape(-1).astype(np.int64).tolist() for one in rows.ids]
        return [rows.dense.astype("<f4").tobytes(), ids, lengths]

    return bits(found) == bits(expected)


def test_made_columns_are_the_same_through_every_door(tmp_path: Path):
    rows = draw_rows(1_200, 2)
    spec = prepared(tmp_path, draw_rows(2_000, 1), rows)
    expected = validation_rows(spec.data.path)
    manifest = read_manifest(spec.data.path)
    features = {feature.name: feature for feature in manifest.layout.features}
    assert (features["user"].rows, features["user"].multi_hot, features["user"].is_ragged) == (5_000, 3, False)
    assert (features["who"].rows, features["title"].multi_hot) == (997, 3)
    assert manifest.layout.dense[-3:] == ("country_count", "country_label_rate", "user_label_rate")
    artifact = open_artifact(export_run(save_run(spec).uri, str(tmp_path / "models")).uri)
    scorer = RequestScorer(artifact, None)

    def encoded(raw: RawRows | EmbarkError) -> Rows:
        assert isinstance(raw, RawRows), raw
        return artifact.encoder.encode(raw)

    unlabelled = [{name: cell for name, cell in row.items() if name != "label"} for row in rows]
    assert same(encoded(scorer.parse(JsonColumns(unlabelled))), expected)
    names = [name for name in COLUMNS if name != "label"]
    tensors = [Tensor(name, (len(rows),), [row[name] for row in rows]) for name in names]
    assert same(encoded(scorer.parse(tensor_columns(tensors, artifact.info.rows.columns))), expected)
    one_by_one = [encoded(scorer.parse(JsonColumns([row]))) for row in unlabelled[:50]]
    assert all(same(one, expected.cut(i, i + 1)) for i, one in enumerate(one_by_one))

    inputs, files = open_inputs(str(tmp_path / "later.csv"))
    schema = schema_in(artifact.info.rows.columns, artifact.info.rows.prepare, inputs, files)  # as `embark score` does
    reader = open_reader(schema, artifact.info.rows.prepare, inputs)
    raw = [raw for segment in reader.segments(files[0], 1 << 62) for raw in reader.read(segment, 30_000)]
    assert len(raw) > 1
    assert same(Rows.join([encoded(one) for one in raw]), expected)
    before = PreparedWith.of(spec.data.path, manifest)
    assert before is not None
    later, _ = write_later_rows(before, str(tmp_path / "later.csv"), tmp_path / "again")
    (block,) = iter_blocks(tmp_path / "again", later, "validation")
    positions = range(len(later.layout.features))
    assert same(Rows(block.label, block.dense, tuple(map(block.ids, positions)), tuple(map(block.lengths, positions))),
                expected)
    batch, _ = StreamSource(resolve_from_data(spec)).rows_of_files(str(tmp_path / "later.csv"))
    by_feature = dict(zip([table.name for table in resolve_from_data(spec).model.table_list()],
                          batch.by_feature(batch.ids), strict=True))
    streamed = tuple(by_feature[feature.name] for feature in manifest.layout.features)
    assert same(Rows(batch.label, batch.dense, streamed, expected.lengths), expected)


def test_a_cross_gives_each_pair_its_id_and_no_value_is_one(tmp_path: Path):
    pairs = [(country, device) for country in ("", "no", "fr") for device in ("", "tv")]
    usual = draw_rows(1, 1)[0]
    rows = [{**usual, "country": country, "device": device} for country, device in pairs * 2]
    spec = prepared(tmp_path, rows, rows, features={"crosses": [{"columns": ["country", "device"]}]})
    found = validation_rows(spec.data.path)
    names = [feature.name for feature in read_manifest(spec.data.path).layout.features]
    ids = found.ids[names.index("country_x_device")].reshape(-1)
    assert sorted(ids[:6]) == [1, 2, 3, 4, 5, 6]
    assert ids[:6].tolist() == ids[6:].tolist()
    assert resolve_from_data(spec).model.table_list()[-1].rows == 7  # which is what `plan` and `model` count


def test_a_cross_with_a_number_has_its_buckets_and_one_for_no_value(tmp_path: Path):
    usual = draw_rows(1, 1)[0]
    rows = [{**usual, "device": "tv", "price": price} for price in ["-9", "0", "0.5", "7", "", "nan"]]
    features = {"crosses": [{"columns": ["device", "price"], "buckets": {"price": [0, 0.5]}}]}
    spec = prepared(tmp_path, rows, rows, features=features)
    ids = validation_rows(spec.data.path).ids[-1].reshape(-1).tolist()
    assert ids[2] == ids[3]
    assert ids[4] == ids[5]
    assert len(set(ids)) == 4


def test_words_are_lower_case_letters_and_digits_of_any_script(tmp_path: Path):
    usual = draw_rows(1, 1)[0]
    titles = ["Größe 42, GRÖSSE-42", "größe", "日本 café", "cafe\u0301!", "", "... -", "a b c d e"]
    rows = [{**usual, "title": title} for title in titles]
    spec = prepared(tmp_path, rows, rows, features={"columns": {"title": {"words": True, "max_ids": 4}}})
    found = validation_rows(spec.data.path)
    at = [feature.name for feature in read_manifest(spec.data.path).layout.features].index("title")
    assert found.lengths[at].tolist() == [4, 1, 2, 1, 0, 0, 4]
    words = np.split(found.ids[at], np.cumsum(found.lengths[at])[:-1])
    assert words[0][0] == words[1][0]
    assert words[0][1] == words[0][3] != words[0][2]
    assert words[2][1] == words[3][0]
    assert found.ids[at].min() > 0


def test_several_hashes_tell_values_apart_that_one_hash_does_not(tmp_path: Path):
    usual = draw_rows(1, 1)[0]
    rows = [{**usual, "user": str(user)} for user in range(2_000)]
    spec = prepared(tmp_path, rows, rows, features={"columns": {"user": {"rows": 400, "num_hashes": 2}}})
    at = [feature.name for feature in read_manifest(spec.data.path).layout.features].index("user")
    ids = validation_rows(spec.data.path).ids[at].reshape(-1, 2)
    assert len(np.unique(ids[:, 0])) == 400
    assert len(np.unique(np.sort(ids, axis=1), axis=0)) > 1_950


def test_a_column_has_its_own_minimum_count(tmp_path: Path):
    usual = draw_rows(1, 1)[0]
    rows = [{**usual, "country": cell, "device": cell} for cell in ["often"] * 3 + ["rare"] * 2]
    spec = prepared(tmp_path, rows, rows, features={"columns": {"country": {"min_count": 3}}})
    layout = read_manifest(spec.data.path).layout
    assert {one.name: one.rows for one in layout.features if one.name in ("country", "device")} == {
        "country": 2, "device": 3}


def split_dense(spec: RunSpec, split: str) -> tuple[np.ndarray, np.ndarray]:
    manifest = read_manifest(spec.data.path)
    blocks = list(iter_blocks(Path(spec.data.path), manifest, split))
    return np.concatenate([one.dense for one in blocks]), np.concatenate([one.label for one in blocks])


def test_statistics_of_training_rows_count_earlier_rows_only(tmp_path: Path):
    usual, num = draw_rows(1, 1)[0], 1_000
    # The rows of one value in the order of time, but not in the file's: its label is 1 in the later half.
    rows = [{**usual, "country": "no", "label": str(int(i >= num // 2)),
             "at": f"2024-05-{1 + i // 50:02}T{i % 50 // 3:02}:{i % 50 % 3 * 20:02}:00"} for i in range(num)]
    order = random.Random(3).sample(range(num), num)
    features = {"columns": {"country": {"statistics": ["count", "label_rate"]}}}
    spec = prepared(tmp_path, [rows[i] for i in order], rows[:5], features=features)
    counts, rates = split_dense(spec, "train")[0][np.argsort(order), -2:].T
    assert (np.diff(counts) >= 0).all()
    assert len(np.unique(counts)) > 50
    assert (np.expm1(counts) <= np.arange(num) + 1e-3).all()  # never itself, never a later one
    assert (rates[: num // 2] <= 0).all()
    assert (np.diff(rates[: num // 2]) <= 0).all()  # a later label 1 is in none of them
    held_out = split_dense(spec, "validation")[0][:, -2:]
    assert np.allclose(held_out, [[np.log1p(num), 0]], atol=1e-6)


def test_new_data_with_the_ids_of_earlier_data_keeps_its_statistics(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    earlier = prepared(tmp_path / "one", draw_rows(600, 1), draw_rows(5, 2))
    rows = draw_rows(300, 3)
    spec = prepared(tmp_path / "two", rows, draw_rows(40, 4), id_map_from=earlier.data.path)
    before, now = (PreparedWith.of(path, read_manifest(path)) for path in (earlier.data.path, spec.data.path))
    assert before is not None
    assert now is not None
    assert all(np.array_equal(one.values, other.values) and np.array_equal(one.keys, other.keys)
               for one, other in zip(before.statistics(), now.statistics(), strict=True))
    later, _ = write_later_rows(before, str(tmp_path / "two" / "train.csv"), tmp_path / "again")
    (block,) = iter_blocks(tmp_path / "again", later, "validation")
    assert np.array_equal(split_dense(spec, "train")[0], block.dense)
    assert check(spec.data.path).problems == ()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    order = np.argsort(scores, kind="stable")
    _, number, nums = np.unique(scores[order], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(nums) - (nums - 1) / 2)[number]
    is_one = labels[order] > 0
    return float((ranks[is_one].sum() - is_one.sum() * (is_one.sum() + 1) / 2) / (is_one.sum() * (~is_one).sum()))


@pytest.mark.parametrize("has_time", [True, False], ids=["by time", "by chance"])
def test_label_rates_of_nearly_unique_ids_say_nothing_of_random_labels(tmp_path: Path, has_time: bool):
    draw, usual = random.Random(5), draw_rows(1, 1)[0]
    rows = [{**usual, "user": str(draw.randrange(6_000)), "label": str(draw.randrange(2)),
             "at": f"2024-05-{draw.randrange(1, 29):02}T{draw.randrange(24):02}:00:00"} for _ in range(12_000)]
    files = [write_csv(tmp_path / "train.csv", rows[:9_000]), write_csv(tmp_path / "later.csv", rows[9_000:])]
    spec = spec_of(tmp_path, files, {"columns": {"user": {"statistics": ["count", "label_rate"]}}})
    if not has_time:
        data = spec.data.model_copy(update={"time_column": ""})
        spec = spec.model_copy(update={"data": data})
    prepare_from_spec(spec, tmp_path / "data")
    for split in ("train", "validation"):
        dense, label = split_dense(spec, split)
        assert len(np.unique(dense[:, -1])) > 5
        assert 0.47 < auc(dense[:, -1], label) < 0.53, split  # of training rows with their own labels it would be 0.9
        assert 0.47 < auc(dense[:, -2], label) < 0.53, split


def test_statistics_are_the_same_whatever_is_in_memory_at_once(tmp_path: Path, monkeypatch):
    rows = draw_rows(3_000, 4)
    one = prepared(tmp_path, rows, rows[:50])
    monkeypatch.setattr(budget, "MAX_RUN_ROWS", 700)
    monkeypatch.setattr(budget, "MIN_RUN_ROWS", 700)
    monkeypatch.setattr(budget, "MAX_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(budget, "MIN_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(budget, "BYTES_PER_ENTRY", 5_000_000)
    (tmp_path / "other").mkdir()
    other = prepared(tmp_path / "other", rows, rows[:50])
    manifests = [read_manifest(spec.data.path) for spec in (one, other)]
    assert manifests[0].fingerprint() == manifests[1].fingerprint()


def test_what_features_say_of_ids_is_refused_where_it_cannot_be(tmp_path: Path):
    files = [write_csv(tmp_path / name, draw_rows(50, 1)) for name in ("train.csv", "later.csv")]

    def why(features: dict[str, Any], **prepare: Any) -> str:
        with pytest.raises(EmbarkError) as caught:
            preview(spec_of(tmp_path, files, features, **prepare))
        return str(caught.value)

    assert "names 'planet', which has no table" in why({"crosses": [{"columns": ["country", "planet"]}]})
    assert "names 'price', which is a number column, and has no buckets" in why(
        {"crosses": [{"columns": ["country", "price"]}]})
    assert "names 'country', which is no number column" in why(
        {"crosses": [{"columns": ["country", "price"], "buckets": {"country": [1]}}]})
    assert "names 'title', which is a list" in why(
        {"columns": {"title": {"words": True}}, "crosses": [{"columns": ["country", "title"]}]})
    assert "the rows of its table are not given" in why({"columns": {"user": {"num_hashes": 2}}})
    assert "needs one value a row" in why({"columns": {"title": {"words": True, "statistics": ["count"]}}})
    assert "have the same name" in why({"crosses": [{"columns": ["country", "device"], "name": "user"}]})
    shown = preview(spec_of(tmp_path, files)).schema.describe()
    assert {"column": "country_x_device", "taken_for": "cross of country and device",
            "why": "is named in features.crosses", "examples": ""} in shown


def test_criteo_columns_are_crossed_hashed_and_counted(tmp_path: Path):
    draw = random.Random(1)
    lines = ["\t".join([draw.choice("01"), *(str(draw.randrange(50)) for _ in range(13)),
                        *(draw.choice(["", f"{draw.randrange(9):08x}"]) for _ in range(26))]) for _ in range(400)]
    for name, part in (("train.txt", lines[:300]), ("later.txt", lines[300:])):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    spec = resolve({
        "name": "criteo", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {"kind": "prepared", "path": str(tmp_path / "data"), "prepare": {
            "input": [str(tmp_path / "train.txt"), str(tmp_path / "later.txt")], "split": "file",
            "validation_files": ["later.txt"]}},
        "features": {"columns": {"cat_3": {"rows": 100, "num_hashes": 2}, "cat_1": {"statistics": ["label_rate"]}},
                     "crosses": [{"columns": ["cat_0", "cat_1"]}]},
        "train": {"batch_size": 64, "precision": "fp32"}, "store": {"root": str(tmp_path)}})
    prepare_from_spec(spec, tmp_path / "data")
    artifact = open_artifact(export_run(save_run(spec).uri, str(tmp_path / "models")).uri)
    names = [*(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))]
    raw = RequestScorer(artifact, None).parse(JsonColumns(
        [dict(zip(names, line.split("\t")[1:], strict=True)) for line in lines[300:]]))
    assert isinstance(raw, RawRows)
    assert same(artifact.encoder.encode(raw), validation_rows(spec.data.path))


def test_arrow_lists_of_text_are_words_too():
    from embark.features.arrow.cells import CellParser
    from embark.features.schema import SparseColumn

    column = SparseColumn("title", "text", is_list=True, max_ids=9, is_words=True)
    lists = CellParser(("",)).keys(pa.array([["Red shoes", None], [], ["x"]]), column)
    texts = CellParser(("",)).keys(pa.array(["red, SHOES", None, "x"]), column)
    assert lists.lengths is not None
    assert lists.lengths.tolist() == [2, 0, 1]
    assert lists.keys.tolist() == texts.keys.tolist()
