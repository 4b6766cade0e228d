"""Processes on several hosts train as one, and say what is wrong with how they were started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from limits import HANG_S

from embark.errors import UserError
from embark.spec import to_toml
from embark.store import RunDir
from embark.trainers.jax.world import _described

LATE = """
import os, sys, time
from embark.__main__ import run
from embark.data.synthetic import SyntheticSource

make, naps_s = SyntheticSource.train_rows, [0.5] * 3  # the first call looks at ids, and trains nothing

def late(*words):
    time.sleep(naps_s.pop() if naps_s else 0)
    return make(*words)

if os.environ["JAX_PROCESS_ID"] == "1":
    SyntheticSource.train_rows = late
sys.exit(run(["train", "pair.toml", "--quiet"]))
"""
SOURCES = Path(__file__).parents[4] / "src"
SETS = ("train.num_steps=12", "watch.every=3", "store.checkpoint_at_end=true", "data.num_train_samples=2560")


@pytest.mark.slow
def test_two_processes_train_as_one_and_save_a_checkpoint_together(tiny, train_tiny, tmp_path):
    spec = tiny(*SETS, "name=pair", "store.checkpoint_every=6", "watch.system_every_s=0.05")
    (tmp_path / "pair.toml").write_text(to_toml(spec))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    started = [_started(tmp_path, address, rank) for rank in range(2)]
    for process in started:
        _, output = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, output
    run = RunDir(str(tmp_path / "pair"))
    files = run.checkpoints.committed()[-1].files
    assert {name.rpartition("-")[0] for name in files if name.endswith(".bin")} == {"rank-00000", "rank-00001"}
    assert not run.checkpoints.damage(run.checkpoints.committed()[-1])
    alone = train_tiny(*SETS, num_devices=4)
    onward = train_tiny(*SETS[1:], "name=pair", "train.num_steps=18", num_devices=4, fresh=False)
    assert onward.of("resume")[0]["step"] == 12
    assert onward.losses()[:4] == pytest.approx(alone.losses(), abs=1e-6)
    assert onward.of("start")[0]["num_machines"] == 2
    assert onward.of("eval")[0]["auc"] == pytest.approx(alone.of("eval")[0]["auc"], abs=1e-6)
    reference = train_tiny(*SETS[1:], "train.num_steps=18", num_devices=4)
    assert onward.losses()[4:] == pytest.approx(reference.losses()[4:], abs=1e-6)
    _check_ranks([one for one in onward.of("ranks") if one["step"] <= 12])
    assert {len(one["step_s"]) for one in alone.of("ranks")} == {1}


def _check_ranks(result: list[dict[str, Any]]) -> None:
    """Each process tells its own times; the second is the one whose first batches come late."""
    assert (result[0]["step"], result[-1]["step"]) == (3, 12)
    assert {len(one[name]) for one in result for name in ("step_s", "input_s")} == {2}
    assert result[0]["input_s"][1] > 0.5 / 3 / 10, "of half a second over three steps, most of it not overlapped"
    assert all(step_s > 0 for one in result for step_s in one["step_s"])
    assert {machine["rank"] for one in result for machine in one["systems"]} == {0, 1}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (None, None, None)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (None, 1, 0)),
        ({"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "host0", "MASTER_PORT": "1234"}, ("host0:1234", 4, 3)),
        ({"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "host0"}, ("host0:29500", 4, 3)),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a:5"}, ("a:5", 2, 1)),
    ],
)
def test_who_the_processes_are_is_read_by_torchrun_s_names_or_by_jax_s(monkeypatch, environment, expected):
    _only(monkeypatch, environment)
    assert _described() == expected


@pytest.mark.parametrize(
    ("environment", "what"),
    [({"WORLD_SIZE": "2", "RANK": "0"}, "nothing names the coordinator"),
     ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'"),
     ({"JAX_NUM_PROCESSES": "2", "MASTER_ADDR": "a"}, "JAX_PROCESS_ID is ''")],
)
def test_half_a_description_is_refused(monkeypatch, environment, what):
    _only(monkeypatch, environment)
    with pytest.raises(UserError, match=what):
        _described()


def _only(monkeypatch, environment: dict[str, str]) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
                 "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _started(where: Path, address: str, rank: int) -> subprocess.Popen[str]:
    settings = {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank),
        "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(SOURCES), "COLUMNS": "120",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    }
    return subprocess.Popen([sys.executable, "-c", LATE], cwd=where, env=os.environ | settings,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
