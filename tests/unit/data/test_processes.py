"""Work that processes share: every result once, errors as they are, and no process left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from embark.data.processes import each_result
from embark.errors import DataError, Fault


def double(task: int) -> tuple[int, int]:
    return 2 * task, os.getpid()


def fail(task: int) -> int:
    if task == 3:
        raise DataError("task 3 is bad", fix="leave it out")
    return task


def die(task: int) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return task


def name(task: float) -> int:
    time.sleep(task)
    return os.getpid()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_task_has_one_result_with_its_position(num_workers):
    found = dict(each_result(double, list(range(10, 30)), num_workers))
    assert {position: value for position, (value, _) in found.items()} == {i: 2 * (i + 10) for i in range(20)}
    assert all((pid == os.getpid()) == (num_workers == 1) for _, pid in found.values())


def test_an_error_of_a_task_comes_through_with_its_fix():
    with pytest.raises(DataError, match="task 3 is bad") as caught:
        list(each_result(fail, list(range(8)), 2))
    assert caught.value.fix == "leave it out"


def test_a_worker_that_is_killed_is_a_fault():
    with pytest.raises(Fault, match="ended from outside"):
        list(each_result(die, list(range(8)), 2))


def test_who_stops_listening_leaves_no_worker():
    results = each_result(name, [0.0, 0.0, 60.0, 60.0], 2)
    pids = {next(results)[1], next(results)[1]}
    results.close()
    until = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
