"""Real ranks: processes under torchrun, joined by gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

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


def command(num_ranks: int, spec: Path, sets: tuple[str, ...], more: tuple[str, ...] = ()) -> list[str]:
    embark = ["-m", "embark", "train", str(spec), *(w for s in sets for w in ("--set", s)), *more]
    if num_ranks == 1:
        return [sys.executable, *embark]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", *embark]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(directory: Path, num_ranks: int, *sets: str, name: str = "ranks", more: tuple[str, ...] = ()) -> Ranks:
    """Train on so many ranks and wait for the end."""
    spec = directory / "ranks.toml"
    spec.write_text(SPEC)
    done = subprocess.run(command(num_ranks, spec, (f"store.root={directory}", f"name={name}", *sets), more),
                          capture_output=True, text=True, timeout=240, env=environment(), cwd=directory)
    return Ranks(done.returncode, done.stdout + done.stderr, directory / name)


@pytest.fixture(scope="session")
def one(tmp_path_factory) -> Ranks:
    """The run of one process that the others are held against."""
    return train(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture
def spec_file(tmp_path) -> Path:
    path = tmp_path / "ranks.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def ranks(tmp_path):
    """`train` in this test's own directory."""
    return partial(train, tmp_path)
