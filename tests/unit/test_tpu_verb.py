"""`embark plan --tpu-compile` shows what the compiler plans beside what Embark plans, or what is missing."""

from __future__ import annotations

import json

import pytest

from embark import tpu_verb
from embark.__main__ import run
from embark.tpu import aot

MEASURED = aot.Compiled("v5e:2x4", 8, 2048, 1_035_338_240, 7_671_808, 1_035_167_744, 1_035_165_696, 10_132_480, 115.4)
"""What jax 0.10.2 said of four tables of 4 million rows of 128."""


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def test_without_the_compiler_the_command_that_brings_it_is_told(monkeypatch, capsys):
    monkeypatch.setattr(aot, "find_spec", lambda name: None if name == "libtpu" else object())
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4"]) == 64
    assert "pip install 'embark-rec[tpu]'" in capsys.readouterr().err


def test_the_compiler_s_bytes_stand_beside_the_plan_s(monkeypatch, capsys):
    monkeypatch.setattr(tpu_verb, "compile_for", lambda spec, topology: MEASURED)
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4"]) == 0
    told = capsys.readouterr().out
    assert "quickstart compiles for v5e:2x4: 1.05 GB on each of 8 chips, 2,048 samples each" in told
    assert "during a step" in told
    assert "7.67 MB" in told
    assert "embark plan, v5litepod-8" in told
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:2x4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_bytes"] == 1_035_338_240 + 7_671_808 + 2_048 + 10_132_480
    assert data["planned"]["machine"] == "v5litepod-8"
    assert data["planned"]["device_bytes"]["tables"] > 0


def test_chips_that_no_slice_of_the_catalog_has_are_told_without_a_plan(monkeypatch, capsys):
    odd = aot.Compiled("v5e:1x3", 3, 1, 1, 1, 1, 1, 1, 1.0)
    monkeypatch.setattr(tpu_verb, "compile_for", lambda spec, topology: odd)
    assert run(["plan", "quickstart", "--tpu-compile", "v5e:1x3"]) == 0
    assert "v5litepod-3 is not in the catalog" in capsys.readouterr().out
