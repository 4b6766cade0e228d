"""What it is worth to stay fresh: on a drifting stream, a model that follows it against the same one of each midnight.

    .venv/bin/python bench/follow.py --days 5 --rows-per-day 30000

One run follows the stream, and each row is scored before it is trained on: that is the fresh model. Its checkpoint of
each midnight, unchanged for the day, is the daily one: it is evaluated on samples of the day that follows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from drifting_world import World

from embark.events import read_events
from embark.run.evaluate_run import evaluate_run
from embark.spec import RunSpec, resolve
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend, train

EXAMPLE = Path(__file__).parents[1] / "examples" / "drifting_world.py"


def world_of(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the world, as `drifting_world.World` takes them."""
    return {"num_features": args.tables, "samples_per_day": args.rows_per_day // args.batch * args.batch,
            "id_churn": args.id_churn, "preference_drift": args.preference_drift, "rows": 20_000}


def spec_of(args: argparse.Namespace, root: Path) -> RunSpec:
    per_day = args.rows_per_day // args.batch
    code = f"{EXAMPLE.read_text()}\nStream.settings = Samples.settings = {world_of(args)}\n"
    return resolve({
        "name": "fresh",
        "model": {"num_dense": 4, "embedding_dim": 16, "bottom_mlp": [32], "top_mlp": [64, 32],
                  "num_tables": args.tables, "rows_per_table": 20_000},
        "data": {"kind": "drifting_world:Samples", "code": code, "num_eval_samples": per_day * args.batch},
        "train": {"batch_size": args.batch, "num_steps": args.days * per_day, "learning_rate": args.learning_rate},
        "stream": {"source": "drifting_world:Stream", "code": code, "time_column": "time"},
        "store": {"root": str(root), "checkpoint_every": per_day, "keep_every": per_day},
        "watch": {"every": per_day, "tensorboard": False},
        "place": {"device": "cpu"},
    })


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("days", 6), ("rows-per-day", 40_000), ("batch", 500), ("tables", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("id-churn", 0.3), ("preference-drift", 0.3), ("learning-rate", 0.05)):
        parser.add_argument(f"--{name}", type=float, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embark-follow-") as folder:
        root = Path(folder)
        spec = spec_of(args, root)
        train(spec)
        report(spec, root, World(**world_of(args)))


def report(spec: RunSpec, root: Path, world: World) -> None:
    per_day, batch = spec.watch.every, spec.train.batch_size
    fresh = {event.values["step"] // per_day - 1: event.values for event in read_events(root / "fresh" / "events.jsonl")
             if event.kind == "step"}
    print("day   best AUC   fresh AUC   daily AUC    fresh NE   daily NE")
    gains: list[tuple[float, float]] = []
    for day in range(1, len(fresh)):
        daily = evaluate_on(str(root / "fresh"), day, per_day, batch)
        best = world.best_auc(np.arange(day * per_day * batch, (day + 1) * per_day * batch))
        now = fresh[day]
        gains.append((now["auc"] - daily.auc, daily.normalized_entropy - now["normalized_entropy"]))
        print(f"{day:3d}   {best:8.4f}   {now['auc']:9.4f}   {daily.auc:9.4f}   {now['normalized_entropy']:9.4f}   "
              f"{daily.normalized_entropy:8.4f}")
    last = gains[len(gains) // 2 :]  # the first days are those of a model that has hardly learnt
    auc, entropy = (sum(gain[i] for gain in last) / len(last) for i in (0, 1))
    print(f"the last {len(last)} days: fresh is better by {auc:.4f} AUC and {entropy:.4f} NE")


def evaluate_on(run: str, day: int, per_day: int, batch: int) -> Any:
    """The checkpoint of the midnight before `day` on samples of that day."""
    trained = find_trained(run, day * per_day)
    data = trained.spec.data.model_copy(update={"num_train_samples": day * per_day * batch})
    return evaluate_run(replace(trained, spec=trained.spec.model_copy(update={"data": data})), open_backend)


if __name__ == "__main__":
    main()
