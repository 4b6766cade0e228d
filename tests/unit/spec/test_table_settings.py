"""Optimizer, type and sharding of a single table, as a spec says them."""

from __future__ import annotations

import pytest

from embark.errors import SpecError
from embark.spec import resolve

ITEM = {"name": "item", "rows": 50}
COPIED = {**ITEM, "sharding": "data_parallel"}


def test_features_of_a_table_have_its_settings():
    spec = resolve({"model": {"tables": [{**ITEM, "optimizer": "adagrad", "dtype": "fp16", "sharding": "row_wise"},
                                         {"name": "seen", "shares": "item"}, {"name": "shop", "rows": 5}]}})
    item, shop = spec.model.stored_tables()
    assert (item.optimizer, item.dtype, item.sharding) == ("adagrad", "fp16", "row_wise")
    assert (shop.optimizer, shop.dtype, shop.sharding) == (None, None, None)
    assert spec.model.tables[1].optimizer == "adagrad"
    assert "optimizer" not in spec.model.tables[2].model_dump()  # the identity of older runs stays what it was


@pytest.mark.parametrize(("sections", "field", "what"), [
    ({"model": {"tables": [{**ITEM, "optimizer": "adam"}]}, "place": {"device": "cpu"}}, "model.tables.0.optimizer",
     "no fused Adam on the CPU"),
    ({"model": {"tables": [ITEM, {"name": "seen", "shares": "item", "dtype": "fp16"}]}}, "model.tables.1.dtype",
     "is not that of table item"),
    ({"model": {"tables": [{**COPIED, "optimizer": "adam"}]}}, "model.tables.0.sharding", "rows that no sample has"),
    ({"model": {"tables": [COPIED]}, "train": {"table_dtype": "fp16"}}, "model.tables.0.sharding", "needs fp32"),
    ({"model": {"tables": [{**ITEM, "dtype": "bf16"}]}, "train": {"engine": "pipeline"}}, "train.engine",
     "no tables in bf16"),
    ({"model": {"kind": "my_model:MyModel", "tables": [{**COPIED, "pooling": "none", "max_length": 5}]}},
     "model.tables.0.sharding", "tables of sequences"),
    ({"model": {"tables": [COPIED, {"name": "user", "ids": "dynamic", "capacity": 64, "rows": 1}]}},
     "model.tables.0.sharding", "dynamic tables"),
    ({"model": {"tables": [{**ITEM, "sharding": "by_rows"}]}}, "model.tables.0.sharding", "row_wise"),
])
def test_what_cannot_be_is_refused_with_its_field(sections, field, what):
    with pytest.raises(SpecError) as raised:
        resolve(sections)
    mistakes = {one.field: one for one in raised.value.mistakes}
    assert field in mistakes
    assert what in mistakes[field].what + mistakes[field].fix
