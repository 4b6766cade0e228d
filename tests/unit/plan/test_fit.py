"""A fit finds again what measurements were made from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embark.model.placement import Cluster
from embark.plan.calibration import Calibration, EngineFit, MemoryFit, Rates, at_pace
from embark.plan.fit import Measurement, fit_calibration, fit_engine, fit_memory, one_rank_placement, solve_non_negative
from embark.plan.memory import device_parts
from embark.plan.step_time import step_time
from embark.spec import load_spec

RATES = Rates(4e12, {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14}, 5e10, python_s=2e-3)
GRAPH = EngineFit(*[0.0] * 4, 2e-5, 2e-5, 1e-5, 4e-5, 1e-5, 1e-5, 0.0, 3e-5, 2e-10, 2.0, 2.5, 2.2, 2.2, 1.2, 2.0,
                  0.3, 1.5, 4.0)
PIPELINE = EngineFit(3e-3, 3e-4, 1e-3, 0.1, *[0.0] * 9, 2.0, 2.0, 2.0, 2.0, 1.0, 2.0, 5.0, 5.0, 5.0)
HELD = MemoryFit(1.3e9, 1e8, 0.0, 1.0, 1.2, 0.0)
TRUTH = Calibration("H200", "a card", "2026-11-15", "", RATES, {"cuda_graph": GRAPH, "pipeline": PIPELINE},
                    {"cuda_graph": HELD, "pipeline": MemoryFit(1.4e9, 1e8, 0.0, 1.0, 1.5, 1.6)})
SHAPES = {
    "plain": (),
    "deep": ("model.top_mlp=[1024, 1024, 512, 256]", "model.embedding_dim=128",
             "train.optimizer=adam"),
    "crossed": ("model.kind=dcnv2", "model.num_tables=10"), "few": ("model.num_tables=3", "train.optimizer=adam"),
    "narrow": ("model.embedding_dim=16", "train.optimizer=sgd"), "small": ("model.rows_per_table=1000",),
    "many": ("model.tables=[{name='a', rows=1000000, multi_hot=20}, {name='b', rows=5000, multi_hot=3}]",),
    "means": ("model.tables=[{name='a', rows=1000000, multi_hot=9, pooling='mean'}, {name='b', rows=5000}]",),
    "widths": ("model.kind=dcnv2", "model.tables=[{name='a', rows=1000000, dim=32}, {name='b', rows=5000}]"),
}
OTHER = ("model.kind=dcnv2", "model.num_tables=40", "model.embedding_dim=48", "train.batch_size=16384",
         "model.top_mlp=[256, 128]", "train.optimizer=adam")


def measured(engine: str, *, noise: float = 0.0, python_s: float = 0.0) -> list[Measurement]:
    """What a machine that is exactly as TRUTH says would show; `python_s`: of its host."""
    found = []
    for name, sets in SHAPES.items():
        for batch in (512, 4_096, 32_768, 262_144):
            spec = load_spec("quickstart", [f"name={name}", f"train.batch_size={batch}", *sets])
            step_s = step_time(spec, one_rank_placement(spec), Cluster(1, 1, 0, 0), engine, "bf16",
                               at_pace(TRUTH, python_s), from_memory=True).total_s
            used = sum(device_parts(spec, one_rank_placement(spec), engine, "bf16", TRUTH).values())
            step_s *= 1 + noise * (1 if batch == 4_096 else 0)
            found.append(Measurement(spec, engine, "bf16", step_s, used, used - 1.3e9, 0.0, python_s=python_s))
    return found


def other_step_s(fit: EngineFit, engine: str) -> float:
    spec, calibration = load_spec("quickstart", [*OTHER]), replace(TRUTH, engines={engine: fit})
    return step_time(spec, one_rank_placement(spec), Cluster(1, 1, 0, 0), engine, "bf16", calibration).total_s


def test_a_captured_engine_is_found_again_by_what_it_says_of_another_model():
    found = fit_engine(TRUTH, measured("cuda_graph"))
    for name in ("start_s", "layer_s"):
        assert getattr(found, name) == pytest.approx(getattr(GRAPH, name), rel=0.15)
    assert found.host_s == 0
    assert other_step_s(found, "cuda_graph") == pytest.approx(other_step_s(GRAPH, "cuda_graph"), rel=0.02)


def test_a_host_bound_pipeline_is_fitted_despite_disturbed_steps():
    found = fit_engine(TRUTH, measured("pipeline", noise=0.1), GRAPH)
    for name in ("host_s", "host_layer_s", "host_group_s"):
        assert getattr(found, name) == pytest.approx(getattr(PIPELINE, name), rel=0.1), name
    assert other_step_s(found, "pipeline") == pytest.approx(other_step_s(PIPELINE, "pipeline"), rel=0.1)


def test_hosts_of_different_pace_give_one_fit():
    found = fit_engine(TRUTH, [*measured("pipeline", python_s=1.5e-3), *measured("pipeline", python_s=3e-3)], GRAPH)
    for name in ("host_s", "host_layer_s", "host_group_s", "host_wait"):
        assert getattr(found, name) == pytest.approx(getattr(PIPELINE, name), rel=0.1), name


def test_what_few_measurements_leave_open_stays_as_another_device_has_it():
    few = [m for m in measured("cuda_graph") if m.spec.name == "plain"]
    found = fit_engine(TRUTH, few, GRAPH)
    assert other_step_s(found, "cuda_graph") == pytest.approx(other_step_s(GRAPH, "cuda_graph"), rel=0.02)


def test_memory_is_found_again():
    for engine in ("cuda_graph", "pipeline"):
        found, truth = fit_memory(measured(engine), is_cpu=False), TRUTH.memory[engine]
        always = truth.context_bytes + truth.workspace_bytes
        assert found.context_bytes + found.workspace_bytes == pytest.approx(always, rel=0.01)
        for part in ("layers", "ids", "gaps"):
            assert getattr(found, part) == pytest.approx(getattr(truth, part), rel=0.02), (engine, part)


def test_a_fit_keeps_the_rates_and_has_every_engine_that_was_measured():
    base = replace(TRUTH, engines={}, memory={})
    found = fit_calibration(base, [*measured("cuda_graph"), *measured("pipeline")])
    assert found.rates == RATES
    assert set(found.engines) == set(found.memory) == {"cuda_graph", "pipeline"}


def test_least_squares_never_go_below_zero():
    assert solve_non_negative([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])[1] == 0
    assert solve_non_negative([[1.0, 0.0], [0.0, 2.0]], [3.0, 4.0]) == pytest.approx([3.0, 2.0])
