"""Labels of several tasks: drawn with a known best, read from files, stored, and missing ones kept missing."""

import json
from pathlib import Path

import numpy as np
import pytest

from embark.data import open_source, resolve_from_data
from embark.data.column_report import auc
from embark.data.make import make
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.synthetic import SyntheticSource
from embark.errors import DataError
from embark.spec import resolve

CLICK, BUY = {"name": "click"}, {"name": "buy"}
STARS, KIND = {"name": "stars", "loss": "regression"}, {"name": "kind", "loss": "softmax", "num_classes": 3}
MODEL = {"num_dense": 8, "num_tables": 6, "rows_per_table": 100}


def source_of(tasks, conflict=0.5, num=20_000):
    spec = resolve({"model": MODEL | {"tasks": tasks},
                    "data": {"num_eval_samples": num, "num_train_samples": 4096, "task_conflict": conflict}})
    return SyntheticSource(spec.model, spec.data)


def test_synthetic_labels_follow_the_best_outputs_of_each_task():
    correlations = {}
    for conflict in (0.0, 0.5, 1.0):
        batch = source_of([CLICK, BUY, STARS, KIND], conflict).eval_rows(0, 20_000)
        best, label = batch.best_probability, batch.label
        assert label.shape == (20_000, 4)
        assert best.shape == (20_000, 6)
        for task in (0, 1):
            assert auc(best[:, task].astype(np.float64), label[:, task]) == pytest.approx(0.80, abs=0.015)
            assert label[:, task].mean() == pytest.approx(best[:, task].mean(), abs=0.01)
        assert np.mean((label[:, 2] - best[:, 2]) ** 2) == pytest.approx(1, abs=0.03)
        assert best[:, 3:].sum(axis=1) == pytest.approx(np.ones(20_000), abs=1e-5)
        assert [np.mean(label[:, 3] == k) for k in range(3)] == pytest.approx(best[:, 3:].mean(axis=0), abs=0.01)
        logits = np.log(best[:, :2] / (1 - best[:, :2]))
        correlations[conflict] = np.corrcoef(logits.T)[0, 1]
    assert correlations[0.0] == pytest.approx(1)
    assert 0.3 < correlations[0.5] < 0.8
    assert abs(correlations[1.0]) < 0.35


def test_a_sample_and_a_task_do_not_depend_on_what_is_drawn_beside_them():
    all_tasks, alone = source_of([CLICK, STARS, KIND, BUY]), source_of([BUY])
    batch = all_tasks.eval_rows(0, 500)
    for name in ("label", "best_probability"):
        assert (getattr(all_tasks.eval_rows(77, 79), name) == getattr(batch, name)[77:79]).all()
    assert (alone.eval_rows(0, 500).label[:, 0] == batch.label[:, 3]).all()


def test_made_data_has_the_labels_of_the_synthetic_source(tmp_path):
    raw = {"model": MODEL | {"tasks": [STARS, CLICK, KIND]},
           "data": {"num_train_samples": 300, "num_eval_samples": 200, "task_conflict": 0.3},
           "train": {"batch_size": 32}}
    made = make(resolve(raw), tmp_path / "made")
    opened = resolve_from_data(resolve({**raw, "data": {"kind": "prepared", "path": str(made.path)}}))
    expected, found = open_source(resolve(raw)).eval_rows(5, 150), open_source(opened).eval_rows(5, 150)
    assert (found.label == expected.label).all()
    assert json.loads((made.path / "manifest.json").read_text())["version"] == 2
    plain = open_source(resolve_from_data(resolve({"data": {"kind": "prepared", "path": str(made.path)}})))
    assert (plain.eval_rows(5, 150).label == expected.label[:, 1]).all()  # the first binary task's


CSV = """user,price,clicked,rating,kind
1,0.5,1,5,2
2,1.5,,4,
0,2.5,no,,0
3,0.1,0,1,1
"""
TASKS = [{"name": "click", "label": "clicked"}, {"name": "stars", "label": "rating", "loss": "regression"},
         {"name": "liked", "label": "rating", "above": 3.0}, KIND]
