"""Under torchrun a worker that dies is restarted with the others, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration.faults.conftest import SPEC, Run

pytestmark = pytest.mark.slow

WAITS_S = 120


def test_torchrun_restarts_and_the_losses_are_the_same(zygote, tmp_path, tmp_path_factory):
    sets = ("train.num_steps=60",)
    reference = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=sets)
    assert reference.ends(2) == [0, 0], reference.output()
    run = Run(zygote, tmp_path)  # read, not started
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    words = ["train", str(spec), "--set", f"store.root={tmp_path}", "--set", *sets]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3",
               "--monitor-interval=0.1", "-m", "embark", *words]
    with open(tmp_path / "run.log.0", "wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            wait_for(lambda: run.events("save") or process.poll() is not None)
            os.kill(worker(process.pid), signal.SIGKILL)
            assert process.wait(WAITS_S) == 0, run.output()
        finally:
            process.kill()
    assert len(run.events("start")) == 2
    assert run.events("resume")[0]["step"] >= 5
    assert {step: set(result) for step, result in run.losses().items()} == {
        step: set(result) for step, result in reference.losses().items()}


def wait_for(happened) -> None:
    until = time.monotonic() + WAITS_S
    while not happened() and time.monotonic() < until:
        time.sleep(0.005)


def worker(agent: int) -> int:
    """The last of torchrun's children."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(children[-1])
