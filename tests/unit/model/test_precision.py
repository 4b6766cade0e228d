"""One rule for `train.precision = "auto"`, in every trainer and in the plan."""

import pytest

from embark.catalog import load_catalog
from embark.model.engine_selection import choose_precision, cpu_has_matrix_bf16, gpu_has_matrix_bf16
from embark.spec import TrainSpec


@pytest.mark.parametrize(("named", "has_units", "chosen"), [
    ("auto", True, "bf16"), ("auto", False, "fp32"), ("fp32", True, "fp32"), ("tf32", False, "tf32"),
    ("bf16", False, "bf16"),
])
def test_only_auto_depends_on_the_device(named, has_units, chosen):
    assert choose_precision(TrainSpec(precision=named), has_matrix_bf16=has_units) == chosen


@pytest.mark.parametrize(("flags", "has_units"), [("avx512f amx_bf16 amx_tile", True), ("avx512_bf16", False)])
def test_a_cpu_is_known_by_its_flags(tmp_path, flags, has_units):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : {flags}\n")
    assert cpu_has_matrix_bf16(cpuinfo) == has_units


def test_a_system_without_cpuinfo_has_no_such_cpu(tmp_path):
    assert not cpu_has_matrix_bf16(tmp_path / "none")


def test_a_gpu_is_known_by_its_compute_capability():
    assert [gpu_has_matrix_bf16(c) for c in ((7, 0), (7, 5), (8, 0), (9, 0))] == [False, False, True, True]


def test_the_catalog_has_bf16_rates_of_the_same_gpus():
    before_ampere = {name for name, gpu in load_catalog().gpus.items() if gpu.bf16_tflops is None}
    assert before_ampere == {"T4", "V100", "V100-32GB"}
