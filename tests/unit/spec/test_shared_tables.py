"""Features that share a table, as a spec says them."""

from __future__ import annotations

import tomllib

import pytest

from embark.errors import SpecError
from embark.spec import resolve, to_toml

ITEM = {"name": "item", "rows": 50, "pooling": "mean", "dim": 8}
SEEN = {"name": "seen", "shares": "item", "multi_hot": 20}


def model(*tables, **more):
    return resolve({"model": {"kind": "dcnv2", "tables": list(tables), **more}}).model


@pytest.mark.parametrize("tables", [(ITEM, SEEN), (SEEN, ITEM)])
def test_a_feature_has_the_rows_width_and_pooling_of_the_table_it_shares(tables):
    found = {one.name: one for one in model(*tables).table_list()}
    assert list(found) == [one["name"] for one in tables]
    seen = found["seen"]
    assert (seen.rows, seen.dim, seen.pooling, seen.multi_hot) == (50, 8, "mean", 20)
    (stored,) = model(*tables).stored_tables()
    assert (stored.name, stored.rows, stored.dim, stored.multi_hot) == ("item", 50, 8, 21)
    assert [one.name for one in stored.features] == list(found)


def test_a_saved_spec_is_read_back_equal_without_unused_fields():
    spec = resolve({"model": {"embedding_dim": 8, "tables": [{"name": "item", "rows": 50}, SEEN]}})
    assert resolve(tomllib.loads(to_toml(spec))) == spec
    dumped = [table.model_dump() for table in spec.model.table_list()]
    assert dumped == [{"name": "item", "rows": 50, "dim": 8, "pooling": "sum", "multi_hot": 1},
                      {"name": "seen", "rows": 50, "dim": 8, "pooling": "sum", "multi_hot": 20, "shares": "item"}]


@pytest.mark.parametrize(("tables", "field", "what"), [
    ((ITEM, {**SEEN, "shares": "itm"}), "model.tables.1.shares", "is no table"),
    ((ITEM, SEEN, {"name": "third", "shares": "seen"}), "model.tables.2.shares", "has no rows of its own"),
    (({**SEEN, "name": "item"},), "model.tables.0.shares", "has no rows of its own"),
    ((ITEM, {**SEEN, "rows": 60}), "model.tables.1.rows", "is not that of table item, which is 50"),
    ((ITEM, {**SEEN, "dim": 16}), "model.tables.1.dim", "is not that of table item, which is 8"),
    ((ITEM, {**SEEN, "pooling": "sum"}), "model.tables.1.pooling", "is not that of table item, which is mean"),
    ((ITEM, {**SEEN, "learning_rate": 0.1}), "model.tables.1.learning_rate", "which is not given"),
    (({**ITEM, "learning_rate": -0.1},), "model.tables.0.learning_rate", "greater than or equal to 0"),
    ((ITEM, {"name": "seen"}), "model.tables.1.rows", "is required"),
    ((ITEM, {"name": "seen", "shares": ["item"]}), "model.tables.1.shares", "valid string"),
])
def test_a_table_that_cannot_be_shared_so_is_refused_by_its_field(tables, field, what):
    with pytest.raises(SpecError) as caught:
        model(*tables)
    found = {mistake.field: mistake.what for mistake in caught.value.mistakes}
    assert what in found[field]
    assert list(found) == [field]
