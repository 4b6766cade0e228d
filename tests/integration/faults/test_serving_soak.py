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
    return subprocess.run([sys.executable, str(SOAK), "--stores", "folder", "--jobs", "1", *options],
                          capture_output=True, text=True, timeout=HANG_S)


def test_few_rounds_of_versions_kills_and_wipes_differ_in_nothing():
    found = soak("--seed", "1", "--rounds", "2", "--actions", "6")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 rounds differed" in found.stdout


@pytest.mark.parametrize(("plant", "actions", "words"), [
    ("parent_by_number", "reuse,wipe", "current for"),
    ("reused_number", "reuse", "in a place that was not wiped"),
    ("trained_twice", "kill_follower", "of the follower"),
    ("unchecked_switch", "damage_next", "and was not current"),
    ("unseen_rollback", "roll_back_while_judged", "after a rollback during a publish"),
])
def test_planted_defect_is_found(plant, actions, words):
    found = soak("--seed", "1", "--rounds", "3", "--actions", "8", "--only", actions, "--plant", plant)
    assert found.returncode == 1, found.stdout + found.stderr
    assert words in found.stdout
