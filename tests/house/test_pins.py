"""pyproject.toml's extras and stack/versions.toml's default triple say the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import embark
from embark.stack.versions import Variant, default_triple

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(("extra", "variant"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_an_extra_pins_the_default_triple(extra: str, variant: Variant):
    triple = default_triple()
    expected = {
        f"torch=={triple.torch_minor}.*",
        f"{triple.fbgemm_distribution(variant)}=={triple.fbgemm}",
        f"torchmetrics=={triple.torchmetrics}",
    }
    # With the CUDA build torchrec brings its own needs; without it, it goes in by --no-deps and they are listed.
    expected |= {f"torchrec=={triple.torchrec}"} if variant == "cuda" else set(triple.needs)
    assert set(PROJECT["optional-dependencies"][extra]) == expected


def test_every_python_that_is_promised_has_wheels():
    prefix = "Programming Language :: Python :: "
    promised = {line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)}
    assert promised <= set(default_triple().pythons)
    assert PROJECT["requires-python"] == f">={min(default_triple().pythons)}"


def test_the_simulated_accounts_have_the_version_of_embark():
    project = tomllib.loads((ROOT / "cloudsim" / "pyproject.toml").read_text())["project"]
    assert project["version"] == embark.__version__
    assert f"embark-rec=={embark.__version__}" in project["dependencies"]
