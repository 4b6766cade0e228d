"""Rehearsals of the quickstart for the tests: the verb itself, in a process of its own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from limits import HANG_S

PLACES = {"aws": ("p4d.24xlarge", "s3://training/runs"), "azure": ("Standard_ND96asr_v4", "az://training/runs"),
          "gcp": ("a2-highgpu-8g", "gs://training/runs")}
SETS = ("model.num_tables=4", "model.embedding_dim=16", "model.bottom_mlp=[32]", "model.top_mlp=[32]",
        "train.precision=fp32", "watch.tensorboard=false", "place.storage_account=training")
NUM_STEPS = 60
LIMIT = "8m"
"""A machine that runs other tests meanwhile is slow."""
AS_PYTHON = "import sys; sys.executable = sys.argv.pop(1); from embark.__main__ import main; main()"
"""`embark` whose pods run another Python."""


def rehearse_quickstart(cloud: str, *flags: str, target: str = "job", **where: Any) -> dict[str, Any]:
    """Two pods of one process, rehearsed as by `rehearse`."""
    machine, root = PLACES[cloud]
    sets = [*SETS, f"place.machine={machine}", f"store.root={root}", f"place.target={target}"]
    words = ["quickstart", "--nodes", "2", "--processes", "1", "--steps", str(NUM_STEPS), "--limit", LIMIT, *flags,
             *(word for one in sets for word in ("--set", one))]
    return rehearse(*words, **where)


def rehearse(*words: str, path: Path | None = None, python: str = sys.executable,
             timeout_s: float = HANG_S) -> dict[str, Any]:
    """What `embark rehearse --json` answers. `path` comes before the others that programs are looked for in; pods that
    are processes run `python`."""
    before = f"{path}{os.pathsep}" if path else ""
    done = subprocess.run([sys.executable, "-c", AS_PYTHON, python, "rehearse", *words, "--json"], text=True,
                          capture_output=True, timeout=timeout_s, check=False,
                          env={**os.environ, "PATH": before + os.environ["PATH"], "COLUMNS": "200"})
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["verdict"]["is_ok"] else 1)
    return answer


def undisturbed_loss(common: Path, python: str) -> float:
    """Of the quickstart that nothing happened to; found out once for all workers of a session."""
    with (common / "embark-undisturbed.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            return float.fromhex(json.loads(text))
        answer = rehearse_quickstart("aws", python=python)
        assert_trained(answer)
        file.write(json.dumps(answer["verdict"]["final_loss"].hex()))
        return answer["verdict"]["final_loss"]


def assert_trained(answer: dict[str, Any]) -> None:
    assert answer["verdict"]["is_ok"], answer
    assert (answer["progress"]["step"], answer["progress"]["world_sizes"][-1], len(answer["pods"])) == (NUM_STEPS, 2, 2)
    assert [check["is_ok"] for check in answer["verdict"]["checks"]] == [True] * len(answer["verdict"]["checks"])


def rehearse_elastic(target: str, *flags: str, python: str) -> dict[str, Any]:
    """Two to three pods of one process."""
    machine, root = PLACES["aws"]
    sets = [*SETS, f"place.machine={machine}", f"store.root={root}", f"place.target={target}",
            "place.nodes={min=2, max=3}", "train.batch_size=6144"]
    return rehearse("quickstart", "--processes", "1", "--steps", str(NUM_STEPS), "--limit",
                    LIMIT, *flags, *(word for one in sets for word in ("--set", one)), python=python)
