"""How far a spec without any [train] key is from the best of so many tuned trials, on small sets.

    python bench/defaults.py FOLDER --out /tmp/defaults [--trials 30] [--seeds 1 2 3] [--only criteo-kaggle]

FOLDER holds criteo_kaggle_first10k.txt, criteo_1tb_day0_10k.txt and movietweetings_ratings.dat; the fourth set is
generated, with heavy tails. Trials are those of `embark tune` and are chosen by validation rows; the AUC shown is of
test rows, which none has seen: of the best trial, of its settings with several seeds, and of the defaults with the same
seeds. Its standard error (Hanley and McNeil) says how well so few rows tell settings apart.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from embark import TuneRequest, evaluate, prepare_data, train, tune
from embark.run.evaluate_run import EvaluationResult
from embark.spec import RunSpec, resolve

CRITEO = {"format": "criteo", "test_fraction": 0.4}
RATINGS = {"format": "csv", "delimiter": "::", "header": False, "column_names": ["user", "item", "rating", "time"],
           "label_above": 7.0, "sparse_columns": ["user", "item"], "ignored_columns": ["time"], "test_fraction": 0.2}
TAILS = {"format": "parquet", "test_fraction": 0.4}
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "criteo-kaggle": ("criteo_kaggle_first10k.txt", CRITEO, {"eval_fraction": 0.2}),
    "criteo-1tb": ("criteo_1tb_day0_10k.txt", CRITEO, {"eval_fraction": 0.2}),
    "movietweetings": ("movietweetings_ratings.dat", RATINGS,
                       {"eval_fraction": 0.2, "label": "rating", "dense_columns": []}),
    "heavy-tails": ("", TAILS, {"eval_fraction": 0.1, "dense_columns": [f"dense_{i}" for i in range(13)]}),
}
TAILS_ROWS = 200_000


def spec_of(name: str, folder: Path, out: Path, seed: int = 1) -> RunSpec:
    """A spec that says what the data is, and nothing of how to train. `seed` is that of the split."""
    file, prepare, columns = SETS[name]
    source = folder / file if file else generate(out / f"heavy-tails-{seed}.parquet", seed)
    path = out / f"{name}-{seed}-data"
    data = {"kind": "prepared", "path": str(path), "seed": seed, **columns,
            "prepare": {"input": str(source), "num_workers": 1, **prepare}}
    spec = resolve({"name": name, "data": data, "place": {"device": "cpu"}, "store": {"root": str(out)},
                    "watch": {"tensorboard": False, "every": 1000}})
    if not path.exists():
        prepare_data(spec, path)
    return spec


def generate(path: Path, seed: int) -> Path:
    """Rows of the synthetic source, 8 tables with ids by Zipf 1.3, as a file like any other."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embark.data import open_source

    if path.exists():
        return path
    source = open_source(resolve({
        "name": "tails", "model": {"num_tables": 8, "rows_per_table": 100_000},
        "data": {"num_train_samples": TAILS_ROWS, "zipf_exponent": 1.3, "seed": seed}}))
    rows = source.train_rows(0, 0, TAILS_ROWS)
    ids = rows.ids.reshape(8, TAILS_ROWS)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"label": rows.label.astype(np.int8),
                             **{f"dense_{i}": rows.dense[:, i] for i in range(rows.dense.shape[1])},
                             **{f"cat_{i}": [str(one) for one in ids[i].tolist()] for i in range(8)}}), path)
    return path


def standard_error(found: EvaluationResult, num_positives: float) -> float:
    """Of an AUC, after Hanley and McNeil (1982)."""
    auc, positives, negatives = found.auc, num_positives, found.num_samples - num_positives
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    return math.sqrt((auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2))
                     / (positives * negatives))


def test_auc(spec: RunSpec, name: str, settings: dict[str, Any], seed: int) -> EvaluationResult:
    """Of a run with these settings and this seed of the initial weights."""
    given = [f"{field}={value}" for field, value in settings.items()]
    trained = resolve({**spec.model_dump(exclude_unset=True), "name": f"{spec.name}-{name}-{seed}"},
                      [*given, f"train.seed={seed}"])
    return evaluate(str(train(trained, fresh=True)["run_dir"]), split="test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=[*SETS], nargs="*", default=[*SETS])
    given = parser.parse_args()
    for name in given.only:
        spec = spec_of(name, given.folder, given.out)
        defaults = [test_auc(spec, "defaults", {}, seed).auc for seed in given.seeds]
        print(json.dumps({"set": name, "defaults": defaults}), flush=True)
        tuned = tune(spec, TuneRequest(trials=given.trials))
        chosen = tuned.trials[tuned.best or 0]
        best = evaluate(chosen.run_dir, split="test")
        again = [test_auc(spec, "tuned", dict(chosen.values), seed).auc for seed in given.seeds]
        print(json.dumps({
            "set": name, "defaults": statistics.fmean(defaults), "best trial": best.auc,
            "its settings": statistics.fmean(again), "all": again, "trials": len(tuned.trials),
            "validation": tuned.best_value, "settings": dict(chosen.values),
            "standard error": standard_error(best, best.num_samples * positive_share(spec))}), flush=True)


def positive_share(spec: RunSpec) -> float:
    from embark.data import open_source, resolve_from_data

    source = open_source(resolve_from_data(spec))
    labels = source.train_rows(0, 0, min(source.num_train_samples, 8000)).label
    return float(labels.mean())


if __name__ == "__main__":
    main()
