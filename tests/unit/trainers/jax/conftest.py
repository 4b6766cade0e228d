"""Small runs of the trainer in JAX, on virtual devices of the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from embark.spec import RunSpec, resolve
from embark.trainers.jax.exchange import AXIS
from embark.trainers.jax.world import World

jax.config.update("jax_num_cpu_devices", 8)
# Most of a small run is compiling it.
jax.config.update("jax_disable_most_optimizations", True)

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"num_dense": 3, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16], "num_tables": 4,
              "rows_per_table": [50, 3, 1000, 77], "num_cross_layers": 2, "cross_rank": 4},
    "data": {"num_train_samples": 12_800, "num_eval_samples": 300},
    "train": {"batch_size": 128, "num_steps": 100, "learning_rate": 0.05, "precision": "fp32"},
    "place": {"device": "jax"},
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


def train_result(values: dict[str, Any]) -> TrainResult:
    lines = Path(values["run_dir"], "events.jsonl").read_text().splitlines()
    return TrainResult(values, [json.loads(line) for line in lines])


@pytest.fixture
def world_of() -> Callable[[int], World]:
    """A function from a number of devices to a world of this process with so many."""
    return lambda num_devices: World(0, 1, Mesh(np.array(jax.devices()[:num_devices]), (AXIS,)), "cpu")


@pytest.fixture(scope="session", autouse=True)
def _kept_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of one spec share what was compiled for the first, also by another of xdist's workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax_programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunSpec]:
    """A function from settings to a small spec whose runs go into `tmp_path`."""
    return lambda *sets: resolve(TINY, [f"store.root={tmp_path}", *sets])


@pytest.fixture
def train_tiny(tiny, monkeypatch) -> Callable[..., TrainResult]:
    """A function from settings to what the run in JAX said."""
    from embark.trainers import train
    from embark.trainers.jax import world

    def run(*sets: str, num_devices: int = 8, fresh: bool = True, view=()) -> TrainResult:
        monkeypatch.setattr(world, "_devices", lambda place: jax.devices()[:num_devices])
        return train_result(train(tiny(*sets), view, fresh=fresh))

    return run


@pytest.fixture
def train_in_torch(tiny) -> Callable[..., TrainResult]:
    """The same by the torch trainer, on the CPU."""
    from embark.trainers import train

    return lambda *sets, fresh=True: train_result(train(tiny(*sets, "place.device=cpu"), fresh=fresh))
