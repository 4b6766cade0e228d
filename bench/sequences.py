"""SASRec and HSTU on a log of users and items: the last item of each user, ranked among all items or sampled ones.

    python bench/sequences.py amazon_video_games.txt --out /tmp/sequences
    python bench/sequences.py beauty.txt --out /tmp/sequences --full

The file has a line `user item` for each choice, in time order within a user. The last item of a user is for testing,
the one before it for validation; neither is trained on. Runs differ in their seeds. With --full ranks are among all
items that the user had not chosen, and of the epoch with the best NDCG@10 on validation; else among 100 sampled ones,
after a fixed number of epochs.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from embark import evaluate, train
from embark.spec import resolve

RECIPES = {"sasrec": (0.5, 64, 20), "hstu": (0.7, 192, 24)}
"""Dropout, negatives and epochs, chosen on validation (LOG.md). HSTU learns the training part by heart sooner."""


def spec_of(kind: str, num_users: int, num_rows: int, *, is_full: bool) -> dict[str, object]:
    """Row-wise Adagrad for the items, Adam for the layers; a softmax over the next item and the negatives.

    For ranks among all items as Klenitskiy and Vasilev train SASRec: 64 wide, about 3,000 negatives, which the samples
    of a batch share, and until validation no longer improves.
    """
    dropout, num_negatives, num_epochs = (0.3, 24, 40) if is_full else RECIPES[kind]
    batch_size, dim, dense_rate = (128, 64, 0.001) if is_full else (512, 48, 0.002)
    stopping = {"eval_every": num_users // batch_size, "early_stopping_patience": 3} if is_full else {}
    return {
        "model": {"kind": kind, "num_dense": 0, "embedding_dim": dim, "dropout": dropout, "tables": [
            {"name": "item", "rows": num_rows, "pooling": "none", "max_length": 51, "mean_length": 7.3,
             "init_range": 0.02},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": num_negatives}],
            "sequence": {"history": "item", "negatives": "negatives", "share_negatives": is_full}},
        "data": {"kind": "interactions", "interactions": {"negatives": "frequency" if is_full else "uniform"}},
        "train": {"batch_size": batch_size, "num_epochs": num_epochs, "learning_rate": 0.05, "dense_optimizer": "adam",
                  "dense_learning_rate": dense_rate, "precision": "fp32", **stopping},
        "watch": {"tensorboard": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--kinds", choices=["sasrec", "hstu"], nargs="*", default=["sasrec", "hstu"])
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--full", action="store_true", help="rank among all items, with the recipe for that")
    parser.add_argument("--set", action="append", default=[], help="another setting of the spec")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = np.loadtxt(given.log, dtype=np.int64)
    num_users, path = len(np.unique(rows[:, 0])), given.out / "log.csv"
    np.savetxt(path, rows[:, :2], "%d", ",", header="user,item", comments="")
    for kind in given.kinds:
        found = []
        for seed in given.seeds:
            spec = resolve(spec_of(kind, num_users, int(rows[:, 1].max()) + 1, is_full=given.full), [
                f"name={kind}-{seed}", f"train.seed={seed}", f"data.path={path}", f"store.root={given.out}",
                *given.set])
            ended = train(spec)
            if given.full:
                best = ended["early_stopping"]
                print(f"  validation: {best['metric']} {best['best']:.4f} at step {best['best_step']}", flush=True)
            tested = evaluate(ended["run_dir"], split=given.split)
            for candidates, result in tested.rankings.items():
                print(f"  among {candidates}: {result}", flush=True)
            result = tested.rankings["unseen_items" if given.full else "sampled_negatives"]
            found.append((result["hit_at_10"], result["ndcg_at_10"]))
            print(f"{kind}, seed {seed}: Hit@10 {found[-1][0]:.4f}, NDCG@10 {found[-1][1]:.4f}, "
                  f"{result['num_users']:,} users ({given.split}); {ended['step']} steps in "
                  f"{ended['train_s']:.0f} s", flush=True)
        for name, values in zip(("Hit@10", "NDCG@10"), zip(*found, strict=True), strict=True):
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            print(f"{kind}: {name} {mean(values):.4f}{spread}, mean of {len(values)}", flush=True)


if __name__ == "__main__":
    main()
