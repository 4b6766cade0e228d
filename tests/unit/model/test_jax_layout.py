"""How the JAX trainer lays tables over devices, and what it refuses."""

from __future__ import annotations

import pytest

from embark.errors import UserError
from embark.model.jax_layout import LINE_WIDTHS, make_layout
from embark.spec import load_spec, resolve

MIXED = {"model": {"embedding_dim": 32, "tables": [
    {"name": "a", "rows": 1003, "dim": 32}, {"name": "b", "rows": 7, "dim": 32, "multi_hot": 3},
    {"name": "c", "rows": 50_001, "dim": 128}, {"name": "d", "rows": 12, "dim": 100}], "kind": "dcnv2"}}


def test_the_placement_has_every_row_once():
    spec = resolve(MIXED, ["train.batch_size=4096"])
    rows: dict[str, int] = {}
    for shard in make_layout(spec, 8, LINE_WIDTHS["tpu"]).placement(spec).shards:
        rows[shard.table] = rows.get(shard.table, 0) + shard.num_rows
    assert rows == {t.name: t.rows for t in spec.model.table_list()}


def test_narrow_rows_share_a_line_of_memory_in_fp32_alone():
    spec = resolve(MIXED, ["train.batch_size=4096"])
    by_dim = {g.dim: g.rows_per_line for g in make_layout(spec, 8, LINE_WIDTHS["tpu"]).groups}
    assert by_dim == {32: 4, 100: 1, 128: 1}
    halves = resolve(MIXED, ["train.batch_size=4096", "train.table_dtype=fp16"])
    assert {g.rows_per_line for g in make_layout(halves, 8, LINE_WIDTHS["tpu"]).groups} == {1}


@pytest.mark.parametrize(("sets", "result"), [
    (["train.optimizer=adam"], "train.optimizer = adam"),
    (["train.sharding=column_wise"], "train.sharding = column_wise"),
    (["train.sharding=table_wise"], "train.sharding = table_wise"),
    (["train.batch_size=1001"], "does not divide over 8 devices\n +fix: use 1000 or 1008"),
    (["model.rows_per_table=2140000000"], "32 bits"),
    (['model.tables=[{ name = "a", rows = 9 }, { name = "b", shares = "a" }]'], r"(?s)tables\.1\.shares = a.*JAX"),
    (['model.tables=[{ name = "a", rows = 9, learning_rate = 0.0 }]'], r"(?s)tables\.0\.learning_rate = 0\.0.*JAX"),
])
def test_what_the_trainer_cannot_do_is_refused(sets, result):
    with pytest.raises(UserError, match=result):
        make_layout(load_spec("quickstart", sets), 8)
