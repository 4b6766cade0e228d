"""What the processes may take adds up to no more than was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embark.data.prepare.budget import MIN_CHUNK_BYTES, PARENT_BYTES, plan_budget
from embark.data.prepare.prepare import segment_bytes_of
from embark.errors import UserError
from embark.features.schema import SparseColumn


@pytest.mark.parametrize("memory_gb", [0.5, 0.7, 1, 2, 8, 100])
@pytest.mark.parametrize("has_runs", [False, True])
@pytest.mark.parametrize("num_cores", [1, 2, 64])
def test_the_memory_limit_holds_whatever_is_requested(make_spec, criteo, memory_gb, has_runs, num_cores):
    lists = tuple(replace(column, is_list=True, max_ids=32) for column in criteo.schema().sparse[:3])
    for schema in (criteo.schema(), replace(criteo.schema(), sparse=lists)):
        prepare = make_spec({"memory_gb": memory_gb, "num_workers": num_cores}).data.prepare
        budget = plan_budget(prepare, schema, has_runs=has_runs)
        assert 1 <= budget.num_workers <= num_cores
        assert budget.chunk_bytes >= MIN_CHUNK_BYTES
        assert PARENT_BYTES + budget.num_workers * budget.worker_bytes <= memory_gb * 1e9
        assert bool(budget.run_rows) == has_runs


def test_too_little_is_refused_with_the_least_that_works(make_spec, criteo):
    with pytest.raises(UserError, match=r"memory_gb = 0\.1 is too little") as caught:
        plan_budget(make_spec({"memory_gb": 0.1}).data.prepare, criteo.schema(), has_runs=True)
    least = float(caught.value.fix.split()[2])
    assert plan_budget(make_spec({"memory_gb": least}).data.prepare, criteo.schema(), has_runs=True).num_workers == 1


def test_wide_lists_take_fewer_workers(make_spec, criteo):
    wide = replace(criteo.schema(), sparse=(SparseColumn("tags", "text", is_list=True, max_ids=1000),))
    prepare = make_spec({"memory_gb": 3, "num_workers": 16}).data.prepare
    assert plan_budget(prepare, wide, has_runs=False).num_workers < plan_budget(
        prepare, criteo.schema(), has_runs=False).num_workers


def test_segments_depend_on_the_input_alone_and_are_neither_tiny_nor_huge():
    assert segment_bytes_of(1000) == 8 << 20
    assert segment_bytes_of(10**9) == 10**9 // 32
    assert segment_bytes_of(10**12) == 96 << 20
