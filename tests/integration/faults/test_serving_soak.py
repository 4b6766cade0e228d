"""A short soak of serving: rounds of versions, kills and wiped places show no difference, and a planted defect does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

SOAK = Path(__file__).parents[3] / "bench" / "serving_soak.py"

pytestmark = pytest.mark.slow


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SOAK), "--seed", "1", "--stores", "folder", *options],
                          capture_output=True, text=True, timeout=HANG_S)


def test_few_rounds_of_versions_kills_and_wipes_differ_in_nothing():
    found = soak("--rounds", "2", "--actions", "6")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 rounds, 12 actions" in found.stdout
    assert "0 rounds differed" in found.stdout


def test_each_planted_defect_is_found_by_what_it_does():
    found = soak("--rounds", "3", "--actions", "8", "--plant", "all", "--jobs", "1")
    assert found.returncode == 0, found.stdout + found.stderr
    for plant, words in {
        "parent_by_number": ("is current, and the server", "are not those of"),
        "reused_number": ("in a place that was not wiped",),
        "trained_twice": ("of the follower",),
        "unchecked_switch": ("is damaged, and answers",),
        "unseen_rollback": ("after a rollback during a publish",),
    }.items():
        before, is_found, _ = found.stdout.partition(f"planted {plant}: found\n")
        assert is_found, found.stdout
        told = before.rpartition("planted ")[2]
        assert any(one in told for one in words), told
