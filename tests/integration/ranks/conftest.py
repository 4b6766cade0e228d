"""Real ranks, joined by gloo: under torchrun, or forked by a process that has imported torch already."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration.faults.conftest import Zygote
from limits import HANG_S

SPEC = """
name = "ranks"
[model]
num_dense = 4
embedding_dim = 32
bottom_mlp = [16]
top_mlp = [16]
[[model.tables]]
name = "user"
rows = 301
[[model.tables]]
name = "item"
rows = 100
multi_hot = 3
pooling = "mean"
[[model.tables]]
name = "shop"
rows = 7
[[model.tables]]
name = "tags"
rows = 64
multi_hot = 5
[data]
num_train_samples = 4096
num_eval_samples = 515
ragged = true
[train]
batch_size = 96
num_steps = 12
learning_rate = 0.05
precision = "fp32"
[place]
device = "cpu"
timeout_s = 120
[store]
checkpoint_at_end = false
[watch]
every = 1
tensorboard = false
"""


@dataclass
class Ranks:
    """What ranks that ended left behind."""

    code: int
    output: str
    run_dir: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def losses(self) -> list[float]:
        return [e["loss"] for e in self.events("step")]

    def last_eval(self) -> dict[str, Any]:
        return self.events("eval")[-1]


def train(python: str, directory: Path, num_ranks: int, *sets: str, name: str = "ranks") -> Ranks:
    """Train on so many ranks under torchrun and wait for the end."""
    every = (f"store.root={directory}", f"name={name}", *sets)
    words = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m",
             "embark", "train", str(written_spec(directory)), *(word for one in every for word in ("--set", one))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, cwd=directory,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return Ranks(done.returncode, done.stdout + done.stderr, directory / name)


def forked(zygote: Zygote, directory: Path, num_ranks: int, *sets: str, name: str = "ranks", hook: str = "") -> Ranks:
    """The same without torchrun, and without four seconds of imports for each rank."""
    every = (f"store.root={directory}", f"name={name}", *sets)
    words = ["train", str(written_spec(directory)), *(word for one in every for word in ("--set", one))]
    log = directory / f"{name}.log"
    pids = zygote.fork(num_ranks, words, cwd=directory, log=log, hook=hook)
    codes = [zygote.code(pid, 240.0) for pid in pids]
    assert None not in codes, "not ended"
    output = "".join(Path(f"{log}.{rank}").read_text() for rank in range(num_ranks))
    return Ranks(max(map(abs, codes)), output, directory / name)


def written_spec(directory: Path) -> Path:
    path = directory / "ranks.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="session")
def one(zygote, tmp_path_factory) -> Ranks:
    """The run of one process that the others are held against."""
    return forked(zygote, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture
def spec_file(tmp_path) -> Path:
    return written_spec(tmp_path)


@pytest.fixture
def ranks(zygote, tmp_path):
    """`forked` in this test's own directory."""
    return partial(forked, zygote, tmp_path)


@pytest.fixture
def torchrun(warm_python, tmp_path):
    """`train` in this test's own directory."""
    return partial(train, warm_python, tmp_path)
