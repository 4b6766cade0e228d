"""Under torchrun a worker that dies is restarted with the others, and a machine that is lost is done without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration.faults.conftest import SPEC, Run
from integration.faults.zygote import free_port
from limits import HANG_S
from warm_python import processes_with

pytestmark = pytest.mark.slow


def test_torchrun_restarts_and_the_losses_are_the_same(zygote, warm_python, tmp_path, tmp_path_factory):
    sets = ("train.num_steps=30",)
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
                                   env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python})
        try:
            wait_for(lambda: run.events("save") or process.poll() is not None)
            os.kill(worker(process.pid), signal.SIGKILL)
            assert process.wait(HANG_S) == 0, run.output()
        finally:
            process.kill()
    assert len(run.events("start")) == 2
    assert run.events("resume")[0]["step"] >= 5
    assert {step: set(result) for step, result in run.losses().items()} == {
        step: set(result) for step, result in reference.losses().items()}

ALL_STEPS = 30
HELD_AT = 13
MACHINE = "TEST_MACHINE"


def test_a_run_goes_on_without_a_lost_machine_and_takes_one_in_again(zygote, warm_python, tmp_path, tmp_path_factory):
    """Three agents, as on three machines; one is killed with its rank, and later started anew."""
    sets = (f"train.num_steps={ALL_STEPS}", "train.sharding=table_wise", "store.keep_checkpoints=9")
    reference = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=sets)
    assert reference.ends(3) == [0, 0, 0], reference.output()
    run, machines = Run(zygote, tmp_path), Machines(tmp_path, sets, warm_python)
    try:
        agents = [machines.start(index) for index in range(3)]
        machines.wait_until_held(3)
        machines.lose(agents[2])
        machines.release(3)
        machines.wait_until_held(2)
        assert run.events("start")[-1]["world_size"] == 2
        agents[2] = machines.start(2)
        assert [agent.wait(HANG_S) for agent in agents] == [0, 0, 0], run.output()
    finally:
        machines.end()
    starts = [event["world_size"] for event in run.events("start")]
    assert starts == [3, 2, 3]
    # The first resumes from the last checkpoint before the loss; the second from where SIGTERM made the ranks save.
    lost, grown = (event["step"] for event in run.events("resume"))
    assert 0 < lost < HELD_AT
    assert grown >= lost + HELD_AT - 1
    losses, expected = run.losses(), reference.losses()
    assert losses.keys() == expected.keys() == set(range(1, ALL_STEPS + 1))
    # Of three ranks before the loss: bit for bit. Of another number since: but for the order of sums.
    assert all(losses[step][0] == expected[step][0] for step in range(1, lost + 1))
    for step, values in losses.items():
        assert values == pytest.approx(expected[step] * len(values), rel=2e-5)
    assert run.events("end")[-1]["step"] == ALL_STEPS


class Machines:
    """Agents of `python -m embark.torchrun --nnodes=2:3` on loopback."""

    def __init__(self, folder: Path, sets: tuple[str, ...], python: str) -> None:
        self._folder, self._port, self._python = folder, free_port(), python
        (folder / "spec.toml").write_text(SPEC)
        settings = (f"store.root={folder}", *sets)
        self._words = ["train", str(folder / "spec.toml"), *(w for one in settings for w in ("--set", one))]
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, index: int) -> subprocess.Popen[bytes]:
        conf = (f"is_host={str(index == 0).lower()},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,"
                "join_timeout=120,read_timeout=120")
        command = [self._python, "-m", "embark.torchrun", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=5",
                   "--rdzv-id=run", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
                   f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", "--monitor-interval=0.1",
                   str(Path(__file__).parent / "held_train.py"), *self._words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HELD_DIR": str(self._folder),
               "HELD_AT": str(HELD_AT), MACHINE: self._name(len(self._agents))}
        with open(self._folder / f"run.log.{len(self._agents)}", "wb") as log:
            self._agents.append(subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, env=env))
        return self._agents[-1]

    def wait_until_held(self, world_size: int) -> None:
        held = [self._folder / f"held-{world_size}-{rank}" for rank in range(world_size)]
        wait_for(lambda: all(path.exists() for path in held))
        assert all(path.exists() for path in held), Run(None, self._folder).output()

    def release(self, world_size: int) -> None:
        (self._folder / f"go-{world_size}").touch()

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """As a machine is lost: the agent and its rank at once, without a word to the others."""
        for pid in processes_with(MACHINE, self._name(self._agents.index(agent))):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def _name(self, number: int) -> str:
        return f"{self._folder}#{number}"

    def end(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                self.lose(agent)


def wait_for(happened) -> None:
    until = time.monotonic() + HANG_S
    while not happened() and time.monotonic() < until:
        time.sleep(0.005)


def worker(agent: int) -> int:
    """The last of torchrun's children."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(children[-1])
