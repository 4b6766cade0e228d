"""Several tasks in one model against a model of each alone, on synthetic tasks whose best AUC is known.

    python bench/tasks.py --out /tmp/tasks

For each seed and `data.task_conflict`: two binary tasks, trained alone (one task in the spec) and together, with each
of the three heads. All models see the same samples and have the same layers but for the head. Held-out AUC, mean and
standard error over seeds.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from embark import train
from embark.spec import resolve

TASKS = ("click", "buy")
MODEL = {"kind": "dcnv2", "num_cross_layers": 2, "cross_rank": 32, "num_dense": 8, "num_tables": 6,
         "rows_per_table": 200, "embedding_dim": 16, "bottom_mlp": [16], "top_mlp": [64], "tower_mlp": [16]}
HEADS = ("shared_bottom", "mmoe", "ple")


def auc_of(
    out: Path, tasks: Sequence[str], head: str, conflict: float, seed: int, num_samples: int
) -> dict[str, float]:
    """Held-out AUC of each task, and the best there is."""
    values = train(resolve({
        "name": "-".join([*tasks, head, f"{conflict:g}", str(seed)]),
        "model": {**MODEL, "task_head": head, "tasks": [{"name": task} for task in tasks]},
        "data": {"num_train_samples": num_samples, "num_eval_samples": 50_000, "task_conflict": conflict, "seed": seed},
        "train": {"batch_size": 256, "learning_rate": 0.05, "dense_optimizer": "adam", "dense_learning_rate": 0.003,
                  "precision": "fp32", "seed": seed},
        "place": {"device": "cpu"}, "store": {"root": str(out), "checkpoint_at_end": False},
        "watch": {"tensorboard": False, "every": 100}}), fresh=True)
    found = {task: values["tasks"][task]["auc"] for task in tasks}
    return found | {f"best {task}": values["tasks"][task]["best_auc"] for task in tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conflicts", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=100_000)
    given = parser.parse_args()
    print("| conflict | task | best possible | alone | shared bottom | MMoE | PLE |\n|---|---|---|---|---|---|---|")
    for conflict in given.conflicts:
        found: dict[tuple[str, str], list[float]] = {}
        for seed, head in product(given.seeds, ("alone", *HEADS)):
            runs = [(task,) for task in TASKS] if head == "alone" else [TASKS]
            for tasks in runs:
                name = "shared_bottom" if head == "alone" else head
                for task, auc in auc_of(given.out, tasks, name, conflict, seed, given.samples).items():
                    found.setdefault((task, head), []).append(auc)
        for task in TASKS:
            cells = [found[f"best {task}", "alone"], *(found[task, head] for head in ("alone", *HEADS))]
            print(f"| {conflict:g} | {task} | " + " | ".join(map(_shown, cells)) + " |", flush=True)


def _shown(values: Sequence[float]) -> str:
    apart = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ±{apart:.4f}"


if __name__ == "__main__":
    main()
