"""Specs as rows: what was set, and what differs."""

from __future__ import annotations

from embark.report.spec_rows import differences, flat, set_fields, shown
from embark.spec import RunSpec


def test_defaults_are_left_out_and_the_rest_has_its_meaning():
    spec = RunSpec(name="mine").model_dump(mode="json")
    assert set_fields(spec) == []
    spec["train"]["batch_size"] = 64
    spec["place"]["spot"] = True
    rows = {field: (value, default) for field, value, default, _ in set_fields(spec)}
    assert rows == {"train.batch_size": ("64", "2,048"), "place.spot": ("true", "false")}
    meaning = next(row[3] for row in set_fields(spec) if row[0] == "train.batch_size")
    assert meaning == "Global batch size: samples per step over all ranks. If left out, less on little data: 400 " \
        "steps an epoch."


def test_differences_count_what_one_leaves_out_as_the_default():
    default = RunSpec().train.batch_size
    assert differences([{"train": {"batch_size": default}}, {}]) == []
    assert differences([{"train": {"batch_size": 64}}, {}]) == [("train.batch_size", ("64", f"{default:,}"))]


def test_names_are_no_difference_and_numbers_are_compared_as_numbers():
    complete, part = {"name": "a", "train": {"learning_rate": 1}}, {"name": "b", "train": {"learning_rate": 1.0}}
    assert differences([complete, part]) == []
    assert differences([{"watch": {"tensorboard": True}}, {"watch": {"tensorboard": 1}}]) != []


def test_tables_are_reported_by_their_names():
    found = flat({"model": {"tables": [{"name": "a", "rows": 3}]}})
    assert found == {"model.tables.a.name": "a", "model.tables.a.rows": 3}


def test_a_field_of_another_version_is_shown_without_a_meaning():
    rows = set_fields({"train": {"gone": 3}, "room": {"x": 1}})
    assert rows == [("train.gone", "3", "–", ""), ("room.x", "1", "–", "")]


def test_long_values_are_cut():
    assert len(shown("x" * 1000)) == 160
    assert shown([1, 2]) == "1, 2"
    assert shown(None) == "–"


def test_texts_of_files_are_told_apart_by_their_checksums():
    (field, (one, other)), = differences([{"model": {"code": f"import torch\nx = {x}\n"}} for x in (1, 2)])
    assert (field, one[:8], other[:8]) == ("model.code", "2 lines,", "2 lines,")
    assert one != other
