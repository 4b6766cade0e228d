"""A column that gives the label away is named, whatever kind of data it is in."""

import json
import random
from pathlib import Path

import pytest

from embark.__main__ import run
from embark.data import column_report, open_source, resolve_from_data
from embark.data.column_report import Column, describe_columns, leak_note
from embark.data.prepare.prepare import prepare_from_spec
from embark.spec import resolve, to_toml

NUM_ROWS = 3000


@pytest.fixture
def path(tmp_path):
    draw = random.Random(3)
    lines = ["user,secret,tags,age,refund,label"]
    for _ in range(NUM_ROWS):
        label = int(draw.random() < 0.3)
        tags = [draw.randrange(10) + 10 * label] + [draw.randrange(20) for _ in range(draw.randrange(3))]
        lines.append(f"{draw.randrange(50)},{2 * draw.randrange(5) + label},{'|'.join(map(str, tags))},{draw.random()},"
                     f"{label + draw.random()},{label}")
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "rows.csv"


def columns_spec(path):
    tables = [{"name": "user", "rows": 50}, {"name": "secret", "rows": 10},
              {"name": "tags", "rows": 20, "multi_hot": 3}]
    return resolve({"model": {"num_dense": 2, "tables": tables},
                    "data": {"kind": "columns", "path": str(path), "dense_columns": ["age", "refund"]}})


def prepared_spec(path):
    out = path.parent / "prepared"
    spec = resolve({"data": {"kind": "prepared", "path": str(out), "dense_columns": ["age", "refund"],
                             "prepare": {"input": str(path), "sparse_columns": ["user", "secret"],
                                         "list_columns": ["tags"]}}, "features": {"numbers": "standardize"}})
    prepare_from_spec(spec, out)
    return resolve_from_data(spec)


@pytest.mark.parametrize("spec_of", [columns_spec, prepared_spec])
@pytest.mark.parametrize("max_rows", [column_report.MAX_ROWS, 1600])
def test_leaking_ids_and_values_are_named_and_others_are_not(path, spec_of, max_rows, monkeypatch):
    monkeypatch.setattr(column_report, "MAX_ROWS", max_rows)
    spec = spec_of(path)
    columns = list(describe_columns(open_source(spec), spec))
    scores = {one.column: one.auc_alone for one in columns if one.column != "label"}
    assert set(scores) == {"user", "secret", "tags", "age", "refund"}
    assert scores["secret"] == scores["refund"] == 1
    assert max(scores["user"], scores["age"]) < 0.7
    note = leak_note(columns)
    assert "secret (AUC 1.0000)" in note
    assert "refund (AUC 1.0000)" in note
    assert "each alone predict the label" in note
    assert "user" not in note


def test_data_check_of_files_that_are_not_prepared_scores_their_columns(path, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    spec = columns_spec(path)
    Path("run.toml").write_text(to_toml(spec))
    assert run(["data", "check", "run.toml"]) == 0
    shown = capsys.readouterr().out
    assert all(f"hint: {name}: alone predicts the label" in shown for name in ("refund", "secret", "tags"))
    assert run(["data", "check", "run.toml", "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert {one["column"]: one["auc_alone"] for one in columns}["secret"] == 1


def test_nothing_is_named_where_no_column_leaks():
    assert leak_note([Column("user", "ids", 9, 9, 0.2, 0.1, "1 each", "", 0.61)]) == ""


def test_a_column_of_bins_and_a_flag_is_one_line_in_its_own_units(tmp_path, capsys):
    draw = random.Random(3)
    lines = ["city,price,refund,label"]
    for _ in range(NUM_ROWS):
        label = int(draw.random() < 0.3)
        refund = "" if label else round(9 * draw.random(), 3)
        lines.append(f"{draw.choice('abc')},{draw.randrange(20, 90)},{refund},{label}")
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "prepared"), "label": "label",
                             "prepare": {"input": str(tmp_path / "rows.csv")}}})
    names = prepare_from_spec(spec).manifest.layout.dense
    assert {"price_bin_5", "refund_bin_2", "refund_missing"} < set(names)
    assert run(["data", "check", str(tmp_path / "prepared"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {one["column"]: one for one in report["columns"]}
    assert list(found) == ["label", "price", "refund", "city"]
    assert (found["price"]["spread"], found["price"]["num_values"]) == ("20 … 89", 70)
    assert found["price"]["auc_alone"] < 0.6
    assert found["refund"]["auc_alone"] == 1  # by the flag alone: a missing refund counts as the mean
    assert [one["where"] for one in report["hints"]] == ["refund"]
    spec = resolve_from_data(spec)
    assert leak_note(list(describe_columns(open_source(spec), spec))) == \
        "refund (AUC 1.0000) alone predicts the label of held-out rows"
