"""Small runs and a world of one, for what is the same whichever library trains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embark.spec import resolve

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


class Recorded:
    """The events of a run."""

    def __init__(self, values: dict[str, Any]) -> None:
        lines = Path(values["run_dir"], "events.jsonl").read_text().splitlines()
        self.values, self.events = values, [json.loads(line) for line in lines]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]


@pytest.fixture
def tiny(tmp_path):
    """A function from settings to a small spec whose runs go into `tmp_path`."""
    return lambda *sets: resolve(TINY, [f"store.root={tmp_path}", *sets])


@pytest.fixture
def train_tiny(tiny):
    """A function from settings to the events of the run."""
    from embark.trainers import train

    return lambda *sets, fresh=True: Recorded(train(tiny(*sets), fresh=fresh))


@pytest.fixture
def alone():
    """The only rank."""
    return SimpleNamespace(rank=0, world_size=1, is_first=True, sum_of=lambda numbers: numbers,
                           gathered=lambda value: [value])
