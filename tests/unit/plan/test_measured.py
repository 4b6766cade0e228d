"""The shipped H200 calibration is the fit of the steps measured there, and meets the runs it was not fitted to."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from embark.plan.calibration import SHIPPED, read_calibrations
from embark.trainers.torch.bench.calibrate import compare

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module")
def bench_plan() -> ModuleType:
    found = importlib.util.spec_from_file_location("bench_plan", BENCH / "plan.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_shipped_factors_are_what_the_recorded_steps_give(bench_plan):
    fit, _ = bench_plan.recorded(BENCH / "h200_steps.csv")
    shipped = read_calibrations(SHIPPED)["H200"]
    for engine in ("cuda_graph", "pipeline"):
        for name in shipped.engines[engine].__dataclass_fields__:
            assert getattr(shipped.engines[engine], name) == pytest.approx(getattr(fit.engines[engine], name), rel=0.01)
        here, there = shipped.memory[engine], fit.memory[engine]
        assert here.context_bytes + here.workspace_bytes == pytest.approx(there.context_bytes, rel=0.01)
        for name in ("pooled", "layers", "ids"):
            assert getattr(here, name) * (1 + here.fragmentation) == pytest.approx(getattr(there, name), rel=0.01)


def test_both_models_at_three_sizes_by_both_engines_are_within_what_is_promised(bench_plan):
    _, others = bench_plan.recorded(BENCH / "h200_steps.csv")
    shipped = read_calibrations(SHIPPED)["H200"]
    assert len(others) == 12
    for one in others:
        row = compare(shipped, one)
        assert abs(row.predicted_s / row.step_s - 1) < 0.2, row
        assert abs(row.predicted_bytes / row.used_bytes - 1) < 0.05, row