EXPECTED = np.array([[1, 5, 1, 2], [np.nan, 4, 1, np.nan], [0, np.nan, np.nan, 0], [0, 1, 0, 1]], np.float32)


def in_order(batch):
    return batch.label[np.argsort(batch.dense[:, 0])]  # the prices, or their logarithms


def test_missing_labels_stay_missing_in_files_and_prepared_data(tmp_path):
    Path(tmp_path, "rows.csv").write_text(CSV)
    model = {"num_dense": 1, "tables": [{"name": "user", "rows": 4}], "tasks": TASKS}
    columns = open_source(resolve({"model": model, "train": {"batch_size": 1}, "data": {
        "kind": "columns", "path": str(tmp_path / "rows.csv"), "dense_columns": ["price"], "eval_fraction": 1e-9}}))
    expected = EXPECTED[[3, 0, 1, 2]]  # by price
    assert np.array_equal(in_order(columns.train_rows(0, 0, 4)), expected, equal_nan=True)
    raw = {"model": {"tasks": TASKS}, "data": {
        "kind": "prepared", "path": str(tmp_path / "prepared"), "eval_fraction": 1e-9, "dense_columns": ["price"],
        "prepare": {"input": str(tmp_path / "rows.csv"), "sparse_columns": ["user"]}},
        "features": {"numbers": "standardize"}}
    prepare_from_spec(resolve(raw), tmp_path / "prepared")
    prepared = open_source(resolve_from_data(resolve(raw)))
    assert np.array_equal(in_order(prepared.train_rows(0, 0, 4)), expected, equal_nan=True)
    with pytest.raises(DataError, match="has no label 'other'; it has 'clicked', 'rating', 'kind'"):
        resolve_from_data(resolve({**raw, "model": {"tasks": [{"name": "other"}]}}))


@pytest.mark.parametrize(("cell", "what"), [("2,5,2", "neither 0 nor 1"), ("1,x,2", "not a number"),
                                            ("1,5,3", "is no class from 0 to 2"), ("1,5,0.5", "is no class")])
def test_a_cell_that_is_no_label_of_its_task_is_refused(tmp_path, cell, what):
    Path(tmp_path, "rows.csv").write_text(CSV.replace("1,5,2", cell))
    model = {"num_dense": 1, "tables": [{"name": "user", "rows": 4}], "tasks": TASKS}
    with pytest.raises(DataError, match=what):
        open_source(resolve({"model": model, "data": {
            "kind": "columns", "path": str(tmp_path / "rows.csv"), "dense_columns": ["price"]}}))


def test_data_of_one_s_own_gives_labels_by_name(tmp_path, monkeypatch):
    code = """
import numpy as np
class Source:
    num_train_samples, num_eval_samples = 8, 4
    def __init__(self, data, model): pass
    def rows(self, split, positions):
        label = {"click": positions % 2, "stars": np.where(positions > 2, np.nan, LAST)}
        return label, None, {"user": positions % 4}
"""
    def spec(last):
        return resolve({"model": {"num_dense": 0, "tables": [{"name": "user", "rows": 4}], "tasks": [CLICK, STARS]},
                        "data": {"kind": "my_data:Source", "code": code.replace("LAST", last)},
                        "train": {"batch_size": 2}})

    label = open_source(spec("2.5")).eval_rows(0, 4).label
    assert np.array_equal(label, [[0, 2.5], [1, 2.5], [0, 2.5], [1, np.nan]], equal_nan=True)
    with pytest.raises(DataError, match="returned label stars = inf"):
        open_source(spec("np.inf")).eval_rows(0, 4)
    with pytest.raises(DataError, match="label without stars"):
        open_source(spec("1").model_copy(update={"data": spec("1").data.model_copy(update={
            "code": code.replace('"stars"', '"star"').replace("LAST", "1")})})).eval_rows(0, 4)
