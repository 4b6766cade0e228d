"""A file of one's own: read right, or refused with the file, the column, the value and the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from embark.data import open_source
from embark.data.columns import ColumnsSource, read_rows
from embark.data.prepare.inputs import open_inputs
from embark.data.prepare.later_rows import fit_schema
from embark.data.prepare.sampling import take_sample
from embark.data.synthetic import SyntheticSource
from embark.errors import DataError, MissingPackage, SpecError, UserError
from embark.features.arrow.row_parser import RowParser
from embark.features.encoding import plain_row_format
from embark.features.numbers import numbers_of
from embark.run.resolve import resolve_run
from embark.spec import DataSpec, ModelSpec, RunSpec, Table, resolve, to_toml
from embark.spec.train import TrainSpec

NUM_ROWS = 500


def model(rows: int = 50, tag_rows: int = 20, multi_hot: int = 3) -> ModelSpec:
    return ModelSpec(
        num_dense=2,
        tables=(Table(name="user", rows=rows), Table(name="tags", rows=tag_rows, multi_hot=multi_hot)),
    )


def data(path: Path, **changes: Any) -> DataSpec:
    return DataSpec(kind="columns", path=str(path), dense_columns=("age", "price"), **changes)


def content() -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    return {
        "label": rng.integers(0, 2, NUM_ROWS).tolist(),
        "age": np.arange(NUM_ROWS, dtype=float).tolist(),
        "price": rng.normal(size=NUM_ROWS).astype(np.float32).tolist(),
        "user": rng.integers(0, 50, NUM_ROWS).tolist(),
        "tags": [rng.integers(0, 20, rng.integers(0, 4)).tolist() for _ in range(NUM_ROWS)],
    }


def write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    def text(cell: Any) -> str:
        return "|".join(map(str, cell)) if isinstance(cell, list) else str(cell)

    lines = [",".join(columns)] + [",".join(map(text, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def refusal(path: Path, change: ModelSpec | None = None, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        ColumnsSource(change or model(), data(path, **changes))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=[("d.csv", write_csv), ("d.parquet", write_parquet)], ids=["csv", "parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    name, write = request.param

    def make(**changes: list[Any]) -> Path:
        return write(tmp_path / name, content() | changes)

    return make


def test_every_row_comes_once_in_training_or_held_out(file: Callable[..., Path]):
    source = ColumnsSource(model(), data(file()))
    expected = content()
    assert source.num_train_samples + source.num_eval_samples == NUM_ROWS
    rows_seen = []
    for batch in (source.train_rows(0, 0, source.num_train_samples), source.eval_rows(0, source.num_eval_samples)):
        assert not batch.is_fixed
        rows = batch.dense[:, 0].astype(int)
        rows_seen += rows.tolist()
        user, tags = batch.ids[: len(rows)], batch.ids[len(rows) :]
        assert user.tolist() == [expected["user"][row] for row in rows]
        assert batch.label.tolist() == [expected["label"][row] for row in rows]
        assert batch.dense[:, 1].tolist() == [expected["price"][row] for row in rows]
        ends = np.cumsum(batch.lengths[1])
        assert [part.tolist() for part in np.split(tags, ends[:-1])] == [expected["tags"][row] for row in rows]
    assert sorted(rows_seen) == list(range(NUM_ROWS))


def test_numbers_are_scaled_by_training_rows_and_so_is_a_row_to_score(tmp_path: Path):
    columns = content()
    columns["price"] = np.exp(np.random.default_rng(0).normal(3, 2, NUM_ROWS)).astype(np.float32).tolist()
    file = write_csv(tmp_path / "d.csv", columns)
    spec = RunSpec(model=model(), data=data(file, eval_fraction=0.3), train=TrainSpec(batch_size=50))
    found = resolve_run(spec)
    batch = found.source.train_rows(0, 0, found.source.num_train_samples)
    assert np.abs(batch.dense.mean(axis=0)).max() < 1e-3
    assert np.abs(batch.dense.std(axis=0) - 1).max() < 0.01
    assert found.source.eval_rows(0, 100).dense.mean(axis=0)[0] != 0
    encoder = plain_row_format(found.spec.model, found.spec.data, features=found.spec.features)[2]
    assert [code.transform for code in encoder.numbers.codes] == ["standardize", "log"]
    cells = np.array([columns["age"], columns["price"]], np.float32).T
    scored = {tuple(row) for row in encoder.numbers.encode(cells).tolist()}
    assert {tuple(row) for row in batch.dense.tolist()} < scored
    assert "fitted" in to_toml(found.spec)
    assert resolve_run(found.spec).identity == found.identity
    # One that has no state of its own is refused where it is of other columns.
    with pytest.raises(UserError, match=r"features\.fitted: is of the columns"):
        numbers_of(found.spec.features.fitted, ("price", "age"))


@pytest.mark.parametrize("given", [False, True])
def test_numbers_alone_are_a_model_of_their_quantile_buckets(tmp_path: Path, given: bool):
    columns = content()
    columns["price"] = np.exp(np.random.default_rng(0).normal(3, 2, NUM_ROWS)).astype(np.float32).tolist()
    file = write_csv(tmp_path / "d.csv", columns)
    values: dict[str, Any] = {
        "model": {"num_dense": 2}, "data": {"kind": "columns", "path": str(file), "dense_columns": ["age", "price"]},
        "train": {"batch_size": 50}}
    if given:
        values["model"]["tables"] = [{"name": "user", "rows": 100}]
        values["features"] = {"columns": {"price": {"bucket_table": True, "num_buckets": 4}}}
    found = resolve_run(resolve(values))
    tables = {table.name: table.rows for table in found.spec.model.table_list()}
    assert tables == ({"user": 100, "price_bucket": 5} if given else {"age_bucket": 17, "price_bucket": 17})
    batch = found.source.train_rows(0, 0, found.source.num_train_samples)
    buckets = np.split(batch.ids, len(tables))[-1]
    counts = np.bincount(buckets, minlength=tables["price_bucket"])[1:]
    assert counts.max() - counts.min() <= 2
    # Raw rows get the same buckets in scoring and serving.
    assert resolve_run(found.spec).identity == found.identity
    schema, prepare, encoder = plain_row_format(found.spec.model, found.spec.data, features=found.spec.features)
    inputs, files = open_inputs(str(file))
    raw = read_rows(inputs, files, fit_schema(schema, take_sample(prepare, schema.needed, inputs, files), "d.csv"),
                    RowParser(schema, prepare))
    scored = encoder.encode(encoder.readable(raw))
    assert dict(zip(scored.dense[:, 1].tolist(), scored.ids[-1].tolist(), strict=True)).items() >= dict(
        zip(batch.dense[:, 1].tolist(), buckets.tolist(), strict=True)).items()


def test_several_values_of_a_column_need_prepared_data():
    spec = {"data": {"kind": "columns", "path": "x.csv", "dense_columns": ["a"]}, "model": {"num_dense": 1}}
    for features in ({"numbers": "piecewise_linear"}, {"missing_flags": True}, {"columns": {"a": {
            "transform": "piecewise_linear"}}}, {"columns": {"a": {"missing_flag": True}}}):
        with pytest.raises(SpecError, match="features"):
            resolve({**spec, "features": features})


def test_epochs_have_orders_of_their_own_that_the_seed_fixes(tmp_path: Path):
    path = write_csv(tmp_path / "d.csv", content())
    source, again = ColumnsSource(model(), data(path)), ColumnsSource(model(), data(path))
    orders = [source.train_rows(epoch, 0, 100).dense[:, 0].tolist() for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] == again.train_rows(0, 0, 100).dense[:, 0].tolist()
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_the_same_rows_stay_held_out_when_rows_are_added(tmp_path: Path):
    def held_out(num_rows: int) -> set[float]:
        part = {name: values[:num_rows] for name, values in content().items()}
        source = ColumnsSource(model(), data(write_csv(tmp_path / "d.csv", part), eval_fraction=0.3))
        return set(source.eval_rows(0, source.num_eval_samples).dense[:, 0].tolist())

    few, all_rows = held_out(300), held_out(NUM_ROWS)
    assert few == {row for row in all_rows if row < 300}
    assert len(all_rows) == pytest.approx(0.3 * NUM_ROWS, abs=40)


@pytest.mark.parametrize("format", ["s", "zoned", "typed"])
def test_with_a_time_column_the_newest_rows_are_held_out(tmp_path: Path, format: str):
    draw = np.random.default_rng(2)
    seconds = draw.integers(1_700_000_000, 1_700_003_000, NUM_ROWS)  # some are equal
    times = np.datetime64("1970-01-01T00:00:00") + seconds.astype("m8[s]")
    cells = {"s": seconds.tolist(), "zoned": [f"{time}Z" for time in times], "typed": times}[format]
    columns = content() | {"at": cells}
    files = [write_parquet(tmp_path / "d.parquet", columns),
             write_csv(tmp_path / "d.csv", columns | {"at": list(map(str, cells))})]
    wanted = np.flatnonzero(seconds >= sorted(seconds)[-100])
    for file in files:
        source = ColumnsSource(model(), data(file, time_column="at", eval_fraction=0.2))
        held_out = source.eval_rows(0, source.num_eval_samples).dense[:, 0]
        assert held_out.tolist() == wanted.tolist()
        trained = source.train_rows(0, 0, source.num_train_samples).dense[:, 0]
        assert sorted([*trained.tolist(), *held_out.tolist()]) == list(range(NUM_ROWS))
        assert source.fingerprint() != ColumnsSource(model(), data(file, time_column="at")).fingerprint()


def test_a_split_by_time_needs_times(tmp_path: Path):
    one = write_csv(tmp_path / "one.csv", content() | {"at": ["2024-05-31"] * NUM_ROWS})
    assert "so many have the time 2024-05-31T00:00:00Z" in refusal(one, time_column="at")
    two = write_csv(tmp_path / "two.csv", content() | {"at": ["2024-05-31"] * 250 + ["1717113600"] * 250})
    assert "two.csv, line 252: column 'at': '1717113600' does not fit" in refusal(two, time_column="at")
    assert "has no column 'when'" in refusal(one, time_column="when")


def test_csv_may_begin_with_a_byte_order_mark_and_hold_empty_lines(tmp_path: Path):
    path = tmp_path / "d.csv"
    path.write_text("\ufeffuser,label,age,price,tags\n1,0,1,2, 4|5\n2,1,1,2,\n\n3,1.0,1,2,6|7\n", encoding="utf-8")
    source = ColumnsSource(model(), data(path, eval_fraction=1e-9))
    batch = source.train_rows(0, 0, 3)
    order = np.argsort(batch.ids[:3])
    assert batch.lengths[1][order].tolist() == [2, 0, 2]
    assert batch.label[order].tolist() == [0, 1, 1]


MISTAKES: dict[str, tuple[dict[str, list[Any]], list[str]]] = {
    "a string id": ({"user": ["ann"] + ["1"] * 499}, ["'user'", "integer"]),
    "a label of 2": ({"label": [0, 1, 2] + [0] * 497}, ["line ", "'label': ", "2", "neither 0 nor 1"]),
    "a dense NaN": ({"age": [0.0, float("nan")] + [1.0] * 498}, ["'age', row 2", "is empty"]),
    "a dense infinity": ({"age": [float("inf")] + [1.0] * 499}, ["line ", "'age'", "inf", "not a number"]),
    "a dense number too large for 32 bits": ({"age": [1e300] + [1.0] * 499}, ["line ", "'age'", "1e+300"]),
    "words for numbers": ({"price": ["cheap"] * 500}, ["'price'", "number"]),
    "fractional ids": ({"user": [1.5] * 500}, ["'user'", "integer"]),
    "a negative id": ({"user": [1, -1, -7] + [0] * 497}, ["'user'", "49: 2", "-1 in row 2", "smallest here is -7"]),
    "an id too large": ({"user": [1] * 498 + [51, 90]}, ["'user'", "49: 2", "51 in row 499", "rows = 91", '"clip"']),
    "an id too large in a list": (
        {"tags": [[]] * 5 + [[1, 77]] + [[2]] * 494}, ["'tags'", "19: 1", "77 in row 6", "rows = 78"]
    ),
}


@pytest.mark.parametrize(("changes", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_wrong_value_is_named_with_its_column_and_row(
    file: Callable[..., Path], changes: dict[str, list[Any]], says: list[str]
):
    message = refusal(file(**changes))
    assert [part for part in says if part not in message] == [], message


def test_bad_ids_of_all_columns_are_reported_at_once(file: Callable[..., Path]):
    message = refusal(file(user=[99] * 500, tags=[[88]] * 500))
    assert "column 'user': ids outside 0 to 49: 500" in message
    assert "column 'tags': ids outside 0 to 19: 500" in message
    assert "user: rows = 100; tags: rows = 89" in message


def test_lists_that_are_too_long_keep_their_newest_ids_and_are_counted(file: Callable[..., Path]):
    source = ColumnsSource(model(), data(file(tags=[[1]] * 499 + [[1, 2, 3, 4]]), eval_fraction=1e-9))
    batch = source.train_rows(0, 0, source.num_train_samples)
    tags = batch.by_feature(batch.ids)[1].tolist()
    assert sorted(tags) == [1] * 499 + [2, 3, 4]
    assert tags[tags.index(2) :][:3] == [2, 3, 4]
    assert source.notes == ("lists with more ids than their column takes, of which the last, the newest, were kept: 1",)


def test_clipped_ids_are_counted_in_the_notes(file: Callable[..., Path]):
    source = ColumnsSource(model(), data(file(user=[-3, 70] + [5] * 498), on_bad_id="clip", eval_fraction=1e-9))
    batch = source.train_rows(0, 0, 500)
    assert sorted(set(batch.ids[:500].tolist())) == [0, 5, 49]
    assert len(source.notes) == 1
    assert "'user': ids outside 0 to 49: 2" in source.notes[0]
    assert ColumnsSource(model(), data(file(), on_bad_id="clip")).notes == ()


def test_missing_values_are_refused(tmp_path: Path):
    lines = write_csv(tmp_path / "d.csv", content()).read_text().splitlines()
    cells = lines[7].split(",")
    for position, name in enumerate(["label", "age", "price", "user"]):
        lines[7] = ",".join("" if i == position else cell for i, cell in enumerate(cells))
        (tmp_path / "d.csv").write_text("\n".join(lines))
        wanted = ("line 8: column 'label' is empty; the label must be 0 or 1" if name == "label" else
                  f"column {name!r}, row 7 of the data: is empty")
        assert wanted in refusal(tmp_path / "d.csv")


def test_parquet_nulls_are_refused_and_counted(tmp_path: Path):
    message = refusal(write_parquet(tmp_path / "d.parquet", content() | {"user": [1, None, None] + [1] * 497}))
    assert "column 'user', row 2 of the data: is empty; such rows: 2" in message


def test_a_missing_column_is_reported_with_the_nearest_name(file: Callable[..., Path]):
    assert "no column 'lable'" in refusal(file(), label="lable")
    assert "did you mean 'label'?" in refusal(file(), label="lable")


def test_files_that_cannot_be_data_are_refused(tmp_path: Path):
    assert "no such file" in refusal(tmp_path / "none.csv")
    assert "holds no data files" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "*.parquet")
    for name in ("e.csv", "e.parquet"):
        (tmp_path / name).touch()
        assert "empty" in refusal(tmp_path / name)
    np.savez(tmp_path / "d.npz", user=np.zeros(9))
    assert "is a zip archive, which is not read" in refusal(tmp_path / "d.npz")
    (tmp_path / "d.parquet").write_text("not at all")
    assert "is not a Parquet file" in refusal(tmp_path / "d.parquet")
    (tmp_path / "h.csv").write_text("label,age,price,user,tags\n")
    assert "no rows" in refusal(tmp_path / "h.csv")
    (tmp_path / "r.csv").write_text("label,age,price,user,tags\n1,2,3,4,5\n1,2,3\n")
    assert "line 3: its fields are 3 instead of 5" in refusal(tmp_path / "r.csv")
    (tmp_path / "t.csv").write_text("label,age,price,user,tags,age\n1,2,3,4,5,6\n")
    assert "two columns named 'age'" in refusal(tmp_path / "t.csv")


def test_the_label_cannot_be_a_feature_too(file: Callable[..., Path]):
    assert "show the model the answer" in refusal(file(), label="age")


def test_without_pyarrow_parquet_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_parquet(tmp_path / "d.parquet", content())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arrow = ("embark.data.columns", "embark.features.arrow", "embark.data.prepare.readers")
    for name in [name for name in sys.modules if name.startswith(arrow)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingPackage, match=r"pip install 'embark-rec\[columns\]'"):
        open_source(RunSpec(model=model(), data=data(path)))


def test_open_source_opens_what_the_spec_names(tmp_path: Path):
    path = write_csv(tmp_path / "d.csv", content())
    assert isinstance(open_source(RunSpec(model=model(), data=data(path))), ColumnsSource)
    assert isinstance(open_source(RunSpec()), SyntheticSource)


@pytest.mark.parametrize("ending", ["", "part_*.parquet"], ids=["folder", "glob"])
def test_a_folder_of_parquet_is_its_files_one_behind_the_other(tmp_path: Path, ending: str):
    """As NVTabular writes it, with what it puts beside the parts."""
    columns = content()
    for part, (start, stop) in enumerate([(0, 120), (120, 120), (120, 333), (333, NUM_ROWS)]):
        some = {name: values[start:stop] for name, values in columns.items()}
        arrays = {"tags": pyarrow.array(some.pop("tags"), pyarrow.list_(pyarrow.int64())),
                  "user": pyarrow.array(some.pop("user"), pyarrow.int64())}
        floats = {name: pyarrow.array(values, pyarrow.float32()) for name, values in some.items()}
        pyarrow.parquet.write_table(pyarrow.table({**arrays, **floats}), tmp_path / f"part_{part}.parquet")
    (tmp_path / "_metadata").write_bytes(b"not a part")
    (tmp_path / "_metadata.json").write_text("{}")
    (tmp_path / "_file_list.txt").write_text("3\npart_0.parquet\n")
    found = ColumnsSource(model(), data(tmp_path / ending))
    (tmp_path / "one").mkdir()
    alone = ColumnsSource(model(), data(write_parquet(tmp_path / "one" / "d.parquet", columns)))
    assert found.num_train_samples + found.num_eval_samples == NUM_ROWS
    for field in ("dense", "ids", "lengths", "label"):
        one, other = (getattr(source.train_rows(1, 0, 400), field) for source in (found, alone))
        np.testing.assert_array_equal(one, other)


def test_a_glob_of_csv_is_its_files_one_behind_the_other(tmp_path: Path):
    write_csv(tmp_path / "a.csv", content())
    write_csv(tmp_path / "b.csv", content())
    source = ColumnsSource(model(), data(tmp_path / "*.csv"))
    assert source.num_train_samples + source.num_eval_samples == 2 * NUM_ROWS
