"""A real Ray cluster on this machine: a head without processors, and machines beside it that are processes.

Run as a program it is the cluster, whose processes the Python of its first word runs: `add N` on its input adds a
machine of N processors, `kill I` kills the machine I, and the end of its input is the cluster's own end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

STORE_BYTES = 80 << 20
SOURCES = Path(__file__).parents[3] / "src"


class RayCluster:
    """One that runs, with its jobs at `url` and its tasks at `address`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self.folder = folder
        found = self._answer()
        self.url, self.address = found["url"], found["address"]

    def add(self, num_cpus: int) -> None:
        """Comes back when the machine is there."""
        self._ask(f"add {num_cpus}")

    def kill(self, machine: int) -> None:
        """Comes back when all processes of the machine have got SIGKILL."""
        self._ask(f"kill {machine}")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray writes there too
            if line.startswith("{"):
                payload: dict[str, str] = json.loads(line)
                return payload
        raise AssertionError(f"the cluster did not start: {(self.folder / 'err').read_text()[-3000:]}")


@contextlib.contextmanager
def ray_cluster(python: str, num_cpus: tuple[int, ...] = ()) -> Iterator[RayCluster]:
    """With machines of so many processors each, whose processes `python` runs."""
    # Ray's sockets have short names, so pytest's own folder will not do.
    with (TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name,
          open(f"{name}/err", "w") as err):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "COV"))}
        env = {**environment, "RAY_TMPDIR": name, "TMPDIR": name, "HOME": name, "OMP_NUM_THREADS": "1",
               "PYTHONPATH": str(SOURCES), "RAY_USAGE_STATS_ENABLED": "0",
               # On a machine that does much else a machine of the cluster is slow, and not dead.
               "RAY_health_check_timeout_ms": "60000",
               "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        words = [sys.executable, __file__, python, *map(str, num_cpus)]
        with contextlib.ExitStack() as stack:
            for tries_left in (2, 1, 0):
                process = stack.enter_context(_running(words, Path(name), env, err))
                try:
                    cluster = RayCluster(process, Path(name))
                    break
                except AssertionError:  # Ray gives a head 30 seconds to start, however busy the machine is
                    if not tries_left:
                        raise
            yield cluster


@contextlib.contextmanager
def _running(words: list[str], folder: Path, env: dict[str, str], err: IO[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, env=env, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=err)
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def main(python: str, num_cpus: list[int]) -> None:
    sys.executable = python
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={
        **options(0), "include_dashboard": True, "dashboard_port": free_port()})
    try:
        machines = [cluster.add_node(**options(count)) for count in num_cpus]
        print(json.dumps({"url": f"http://{cluster.webui_url}", "address": cluster.address}), flush=True)
        for line in sys.stdin:
            word, number = line.split()
            if word == "add":
                machines.append(cluster.add_node(**options(int(number))))
            else:
                kill(machines[int(number)])
            print("{}", flush=True)
    finally:
        cluster.shutdown()


def kill(machine: Any) -> None:
    """Not `remove_node`, after which the cluster knows that the machine has gone."""
    raylet = psutil.Process(machine.all_processes["raylet"][0].process.pid)
    for process in (raylet, *raylet.children(recursive=True)):
        process.kill()


def options(num_cpus: int) -> dict[str, int]:
    """The agent's port is one and the same on every machine, unless it is said."""
    return {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "dashboard_agent_listen_port": free_port()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
