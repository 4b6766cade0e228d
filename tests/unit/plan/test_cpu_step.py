"""Step times of a CPU: small operations, bytes and arithmetic at its own rates."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import pytest

from embark.model.placement import Cluster
from embark.plan.calibration import SHIPPED, Calibration, CpuFit, Rates, read_calibrations
from embark.plan.fit import Measurement, fit_calibration, fit_cpu, one_rank_placement
from embark.plan.prediction import StepTime
from embark.plan.step_time import PARTS, step_time
from embark.spec import RunSpec, load_spec

SHAPES = (
    (), ("model.kind=dcnv2", "model.num_tables=10"), ("model.num_tables=3", "train.optimizer=adagrad"),
    ("model.embedding_dim=16", "train.optimizer=sgd", "train.dense_optimizer=sgd"),
    ("model.top_mlp=[1024, 1024, 512]", "model.num_tables=40", "train.dense_optimizer=adam"),
    ("model.kind=dcnv2", "model.top_mlp=[64]", "train.optimizer=adagrad",
     "model.tables=[{name='a', rows=100000, multi_hot=20}, {name='b', rows=5000, dim=32}]"),
    ("model.tables=[{name='a', rows=100000, multi_hot=9, pooling='mean'}, {name='b', rows=5000}]",),
    ("data.zipf_exponent=0", "model.num_tables=60", "model.rows_per_table=100"),
)


def shipped() -> Calibration:
    return read_calibrations(SHIPPED)["cpu"]


def step_of(spec: RunSpec, calibration: Calibration, *, draws_samples: bool = False) -> StepTime:
    return step_time(spec, one_rank_placement(spec), Cluster(1, 1, 0, 0, "cpu"), "pipeline", "fp32", calibration,
                     draws_samples=draws_samples)


def measured(calibration: Calibration) -> list[Measurement]:
    """What a machine that is exactly as the calibration says would show."""
    specs = [load_spec("quickstart", ["place.device=cpu", f"train.batch_size={batch}", *sets])
             for sets in SHAPES for batch in (32, 256, 4096)]
    return [Measurement(spec, "pipeline", "fp32", step_of(spec, calibration).total_s, 1e9, 0.0, 0.0) for spec in specs]


def test_a_fit_finds_again_what_the_measured_steps_were_made_from():
    truth = shipped()
    found = replace(truth, engines={"pipeline": fit_cpu(truth, measured(truth))})
    other = load_spec("quickstart", ["model.num_tables=17", "model.embedding_dim=48", "train.batch_size=1000"])
    assert step_of(other, found).total_s == pytest.approx(step_of(other, truth).total_s, rel=0.01)


def test_a_cpu_calibration_stays_near_the_shipped_one_without_evidence():
    truth = shipped()
    few = measured(truth)[:2]
    found = fit_calibration(replace(truth, engines={}, memory={}), few, truth)
    assert astuple(found.engines["pipeline"]) == pytest.approx(astuple(truth.engines["pipeline"]), rel=0.02)


def test_a_cpu_that_does_all_at_twice_the_rate_takes_half_the_time():
    rates = shipped().rates
    twice = Rates(2 * rates.copy_bytes, {name: 2 * rate for name, rate in rates.matmul_flops.items()},
                  2 * rates.upload_bytes, 2 * rates.synthetic_values, rates.op_s / 2)
    spec = load_spec("quickstart", [])
    assert step_of(spec, replace(shipped(), rates=twice), draws_samples=True).total_s == pytest.approx(
        step_of(spec, shipped(), draws_samples=True).total_s / 2)


def test_the_cores_that_train_also_draw_the_samples():
    spec = load_spec("quickstart", [])
    trained, drawn = step_of(spec, shipped()), step_of(spec, shipped(), draws_samples=True)
    assert drawn.total_s == pytest.approx(trained.total_s + drawn.parts_s["drawing samples"])


def test_every_factor_is_part_of_a_step():
    assert sorted(name for names in PARTS.values() for name in names) == sorted(f.name for f in fields(CpuFit))
