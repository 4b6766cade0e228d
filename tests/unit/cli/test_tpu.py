"""`embark plan --tpu-compile` shows what the compiler plans beside what Embark plans, or what is missing."""

from __future__ import annotations

import json
import re

import pytest

from embark.__main__ import run
from embark.trainers.jax import aot

MEASURED = aot.CompiledStep("v5e:2x4", 8, 2048, 1_035_338_240, 7_671_808, 1_035_167_744, 1_035_165_696, 10_132_480,
                            115.4)
"""What jax 0.10.2 said of four tables of 4 million rows of 128."""


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def test_without_the_compiler_the_command_that_brings_it_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(aot, "find_spec", lambda name: None if name == "libtpu" else object())
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4"]) == 64
    assert "[tpu]'" in capsys.readouterr().err


WIDE = ["-s", "model.num_tables=4", "-s", "model.rows_per_table=4000000", "-s", "model.embedding_dim=128", "-s",
        "train.batch_size=16384"]
"""The run that was compiled."""


def test_the_compiler_s_bytes_stand_beside_the_plan_s(monkeypatch, capsys):
    monkeypatch.setattr(aot, "compile_for", lambda spec, topology: MEASURED)
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4", *WIDE]) == 0
    output = capsys.readouterr().out
    assert "quickstart compiles for v5e:2x4: 1.05 GB on each of 8 chips, 2,048 samples each" in output
    rows = {line[:36].strip(): re.split(r"\s{2,}", line[36:].strip()) for line in output.splitlines()}
    assert rows["tables, state, dense layers, batch"] == ["1.04 GB", "1.04 GB"]
    assert rows["during a step"][0] == "7.67 MB"
    assert rows["in all"] == ["1.05 GB", "1.05 GB"]
    assert rows["available"][1] == "16.9 GB"


def test_the_table_is_complete_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(aot, "compile_for", lambda spec, topology: MEASURED)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4", *WIDE]) == 0
    output = capsys.readouterr().out
    assert "tables, state, dense layers, batch  1.04 GB" in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_program_reads_the_same_with_units_in_the_names(monkeypatch, capsys):
    monkeypatch.setattr(aot, "compile_for", lambda spec, topology: MEASURED)
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4", *WIDE, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_bytes"] == 1_035_338_240 + 7_671_808 + 2_048 + 10_132_480
    planned = data["planned"]
    assert planned["chip"] == "TPU-v5e"
    assert planned["argument_bytes"] == pytest.approx(data["argument_bytes"], rel=0.001)
    assert planned["peak_bytes"] == pytest.approx(data["peak_bytes"], rel=0.01)
    assert planned["device_limit_bytes"] == 15.75 * 2**30


def test_chips_that_no_slice_of_the_catalog_has_are_planned_too(monkeypatch, capsys):
    odd = aot.CompiledStep("v5e:1x2", 2, 8192, 1, 1, 1, 1, 1, 1.0)
    monkeypatch.setattr(aot, "compile_for", lambda spec, topology: odd)
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:1x2", *WIDE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planned"]["tables"] == 4 * 2_000_000 * 512
