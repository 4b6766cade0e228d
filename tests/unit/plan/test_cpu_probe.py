"""This machine's CPU, measured in some tenths of a second."""

from __future__ import annotations

import itertools
import time

from embark.plan import calibration
from embark.plan.calibration import probe_cpu, probe_python_s


def test_a_cpu_is_probed_for_bytes_arithmetic_and_operations():
    found = probe_cpu()
    assert 1e8 < found.copy_bytes < 1e13
    assert 1e8 < found.matmul_flops < 1e14
    assert 1e-8 < found.op_s < 1e-3


def test_the_pace_of_python_is_probed_in_seconds():
    assert 1e-5 < probe_python_s(1) < 1


def test_a_rate_is_the_best_of_several_rounds_however_long_one_takes(monkeypatch):
    now_s = itertools.count(0.0, 10.0)  # every look at the clock is ten seconds later than the one before
    monkeypatch.setattr(time, "perf_counter", lambda: next(now_s))
    called = []
    assert calibration._best_s(lambda: called.append(1)) == 10.0
    assert len(called) == calibration.LEAST_ROUNDS


def test_a_machine_that_was_busy_when_it_was_measured_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for copy_bytes, is_told in ((2e8, True), (2e10, False)):
        calibration.clear_cache()
        monkeypatch.setattr(calibration, "_cpu_rates", lambda rate=copy_bytes: calibration.CpuRates(rate, 4e10, 2e-6))
        basis = calibration.cpu_calibration().basis
        assert f"{copy_bytes / 1e9:.1f} GB/s" in basis
        assert ("was busy" in basis) is is_told
    calibration.clear_cache()
