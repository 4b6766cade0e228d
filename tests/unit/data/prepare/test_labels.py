"""Labels that are words: which of them is the 1 is said, never guessed, and means the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source, resolve_from_data
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import Inputs
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.stream.source import StreamSource
from embark.errors import DataError, SpecError
from embark.spec import resolve

INCOMES = ["<=50K", " >50K", ">50K.", "<=50K"] * 10
ONES = [0, 1, 1, 0] * 10


def write(folder: Path, incomes: list[str] = INCOMES) -> Path:
    rows = [{"income": income, "job": f"job {i % 3}", "code": i % 3} for i, income in enumerate(incomes)]
    (folder / "rows.csv").write_text("income,job,code\n" + "".join(",".join(map(str, row.values())) + "\n"
                                                                    for row in rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


def spec_of(folder: Path, name: str = "rows.csv", model: dict | None = None, **prepare):
    return resolve({"model": model or {}, "data": {
        "kind": "prepared", "path": str(folder / f"{name}-data"), "eval_fraction": 1e-9,
        **({} if (model or {}).get("tasks") else {"label": "income"}),
        "prepare": {"input": str(folder / name), "num_workers": 1, "ignored_columns": ["code"], **prepare}}})


def guess(folder: Path, **prepare):
    spec, inputs = spec_of(folder, **prepare), Inputs()
    return guess_schema(spec, inputs, inputs.find(str(folder / "rows.csv")))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_a_label_of_words_is_1_for_those_that_the_spec_names(tmp_path, read_rows, name):
    spec = spec_of(write(tmp_path), name, label_is=[">50K", ">50K."])
    manifest = prepare_from_spec(spec, tmp_path / "out").manifest
    assert [label for label, _, _ in read_rows(tmp_path / "out", manifest, "train")] == ONES


def test_a_task_has_a_label_of_words_as_well(tmp_path):
    tasks = [{"name": "rich", "label": "income", "label_is": [">50K", ">50K."]},
             {"name": "code", "loss": "softmax", "num_classes": 3}]
    spec = spec_of(write(tmp_path), model={"tasks": tasks}, ignored_columns=[])
    prepare_from_spec(spec, tmp_path / "rows.csv-data")
    source = open_source(resolve_from_data(spec))
    labels = source.train_rows(0, 0, 40).label
    assert sorted(map(tuple, labels.tolist())) == sorted((float(one), float(i % 3)) for i, one in enumerate(ONES))
    tasks.append({"name": "poor", "label": "income", "label_is": "<=50K"})
    with pytest.raises(SpecError, match="two of the same column have another label_is"):
        spec_of(tmp_path, model={"tasks": tasks})


def test_files_in_memory_and_streams_read_the_same_label_of_words(tmp_path):
    write(tmp_path)
    for name in ("rows.csv", "rows.parquet"):
        spec = resolve({"model": {"num_dense": 0, "tables": [{"name": "code", "rows": 3}]},
                        "data": {"kind": "columns", "path": str(tmp_path / name), "label": "income",
                                 "eval_fraction": 1e-9, "prepare": {"label_is": [">50K", ">50K."]}},
                        "stream": {"source": "files", "path": str(tmp_path)}, "train": {"batch_size": 1}})
        source = open_source(spec.model_copy(update={"stream": type(spec.stream)()}))
        order = np.argsort(source._order(0))
        assert source.train_rows(0, 0, 40).label[order].tolist() == ONES
        assert StreamSource(spec).rows_of_files(str(tmp_path / name))[0].label.tolist() == ONES


def test_two_words_in_the_label_are_answered_by_the_line_to_write(tmp_path):
    write(tmp_path, ["no churn", "no churn", "churn"] * 5)
    with pytest.raises(DataError, match="holds churn, no churn and not 0 and 1") as caught:
        guess(tmp_path)
    assert 'label_is = "churn"' in caught.value.fix
    assert guess(tmp_path, label_is="churn").why["income"] == "is the label: 1 for churn, 0 for no churn"


def test_a_word_that_the_label_never_has_is_refused(tmp_path):
    with pytest.raises(DataError, match="label_is is >50k, and column 'income' holds <=50K, >50K, >50K") as caught:
        guess(write(tmp_path), label_is=">50k")
    assert "label_is = " in caught.value.fix


def test_an_empty_label_of_words_is_a_bad_row(tmp_path, read_rows):
    spec = spec_of(write(tmp_path, ["yes!", "", "no", "NA"]), label_is="yes!", max_bad_share=0.5)
    manifest = prepare_from_spec(spec, tmp_path / "out").manifest
    assert [label for label, _, _ in read_rows(tmp_path / "out", manifest, "train")] == [1, 0]
    assert manifest.bad_rows["num"] == 2
