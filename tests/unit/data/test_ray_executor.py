"""What is refused before a task goes to Ray; tests/integration/cloud/test_ray_prepare.py has real clusters."""

from __future__ import annotations

import socket
import sys

import pytest

from embark.data.ray_executor import RayExecutor
from embark.errors import MissingPackage, UserError


class Work:
    def do(self, task, report):
        return lambda: task


@pytest.fixture
def executor():
    return RayExecutor(Work(), 0, 2_000_000_000)


def test_without_ray_the_extra_is_named(executor, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r'executor = "ray" needs ray') as caught, executor:
        pass
    assert "embark-rec[ray]" in caught.value.fix


def test_the_address_of_jobs_is_refused_with_the_one_to_use(executor, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.5:8265")
    with pytest.raises(UserError, match="is the address of jobs") as caught, executor:
        pass
    assert "HOST:6379" in caught.value.fix


def test_a_cluster_that_is_not_there_is_said_at_once(executor, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=f"no Ray cluster at 127.0.0.1:{port}: .*refused"), executor:
        pass


@pytest.mark.parametrize(("memory", "is_refused"), [((1e9, 3e9), False), ((1e9, 1.5e9), True), ((), False)])
def test_a_task_that_no_machine_has_memory_for_is_refused(executor, memory, is_refused):
    head = {"Alive": True, "Resources": {"memory": 9e9}}
    lost = {"Alive": False, "Resources": {"CPU": 1.0, "memory": 9e9}}
    nodes = [head, lost, *({"Alive": True, "Resources": {"CPU": 4.0, "memory": size}} for size in memory)]
    if is_refused:
        with pytest.raises(UserError, match="no machine of the Ray cluster has 2 GB for a task") as caught:
            executor._check_room(nodes)
        assert "lower data.prepare.memory_gb" in caught.value.fix
    else:
        executor._check_room(nodes)  # With no machine that has a core yet, an autoscaler may add some.
