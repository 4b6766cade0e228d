"""How far a spec without any [train] key is from the best of so many tuned trials, on small sets.

    python bench/defaults.py FOLDER --trials 30 --out /tmp/defaults

FOLDER holds criteo_kaggle_first10k.txt, criteo_1tb_day0_10k.txt and movietweetings_ratings.dat; the fourth set is
generated, with heavy tails. Trials are chosen by validation rows; the AUC shown is of test rows, which none has seen,
with its standard error: samples of 10,000 rows are too few to tell settings apart that differ by 0.005.
"""

import argparse
import math
from pathlib import Path

from embark import TuneRequest, evaluate, prepare_data, train, tune
from embark.run.evaluate_run import EvaluationResult
from embark.spec import RunSpec, resolve

CRITEO = {"format": "criteo", "test_fraction": 0.4}
RATINGS = {"format": "csv", "delimiter": "::", "header": False, "column_names": ["user", "item", "rating", "time"],
           "label_above": 7.0, "sparse_columns": ["user", "item"], "ignored_columns": ["time"], "test_fraction": 0.2}
SETS = {"criteo-kaggle": ("criteo_kaggle_first10k.txt", CRITEO, {}),
        "criteo-1tb": ("criteo_1tb_day0_10k.txt", CRITEO, {}),
        "movietweetings": ("movietweetings_ratings.dat", RATINGS, {"label": "rating", "dense_columns": []})}
TAILS = {"name": "heavy-tails", "model": {"num_tables": 8, "rows_per_table": 100_000},
         "data": {"num_train_samples": 100_000, "num_eval_samples": 50_000, "zipf_exponent": 1.3}}


def spec_of(name: str, folder: Path, out: Path) -> RunSpec:
    """A spec that says what the data is, and nothing of how to train."""
    here = {"place": {"device": "cpu"}, "store": {"root": str(out)}, "watch": {"tensorboard": False}}
    if name == "heavy-tails":
        return resolve({**TAILS, **here})
    file, prepare, columns = SETS[name]
    data = {"kind": "prepared", "path": str(out / f"{name}-data"), "eval_fraction": 0.2, **columns,
            "prepare": {"input": str(folder / file), **prepare}}
    spec = resolve({"name": name, "data": data, **here})
    if not (out / f"{name}-data").exists():
        prepare_data(spec, out / f"{name}-data")
    return spec


def standard_error(found: EvaluationResult, num_positives: float) -> float:
    """Of an AUC, after Hanley and McNeil (1982)."""
    auc, positives, negatives = found.auc, num_positives, found.num_samples - num_positives
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    return math.sqrt((auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2))
                     / (positives * negatives))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], help="a setting of the spec that is compared")
    parser.add_argument("--only", choices=[*SETS, "heavy-tails"], nargs="*", default=[*SETS, "heavy-tails"])
    given = parser.parse_args()
    for name in given.only:
        spec = spec_of(name, given.folder, given.out)
        split = "" if name == "heavy-tails" else "test"
        tuned = tune(spec, TuneRequest(trials=given.trials))
        compared = resolve(spec.model_dump(exclude_unset=True), given.set)
        own = evaluate(str(train(compared, fresh=True)["run_dir"]), split=split)
        chosen = tuned.trials[tuned.best or 0]
        best = evaluate(chosen.run_dir, split=split)
        error = standard_error(best, best.num_samples * positive_share(spec))
        print(f"{name}: AUC {own.auc:.4f} without [train], {best.auc:.4f} the best of {given.trials} trials "
              f"(standard error {error:.4f}); {own.auc - best.auc:+.4f}\n  {dict(chosen.values)}", flush=True)


def positive_share(spec: RunSpec) -> float:
    from embark.data import open_source, resolve_from_data

    source = open_source(resolve_from_data(spec))
    labels = source.train_rows(0, 0, min(source.num_train_samples, 8000)).label
    return float(labels.mean())


if __name__ == "__main__":
    main()
