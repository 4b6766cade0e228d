"""Small things to train, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from embark.data import open_source
from embark.spec import PlaceSpec, RunSpec, resolve
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import World, join

TINY = {
    "name": "tiny",
    "model": {"num_dense": 3, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16], "num_tables": 4,
              "rows_per_table": 50},
    "data": {"num_train_samples": 4096, "num_eval_samples": 300},
    "train": {"batch_size": 128, "learning_rate": 0.05, "precision": "fp32"},
    "place": {"device": "cpu"},
    "store": {"checkpoint_at_end": False},
    "watch": {"every": 1, "tensorboard": False},
}


@dataclass
class TrainResult:
    """What a run said."""

    values: dict[str, Any]
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    def losses(self) -> list[float]:
        return [e["loss"] for e in self.of("step")]


@pytest.fixture
def tiny(tmp_path):
    """A function from settings to a small spec whose runs go into `tmp_path`."""

    def make(*sets: str) -> RunSpec:
        return resolve(TINY, [f"store.root={tmp_path}", *sets])

    return make


@pytest.fixture
def train_tiny(tiny):
    """A function from settings to what the run said."""
    from embark.trainers import train

    def run(*sets: str, fresh: bool = True) -> TrainResult:
        values = train(tiny(*sets), fresh=fresh)
        lines = Path(values["run_dir"], "events.jsonl").read_text().splitlines()
        return TrainResult(values, [json.loads(line) for line in lines])

    return run


@pytest.fixture
def alone() -> Iterator[World]:
    """A process group of one."""
    with join(PlaceSpec(device="cpu")) as world:
        yield world


@pytest.fixture
def built(tiny, alone):
    """A function from settings to a model ready to train."""

    def make(*sets: str) -> TorchTrainer:
        spec = tiny(*sets)
        return TorchTrainer(spec, alone, 100, open_source(spec))

    return make
