"""A run's life on a real Ray cluster of two machines, through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from integration.cloud.ray_cluster import RayCluster, ray_cluster
from limits import HANG_S

from embark.store import RunDir

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).parents[3] / "src"
SPEC = """
name = "clicks"
[model]
num_dense = 4
embedding_dim = 8
bottom_mlp = [16]
top_mlp = [16]
num_tables = 3
rows_per_table = 200
[data]
num_train_samples = 16384
num_eval_samples = 256
[train]
batch_size = 64
num_steps = 200
precision = "fp32"
[place]
device = "cpu"
timeout_s = 600
[store]
checkpoint_every = 10
[watch]
every = 1
tensorboard = false
"""


class Terminal:
    """One that `embark` is called from."""

    def __init__(self, folder: Path, cluster: RayCluster, python: str) -> None:
        self.folder, self.python = folder, python
        self.env = {**os.environ, "PYTHONPATH": str(SOURCES), "HOME": str(folder), "OMP_NUM_THREADS": "1",
                    "XDG_DATA_HOME": str(folder / "data"), "RAY_ADDRESS": cluster.url, "COLUMNS": "200"}
        (folder / "spec.toml").write_text(SPEC)

    def embark(self, *words: str, code: int = 0) -> str:
        done = subprocess.run([self.python, "-m", "embark", *words], env=self.env, cwd=self.folder, text=True,
                              capture_output=True, timeout=HANG_S)
        assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    def launch(self, name: str, *settings: str) -> None:
        words = [f"name={name}", "place.target=ray", f"store.root={self.folder}/runs", "place.nodes=2", *settings]
        output = self.embark("launch", "spec.toml", "--yes", *(word for one in words for word in ("--set", one)))
        assert "2 machines of a Ray cluster: 2 ranks: launched" in output

    def status(self, name: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.embark("status", name, "--json"))
        return read

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ray_runs_wait_survive_a_dead_worker_and_are_cancelled(
    tmp_path, warm_ray_python
):
    """One cluster for all of it: its start is what takes time."""
    with ray_cluster(warm_ray_python, (1,)) as cluster:
        here = Terminal(tmp_path, cluster, warm_ray_python)
        waits_for_its_machines_and_survives_a_worker_s_death(here, cluster)
        cancel_leaves_a_checkpoint_of_the_step_that_it_came_at(here)
    assert losses(here.events("clicks")) == losses(undisturbed(here))


def waits_for_its_machines_and_survives_a_worker_s_death(here: Terminal, cluster: RayCluster) -> None:
    here.launch("clicks")
    status = until(lambda: here.status("clicks"), lambda s: "waits for" in s["reason"], every_s=5.0)
    assert status["state"] == "pending"
    assert status["reason"] == "waits for 2 x {CPU: 1}: the cluster has 1"
    assert "add machines" in status["fix"]

    cluster.add(1)
    checkpoints = RunDir(str(here.folder / "runs" / "clicks")).checkpoints
    until(lambda: len(ranks_of(cluster)), lambda count: count == 4)  # torchrun and a rank on each machine
    victim = a_worker(cluster)  # found out now: it takes a while, and the run does not wait
    until(lambda: len(checkpoints.committed()), lambda count: count >= 1, every_s=0.02)
    os.kill(victim, signal.SIGKILL)

    output = here.embark("logs", "clicks", "--follow")
    assert "succeeded" in output.splitlines()[-1]
    assert re.search(r"(?m)^\d\d:\d\d:\d\d rank 0 \|   saved     step 200/200", output)
    assert "1 worker lost so far" in here.embark("status", "clicks")
    assert here.status("clicks")["num_restarts"] == 1
    assert not ranks_of(cluster), "ranks outlived their worker"
    events = here.events("clicks")
    assert [event["world_size"] for event in events if event["event"] == "start"] == [2, 2]
    assert events[-1]["event"] == "end"


def cancel_leaves_a_checkpoint_of_the_step_that_it_came_at(here: Terminal) -> None:
    here.launch("long", "train.num_steps=100000", "store.checkpoint_every=0")
    until(lambda: here.events("long"), lambda events: any(event["event"] == "step" for event in events))
    output = here.embark("cancel", "long", "--yes")
    assert "removed Ray job embark-long-" in output
    (saved,) = RunDir(str(here.folder / "runs" / "long")).checkpoints.committed()
    assert saved.name in output
    last = max(event["step"] for event in here.events("long") if event["event"] == "step")
    assert saved.name == f"step-{last:09d}"
    assert here.status("long")["state"] == "gone"
    assert "removed from the list" in here.embark("cancel", "long", "--yes")


def undisturbed(here: Terminal) -> list[dict[str, Any]]:
    """The same run by torchrun's ranks alone."""
    words = [here.python, "-m", "embark.torchrun", "--standalone", "--nproc-per-node=2", "-m", "embark", "train",
             "spec.toml", "--set", "name=still", "--set", f"store.root={here.folder}/runs"]
    done = subprocess.run(words, env=here.env, cwd=here.folder, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return here.events("still")


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    """Of each step the last that was told: a run that went back tells some steps twice."""
    found = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    assert sorted(found) == list(range(1, 201))
    return found


def ranks_of(cluster: RayCluster) -> list[str]:
    """Command lines of what runs with a spec of this cluster's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().replace("\0", " "))
    return [line for line in found if f"{cluster.folder}/embark-ranks-" in line]


def a_worker(cluster: RayCluster) -> int:
    """The process of one of Ray Train's workers."""
    with urllib.request.urlopen(f"{cluster.url}/api/v0/actors?detail=true", timeout=HANG_S) as reply:
        actors = json.load(reply)["data"]["result"]["result"]
    return int(next(a["pid"] for a in actors if a["class_name"] == "RayTrainWorker" and a["state"] == "ALIVE"))


def until(look: Any, is_so: Any, limit_s: float = HANG_S, every_s: float = 0.5) -> Any:
    end_s = time.monotonic() + limit_s
    while True:
        seen = look()
        if is_so(seen):
            return seen
        assert time.monotonic() < end_s, seen
        time.sleep(every_s)
