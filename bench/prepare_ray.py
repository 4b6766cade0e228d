"""`embark data prepare` on a Ray cluster of three machines, one of which is killed, beside local processes.

    python bench/prepare_ray.py [--gb 2] [--turns 3] [--ids frequency] [--lost-gb 20] [--folder FOLDER]

The machines are processes of this one, of a core each, with a head without cores. First both prepare the same text in
turns, with as many workers, for the rates. Then a larger text is prepared by local processes and by the cluster, whose
first machine is killed by SIGKILL when some tasks are done, and all files are compared. The memory is measured from
outside: that of the tasks' processes, which `data.prepare.memory_gb` limits, and that of Ray's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prepare import TABLE_ROWS, make_file

from embark.data.prepared import Manifest

NUM_MACHINES = 3
POLL_S = 0.25
MEMORY = {"object_store_memory": 80 << 20, "memory": 4_000_000_000}


@dataclass
class Watch:
    """The most memory of each kind of process, and their processor time; `task` is the largest process of tasks."""

    task: int = 0
    tasks: int = 0
    driver: int = 0
    daemons: int = 0
    cpu_s: dict[str, dict[int, float]] = field(default_factory=lambda: {"tasks": {}, "driver": {}, "daemons": {}})
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, driver: int, before_s: dict[int, float]) -> None:
        while not self.is_over.wait(POLL_S):
            sums = dict.fromkeys(self.cpu_s, 0)
            for kind, process in kinds(driver):
                try:
                    size, used = process.memory_full_info().pss, process.cpu_times()
                except psutil.Error:
                    continue
                sums[kind] += size
                self.cpu_s[kind][process.pid] = used.user + used.system - before_s.get(process.pid, 0.0)
                if kind == "tasks":
                    self.task = max(self.task, size)
            self.tasks, self.driver = max(self.tasks, sums["tasks"]), max(self.driver, sums["driver"])
            self.daemons = max(self.daemons, sums["daemons"])

    def cpu_sums(self) -> dict[str, float]:
        return {kind: round(sum(of_pid.values()), 1) for kind, of_pid in self.cpu_s.items()}


def kinds(driver: int = 0) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the driver, the processes that do tasks, and those of Ray."""
    below = {process.pid for process in psutil.Process(driver).children(recursive=True)} if driver else set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if process.pid == driver:
            yield "driver", process
        elif words.startswith("ray::_do") or process.pid in below:
            yield "tasks", process
        elif "/ray/" in words or words.startswith("ray::"):
            yield "daemons", process


