"""`python -m embark.torchrun` ends with what its ranks ended with, restarts what that can cure, and lets them save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limits import HANG_S

pytestmark = pytest.mark.slow

RANK = """
import os, pathlib, signal, sys, time
rank, here = int(os.environ["RANK"]), pathlib.Path(__file__).parent
with open(here / f"starts-{rank}", "a") as starts:
    starts.write("x")
times = len((here / f"starts-{rank}").read_text())
"""
MEET = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


@pytest.fixture(autouse=True)
def _warm(monkeypatch, warm_python):
    """Agents are forked from a process that has imported torch; ranks are scripts, and have a Python of their own."""
    monkeypatch.setattr(sys, "executable", warm_python)


def start(folder: Path, body: str, *options: str, **environ: str) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(RANK + body)
    command = [sys.executable, "-m", "embark.torchrun", "--nproc-per-node=2", "--monitor-interval=0.1", *options,
               str(script)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **environ})


def ends(folder: Path, body: str, *options: str, **environ: str) -> tuple[int, str, list[int]]:
    process = start(folder, body, *(options or ("--standalone",)), **environ)
    output, _ = process.communicate(timeout=HANG_S)
    marks = [folder / f"starts-{rank}" for rank in (0, 1)]
    # A rank may be ended before its first line: the other was quicker.
    return process.returncode, output, [len(mark.read_text()) if mark.exists() else 0 for mark in marks]


def test_ranks_that_end_well_end_well(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code, output, starts = ends(tmp_path, MEET + "dist.destroy_process_group(); print('hello')",
                                TMPDIR=str(temporary))
    assert (code, starts) == (0, [1, 1]), output
    assert {"[rank0]:hello", "[rank1]:hello"} <= set(output.splitlines()), output
    assert [*temporary.iterdir()] == []  # neither the files that the lines went through nor anything else


@pytest.mark.parametrize("code", [64, 75])
def test_a_final_code_comes_through_and_nothing_is_started_again(tmp_path, code):
    ended, output, starts = ends(tmp_path, f"sys.exit({code})", "--standalone", "--max-restarts=3")
    assert (ended, max(starts)) == (code, 1), output
    assert f"with {code}" in output


def test_a_fault_is_started_again_until_it_is_cured(tmp_path):
    body = "sys.exit(70 if rank == 1 and times < 3 else 0)"
    code, output, starts = ends(tmp_path, body, "--standalone", "--max-restarts=3")
    assert code == 0, output
    assert starts[1] == 3


@pytest.mark.parametrize(("body", "expected"), [
    ("sys.exit(70)", 70),
    ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", 70),
    ("sys.exit(3)", 3),
])
def test_a_fault_that_stays_is_reported(tmp_path, body, expected):
    code, output, _ = ends(tmp_path, body)
    assert code == expected, output


def test_sigterm_lets_the_ranks_save_and_says_start_me_again(tmp_path):
    body = f"""
def save(*_):
    time.sleep(1)
    (here / f"saved-{{rank}}").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(here / f"ready-{{rank}}").touch()
time.sleep({60})
"""
    process = start(tmp_path, body, "--standalone", EMBARK_GRACE_S="20")
    until = time.monotonic() + HANG_S
    while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)) and time.monotonic() < until \
            and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, output
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))


def test_a_machine_that_meets_nobody_says_try_again(tmp_path):
    options = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", "--rdzv-endpoint=localhost:0",
               "--rdzv-conf=is_host=true,join_timeout=2,last_call_timeout=1")
    process = start(tmp_path, "", *options)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 70, output
    assert "rendezvous failed" in output


def test_two_machines_find_each_other_as_the_rendered_job_tells_them(tmp_path):
    """The Job's own options, on one machine: pod 0 holds the store, pod 1 is started first."""
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=run", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=localhost:{port}")
    body = MEET + "dist.destroy_process_group()"
    second = start(tmp_path, body, *options, "--rdzv-conf=is_host=false,join_timeout=60,read_timeout=60")
    time.sleep(1)
    first = start(tmp_path, body, *options, "--rdzv-conf=is_host=true,join_timeout=60,read_timeout=60")
    outputs = [process.communicate(timeout=HANG_S)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
