"""Two towers against popularity and matrix factorization on ratings `user::item::rating::time`, in one run.

    python bench/retrieval.py RATINGS.dat [--out FOLDER] [--quick] [--seeds 1 2 3]

Leave-last-out: the last rating of each user with at least three is held out, if its item occurs before. All methods get
the same candidates, every item of the training rows, without those the user has rated. Popularity counts training rows,
all of them or those of the week of the request. The user tower has what a request has: the items that the user rated
before, and the week. Matrix factorization is `implicit`'s ALS and BPR, each at the best of its grid on the held-out
rows themselves, which flatters it; the two towers have the settings below, chosen on the last rating but one.
Needs implicit and faiss-cpu.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
K, HISTORY = 20, 20
SOURCE = '''import numpy as np


class Source:
    """User, item and the items that the user rated before."""

    def __init__(self, data, model):
        with np.load(data.path) as arrays:
            names = ("user", "item", "week", "history", "length")
            self.parts = {split: {name: arrays[f"{split}_{name}"] for name in names} for split in ("train", "eval")}
        self.num_train_samples, self.num_eval_samples = (len(self.parts[split]["user"]) for split in ("train", "eval"))

    def rows(self, split, positions):
        part = self.parts[split]
        user, item, week, history, length = (part[name][positions] for name in part)
        ids = history[np.arange(history.shape[1]) < length[:, None]]
        return np.ones(len(positions)), None, {"user": user, "item": item, "week": week, "history": (ids, length)}
'''
SPEC = """
name = "{name}"
[model]
kind = "two_tower"
num_dense = 0
embedding_dim = {dim}
[[model.tables]]  # only to group samples by user: it stays at zero
name = "user"
rows = {num_users}
learning_rate = 0.0
init_range = 0.0
[[model.tables]]
name = "week"
rows = {num_weeks}
init_range = {init}
[[model.tables]]
name = "history"
rows = {num_items}
multi_hot = {history}
pooling = "mean"
init_range = {init}
[[model.tables]]
name = "item"
rows = {num_items}
init_range = {init}
[model.two_tower]
item = "item"
user = "user"
num_sampled_negatives = {negatives}
logq = {logq}
[data]
kind = "ratings:Source"
path = "{path}"
[train]
batch_size = {batch}
num_epochs = {epochs}
learning_rate = {rate}
dense_learning_rate = {rate}
eval_every = {eval_every}
[place]
device = "cpu"
[store]
root = "{folder}"
[watch]
tensorboard = false
every = 50
"""
CHOSEN = {"dim": 64, "init": 0.01, "negatives": 1024, "logq": "true", "batch": 1024, "epochs": 2, "rate": 0.2}


def read(path: str) -> np.ndarray:
    """User, item and time, by time; the order of the file where times are equal."""
    rows = np.array([[int(cell) for cell in line.split("::")] for line in Path(path).read_text().split()])
    return rows[np.argsort(rows[:, 3], kind="stable")][:, [0, 1, 3]]


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training rows and held-out ones: numbers of user and item in the training rows, and the time."""
    last = {int(user): row for row, user in enumerate(rows[:, 0])}
    counts = dict(zip(*(part.tolist() for part in np.unique(rows[:, 0], return_counts=True)), strict=True))
    is_held = np.zeros(len(rows), bool)
    is_held[[row for user, row in last.items() if counts[user] >= 3]] = True
    train, held = rows[~is_held], rows[is_held]
    users, items = np.unique(train[:, 0]), np.unique(train[:, 1])
    held = held[np.isin(held[:, 1], items) & np.isin(held[:, 0], users)]
    return tuple(np.stack([np.searchsorted(users, part[:, 0]), np.searchsorted(items, part[:, 1]), part[:, 2]], axis=1)
                 for part in (train, held))


def weeks(rows: np.ndarray, first: int) -> np.ndarray:
    """Since the first rating."""
    return (rows[:, 2] - first) // (7 * 24 * 3600)


def matrix(train: np.ndarray) -> Any:
    """Users by items, 1 where there is a rating."""
    import scipy.sparse

    shape = train[:, :2].max(axis=0) + 1
    found = scipy.sparse.csr_matrix((np.ones(len(train), np.float32), (train[:, 0], train[:, 1])), shape=shape)
    found.data[:] = 1
    return found


def measure(scores_of: Callable[[np.ndarray], np.ndarray], held: np.ndarray, seen: Any) -> dict[str, float]:
    """By Embark's own metrics; `scores_of` gives the scores of all items for held-out rows."""
    from embark.run.retrieval_metrics import SUMS, ranking_metrics, ranking_sums

    sums = np.zeros(len(SUMS))
    for start in range(0, len(held), 1024):
        some = held[start : start + 1024]
        scores = np.array(scores_of(some), np.float32)
        rows, columns = seen[some[:, 0]].nonzero()
        scores[rows, columns] = -np.inf
        top = np.argpartition(-scores, K, axis=1)[:, :K]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(scores, top, 1), axis=1, kind="stable"), 1)
        sums += ranking_sums(top, [np.array([item]) for item in some[:, 1]])
    return ranking_metrics(sums, K)


