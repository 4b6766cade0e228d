"""Scores of rows in memory: those of `embark score` for the same rows, whatever holds them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv

import embark
from embark.errors import DataError, UserError
from embark.serve import predict as predict_module

LATER = draw_rows(3_000, 7, new_words=["never seen", "\U0001f9ff"])


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run, its artifact, a file of later rows, and their scores by `embark score`."""
    folder = tmp_path_factory.mktemp("predicted")
    train, later = write_csv(folder / "train.csv", draw_rows(400, 3)), write_csv(folder / "later.csv", LATER)
    run = save_run(prepared_spec(folder, train, later)).uri
    uri = embark.export_run(run, str(folder / "models")).uri
    return run, uri, later, scores_of(uri, later, folder / "scores.parquet")


def scores_of(uri, rows, to) -> np.ndarray:
    embark.score_file(uri, str(rows), to, force=True)
    return bits(pq.read_table(to)["score"].to_numpy())


def bits(scores) -> np.ndarray:
    return np.asarray(scores, np.float32).view(np.uint32)


def as_read(path) -> pd.DataFrame:
    """All cells are the text of the file."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def test_a_frame_has_the_scores_that_its_file_has_bit_for_bit(scored):
    run, uri, later, expected = scored
    rows = as_read(later)
    rows.index = rows.index[::-1] + 5
    for model in (uri, f"{uri}/version-000000001", run, f"{run}@3"):
        found = embark.predict(model, rows.drop(columns="clicked"))
        assert isinstance(found, pd.Series)
        assert found.name == "score"
        assert found.index.equals(rows.index)
        assert np.array_equal(bits(found), expected), model
    assert len(np.unique(expected)) > 100


def test_dicts_and_arrow_tables_have_the_same_scores(scored):
    _, uri, later, expected = scored
    rows = as_read(later)
    for given in (rows.to_dict("records"), pa.Table.from_pandas(rows, preserve_index=False)):
        assert np.array_equal(bits(embark.predict(uri, given)), expected)
    assert len(embark.predict(uri, rows[:0])) == len(embark.predict(uri, [])) == 0


def test_portions_of_rows_keep_their_order(scored, monkeypatch):
    _, uri, later, expected = scored
    monkeypatch.setattr(predict_module, "NUM_ROWS", 256)
    found = embark.predict(uri, as_read(later)).to_numpy()
    assert np.abs(found - expected.view(np.float32)).max() < 1e-6


def test_a_frame_with_types_of_its_own_has_the_scores_of_its_parquet_file(scored, tmp_path):
    _, uri, *_ = scored
    rows = pd.DataFrame({
        "word": pd.Categorical(["a", None, "日本", "a"]), "tags": [["a", "B"], [], None, ["\\N", "w3"]],
        "number": [7.0, np.nan, -1.0, 99.0], "price": pd.array([1, None, 3, 4], "Int64"),
        "seen at": pd.to_datetime(["2024-05-31T18:00:00", None, "2024-02-29T23:59:59", "1970-01-01T00:00:00"]),
        "bought at": pd.to_datetime(["2024-06-01", "2024-06-02", None, "2024-06-03"])})
    rows.assign(clicked=0).to_parquet(tmp_path / "rows.parquet")
    expected = scores_of(uri, tmp_path / "rows.parquet", tmp_path / "scores.parquet")
    assert np.array_equal(bits(embark.predict(uri, rows)), expected)
    as_dicts = json.loads(rows.to_json(orient="records", date_format="iso", date_unit="s"))
    for row in as_dicts:  # the file's times have no zone
        row |= {name: row[name] and row[name].rstrip("Z") for name in ("seen at", "bought at")}
    assert np.array_equal(bits(embark.predict(uri, as_dicts)), expected)


def test_cells_of_several_types_are_read_as_json_has_them(scored):
    _, uri, *_ = scored
    base = dict.fromkeys(COLUMNS, "")
    words = ["0", 0, np.int64(0), pd.NA, float("nan"), None]
    found = embark.predict(uri, pd.DataFrame([{**base, "word": word} for word in words]))
    assert len(set(found[:3])) == 1
    assert len(set(found[3:])) == 1
    assert found[0] != found[3]
    assert np.array_equal(bits(found), bits(embark.predict(uri, [{**base, "word": word} for word in words])))


def test_whole_numbers_that_pandas_made_fractions_of_are_the_same_words(scored, tmp_path):
    _, uri, *_ = scored
    file = write_csv(tmp_path / "rows.csv", [["0", "a", "1", "2", "", "", "0"], ["", "a", "", "", "", "", "1"]])
    rows = pd.read_csv(file)
    assert rows["word"].dtype == float
    assert np.array_equal(bits(embark.predict(uri, rows)), scores_of(uri, file, tmp_path / "scores.parquet"))


@pytest.mark.parametrize(("change", "what", "fix"), [
    (lambda rows: rows.rename(columns={"price": "Price"}), "no column 'price'", "did you mean 'Price'"),
    (lambda rows: rows.drop(columns=["price", "word"]), "no column 'price', 'word'", "None"),
    (lambda rows: rows.assign(price="cheap"), "'price': 'cheap' is not a number", "training data"),
    (lambda rows: rows.assign(price=1j), "column 'price' holds complex", "training data"),
    (lambda rows: rows.assign(word=True), "column 'word' holds booleans", "dtype={'word': str}"),
    (lambda rows: rows.assign(word=1.5), "column 'word' holds fractions", "dtype={'word': str}"),
    (lambda rows: pd.concat([rows, rows[["price"]]], axis=1), "several columns 'price'", "rename"),
    (lambda rows: "rows.csv", "str is neither a DataFrame", "score_file"),
])
def test_rows_that_cannot_be_scored_are_refused_in_words(scored, change, what, fix):
    _, uri, later, _ = scored
    with pytest.raises(UserError) as caught:
        embark.predict(uri, change(as_read(later)[:3]))
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_row_that_cannot_be_read_has_no_score_and_a_warning(scored):
    _, uri, later, _ = scored
    rows = as_read(later)[:4]
    rows.loc[2, "price"] = "cheap"
    with pytest.warns(UserWarning, match=r"1 row of 4 cannot be scored: row 2: column 'price': 'cheap' is not"):
        found = embark.predict(uri, rows)
    assert found.isna().tolist() == [False, False, True, False]


def test_a_newer_checkpoint_and_a_newer_version_are_scored_with(scored, tmp_path):
    train, later = (write_csv(tmp_path / f"{name}.csv", draw_rows(60, 3)) for name in ("train", "later"))
    spec = prepared_spec(tmp_path, train, later)
    run, rows = save_run(spec, seed=1).uri, as_read(later)
    exported = embark.export_run(run).uri
    before = embark.predict(run, rows), embark.predict(exported, rows)
    assert np.array_equal(*map(bits, before))
    save_run(spec, seed=2, step=4)
    assert not np.array_equal(bits(embark.predict(run, rows)), bits(before[0]))
    assert np.array_equal(bits(embark.predict(exported, rows)), bits(before[0]))
    embark.export_run(run)
    assert np.array_equal(bits(embark.predict(exported, rows)), bits(embark.predict(run, rows)))
    assert np.array_equal(bits(embark.predict(exported, rows, version=1)), bits(before[0]))
    with pytest.raises(UserError, match="version 1 is of an exported model"):
        embark.predict(run, rows, version=1)
    with pytest.raises(UserError, match="no such run"):
        embark.predict("nothing", rows)
    assert issubclass(DataError, UserError)


def test_several_tasks_have_a_column_each(tmp_path):
    train, later = (write_csv(tmp_path / f"{name}.csv", draw_rows(60, 3)) for name in ("train", "later"))
    spec = prepared_spec(tmp_path, train, later, model={
        "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "tasks": [
            {"name": "click", "label": "clicked"},
            {"name": "kind", "label": "clicked", "loss": "softmax", "num_classes": 3}]})
    uri, rows = embark.export_run(save_run(spec).uri, str(tmp_path / "models")).uri, as_read(later)
    embark.score_file(uri, str(later), tmp_path / "scores.parquet")
    expected, found = pq.read_table(tmp_path / "scores.parquet"), embark.predict(uri, rows)
    assert np.array_equal(bits(found["click"]), bits(expected["click"].to_numpy()))
    assert np.array_equal(bits(np.stack(found["kind"])), bits(expected["kind"].to_pylist()))
    assert embark.predict(uri, rows.to_dict("records"))["kind"].shape == (60, 3)
