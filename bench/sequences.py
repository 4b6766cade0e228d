"""SASRec and HSTU on a log of users and items: Hit@10 and NDCG@10 of each user's last item among 100 sampled ones.

    python bench/sequences.py amazon_video_games.txt --out /tmp/sequences

The file has a line `user item` for each choice, in time order within a user. The last item of a user is for testing,
the one before it for validation; neither is trained on. Runs differ in their seeds.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from embark import evaluate, train
from embark.spec import resolve

RECIPES = {"sasrec": (0.5, 64, 20), "hstu": (0.7, 192, 24)}
"""Dropout, negatives and epochs, chosen on validation (LOG.md). HSTU learns the training part by heart sooner."""


def spec_of(kind: str) -> dict[str, object]:
    """Row-wise Adagrad for the items, Adam for the layers; a softmax over the next item and the negatives."""
    dropout, num_negatives, num_epochs = RECIPES[kind]
    return {
        "model": {"kind": kind, "num_dense": 0, "embedding_dim": 48, "dropout": dropout, "tables": [
            {"name": "item", "rows": 23_716, "pooling": "none", "max_length": 51, "mean_length": 7.3,
             "init_range": 0.02},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": num_negatives}],
            "sequence": {"history": "item", "negatives": "negatives"}},
        "data": {"kind": "interactions"},
        "train": {"batch_size": 512, "num_epochs": num_epochs, "learning_rate": 0.05, "dense_optimizer": "adam",
                  "dense_learning_rate": 0.002},
        "watch": {"tensorboard": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--kinds", choices=["sasrec", "hstu"], nargs="*", default=["sasrec", "hstu"])
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--set", action="append", default=[], help="another setting of the spec")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = np.loadtxt(given.log, dtype=np.int64)
    path = given.out / "log.csv"
    np.savetxt(path, rows[:, :2], "%d", ",", header="user,item", comments="")
    for kind in given.kinds:
        found = []
        for seed in given.seeds:
            spec = resolve(spec_of(kind), [f"name={kind}-{seed}", f"train.seed={seed}", f"data.path={path}",
                                           f"store.root={given.out}", *given.set])
            ended = train(spec)
            result = evaluate(ended["run_dir"], split=given.split)
            assert result.ranking is not None
            found.append((result.ranking["hit_at_k"], result.ranking["ndcg_at_k"]))
            print(f"{kind}, seed {seed}: Hit@10 {found[-1][0]:.4f}, NDCG@10 {found[-1][1]:.4f}, "
                  f"{result.num_samples:,} users ({given.split}); {ended['step']} steps in "
                  f"{ended['train_s']:.0f} s", flush=True)
        for name, values in zip(("Hit@10", "NDCG@10"), zip(*found, strict=True), strict=True):
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            print(f"{kind}: {name} {mean(values):.4f}{spread}, mean of {len(values)}", flush=True)


if __name__ == "__main__":
    main()