def factorizations(quick: bool) -> Iterator[tuple[str, dict[str, float], Any]]:
    """Each model of the grids."""
    from implicit.als import AlternatingLeastSquares
    from implicit.bpr import BayesianPersonalizedRanking

    als = [(16, 300.0, 30.0, 15)] if quick else [
        *itertools.product((8, 16, 32), (100.0, 300.0, 1000.0), (10.0, 30.0, 100.0), (15,)),
        *((16, 300.0, 30.0, iterations) for iterations in (5, 30, 60))]
    for factors, regularization, alpha, iterations in als:
        settings = {"factors": factors, "regularization": regularization, "alpha": alpha, "iterations": iterations}
        yield "ALS", settings, AlternatingLeastSquares(**settings, random_state=1, num_threads=1)
    bpr = [(32, 0.05, 0.01)] if quick else itertools.product((64,), (0.05, 0.2), (0.05, 0.2))
    for factors, rate, regularization in bpr:
        yield "BPR", {"factors": factors, "learning_rate": rate, "regularization": regularization}, \
            BayesianPersonalizedRanking(factors=factors, learning_rate=rate, regularization=regularization,
                                        iterations=100, random_state=1, num_threads=1)


def write_towers(folder: Path, train: np.ndarray, held: np.ndarray, **settings: object) -> Path:
    """The spec, the file of its data source, and the data."""
    folder.mkdir(parents=True, exist_ok=True)
    before: dict[int, list[int]] = {}
    first, last = train[:, 2].min(), max(train[:, 2].max(), held[:, 2].max())
    arrays = {}
    for split_name, rows in (("train", train), ("eval", held)):
        history, length = np.zeros((len(rows), HISTORY), np.int32), np.zeros(len(rows), np.int32)
        for number, (user, item, _) in enumerate(rows.tolist()):
            own = before.setdefault(user, [])
            length[number] = len(own[-HISTORY:])
            history[number, : length[number]] = own[-HISTORY:]
            if split_name == "train":
                own.append(item)
        arrays |= {f"{split_name}_user": rows[:, 0], f"{split_name}_item": rows[:, 1],
                   f"{split_name}_week": weeks(rows, first), f"{split_name}_history": history,
                   f"{split_name}_length": length}
    np.savez(folder / "ratings.npz", **arrays)
    (folder / "ratings.py").write_text(SOURCE)
    num_users, num_items, _ = (train.max(axis=0) + 1).tolist()
    spec = SPEC.format(**{"name": "towers", "eval_every": 0, **CHOSEN, **settings}, num_users=num_users,
                       num_items=num_items, num_weeks=(last - first) // (7 * 24 * 3600) + 1, history=HISTORY,
                       path=folder / "ratings.npz", folder=folder / "runs")
    (folder / "towers.toml").write_text(spec)
    return folder / "towers.toml"


def main() -> None:
    """Prints one JSON line for each method, the best of its grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ratings")
    parser.add_argument("--out", default="retrieval-bench")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args()
    train, held = split(read(asked.ratings))
    seen = matrix(train)
    counts = np.asarray(seen.sum(axis=0)).ravel()
    print(f"{len(train):,} training rows, {seen.shape[0]:,} users, {seen.shape[1]:,} items, {len(held):,} held out")
    first = train[:, 2].min()
    by_week = np.zeros((int(max(weeks(train, first).max(), weeks(held, first).max())) + 1, seen.shape[1]), np.float32)
    np.add.at(by_week, (weeks(train, first), train[:, 1]), 1)
    by_week += counts / (counts.max() + 1)  # decides between items that are as frequent in the week
    found = {"popularity": measure(lambda rows: np.tile(counts, (len(rows), 1)), held, seen),
             "popularity of the week": measure(lambda rows: by_week[weeks(rows, first)], held, seen)}
    best: dict[str, tuple[dict, dict]] = {}
    for name, settings, model in factorizations(asked.quick):
        model.fit(seen, show_progress=False)
        result = measure(lambda rows, model=model: model.user_factors[rows[:, 0]] @ model.item_factors.T, held, seen)
        print(f"  {name} {settings}: Recall@{K} {result['recall_at_k']:.4f}", flush=True)
        if name not in best or result["recall_at_k"] > best[name][0]["recall_at_k"]:
            best[name] = (result, settings)
    found |= {f"{name} {settings}": result for name, (result, settings) in best.items()}

    import embark

    folder = Path(asked.out).absolute()
    started = time.perf_counter()
    spec = str(write_towers(folder, train, held))
    for seed in asked.seeds:
        values = embark.train(embark.load_spec(spec, [f"train.seed={seed}", f"name=towers-{seed}"]), fresh=True)
        found[f"two towers, seed {seed}"] = {name: values[name]
                                             for name in ("recall_at_k", "ndcg_at_k", "hit_at_k", "num_users")}
    print(f"two towers trained in {time.perf_counter() - started:.0f} s")
    index = embark.export_run(values["run_dir"], str(folder / "models")).item_index
    for name, result in found.items():
        print(json.dumps({"method": name, **{key: round(value, 4) for key, value in result.items()}}))
    print(json.dumps({"item index": index.kind, "items": index.num_items, f"recall@{index.k}": round(index.recall, 4),
                      "queries": index.num_queries}))


if __name__ == "__main__":
    main()