class Cluster:
    """A head without cores, and machines of one core each."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        os.environ |= {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
                       "RAY_USAGE_STATS_ENABLED": "0"}
        head, machine = {"num_cpus": 0, **MEMORY}, {"num_cpus": 1, **MEMORY}
        self._cluster = _repeated(lambda: RayCluster(initialize_head=True, head_node_args=head))
        self.machines = [_repeated(lambda: self._cluster.add_node(**machine)) for _ in range(NUM_MACHINES)]
        self.address = self._cluster.address

    def kill_one(self) -> None:
        """Kill a machine and all of its processes by SIGKILL."""
        raylet = self.machines[0].all_processes["raylet"][0].process.pid
        below = psutil.Process(raylet).children(recursive=True)
        for process in (psutil.Process(raylet), *below):
            process.kill()

    def close(self) -> None:
        self._cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ids", choices=("hash", "frequency"), default="frequency")
    parser.add_argument("--memory-gb", type=float, default=0.6, help="of each task")
    parser.add_argument("--lost-gb", type=float, default=0, help="also prepare this much, with one machine killed")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--killed-in", choices=("read", "stage", "write"), default="write", help="kind of tasks")
    parser.add_argument("--killed-after", type=int, default=5, help="tasks of that kind, when the machine is killed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch, tempfile.TemporaryDirectory(prefix="ray") as short:
        cluster = Cluster(Path(short))
        try:
            if asked.turns:
                show_rates(asked, Path(scratch), cluster)
            if asked.lost_gb:
                show_lost(asked, Path(scratch), cluster)
        finally:
            cluster.close()


def show_rates(asked: argparse.Namespace, scratch: Path, cluster: Cluster) -> None:
    make_file(scratch / "days.tsv", int(asked.gb * 1e9))
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    cpu_s: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    for turn in range(asked.turns + 1):
        for executor in ("local", "ray"):
            took, watch, _ = prepare(asked, scratch, executor, cluster)
            if turn:  # the first fills the page cache
                seconds[executor].append(round(took, 1))
                cpu_s[executor].append(watch.cpu_sums())
        compare(scratch / "local", scratch / "ray")
        for executor in seconds:
            shutil.rmtree(scratch / executor)
    middle = {executor: statistics.median(some) for executor, some in seconds.items()}
    print(json.dumps({"gb": asked.gb, "seconds": seconds, "cpu_s": cpu_s, "mb_per_s": {
        executor: round(asked.gb * 1e3 / one, 1) for executor, one in middle.items()},
        "ray_of_local": round(middle["local"] / middle["ray"], 3)}, indent=1), flush=True)


def show_lost(asked: argparse.Namespace, scratch: Path, cluster: Cluster) -> None:
    make_file(scratch / "days.tsv", int(asked.lost_gb * 1e9))
    found = {}
    for executor in ("local", "ray"):
        kill_in = asked.killed_in if executor == "ray" else ""
        took, watch, killed = prepare(asked, scratch, executor, cluster, kill_in=kill_in)
        if executor == "local":  # only its checksums are kept: the disk is small
            expected = checksums(scratch / "local")
            shutil.rmtree(scratch / "local")
        found[executor] = {"seconds": round(took, 1), "mb_per_s": round(asked.lost_gb * 1e3 / took, 1), "gb": {
            name: round(getattr(watch, name) / 1e9, 3) for name in ("task", "tasks", "driver", "daemons")},
            "cpu_s": watch.cpu_sums()} | killed
    same = checksums(scratch / "ray")
    assert same == expected, "other bytes"
    print(json.dumps({"gb": asked.lost_gb, **found, "files": len(same), "same_bytes": True}, indent=1), flush=True)


def prepare(
    asked: argparse.Namespace, scratch: Path, executor: str, cluster: Cluster, *, kill_in: str = ""
) -> tuple[float, Watch, dict[str, Any]]:
    """Prepare by the command line; return its seconds, what was measured, and when the machine was killed."""
    tables = "".join(f'[[model.tables]]\nname = "cat_{i}"\nrows = {rows}\n' for i, rows in enumerate(TABLE_ROWS))
    memory_gb = asked.memory_gb if executor == "ray" else NUM_MACHINES * asked.memory_gb
    (scratch / "spec.toml").write_text(
        f'[data]\nkind = "prepared"\npath = "{scratch / executor}"\n[data.prepare]\ninput = "{scratch}/days.tsv"\n'
        f'format = "criteo"\nids = "{asked.ids}"\nexecutor = "{executor}"\nmemory_gb = {memory_gb}\n'
        f'num_workers = {NUM_MACHINES}\n' + (tables if asked.ids == "hash" else ""))
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    before_s = {process.pid: sum(process.cpu_times()[:2]) for _, process in kinds()}
    began_s, watch, killed = time.perf_counter(), Watch(), dict[str, Any]()
    process = subprocess.Popen([sys.executable, "-m", "embark", "data", "prepare", str(scratch / "spec.toml")], env=env,
                               stdout=subprocess.PIPE, text=True)
    thread = threading.Thread(target=watch.run, args=(process.pid, before_s))
    thread.start()
    if kill_in:
        records = scratch / executor / ".preparing" / kill_in
        while process.poll() is None and len(list(records.glob("*.json"))) < asked.killed_after:
            time.sleep(POLL_S)
        cluster.kill_one()
        killed = {"killed_after_s": round(time.perf_counter() - began_s, 1)}
    said, _ = process.communicate()
    took = time.perf_counter() - began_s
    watch.is_over.set()
    thread.join()
    assert process.returncode == 0, said
    return took, watch, killed


def checksums(folder: Path) -> dict[str, str]:
    """Of every file; of the manifest what does not name the folder."""
    found = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    found["manifest.json"] = Manifest.from_text((folder / "manifest.json").read_text(), str(folder)).fingerprint()
    return found


def compare(*folders: Path) -> None:
    first, *rest = (checksums(folder) for folder in folders)
    assert all(one == first for one in rest), "other bytes"


def _repeated(start: Callable[[], Any]) -> Any:
    """Start it again where the machine is so busy that it is not up after Ray's 30 seconds."""
    for _ in range(3):
        with suppress(Exception):
            return start()
    return start()


if __name__ == "__main__":
    main()
