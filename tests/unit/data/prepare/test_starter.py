"""What `embark init FILE` takes a file for: a log if users and items repeat and there is no label, else a table."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepare.starter import starter_of_file
from embark.errors import DataError
from embark.spec import load_spec

DRAW = random.Random(9)
CELLS = {
    "few": lambda: DRAW.randrange(40), "many": lambda: DRAW.randrange(10**12), "word": lambda: f"w{DRAW.randrange(30)}",
    "second": lambda: 1_700_000_000 + DRAW.randrange(10**6), "stars": lambda: DRAW.choice([1, 2.5, 5]),
    "iso": lambda: f"2024-03-{DRAW.randrange(1, 29):02} 10:{DRAW.randrange(60):02}:00",
    "zero_one": lambda: DRAW.randrange(2),
    "dotted": lambda: f"{DRAW.randrange(13, 29)}.03.2024 10:{DRAW.randrange(60):02}", "one": lambda: 1,
    "list": lambda: f"w{DRAW.randrange(9)}|w{DRAW.randrange(9)}", "kind": lambda: DRAW.choice(["view", "cart"]),
    "seconds": lambda: DRAW.randrange(600), "amount": lambda: round(DRAW.random() * 90, 2),
}


def write(path: Path, columns: dict[str, str], num_rows: int = 400) -> Path:
    rows = [[CELLS[kind]() for kind in columns.values()] for _ in range(num_rows)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows]), path)
    else:
        path.write_text("".join(";".join(map(str, row)) + "\n" for row in [columns, *rows]))
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(("columns", "roles"), [
    ({"title": "word", "userId": "few", "movieId": "few", "rating": "stars", "timestamp": "second"},
     ("userId", "movieId", "timestamp")),
    ({"timestamp": "second", "visitorid": "few", "event": "kind", "itemid": "word"},
     ("visitorid", "itemid", "timestamp")),
    ({"user_session": "many", "product_id": "few", "brand": "word", "user_id": "few", "at": "iso"},
     ("user_id", "product_id", "at")),
    ({"played": "dotted", "album": "word", "listener": "word", "price": "amount"}, ("listener", "album", "played")),
    ({"session_id": "few", "reader": "few", "article": "few", "read_time": "seconds"}, ("reader", "article", "")),
    ({"customer": "few", "film": "word", "watched": "one"}, ("customer", "film", "")),
])
def test_a_log_is_recognized_and_prepared_by_the_spec_alone(tmp_path, suffix, columns, roles):
    file, spec = write(tmp_path / f"log.{suffix}", columns), tmp_path / "log.toml"
    spec.write_text(starter_of_file(file, spec))
    loaded = load_spec(str(spec))
    found = loaded.data.interactions
    assert (found.user, found.item, loaded.data.time_column) == roles
    assert (loaded.model.kind, loaded.model.dropout, loaded.model.sequence.share_negatives) == ("sasrec", 0.3, True)
    assert (found.negatives, found.num_negatives) == ("frequency", 48)
    why = spec.read_text().partition("[model]")[0]
    assert all(repr(role) in why for role in roles if role)
    manifest = prepare_from_spec(loaded).manifest
    assert manifest.settings["sequences"]["interactions"] == 400
    assert manifest.num_rows("train") > 10


def test_a_header_that_joined_files_repeat_is_a_header(tmp_path):
    file = write(tmp_path / "log.csv", {"user": "few", "item": "few", "timestamp": "second"})
    spec = tmp_path / "log.toml"
    file.write_text(2 * file.read_text())
    spec.write_text(starter_of_file(file, spec))
    found = load_spec(str(spec)).data
    assert (found.interactions.user, found.interactions.item, found.time_column) == ("user", "item", "timestamp")


@pytest.mark.parametrize("between", [",", "\t", " ", "::"])
@pytest.mark.parametrize(("kinds", "names"), [
    (("few", "forty", "star", "of_1997"), ["user", "item", "rating", "time"]),  # as MovieLens' u.data
    (("few", "forty", "star"), ["user", "item", "rating"]),
    (("forty", "few", "second"), ["user", "item", "time"]),
    (("word", "forty"), ["user", "item"]),
])
def test_a_log_without_a_header_is_recognized_by_its_values(tmp_path, between, kinds, names):
    cells = {**CELLS, "forty": lambda: f"0{DRAW.randrange(40)}", "star": lambda: DRAW.randrange(1, 6),
             "of_1997": lambda: 874_724_710 + DRAW.randrange(10**7)}
    file, spec = tmp_path / "u.data", tmp_path / "log.toml"
    file.write_text("".join(between.join(str(cells[kind]()) for kind in kinds) + "\n" for _ in range(400)))
    text = starter_of_file(file, spec)
    spec.write_text(text)
    loaded = load_spec(str(spec))
    assert list(loaded.data.prepare.column_names) == names
    assert (loaded.data.interactions.user, loaded.data.interactions.item) == ("user", "item")
    assert loaded.data.time_column == ("time" if "time" in names else "")
    assert "'user' has 40 users and 'item' 40 items, by their places;" in text.replace(" 30 ", " 40 ")
    assert "# The file has no header: data.prepare.column_names names its columns" in text
    assert prepare_from_spec(loaded).manifest.settings["sequences"]["interactions"] == 400


@pytest.mark.parametrize("kinds", [
    ("few", "few", "zero_one"), ("few", "amount"), ("few", "star", "second"), ("few", "few", "few", "few"),
    ("few", "few", "second", "second"), ("second", "few", "few"), ("star", "star"), ("few", "few", "second", "word"),
])
def test_a_table_without_a_header_says_how_to_name_its_columns(tmp_path, kinds):
    file, spec = tmp_path / "rows.csv", tmp_path / "rows.toml"
    cells = {**CELLS, "star": lambda: DRAW.choice([1.5, 2.5, 5])}
    file.write_text("".join(",".join(str(cells[kind]()) for kind in kinds) + "\n" for _ in range(400)))
    spec.write_text(text := starter_of_file(file, spec))
    assert "[model]" not in text
    assert "# The file has no header: data.prepare.column_names names its columns, in order." in text
    assert load_spec(str(spec)).data.label.startswith("column_")


@pytest.mark.parametrize("columns", [
    {"user": "few", "item": "few", "clicked": "zero_one"},
    {"user": "few", "item": "few", "outcome": "kind"},  # by its name
    {"user": "many", "item": "few", "spent": "amount"},  # no user comes again
    {"user": "few", "item": "many", "spent": "amount"},
    {"user": "few", "items": "list", "date": "iso"},
    {"user": "few", "city": "word", "date": "iso"},
    {"user": "few", "page_views": "few", "date": "iso"},
    {"column_a": "few", "column_b": "few", "date": "iso"},
])
def test_a_file_that_is_no_log_gets_the_spec_of_a_table(tmp_path, columns):
    text = starter_of_file(write(tmp_path / "rows.csv", columns), tmp_path / "rows.toml")
    assert "[model]" not in text
    assert 'label = "' in text


def test_a_custom_model_starts_from_a_table(tmp_path):
    file = write(tmp_path / "log.csv", {"user": "few", "item": "few", "at": "iso"})
    assert "sasrec" in starter_of_file(file, tmp_path / "log.toml")
    assert "sasrec" not in starter_of_file(file, tmp_path / "log.toml", may_be_log=False)


def test_a_name_cannot_end_the_comment(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text('"user\n[data]",item\n' + "a,1\na,2\nb,1\n" * 9)
    spec = tmp_path / "log.toml"
    spec.write_text(starter_of_file(file, spec))
    assert load_spec(str(spec)).data.interactions.user == "user\n[data]"


def test_times_whose_format_is_not_clear_are_asked_for_and_not_left_out(tmp_path):
    rows = "".join(f"u{n % 5};i{n % 7};0{n % 9 + 1}/0{n % 8 + 1}/2024 10:00\n" for n in range(60))
    (tmp_path / "log.csv").write_text("user;item;time\n" + rows)
    spec = tmp_path / "log.toml"
    spec.write_text(starter_of_file(tmp_path / "log.csv", spec))
    with pytest.raises(DataError, match="which may be") as found:
        prepare_from_spec(load_spec(str(spec)))
    assert "%d/%m/%Y %H:%M" in found.value.fix
    spec.write_text(spec.read_text() + '\n[features.columns.time]\ntime_format = "%d/%m/%Y %H:%M"\n')
    assert prepare_from_spec(load_spec(str(spec))).manifest.num_rows("train") == 5
