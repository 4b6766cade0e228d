"""Workers do the tasks, know nothing of torch, and never outlive their parent."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from limits import HANG_S

from embark.data.workers import WorkerPool
from embark.errors import DataError, Fault

WORK = '''
import os, signal, sys, time


class Various:
    """A task is the name of what to do."""

    def do(self, task, report):
        if task == "modules":
            return lambda: sorted({"torch", "embark.cli.app", "embark.cli.console", "pyarrow"} & set(sys.modules))
        if task == "mask":
            return lambda: signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "refuse":
            from embark.errors import DataError

            raise DataError("x is wrong", fix="correct x")
        if task == "break":
            raise RuntimeError("odd")
        if task == "sleep":
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(60)
        report(1, 2, 3)
        if task == "die late":
            return lambda: os.kill(os.getpid(), signal.SIGKILL)
        return lambda: task * 2


if __name__ == "__main__":
    from embark.data.workers import WorkerPool

    with WorkerPool(Various(), 2) as pool:
        list(pool.run(["sleep", "sleep"], lambda *_: None))
'''


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Work that the workers can import."""
    (tmp_path / "work_for_the_pool.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("work_for_the_pool").Various()
    del sys.modules["work_for_the_pool"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_task_has_its_own_result_and_reports_add_up(work, num_workers):
    reports = []
    with WorkerPool(work, num_workers) as pool:
        results = dict(pool.run(range(1, 20), lambda *report: reports.append(report)))
        results |= dict(pool.run(range(20, 25), lambda *report: reports.append(report)))
    assert results == {n: 2 * n for n in range(1, 25)}
    assert [sum(column) for column in zip(*reports, strict=True)] == [24, 48, 72]


def test_workers_import_neither_torch_nor_the_commands(work):
    with WorkerPool(work, 1) as pool:
        ((_, modules),) = pool.run(["modules"], lambda *_: None)
    assert modules == []


def test_an_error_of_ours_arrives_with_its_fix_and_others_with_their_trace(work):
    with pytest.raises(DataError, match="x is wrong") as caught, WorkerPool(work, 1) as pool:
        list(pool.run(["refuse"], lambda *_: None))
    assert caught.value.fix == "correct x"
    with pytest.raises(Fault, match="odd"), WorkerPool(work, 1) as pool:
        list(pool.run(["break"], lambda *_: None))


@pytest.mark.parametrize("when", ["die", "die late"])
def test_a_worker_that_is_killed_is_reported_and_the_others_end(work, when):
    pool = WorkerPool(work, 2)
    with pytest.raises(Fault, match="SIGKILL") as caught, pool:
        list(pool.run([when, 1, 2, 3], lambda *_: None))
    assert "run the command again" in caught.value.fix


def test_ctrl_c_is_left_to_the_parent_from_a_worker_s_first_import_on(work):
    with WorkerPool(work, 2) as pool:
        assert list(pool.run(["mask"], lambda *_: None)) == [("mask", True)]
        (process,) = pool._workers.values()
        server = Path(f"/proc/{psutil.Process(process.pid).ppid()}/status").read_text()
    assert int(re.search(r"SigBlk:\s*(\w+)", server)[1], 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path, number):
    script = tmp_path / "sleepers.py"
    script.write_text(WORK)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(number)
    parent.wait(HANG_S)
    parent.stdout.close()
    until = time.monotonic() + HANG_S
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < until, "a worker still runs"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
