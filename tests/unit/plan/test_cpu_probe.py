"""This machine's CPU, measured in some tenths of a second."""

from __future__ import annotations

from embark.plan.calibration import probe_cpu, probe_python_s


def test_a_cpu_is_probed_for_bytes_arithmetic_and_operations():
    found = probe_cpu()
    assert 1e8 < found.copy_bytes < 1e13
    assert 1e8 < found.matmul_flops < 1e14
    assert 1e-8 < found.op_s < 1e-3


def test_the_pace_of_python_is_probed_in_seconds():
    assert 1e-5 < probe_python_s(1) < 1
