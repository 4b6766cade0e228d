"""The shipped calibrations are fits of the steps measured there, and meet the runs they were not fitted to."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import ModuleType

import pytest

from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.plan.calibration import SHIPPED, read_calibrations
from embark.plan.fit import Measurement
from embark.spec import load_spec
from embark.trainers.torch.bench.calibrate import compare

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module")
def bench_plan() -> Iterator[ModuleType]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(BENCH))
    found = importlib.util.spec_from_file_location("bench_plan", BENCH / "plan.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    monkeypatch.undo()


def test_the_shipped_factors_are_what_the_recorded_steps_give(bench_plan):
    fit, _ = bench_plan.recorded(BENCH / "h200_steps.csv")
    shipped = read_calibrations(SHIPPED)["H200"]
    for engine in ("cuda_graph", "pipeline"):
        for name in shipped.engines[engine].__dataclass_fields__:
            assert getattr(shipped.engines[engine], name) == pytest.approx(getattr(fit.engines[engine], name), rel=0.01)
        here, there = shipped.memory[engine], fit.memory[engine]
        assert here.context_bytes + here.workspace_bytes == pytest.approx(
            there.context_bytes + there.workspace_bytes, rel=0.01)
        for name in ("layers", "ids", "gaps"):
            assert getattr(here, name) == pytest.approx(getattr(there, name), rel=0.01)


def test_runs_that_were_not_fitted_are_within_what_is_promised(bench_plan):
    _, others = bench_plan.recorded(BENCH / "h200_steps.csv")
    shipped = read_calibrations(SHIPPED)["H200"]
    assert others
    for one in others:
        row = compare(shipped, one)
        assert abs(row.predicted_s / row.step_s - 1) < 0.2, row
        assert abs(row.predicted_bytes / row.used_bytes - 1) < 0.05, row


def test_random_specs_that_were_fitted_are_met(bench_plan):
    fitted, _ = bench_plan.read_measured(BENCH / "h200_random.csv", "cuda")
    found = [compare(read_calibrations(SHIPPED)["H200"], one) for one in fitted]
    steps = [abs(one.predicted_s / one.step_s - 1) for one in found if one.step_s]
    assert sum(step <= 0.15 for step in steps) >= 0.9 * len(steps)
    sizes = [abs(one.predicted_bytes / one.used_bytes - 1) for one in found if one.used_bytes]
    assert sum(size <= 0.05 for size in sizes) >= 0.95 * len(sizes)


def test_the_memory_of_random_specs_that_were_never_fitted_is_met(bench_plan):
    _, unseen = bench_plan.read_measured(BENCH / "h200_random.csv", "cuda")
    shipped = read_calibrations(SHIPPED)["H200"]
    assert len(unseen) == 40
    for one in (compare(shipped, one) for one in unseen):
        assert abs(one.predicted_bytes / one.used_bytes - 1) <= 0.05, one


def test_the_shipped_x86_cpu_is_what_its_recorded_steps_give(bench_plan):
    fit = importlib.import_module("random_plan").fit_cpu_steps(BENCH / "cpu_x86_random.csv")
    shipped = read_calibrations(SHIPPED)["cpu-x86_64"]
    assert astuple(shipped.engines["pipeline"]) == pytest.approx(astuple(fit), rel=0.01)


def test_the_shipped_cpu_fit_meets_nine_of_ten_unseen_steps(bench_plan):
    random_plan = importlib.import_module("random_plan")
    shipped = read_calibrations(SHIPPED)["cpu"]
    fit = random_plan.fit_cpu_steps(BENCH / "cpu_random.csv")
    assert astuple(shipped.engines["pipeline"]) == pytest.approx(astuple(fit), rel=0.01)
    _, unseen = random_plan.read_measured(BENCH / "cpu_random.csv", "cpu")
    near = [abs(found.predicted_s / found.step_s - 1) <= 0.2 for found in (compare(shipped, one) for one in unseen)]
    assert len(near) >= 30
    assert sum(near) >= 0.9 * len(near)


@pytest.mark.parametrize("path", sorted((BENCH / "specs").glob("*.toml")), ids=lambda path: path.stem)
def test_a_spec_written_by_hand_is_planned_on_one_gpu(path):
    spec = load_spec(str(path))
    engine, _ = select_engine(spec, "cuda", cuda_graph_obstacle(spec, "cuda", has_tables_on_host=False))
    found = compare(read_calibrations(SHIPPED)["H200"], Measurement(spec, engine, "bf16", 1.0, 1.0, 0.0, 0.0))
    assert 1e-5 < found.predicted_s < 1
    assert found.predicted_bytes < 141e9
