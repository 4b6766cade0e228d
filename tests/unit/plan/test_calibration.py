"""Measurements are kept, read again, and carried over to other cards as estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embark.catalog import load_catalog
from embark.errors import UserError
from embark.plan import calibration
from embark.plan.calibration import (
    PYTHON_SHARE,
    SHIPPED,
    CpuRates,
    EngineFit,
    at_pace,
    calibration_for,
    calibration_path,
    clear_cache,
    load_calibrations,
    read_calibrations,
    to_toml,
)
from embark.plan.predict import match_gpu


def test_what_ships_was_measured_on_an_h200_and_on_two_kinds_of_cpu():
    shipped = load_calibrations()
    assert set(shipped) == {"H200", "cpu", "cpu-x86_64"}
    assert all(c.is_measured and c.date and c.versions for c in shipped.values())
    assert set(shipped["H200"].engines) == {"cuda_graph", "pipeline"}


@pytest.mark.parametrize("device", ["H200", "cpu", "cpu-x86_64"])
def test_a_calibration_is_read_as_it_was_written(tmp_path, device):
    shipped = load_calibrations()[device]
    (tmp_path / "one.toml").write_text(to_toml(shipped))
    assert read_calibrations(tmp_path / "one.toml") == {device: shipped}


def test_what_was_measured_here_goes_before_what_ships(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    text = to_toml(load_calibrations()["H200"]).replace("NVIDIA H200", "my own card")
    calibration_path().parent.mkdir(parents=True)
    calibration_path().write_text(text)
    clear_cache()
    assert load_calibrations()["H200"].title == "my own card"
    assert "cpu" in load_calibrations()


def test_other_cards_are_estimates_by_their_datasheets():
    catalog, h200 = load_catalog(), load_calibrations()["H200"]
    h100 = calibration_for(catalog.gpus["H100"])
    assert not h100.is_measured
    assert "estimate" in h100.basis
    of = catalog.gpus["H100"].hbm_gbyte_per_s / catalog.gpus["H200"].hbm_gbyte_per_s
    assert h100.rates.copy_bytes == pytest.approx(h200.rates.copy_bytes * of)
    assert calibration_for(catalog.gpus["H200"]).is_measured


def test_host_bound_time_scales_with_python_s_pace():
    h200 = load_calibrations()["H200"]
    h200 = replace(h200, rates=replace(h200.rates, python_s=2e-3))
    pace = 1 + 0.5 * PYTHON_SHARE
    for name, fit in at_pace(h200, 3e-3).engines.items():
        was = h200.engines[name]
        assert isinstance(fit, EngineFit)
        assert fit == replace(was, host_s=fit.host_s, host_layer_s=fit.host_layer_s, host_group_s=fit.host_group_s)
        assert (fit.host_s, fit.host_layer_s, fit.host_group_s) == pytest.approx(
            (pace * was.host_s, pace * was.host_layer_s, pace * was.host_group_s))
    unknown = replace(h200, rates=replace(h200.rates, python_s=0.0))
    assert at_pace(h200, 0.0) == h200
    assert at_pace(unknown, 3e-3) == unknown


@pytest.mark.parametrize("text", ["[H200]\ntitle = 1", "not toml", "[H200]\n"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, text):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UserError, match=r"bad\.toml: not a calibration"):
        read_calibrations(tmp_path / "bad.toml")


@pytest.mark.parametrize(("title", "gib", "name"), [
    ("NVIDIA H200", 140, "H200"), ("NVIDIA A100-SXM4-80GB", 80, "A100-80GB"), ("NVIDIA A100-SXM4-40GB", 40, "A100"),
    ("NVIDIA H100 80GB HBM3", 80, "H100"), ("Tesla T4", 15, "T4"), ("NVIDIA L4", 22, "L4"),
])
def test_a_drivers_name_is_found_in_the_catalog(title, gib, name):
    assert match_gpu(title, gib * 2**30, load_catalog()).name == name


def test_an_unknown_card_is_none():
    assert match_gpu("NVIDIA GeForce RTX 9090", 24 * 2**30, load_catalog()) is None


@pytest.mark.parametrize(("architecture", "name"), [("aarch64", "cpu"), ("x86_64", "cpu-x86_64"), ("riscv64", "cpu")])
def test_another_cpu_is_an_estimate_at_its_own_rates_until_it_is_measured(tmp_path, monkeypatch, architecture, name):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: architecture)
    shipped = replace(read_calibrations(SHIPPED)[name], device="cpu")
    half = shipped.rates.matmul_flops["fp32"] / 2
    monkeypatch.setattr(calibration, "_cpu_rates", lambda: CpuRates(1e10, half, 2e-6))
    found = calibration.cpu_calibration()
    assert not found.is_measured
    assert (found.rates.copy_bytes, found.rates.op_s) == (1e10, 2e-6)
    assert found.rates.matmul_flops["bf16"] == shipped.rates.matmul_flops["bf16"] / 2
    assert found.engines == shipped.engines
    calibration.clear_cache()
    path = tmp_path / "embark" / "calibration.toml"
    path.parent.mkdir()
    path.write_text(to_toml(shipped))
    assert calibration.cpu_calibration().rates == shipped.rates
