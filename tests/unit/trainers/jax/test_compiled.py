"""The step compiles for TPUs where there is none, and takes the memory that it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from limits import HANG_S

ROOT = Path(__file__).parents[4]
SPEC = """
[model]
num_tables = 2
rows_per_table = 1_000_000
embedding_dim = 64
bottom_mlp = [16]
top_mlp = [16]
"""
TABLE_BYTES = 2 * 1_000_000 * 64 * 4
BATCH_PER_CHIP = 512
NUM_CHIPS = {"v5e:2x2": 4, "v5e:2x4": 8, "v5p:2x2x1": 4, "v6e:4x4": 16}


@pytest.mark.tpu
@pytest.mark.slow
def test_the_complete_step_compiles_and_copies_no_table(compiled):
    result = compiled("v5p:2x2x1")
    check_tables(result, TABLE_BYTES)


@pytest.mark.tpu
@pytest.mark.slow
def test_temporary_memory_does_not_grow_with_the_number_of_chips(compiled):
    few, many = compiled("v5e:2x2"), compiled("v5e:2x4")
    check_tables(many, TABLE_BYTES)
    assert few["batch_per_chip"] == many["batch_per_chip"]
    assert many["temporary_bytes"] < 1.25 * few["temporary_bytes"]


@pytest.fixture
def compiled(tmp_path) -> Callable[..., dict[str, Any]]:
    """A function from chips and settings to what the compiler plans, in a process of its own: the compiler ends the
    one it is in where it meets what it cannot do."""
    (tmp_path / "t.toml").write_text(SPEC)

    def say(topology: str, *sets: str) -> dict[str, Any]:
        settings = (f"train.batch_size={BATCH_PER_CHIP * NUM_CHIPS[topology]}", *sets)
        words = [str(ROOT / "tests/support/tpu_compiler.py"), "t.toml", topology, *settings]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=with_compiler(), capture_output=True,
                              text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return say


def with_compiler() -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    if find_spec("libtpu") is None:
        env["TPU_LIBRARY_PATH"] = str(Path(sys.prefix, "libtpu", "libtpu", "libtpu.so"))
    return env


def check_tables(values: dict[str, Any], kept_bytes: int) -> None:
    """A chip has its part of them once, moved in place, and a step needs no copy."""
    on_chip = kept_bytes / values["num_chips"]
    assert on_chip < values["argument_bytes"] < 1.1 * on_chip + 2**20
    assert values["shared_bytes"] > on_chip
    assert values["temporary_bytes"] < on_chip / 2
