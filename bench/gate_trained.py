"""How often the gate stops a planted fault, and how often a good version, with models that Embark trains and exports.

    python bench/gate_trained.py --seeds 3

Each seed is a drifting stream in hours (`examples/drifting_world.py`). A DLRM trains on each hour and `embark publish`
exports it as a delta, measures it on later rows of the same hour and publishes or refuses it, at the defaults of
`[publish]`. After the last good hour, one hour is faulty in its training rows and the gate's: for each kind of fault a
copy of the run and its versions goes on with that hour.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from drifting_world import World
from gate import FAULTS, NUM_DENSE, Hour, fault

from embark import train
from embark.publish.publisher import PublishResult, publish
from embark.spec import RunSpec, resolve

SIZES = (200, 1_000, 5_000, 5_000, 20_000, 20_000)
BATCH = 500
CODE = '''
import os

import numpy as np


class Rows:
    """The hour in the file that HOUR names."""

    def __init__(self, data, model):
        self.hour = np.load(os.environ["HOUR"])
        self.num_train_samples, self.num_eval_samples = len(self.hour["train_label"]), len(self.hour["eval_label"])
        self.names = [table.name for table in model.table_list()]

    def rows(self, split, positions):
        ids = self.hour[f"{split}_ids"][positions]
        return (self.hour[f"{split}_label"][positions], self.hour[f"{split}_dense"][positions],
                {name: ids[:, i] for i, name in enumerate(self.names)})
'''


class Stream:
    """Hours of a drifting world."""

    def __init__(self, seed: int, num_train: int, num_gate: int) -> None:
        self._num_train, self._per_hour = num_train, num_train + num_gate
        self._world = World(len(SIZES), NUM_DENSE, seed, samples_per_day=24 * self._per_hour)

    def hour(self, number: int) -> tuple[Hour, Hour]:
        """What is trained on, and what the gate measures on."""
        start = number * self._per_hour
        label, dense, ids = self._world.samples(np.arange(start, start + self._per_hour))
        both = Hour(ids % np.array(SIZES), dense, label > 0.5)
        cut = self._num_train
        return Hour(both.ids[:cut], both.dense[:cut], both.label[:cut]), \
            Hour(both.ids[cut:], both.dense[cut:], both.label[cut:])


class Deployment:
    """A run and the versions that it publishes, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_steps = folder, 0

    def copy(self, to: Path) -> Deployment:
        shutil.copytree(self.folder, to)
        other = Deployment(to)
        other.num_steps = self.num_steps
        return other

    def next_version(self, training: Hour, gate: Hour) -> PublishResult:
        file = self.folder / "hour.npz"
        splits = {"train": training, "eval": gate}
        np.savez(file, **{f"{split}_ids": hour.ids for split, hour in splits.items()},
                 **{f"{split}_dense": hour.dense for split, hour in splits.items()},
                 **{f"{split}_label": hour.label.astype(np.float32) for split, hour in splits.items()})
        os.environ["HOUR"] = str(file)
        self.num_steps += len(training) // BATCH
        train(self._spec())
        return publish(str(self.folder / "runs" / "clicks"))

    def _spec(self) -> RunSpec:
        values: dict[str, Any] = {
            "name": "clicks", "model": {
                "num_dense": NUM_DENSE, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [32],
                "tables": [{"name": f"f{i}", "rows": size} for i, size in enumerate(SIZES)]},
            "data": {"kind": "hours:Rows", "code": CODE},
            "train": {"batch_size": BATCH, "num_steps": self.num_steps, "precision": "fp32", "learning_rate": 0.05,
                      "dense_learning_rate": 0.05},
            "store": {"root": str(self.folder / "runs"), "checkpoint_every": 0, "keep_checkpoints": 1,
                      "accept_changes": ["data"]},
            "publish": {"to": str(self.folder / "models"), "keep_versions": 3},
            "place": {"device": "cpu"}, "watch": {"every": 1_000, "tensorboard": False, "phases_every_s": 0}}
        return resolve(values)


def run_seed(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    stream, rng = Stream(seed, options.rows, options.gate_rows), np.random.default_rng((seed, 1))
    deployment, alarms, stopped, aucs = Deployment(folder / "good"), [], {}, []
    deployment.folder.mkdir(parents=True)
    for number in range(options.warm_hours + options.hours):
        result = deployment.next_version(*stream.hour(number))
        assert result.verdict is not None
        aucs.append(result.verdict.auc)
        if result.refused and number >= options.warm_hours:
            alarms.append(result.refused)
    training, gate = stream.hour(number + 1)
    for index, kind in enumerate(FAULTS):
        how, plant = fault(kind, rng, gate, SIZES)
        result = deployment.copy(folder / f"fault-{index}").next_version(plant(training), plant(gate))
        stopped[f"{kind}: {how}"] = bool(result.refused)
    return {"alarms": alarms, "num_good": options.hours, "stopped": stopped, "auc": aucs[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--warm-hours", type=int, default=4, help="before verdicts count")
    parser.add_argument("--hours", type=int, default=6, help="good hours of each stream, each with a verdict")
    parser.add_argument("--rows", type=int, default=60_000, help="training rows an hour")
    parser.add_argument("--gate-rows", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further seed after so long")
    options = parser.parse_args()
    began_s = time.monotonic()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        if time.monotonic() - began_s > options.seconds:
            break
        with tempfile.TemporaryDirectory(prefix="embark-gate-") as folder:
            found = run_seed(seed, options, Path(folder))
        print(json.dumps({"seed": seed, "seconds": round(time.monotonic() - began_s), **found}), flush=True)


def summary(lines: list[str]) -> dict[str, Any]:
    """Of the lines of any number of processes."""
    num: Counter[str] = Counter()
    stopped: Counter[str] = Counter()
    for line in lines:
        found = json.loads(line)
        num["good"] += found["num_good"]
        stopped["good"] += len(found["alarms"])
        for kind, is_stopped in found["stopped"].items():
            for name in (kind, kind.partition(":")[0], "all faults"):
                num[name] += 1
                stopped[name] += is_stopped
    return {name: f"{stopped[name]} of {num[name]}" for name in sorted(num)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["summary"]:
        print(json.dumps(summary([line for line in sys.stdin.read().splitlines() if line.startswith("{")]), indent=1))
    else:
        main()
