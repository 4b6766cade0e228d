"""Times that are not ISO 8601, and time zones: what Python's `strptime` and `zoneinfo` say, through every door."""

from __future__ import annotations

import csv
import random
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source
from embark.data.interactions import read_log
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.later_rows import PreparedWith
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.errors import DataError, SpecError
from embark.features.arrow.cells import CellParser
from embark.features.arrow.times import parse_times
from embark.features.time_formats import common_formats
from embark.spec import resolve

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FORMATS = ["%d.%m.%Y %H:%M", "%y%m%d%H", "%Y%m%d%H%M%S", "%m/%d/%Y %I:%M:%S %p", "%d/%b/%Y:%H:%M:%S %z", "%d-%B-%y",
           "%a %b %d %H:%M:%S %z %Y", "%Y/%m/%d %H:%M:%S.%f", "%H:%M 100%% %d.%m.%Y", "%d.%m.%y (%A)"]


def draw(num: int, seed: int = 1) -> list[datetime]:
    some = random.Random(seed)
    return [datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=some.randrange(3_100_000_000)) for _ in range(num)]


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_read_as_strptime_reads_it(format):
    cells = [moment.astimezone(ZoneInfo("Asia/Kolkata")).strftime(format) for moment in draw(300)]
    if format == "%d.%m.%Y %H:%M":  # without zeros in front, too
        cells += [cell.lstrip("0").replace(".0", ".") for cell in cells]
    found = parse_times(pa.array(cells), format, CellParser(("",)))
    expected = [datetime.strptime(cell, format) for cell in cells]
    assert not found.is_bad.any()
    assert found.micros.tolist() == [micros(one if one.tzinfo else one.replace(tzinfo=UTC)) for one in expected]


@pytest.mark.parametrize("cell", ["31.2.2024 08:00", "1.13.2024 08:00", "1.1.2024 24:00", "1.1.2024",
                                  "1.1.2024 08:00 x", "2024-01-01", "29.2.2023 00:00", "1.1.0000 00:00"])
def test_a_moment_that_no_calendar_has_is_bad(cell):
    found = parse_times(pa.array(["1.1.2024 08:00", cell, "", "29.2.2024 00:00"]), "%d.%m.%Y %H:%M", CellParser(("",)))
    assert found.is_bad.tolist() == [False, True, False, False]
    assert found.is_missing.tolist() == [False, False, True, False]


