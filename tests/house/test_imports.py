"""Imports run downward only, and only trainers/torch knows torch: the contracts of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from limits import HANG_S

ROOT = Path(__file__).parents[2]


def test_the_import_contracts_are_stored():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
