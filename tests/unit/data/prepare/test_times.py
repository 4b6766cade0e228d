"""Dates and times as features, and splits by them: the same as plain Python gives, in every format."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import tomllib
from collections import Counter
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.__main__ import run
from embark.data.check import check
from embark.data.evaluation_rows import open_rows
from embark.data.export.id_values import read_values
from embark.data.prepare import prepare as prepare_module
from embark.data.prepare import splits
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.later_rows import PreparedWith, write_later_rows
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError, SpecError
from embark.features.arrow.cells import CellParser
from embark.features.arrow.times import parse_times
from embark.run.feature_metrics import feature_names
from embark.spec import resolve

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def draw_moments(num: int, seed: int = 1) -> list[datetime]:
    draw = random.Random(seed)
    return [EPOCH + timedelta(microseconds=draw.randrange(-10**15, 2 * 10**15)) for _ in range(num)]


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def in_zone(moment: datetime, index: int) -> datetime:
    return moment.astimezone(timezone(timedelta(minutes=30 * (index % 53 - 24))))


def spec_of(folder: Path, name: str, prepare: dict | None = None, **data):
    return resolve({"data": {"kind": "prepared", "path": str(folder / "out"), "label": "bought", **data,
                             "prepare": {"input": str(folder / name), "num_workers": 1, **(prepare or {})}},
                    "features": {"numbers": "none", "missing_flags": False}})


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def made(folder: Path, name: str, out: str = "out", prepare: dict | None = None, **data):
    return prepare_from_spec(spec_of(folder, name, prepare, **data), folder / out).manifest


TEXT = {
    "date": lambda m, i: m.date().isoformat(),
    "local": lambda m, i: m.replace(tzinfo=None).isoformat("T" if i % 2 else " "),
    "zoned": lambda m, i: in_zone(m, i).isoformat() if i % 3 else f"{m:%Y-%m-%dT%H:%M:%S.%f}" + ("Z", " UTC")[i % 2],
    "s": lambda m, i: str(micros(m) // 10**6),
    "ms": lambda m, i: str(micros(m) // 1000),
}


@pytest.mark.parametrize("format", TEXT)
def test_text_is_the_moment_that_datetime_reads(format):
    moments = draw_moments(400)
    cells = [TEXT[format](moment, i) for i, moment in enumerate(moments)]
    wanted = [{"date": micros(datetime.combine(m.date(), datetime.min.time(), UTC)), "s": micros(m) // 10**6 * 10**6,
               "ms": micros(m) // 1000 * 1000}.get(format, micros(m)) for m in moments]
    times = parse_times(pa.array([*cells, "", " NA "]), format, CellParser(("", "NA")))
    assert times.micros.tolist() == [*wanted, 0, 0]
    assert times.is_missing.tolist() == [False] * 400 + [True] * 2
    assert not times.is_bad.any()
    read = [EPOCH + timedelta(microseconds=one) for one in wanted]
    assert times.keys("hour").keys[:400].tolist() == [one.hour + 1 for one in read]
    assert times.keys("weekday").keys[:400].tolist() == [one.isoweekday() for one in read]


@pytest.mark.parametrize(("format", "cell"), [
    ("date", "2024-02-30"), ("date", "2024-05-31T18:00"), ("date", "31.05.2024"), ("date", "1714521600"),
    ("local", "2024-05-31T24:00:00"), ("local", "2024-05-31T18:00:00Z"), ("local", "2024-05-31"),
    ("zoned", "2024-05-31T18:00:00"), ("zoned", "2024-05-31T18:00:00+99:00"), ("zoned", "2024-05-31T18:00:00 CET"),
    ("s", "2024-05-31"), ("s", "1714521600000"), ("ms", "soon"), ("s", "inf"),
])
def test_a_cell_of_another_format_is_bad_and_its_neighbours_are_read(format, cell):
    good = TEXT[format](datetime(2024, 5, 31, 18, tzinfo=UTC), 1)
    times = parse_times(pa.array([good, cell, good]), format, CellParser(("",)))
    assert times.is_bad.tolist() == [False, True, False]
    assert times.micros[0] == times.micros[2] > 0


@pytest.mark.parametrize(("array", "format"), [
    (lambda m: pa.array([one.date() for one in m], pa.date32()), "date"),
    (lambda m: pa.array([one.date() for one in m], pa.date64()), "date"),
    (lambda m: pa.array([one.replace(tzinfo=None) for one in m], pa.timestamp("us")), "local"),
    (lambda m: pa.array(m, pa.timestamp("us", "Asia/Tokyo")), "zoned"),
    (lambda m: pa.array(m, pa.timestamp("ns", "UTC")), "zoned"),
    (lambda m: pa.array([micros(one) / 10**6 for one in m]), "s"),
    (lambda m: pa.array([micros(one) // 1000 for one in m]), "ms"),
])
def test_typed_columns_are_the_same_moments(array, format, tmp_path):
    moments = draw_moments(50)
    column = pa.concat_arrays([array(moments), pa.array([None], array(moments).type)])
    times = parse_times(column, format, CellParser(("",)))
    exact = [micros(datetime.combine(m.date(), datetime.min.time(), UTC)) if format == "date" else
             micros(m) // 1000 * 1000 if format == "ms" else micros(m) for m in moments]
    assert times.micros.tolist() == [*exact, 0]
    assert times.is_missing.tolist() == [False] * 50 + [True]
    wrong = next(name for name in ("date", "local", "s") if name not in (format, "ms" if format == "s" else "s"))
    with pytest.raises(DataError, match="and the first file's holds"):
        parse_times(column, wrong, CellParser(("",)))


def shop(num: int, seed: int = 1) -> list[dict]:
    """Visits in no order; some products have no date."""
    draw, start = random.Random(seed), datetime(2024, 1, 1, tzinfo=UTC)
    rows = []
    for _ in range(num):
        at = start + timedelta(seconds=draw.randrange(86_400 * 60))
        listed = None if draw.random() < 0.1 else (at - timedelta(days=draw.randrange(900))).date()
        rows.append({"item": f"item {draw.randrange(40) + at.month * 20}", "at": at, "listed": listed,
                     "bought": draw.randrange(2)})
    return rows


SETTINGS = {"split": "time", "time_columns": {"at": ["hour", "weekday"], "listed": ["age"]}, "test_fraction": 0.1}


def write_formats(folder: Path, rows: list[dict]) -> None:
    text = [{**row, "at": row["at"].isoformat(), "listed": row["listed"] and row["listed"].isoformat()} for row in rows]
    write_csv(folder / "rows.csv", text)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table({**columns, "at": pa.array(columns["at"], pa.timestamp("us", "UTC")),
                             "listed": pa.array(columns["listed"], pa.date32())}), folder / "rows.parquet")


def age(row: dict) -> float | None:
    """The days since a product was listed."""
    return row["listed"] and (row["at"] - datetime.combine(row["listed"], datetime.min.time(), UTC)) / timedelta(days=1)


def test_csv_json_lines_and_parquet_give_the_rows_of_plain_python(tmp_path, read_rows):
    rows = shop(900)
    write_formats(tmp_path, rows)
    manifests = {name: made(tmp_path, f"rows.{name}", name, SETTINGS, time_column="at", eval_fraction=0.2)
                 for name in ("csv", "jsonl", "parquet")}
    assert len({manifest.fingerprint() for manifest in manifests.values()}) == 1
    manifest = manifests["csv"]
    assert manifest.layout.dense == ("listed_age",)
    assert [(f.name, f.rows) for f in manifest.layout.features[1:]] == [("at_hour", 25), ("at_weekday", 8)]
    newest = sorted((row["at"] for row in rows), reverse=True)
    validation_from, test_from = newest[269], newest[89]
    assert manifest.time_split == {"column": "at", "validation": validation_from.isoformat().replace("+00:00", "Z"),
                                   "test": test_from.isoformat().replace("+00:00", "Z")}
    splits = {"train": [row for row in rows if row["at"] < validation_from],
              "validation": [row for row in rows if validation_from <= row["at"] < test_from],
              "test": [row for row in rows if row["at"] >= test_from]}
    assert [len(some) for some in splits.values()] == [630, 180, 90]
    counts = Counter(row["item"] for row in splits["train"])
    for split, some in splits.items():
        read = read_rows(tmp_path / "csv", manifest, split)
        assert [label for label, _, _ in read] == [row["bought"] for row in some]
        assert [(hour, day) for _, _, (_, (hour,), (day,)) in read] == [
            (row["at"].hour + 1, row["at"].isoweekday()) for row in some]
        days = [age(row) for row in some]
        mean = np.mean([age(row) for row in splits["train"] if row["listed"]])
        days = [mean if one is None else one for one in days]
        assert [dense for _, (dense,), _ in read] == pytest.approx(days, rel=1e-6)
        # The more training rows an item has, the smaller its id; what only newer rows have is no item of its own.
        assert all((item == 0) == (counts[row["item"]] == 0)
                   for row, (_, _, ((item,), _, _)) in zip(some, read, strict=True))
    ids = {row["item"]: item for row, (_, _, ((item,), _, _)) in
           zip(splits["train"], read_rows(tmp_path / "csv", manifest, "train"), strict=True)}
    assert [counts[item] for item in sorted(ids, key=ids.get)] == sorted(counts.values(), reverse=True)


def files_of(out: Path) -> dict[str, str]:
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.rglob("*.bin"))}


def test_any_number_of_workers_and_an_interruption_give_the_same_split(tmp_path, monkeypatch):
    write_formats(tmp_path, shop(2000))
    monkeypatch.setattr(prepare_module, "MIN_SEGMENT_BYTES", 40_000)
    sizes = {"item": 60, "at_hour": 25, "at_weekday": 9}
    model = {"tables": [{"name": name, "rows": rows} for name, rows in sizes.items()]}
    spec = spec_of(tmp_path, "rows.csv", SETTINGS, time_column="at").model_dump(exclude_unset=True) | {"model": model}
    alone = prepare_from_spec(resolve(spec), tmp_path / "alone").manifest
    assert len(alone.parts["train"]) > 1
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 0)
    spec["data"]["prepare"]["num_workers"] = 2
    with monkeypatch.context() as during:
        during.setattr(prepare_module, "SMALL_BYTES", 1 << 30)
        during.setattr(splits, "newest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_from_spec(resolve(spec), tmp_path / "several")
    several = prepare_from_spec(resolve(spec), tmp_path / "several").manifest
    assert (several.time_split, several.fingerprint()) == (alone.time_split, alone.fingerprint())
    assert files_of(tmp_path / "several") == files_of(tmp_path / "alone") != {}


@pytest.mark.parametrize("spread", [1, 7, 10**6, 10**17])
def test_the_nth_newest_of_files_is_that_of_a_sorted_list(tmp_path, monkeypatch, spread):
    monkeypatch.setattr(splits, "_CHUNK_ROWS", 50)
    values = np.random.default_rng(3).integers(-spread, spread, 333)
    files = []
    for i, some in enumerate(np.split(values, [100, 100, 250])):
        files.append(tmp_path / f"{i}")
        some.tofile(files[-1])
    wanted = sorted(values.tolist(), reverse=True)
    assert [splits.newest(files, rank) for rank in (1, 2, 100, 332, 333)] == [
        wanted[rank - 1] for rank in (1, 2, 100, 332, 333)]


def test_given_moments_split_without_a_first_pass(tmp_path, read_rows):
    rows = shop(300)
    write_formats(tmp_path, rows)
    given = {"split": "time", "validation_from": date(2024, 2, 1), "test_from": "2024-02-20T12:00:00+02:00"}
    manifest = made(tmp_path, "rows.csv", prepare=given, time_column="at")
    assert manifest.time_split == {"column": "at", "validation": "2024-02-01T00:00:00Z", "test": "2024-02-20T10:00:00Z"}
    bounds = datetime(2024, 2, 1, tzinfo=UTC), datetime(2024, 2, 20, 10, tzinfo=UTC)
    places = Counter(sum(row["at"] >= bound for bound in bounds) for row in rows)
    assert manifest.rows_by_split == {"train": places[0], "validation": places[1], "test": places[2]}


def test_rows_of_one_moment_stay_together_and_too_many_of_them_are_refused(tmp_path):
    days = [date(2024, 5, 1 + i // 10) for i in range(100)]
    write_csv(tmp_path / "rows.csv", [{"item": i % 5, "day": day, "bought": i % 2} for i, day in enumerate(days)])
    manifest = made(tmp_path, "rows.csv", prepare={"split": "time"}, time_column="day", eval_fraction=0.15)
    assert manifest.rows_by_split == {"train": 80, "validation": 20, "test": 0}
    with pytest.raises(DataError, match="validation and test both begin at 2024-05-10T00:00:00Z"):
        made(tmp_path, "rows.csv", "two", {"split": "time", "test_fraction": 0.05}, time_column="day",
             eval_fraction=0.01)


def test_the_boundary_is_part_of_the_data_and_is_shown(tmp_path, capsys):
    write_formats(tmp_path, shop(300))
    given = {"split": "time", "time_columns": {"at": ["weekday"]}}
    first, second = (made(tmp_path, "rows.csv", name, {**given, "validation_from": moment}, time_column="at")
                     for name, moment in (("a", "2024-02-20T00:00:00Z"), ("b", "2024-02-19T23:59:59.999999Z")))
    assert first.rows_by_split == second.rows_by_split
    assert first.fingerprint() != second.fingerprint()
    assert check(str(tmp_path / "a")).time_split == first.time_split
    assert run(["data", "check", str(tmp_path / "a")]) == 0
    assert f"validation {first.num_rows('validation')} from 2024-02-20T00:00:00Z" in capsys.readouterr().out


def test_rows_without_a_time_are_bad_in_a_split_and_id_0_in_a_feature(tmp_path, read_rows):
    rows = shop(200)
    rows[7]["at"] = None
    write_csv(tmp_path / "rows.csv", rows)
    with pytest.raises(DataError, match=r"rows.csv, line 9: column 'at' is empty; a split by time needs one in every"):
        made(tmp_path, "rows.csv", prepare={"split": "time"}, time_column="at")
    manifest = made(tmp_path, "rows.csv", prepare={"split": "time", "max_bad_share": 0.01}, time_column="at")
    assert manifest.bad_rows["num"] == 1
    assert sum(manifest.rows_by_split.values()) == 199
    features = made(tmp_path, "rows.csv", "features", {"time_columns": {"at": ["hour"]}}, eval_fraction=0.01)
    assert sum(features.rows_by_split.values()) == 200
    hours = [ids[-1] for split in ("train", "validation")
             for _, _, ids in read_rows(tmp_path / "features", features, split)]
    assert hours.count([0]) == 1


def test_a_column_of_two_formats_is_refused_with_file_and_line(tmp_path):
    rows = shop(50)
    rows[20]["at"] = 1_704_067_200
    rows[30]["at"] = "2024-01-31 18:00:00"
    write_csv(tmp_path / "rows.csv", rows)
    with pytest.raises(DataError) as caught:
        made(tmp_path, "rows.csv", prepare=SETTINGS, time_column="at")
    holds = "does not fit the column, which holds times with a zone (2024-05-31T18:00:00Z)"
    assert f"rows.csv, line 22: column 'at': '1704067200' {holds}" in caught.value.what
    assert "rows.csv, line 32: column 'at': '2024-01-31 18:00:00' does not fit" in caught.value.what


def test_times_are_recognized_named_and_used_only_when_the_spec_says_so(tmp_path):
    write_formats(tmp_path, shop(200))
    for name in ("csv", "jsonl", "parquet"):
        spec = spec_of(tmp_path, f"rows.{name}")
        inputs = Inputs()
        schema = guess_schema(spec, inputs, inputs.find(str(tmp_path / f"rows.{name}")))
        assert schema.ignored == ("at", "listed")
        assert schema.why["at"].startswith("holds times with a zone (2024-05-31T18:00:00Z); features.columns")
        assert schema.why["listed"].startswith("holds dates (2024-05-31); features.columns.NAME.parts makes features")


def guess(folder: Path, rows: list[dict], prepare: dict, model: dict | None = None, **data):
    write_csv(folder / "rows.csv", rows)
    raw = spec_of(folder, "rows.csv", prepare, **data).model_dump(exclude_unset=True)
    inputs = Inputs()
    return guess_schema(resolve(raw | ({"model": model} if model else {})), inputs,
                        inputs.find(str(folder / "rows.csv")))


def test_the_lines_of_toml_say_the_same_again(tmp_path):
    rows = [{**row, "at": micros(row["at"]) // 10**6} for row in shop(200)]
    first = guess(tmp_path, rows, SETTINGS, time_column="at")
    assert [(time.name, time.format) for time in first.times] == [("at", "s"), ("listed", "date")]
    spec = spec_of(tmp_path, "rows.csv", SETTINGS, time_column="at")
    lines = tomllib.loads(first.to_toml(spec.data.prepare, spec.features))
    prepare = lines["data"].pop("prepare")
    assert lines["features"]["columns"] == {"at": {"parts": ["hour", "weekday"]}, "listed": {"parts": ["age"]}}
    again = guess(tmp_path, rows, prepare | {"time_columns": SETTINGS["time_columns"]}, **lines["data"])
    assert (again.times, again.sparse, again.dense_names) == (first.times, first.sparse, first.dense_names)


@pytest.mark.parametrize(("at", "prepare", "message"), [
    ("soon", {"time_columns": {"at": ["hour"]}}, "column 'at' holds soon, which are no dates or times"),
    (12, {"time_columns": {"at": ["hour"]}}, "column 'at' holds 12, which are no dates or times"),
    ("2024-05-31", {"time_columns": {"at": ["hour"]}}, "which have no hour"),
    ("2024-05-31", {"time_columns": {"when": ["hour"]}}, "features.columns names 'when'"),
])
def test_columns_that_hold_no_such_times_are_refused(tmp_path, at, prepare, message):
    with pytest.raises(DataError, match=message):
        guess(tmp_path, [{**row, "at": at} for row in shop(20)], prepare)


def test_ambiguous_numbers_are_times_if_the_spec_says_the_unit(tmp_path):
    rows = [{**row, "at": 12 + i} for i, row in enumerate(shop(20))]
    schema = guess(tmp_path, rows, {"time_columns": {"at": ["hour"]}, "time_unit": "s"})
    assert schema.times[0].format == "s"


def test_tables_of_the_model_have_room_for_the_times(tmp_path):
    tables = [{"name": "at_hour", "rows": 30}, {"name": "item", "rows": 9}]
    prepare = {"time_columns": {"at": ["hour"]}}
    schema = guess(tmp_path, shop(20), prepare, {"tables": tables})
    assert [(column.name, column.rows) for column in schema.sparse] == [("at_hour", 30), ("item", 9)]
    for wrong in (tables[1:], [{"name": "at_hour", "rows": 24}, tables[1]]):
        with pytest.raises(DataError, match="no table, or one of too few rows") as caught:
            guess(tmp_path, shop(20), prepare, {"tables": wrong})
        assert '{ name = "at_hour", rows = 25 }' in caught.value.fix


@pytest.mark.parametrize(("prepare", "data", "message"), [
    ({"split": "time"}, {}, "data.time_column"),
    ({"time_columns": {"at": ["age"]}}, {}, "the age of a column is the time from it to another"),
    ({"time_columns": {"at": ["age"]}}, {"time_column": "at"}, "the age of a column is the time from it to another"),
    ({"time_columns": {"at": ["minute"]}}, {}, "'hour', 'weekday', 'day', 'month' or 'age'"),
    ({"time_columns": {"at": ["hour"]}, "sparse_columns": ["at"]}, {}, "two roles"),
    ({"validation_from": "2024-05-31"}, {}, 'has no effect while data.prepare.split is "fraction"'),
    ({"split": "time", "validation_from": "31.5.2024"}, {"time_column": "at"}, "not an ISO 8601 date or time"),
    ({"split": "time", "test_from": "2024-05-31"}, {"time_column": "at"}, "does not follow"),
    ({"split": "time", "validation_from": "2024-05-31T02:00+02:00", "test_from": "2024-05-31"}, {"time_column": "at"},
     "does not follow"),
    ({"split": "time", "validation_from": "2024-05-31", "test_fraction": 0.1}, {"time_column": "at"}, "test_from"),
])
def test_settings_that_contradict_each_other_are_mistakes_of_the_spec(tmp_path, prepare, data, message):
    with pytest.raises(SpecError, match=message):
        spec_of(tmp_path, "rows.csv", prepare, **data)


def test_rows_with_earlier_ids_have_the_same_features_of_times(tmp_path):
    write_formats(tmp_path, shop(300))
    old = made(tmp_path, "rows.csv", "old", SETTINGS, time_column="at")
    write_csv(tmp_path / "new.csv", shop(200, seed=2))
    kept = {"split": "time", "id_map_from": str(tmp_path / "old"), "ids": "frequency"}
    new = made(tmp_path, "new.csv", "new", kept, time_column="at")
    assert new.layout.dense == old.layout.dense
    assert [feature.name for feature in new.layout.features] == [feature.name for feature in old.layout.features]
    assert [feature.rows for feature in new.layout.features[1:]] == [25, 8]


def test_features_of_one_time_have_names_of_their_own_in_the_importance(tmp_path):
    write_formats(tmp_path, shop(300))
    spec = spec_of(tmp_path, "rows.csv", SETTINGS, time_column="at")
    manifest = prepare_from_spec(spec, tmp_path / "out").manifest
    with open_rows(spec, manifest.fingerprint(), str(tmp_path / "out")) as rows:
        assert [name for name, _, _ in feature_names(rows)] == ["item", "at_hour", "at_weekday", "listed_age"]


def test_later_rows_need_no_time_of_the_split(tmp_path, read_rows):
    write_formats(tmp_path, shop(300))
    manifest = made(tmp_path, "rows.csv", prepare={"split": "time", "time_columns": {"at": ["hour", "weekday"]}},
                    time_column="at")
    later = shop(100, seed=2)
    later[3]["at"] = None
    write_csv(tmp_path / "later.csv", later)
    before = PreparedWith.of(str(tmp_path / "out"), manifest)
    found, bad = write_later_rows(before, str(tmp_path / "later.csv"), tmp_path / "later")
    assert bad.num_bad == 0
    read = read_rows(tmp_path / "later", found, "validation")
    assert [ids[1:] for _, _, ids in read] == [
        [[row["at"].hour + 1], [row["at"].isoweekday()]] if row["at"] else [[0], [0]] for row in later]
    values = read_values(str(tmp_path / "out"), manifest, ["at_hour", "at_weekday"])
    assert values["at_hour"].values.to_pylist() == [None, *range(24)]
    assert values["at_weekday"].values.to_pylist() == [None, *range(1, 8)]