def test_numbers_are_the_text_they_stand_for():
    texts = ["24010105", "05123123", "5010100", "99999999"]
    found = [parse_times(array, "%y%m%d%H", CellParser(("",))) for array in (
        pa.array(texts), pa.array([int(text) for text in texts]), pa.array([int(text) for text in texts], pa.int32()))]
    assert all(one.micros.tolist() == found[0].micros.tolist() for one in found)
    assert found[0].is_bad.tolist() == [False, False, False, True]
    assert found[0].micros.tolist()[2] == micros(datetime(2005, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"])
def test_zones_and_parts_are_those_of_zoneinfo(zone):
    info = ZoneInfo(zone)
    walls = [moment.replace(tzinfo=None) for moment in draw(500)]
    walls += [datetime(2023, 10, 29, 1, 30) + timedelta(minutes=minute) for minute in range(0, 180, 7)]
    walls += [datetime(2024, 3, 31, 1, 30) + timedelta(minutes=minute) for minute in range(0, 180, 7)]
    right = [wall.replace(tzinfo=info).astimezone(UTC) for wall in walls]
    text = pa.array([wall.isoformat(" ", "seconds") for wall in walls])
    found = parse_times(text, "local", CellParser(("",)), zone)
    assert found.micros.tolist() == [micros(moment) for moment in right]
    seconds = parse_times(pa.array([micros(moment) // 10**6 for moment in right]), "s", CellParser(("",)), zone)
    local = [moment.astimezone(info) for moment in right]
    for part, value in (("hour", lambda one: one.hour + 1), ("weekday", lambda one: one.isoweekday()),
                        ("day", lambda one: one.day), ("month", lambda one: one.month)):
        expected = [value(one) for one in local]
        assert found.keys(part).keys.tolist() == seconds.keys(part).keys.tolist() == expected


GUESSES = [
    (["1.12.2010 08:26", "9.12.2010 12:50"], ["%d.%m.%Y %H:%M"]),
    (["12/31/2010 8:26", "1/2/2010 9:00"], ["%m/%d/%Y %H:%M"]),
    (["1/2/2010", "3/4/2010"], ["%d/%m/%Y", "%m/%d/%Y"]), (["31/12/10"], ["%d/%m/%y"]),
    (["14102100", "14103023"], ["%y%m%d%H"]),
    (["20240531", "20240601"], ["%Y%m%d"]), (["20101112"], ["%Y%m%d", "%y%m%d%H"]), (["May 3, 2024"], ["%b %d, %Y"]),
    (["10/Oct/2000:13:55:36 -0700"], ["%d/%b/%Y:%H:%M:%S %z"]), (["soon", "now"], []), (["12", "17"], []),
]


@pytest.mark.parametrize(("cells", "formats"), GUESSES, ids=[cells[0] for cells, _ in GUESSES])
def test_a_common_format_is_guessed_where_no_other_fits(cells, formats):
    assert common_formats(cells, may_be_digits=True) == formats


def write(folder: Path, hour=lambda at: f"{at:%y%m%d%H}") -> list[datetime]:
    hours = random.Random(1).sample(range(500), 400)
    moments = [datetime(2014, 10, 21, tzinfo=UTC) + timedelta(hours=some) for some in hours]
    rows = [{"click": index % 2, "hour": hour(at), "site": f"site {index % 7}"} for index, at in enumerate(moments)]
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]} | {
        "hour": pa.array([int(row["hour"]) if row["hour"].isdigit() else row["hour"] for row in rows])}),
        folder / "rows.parquet")
    return moments


def spec_of(folder: Path, features: dict | None = None, name: str = "rows.csv", **data):
    return resolve({"data": {"kind": "prepared", "path": str(folder / "out"), "label": "click", **data,
                             "prepare": {"input": str(folder / name), "num_workers": 1, **data.get("prepare", {})}},
                    "features": {"columns": features or {}}})


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_split_by_time_and_parts_of_avazus_hours(tmp_path, read_rows, name):
    moments = write(tmp_path)
    spec = spec_of(tmp_path, {"hour": {"parts": ["hour", "day", "month"], "time_zone": "America/New_York"}}, name,
                   time_column="hour", prepare={"split": "time"})
    manifest = prepare_from_spec(spec, tmp_path / "out").manifest
    assert [(one.name, one.rows) for one in manifest.layout.features[1:]] == [
        ("hour_hour", 25), ("hour_day", 32), ("hour_month", 13)]
    newest = sorted(moments)[-40:]
    local = [at.replace(tzinfo=ZoneInfo("America/New_York")) for at in moments]
    assert manifest.time_split["validation"] == newest[0].replace(tzinfo=ZoneInfo("America/New_York")).astimezone(
        UTC).isoformat().replace("+00:00", "Z")
    right = [(at.hour + 1, at.day, at.month) for at, moment in zip(local, moments, strict=True) if moment not in newest]
    assert [tuple(one for (one,) in ids[1:]) for _, _, ids in read_rows(tmp_path / "out", manifest, "train")] == right


def test_the_dry_run_shows_the_format_and_the_lines_that_say_it(tmp_path):
    write(tmp_path, lambda at: f"{at.day}.{at.month}.{at.year} {at:%H:%M}")
    shown = preview(spec_of(tmp_path))
    assert shown.schema.why["hour"] == ("holds times written %d.%m.%Y %H:%M; features.columns.NAME.parts makes "
                                        "features of it, data.time_column splits by it")
    shown = preview(spec_of(tmp_path, {"hour": {"parts": ["weekday"]}}))
    assert shown.schema.why["hour"] == "is named in features.columns; holds times written %d.%m.%Y %H:%M"
    assert tomllib.loads(shown.toml)["features"]["columns"] == {
        "hour": {"parts": ["weekday"], "time_format": "%d.%m.%Y %H:%M"}}


def test_dates_with_day_and_month_unclear_are_refused_with_both_lines(tmp_path):
    write(tmp_path, lambda at: f"{at.day % 12 + 1}/{at.hour % 12 + 1}/2014")
    spec, inputs = spec_of(tmp_path, {"hour": {"parts": ["day"]}}), Inputs()
    with pytest.raises(DataError, match="which may be %d/%m/%Y or %m/%d/%Y") as caught:
        guess_schema(spec, inputs, inputs.find(str(tmp_path / "rows.csv")))
    assert 'time_format = "%m/%d/%Y", in [features.columns.hour]' in caught.value.fix
    spec = spec_of(tmp_path, {"hour": {"parts": ["day"], "time_format": "%m/%d/%Y"}})
    assert guess_schema(spec, inputs, inputs.find(str(tmp_path / "rows.csv"))).times[0].format == "%m/%d/%Y"


@pytest.mark.parametrize(("column", "message"), [
    ({"time_format": "%Q"}, "%Q is no directive"), ({"time_format": "noon"}, "has no directive"),
    ({"time_format": "%Y %Y"}, "stands in it twice"), ({"time_zone": "Berlin"}, "is no IANA time zone")])
def test_formats_and_zones_that_do_not_exist_are_mistakes_of_the_spec(tmp_path, column, message):
    with pytest.raises(SpecError, match=message):
        spec_of(tmp_path, {"hour": column})


def test_later_rows_have_the_format_of_the_earlier_ones(tmp_path):
    write(tmp_path, lambda at: f"{at:%d/%m/%Y}")
    old = prepare_from_spec(spec_of(tmp_path, {"hour": {"parts": ["day"]}}), tmp_path / "out").manifest
    before = PreparedWith.of(str(tmp_path / "out"), old)
    write(tmp_path, lambda at: f"{at.day % 12 + 1}/{at.month}/{at.year}")
    spec = spec_of(tmp_path, prepare={"id_map_from": str(tmp_path / "out"), "ids": "frequency"})
    new = prepare_from_spec(spec, tmp_path / "new").manifest
    assert PreparedWith.of("", new).schema.times == before.schema.times
    assert before.schema.times[0].format == "%d/%m/%Y"


def test_files_in_memory_and_logs_are_split_by_such_times(tmp_path):
    (tmp_path / "log.csv").write_text("label,user,item,at\n" + "".join(
        f"{index % 2},{index % 4},{index % 9},{index % 28 + 1}.{index % 12 + 1}.2024 07:05\n" for index in range(84)))
    features = {"columns": {"at": {"time_format": "%d.%m.%Y %H:%M", "time_zone": "Europe/Berlin"}}}
    data = {"kind": "columns", "path": str(tmp_path / "log.csv"), "time_column": "at", "eval_fraction": 0.08}
    model = {"num_dense": 0, "tables": [{"name": "item", "rows": 9}]}
    spec = resolve({"model": model, "data": data, "features": features})
    source = open_source(spec)
    newest = [index % 9 for index in range(84) if index % 12 == 11]
    assert source.eval_rows(0, source.num_eval_samples).ids.tolist() != []
    assert set(source.eval_rows(0, source.num_eval_samples).ids.tolist()) <= {*newest}
    log = read_log(spec.data.model_copy(update={"kind": "interactions"}), spec.features)
    assert len(log.items) == 84
