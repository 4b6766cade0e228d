"""A spec and its data agree, or all that differs is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prepared_rows import RAGGED, make_prepared

from embark.data import resolve_from_data, resolve_if_readable
from embark.data.prepared import Feature, Layout, Manifest
from embark.data.prepared.manifest import resolve_from_manifest
from embark.errors import DataError
from embark.spec import RunSpec, load_spec, resolve, to_toml

LAYOUT = Layout(("x", "y"), (Feature("user", 100), Feature("tags", 50, multi_hot=4, is_ragged=True)))
MANIFEST = Manifest(LAYOUT, {})


def fit(**model: Any) -> RunSpec:
    return resolve_from_manifest(resolve({"data": {"kind": "prepared", "path": "some/data"}, "model": model}), MANIFEST)


def refusal(**model: Any) -> str:
    with pytest.raises(DataError) as caught:
        fit(**model)
    assert "embark data prepare" in caught.value.fix
    return str(caught.value)


def tables(**rows: int) -> list[dict[str, Any]]:
    return [{"name": name, "rows": number, "multi_hot": 4 if name == "tags" else 1} for name, number in rows.items()]


def test_a_spec_that_says_nothing_takes_what_the_data_has():
    model = fit(embedding_dim=16).model
    assert [(t.name, t.rows, t.multi_hot, t.dim) for t in model.table_list()] == [
        ("user", 100, 1, 16), ("tags", 50, 4, 16),
    ]
    assert model.num_dense == 2


def test_larger_tables_fewer_of_them_and_another_order_will_do():
    model = fit(tables=tables(tags=60, user=100)).model
    assert [t.name for t in model.tables] == ["tags", "user"]
    assert [t.name for t in fit(tables=tables(user=1_000)).model.tables] == ["user"]


def test_everything_that_differs_is_named():
    text = refusal(num_dense=13, tables=[*tables(user=99, item=5), {"name": "tags", "rows": 50, "multi_hot": 2}])
    for result in ("some/data", "model.num_dense = 13", "2 dense columns", "no 'item'", "user: rows = 99",
                 "ids up to 99", "tags: multi_hot = 2", "4 ids"):
        assert result in text


def test_tables_given_by_number_are_compared_by_their_names():
    text = refusal(num_tables=26)
    assert "'cat_0'" in text
    assert "it has 'user', 'tags'" in text


def test_a_column_whose_name_no_table_can_have_is_refused():
    manifest = Manifest(Layout((), (Feature("user id", 3),)), {})
    with pytest.raises(DataError, match="'user id' cannot name a table") as caught:
        resolve_from_manifest(resolve({"data": {"kind": "prepared", "path": "d"}}), manifest)
    assert "rename" in caught.value.fix


def test_the_resolved_spec_is_the_same_when_it_is_written_and_read_back(tmp_path: Path):
    made = make_prepared(tmp_path / "data", RAGGED)
    spec = resolve_from_data(made.spec())
    (tmp_path / "spec.toml").write_text(to_toml(spec))
    again = load_spec(str(tmp_path / "spec.toml"))
    assert again.model == spec.model
    assert resolve_from_data(again).model == spec.model


def test_the_number_of_synthetic_samples_decides_the_batch_alone():
    rates = {"learning_rate": 0.01}
    assert resolve_from_data(spec := resolve({"train": {"batch_size": 2048, **rates}})) is spec
    few = resolve({"data": {"num_train_samples": 40_000}, "train": rates})
    assert resolve_from_data(few) == few.model_copy(update={"train": few.train.model_copy(update={"batch_size": 64})})


def test_a_spec_handed_over_has_what_its_data_decides_and_nothing_else(tmp_path):
    made = make_prepared(tmp_path / "data", RAGGED, train=10)
    spec = resolve({"model": {"embedding_dim": 16}, "data": {"kind": "prepared", "path": str(made.path),
                                                             "prepare": {"input": "raw.csv"}}})
    there, unread = resolve_if_readable(spec)
    assert unread == ""
    assert there.model == resolve_from_data(spec).model
    text = to_toml(there, only_set=True)
    assert f"num_dense = {len(made.layout.dense)}" in text
    assert '{ name = "a", rows = 100, init_range = 0.05 }, { name = "tags", rows = 300, multi_hot = 4' in text
    assert "bottom_mlp = [128, 64]" in text
    assert not {"num_tables", "rows_per_table", "raw.csv"} & set(text.replace("=", " ").split())


@pytest.mark.parametrize("path", ["/nowhere/data", "s3://bucket/data"])
def test_data_that_cannot_be_read_from_here_decides_nothing_and_it_is_said(path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    spec = resolve({"data": {"kind": "prepared", "path": path}})
    there, unread = resolve_if_readable(spec)
    assert there == spec
    assert "[model]" not in to_toml(there, only_set=True)
    assert unread.startswith(f"{path}: cannot be read from here, so the run takes its tables")
    given = resolve({"data": {"kind": "prepared", "path": path}, "model": {"num_dense": 0, "tables": tables(user=3)}})
    assert resolve_if_readable(given) == (given, "")


def test_data_that_is_not_what_the_spec_says_is_refused_early(tmp_path):
    made = make_prepared(tmp_path / "data", RAGGED, train=10)
    with pytest.raises(DataError, match=r"the data is not what \[model\] says"):
        resolve_if_readable(resolve({"data": {"kind": "prepared", "path": str(made.path)}, "model": {"num_dense": 77}}))
