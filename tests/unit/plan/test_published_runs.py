"""The plan of bench/mlperf.py against runs that others published on 8 to 128 GPUs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from embark.catalog import load_catalog

SCRIPT = Path(__file__).parents[3] / "bench" / "mlperf.py"


@pytest.fixture(scope="module")
def mlperf():
    found = importlib.util.spec_from_file_location("bench_mlperf", SCRIPT)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules[found.name]


def test_published_steps_are_planned_without_a_fitted_factor(mlperf):
    catalog, runs = load_catalog(), mlperf.read_runs()
    errors = [abs(mlperf.off(run, mlperf.step_of(run, catalog))) for run in runs]
    assert len(runs) == 14
    assert sum(error <= 0.15 for error in errors) >= 11
    assert sum(error <= 0.25 for error in errors) >= 13


@pytest.mark.parametrize(("at", "replicated"), [(0, 0), (2, 13), (3, 14)])
def test_tables_below_the_published_threshold_are_replicated(mlperf, at, replicated):
    run = mlperf.read_runs()[at]
    spec = mlperf.model_of(run.batch_size)
    division = mlperf.divide(spec, run)
    assert len(division.replicated) == replicated
    # All others are placed completely: a table cut into parts has each of them in another bucket.
    parts = [table for bucket in division.buckets for table in bucket]
    assert {table: parts.count(table) for table in parts} == division.num_parts
    assert set(parts) | division.replicated == set(range(len(spec.model.tables)))


def test_every_row_of_a_published_run_is_somewhere(mlperf):
    for run in mlperf.read_runs():
        division = mlperf.divide(mlperf.model_of(run.batch_size), run)
        spec = mlperf.model_of(run.batch_size, division.replicated)
        placement = mlperf.place(spec, run, division)
        for table in spec.model.stored_tables():
            held = sum(shard.num_rows for shard in placement.shards if shard.table == table.name)
            copies = run.num_gpus if table.is_data_parallel else 1
            assert copies * table.rows <= held < copies * table.rows + run.num_gpus


def test_the_figures_in_the_docs_are_what_the_plan_gives(mlperf, tmp_path):
    mlperf.curves(tmp_path)
    for figure in ("scaling-dcnv2.svg", "scaling-hstu.svg"):
        drawn = (SCRIPT.parents[1] / "docs" / "internals" / figure).read_text()
        assert (tmp_path / figure).read_text() == drawn, "python bench/mlperf.py curves docs/internals"
