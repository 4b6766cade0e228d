"""How well a spec that says only what the data is learns, beside logistic regression and LightGBM on the same rows.

    pip install --target /tmp/peers scikit-learn lightgbm
    PYTHONPATH=/tmp/peers python bench/defaults.py RAW --out /tmp/defaults [--half choose] [--only adult] [--seeds 1 2]

RAW holds the files that SETS names, by their public names:
  adult-train.csv, adult-test.csv, phoneme.csv, mammography.csv     github.com/jbrownlee/Datasets
  Churn_Modelling.csv, GermanCredit.csv                             github.com/selva86/datasets
  HR_comma_sep.csv, telco.csv (WA_Fn-UseC_-Telco-Customer-Churn)    github.com/aiplanethub/Datasets
  UCI_Credit_Card.csv, cardio_train.csv                             github.com/rakibRME/ML-Data-Sets
  bank-full.csv                                       github.com/tule2236/SupervisedML_on_Bank_Marketing
  magic-train.csv, magic-test.csv (data/train.csv, data/test.csv)   github.com/garyForeman/MAGIC-Gamma
  spambase.data                                                     github.com/gustavowr/machine_learning
  hotel_bookings.csv                                                github.com/mfarris/hotel_data
  ml-100k.inter, ml-100k.item, ml-100k.user                         github.com/RUCAIBox/RecBole
  criteo_kaggle_first10k.txt, criteo_1tb_day0_10k.txt               the first 10,000 rows of Criteo's two releases
  movietweetings_ratings.dat                                        MovieTweetings 100K

Each set becomes three files, for training, validation and test: by time where rows have one, else at random by a fixed
seed; a set has at most 50,000 rows. The spec names the files and the label. The two halves were fixed before any result
was seen: rules are chosen on the half `choose`, and `report` is measured with them once.

Logistic regression has standardized numbers with a flag for missing ones and one-hot ids, its strength of
regularization chosen on the validation rows. LightGBM has its defaults and native categories. Columns that are a
different value in nearly every row are left out for both. Test AUC is a mean over seeds; `se` is the standard error
of an AUC of so many rows (Hanley and McNeil). `alive`: the units of the bottom MLP, or of TabM's members, that are not
the same on all test rows, as a share, of the seed with the fewest. `least`: the column with the lowest importance
(the drop of the AUC when it is permuted) among those with at least 5 % of LightGBM's gain.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

MOST_ROWS = 50_000
HALVES = {
    "choose": ("adult", "telco", "credit-default", "magic", "hr", "german", "criteo-kaggle", "ml-100k", "phoneme"),
    "report": ("churn", "bank", "cardio", "spambase", "hotel", "mammography", "criteo-1tb", "movietweetings"),
}
WITH_IDS = ("criteo-kaggle", "ml-100k", "criteo-1tb", "movietweetings")
"""Sets where ids matter; the others are tables of numbers and words."""
ADULT = ("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship",
         "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income")
CRITEO = [f"C{i}" for i in range(1, 27)]
IDS: dict[str, list[str]] = {
    "ml-100k": ["user_id", "item_id", "zip_code", "release_year"], "movietweetings": ["user", "item"],
    "criteo-kaggle": CRITEO, "criteo-1tb": CRITEO}
"""Columns whose numbers are ids, for the peers; other columns of numbers are numbers to them."""


def _labelled(frame: pd.DataFrame, column: str, one: object) -> pd.DataFrame:
    label = (frame[column] == one).astype(int)
    return frame.drop(columns=column).assign(label=label)


def _adult(raw: Path) -> pd.DataFrame:
    rows = pd.concat([pd.read_csv(raw / f"adult-{part}.csv", header=None, names=list(ADULT), skipinitialspace=True,
                                  na_values="?") for part in ("train", "test")])
    rows["income"] = rows["income"].str.rstrip(".")
    return _labelled(rows, "income", ">50K")


def _magic(raw: Path) -> pd.DataFrame:
    return _labelled(pd.concat([pd.read_csv(raw / f"magic-{part}.csv") for part in ("train", "test")]), "class", "g")


def _hotel(raw: Path) -> pd.DataFrame:
    rows = pd.read_csv(raw / "hotel_bookings.csv")
    month = pd.to_datetime(rows["arrival_date_month"], format="%B").dt.month
    order = np.lexsort((rows["arrival_date_day_of_month"], month, rows["arrival_date_year"]))
    return _labelled(rows.drop(columns=["reservation_status", "reservation_status_date"]), "is_canceled", 1).iloc[order]


def _movielens(raw: Path) -> pd.DataFrame:
    parts = [pd.read_csv(raw / f"ml-100k.{part}", sep="\t") for part in ("inter", "user", "item")]
    for part in parts:
        part.columns = [name.split(":")[0] for name in part.columns]
    rows = parts[0].merge(parts[1], on="user_id").merge(parts[2], on="item_id").sort_values("timestamp", kind="stable")
    rows["genres"] = rows.pop("class").str.replace(" ", "|")
    return rows.assign(label=(rows["rating"] > 3).astype(int)).drop(columns=["rating", "timestamp", "movie_title"])


def _tweetings(raw: Path) -> pd.DataFrame:
    rows = pd.read_csv(raw / "movietweetings_ratings.dat", sep="::", engine="python", header=None,
                       names=["user", "item", "rating", "time"]).sort_values("time", kind="stable")
    return rows.tail(MOST_ROWS).assign(label=(rows["rating"] > 7).astype(int)).drop(columns=["rating", "time"])


def _criteo(raw: Path, file: str) -> pd.DataFrame:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *CRITEO]
    return pd.read_csv(raw / file, sep="\t", header=None, names=names, dtype=dict.fromkeys(CRITEO, str))


SETS = {
    "adult": _adult,
    "churn": lambda raw: _labelled(pd.read_csv(raw / "Churn_Modelling.csv"), "Exited", 1),
    "telco": lambda raw: _labelled(pd.read_csv(raw / "telco.csv", na_values=" "), "Churn", "Yes"),
    "bank": lambda raw: _labelled(pd.read_csv(raw / "bank-full.csv"), "y", "yes"),
    "german": lambda raw: _labelled(pd.read_csv(raw / "GermanCredit.csv"), "credit_risk", 1),
    "credit-default": lambda raw: _labelled(pd.read_csv(raw / "UCI_Credit_Card.csv"), "default.payment.next.month", 1),
    "cardio": lambda raw: _labelled(pd.read_csv(raw / "cardio_train.csv", sep=";"), "cardio", 1),
    "magic": _magic,
    "spambase": lambda raw: _labelled(pd.read_csv(raw / "spambase.data").rename(columns=lambda n: n.strip())
                                      .pipe(lambda rows: rows.rename(columns={rows.columns[-1]: "spam"})), "spam", 1),
    "hr": lambda raw: _labelled(pd.read_csv(raw / "HR_comma_sep.csv"), "left", 1),
    "hotel": _hotel,
    "phoneme": lambda raw: _labelled(
        pd.read_csv(raw / "phoneme.csv", header=None, names=[*(f"v{i}" for i in range(1, 6)), "y"]), "y", 1),
    "mammography": lambda raw: _labelled(
        pd.read_csv(raw / "mammography.csv", header=None, names=[*(f"v{i}" for i in range(1, 7)), "y"]), "y", "'1'"),
    "ml-100k": _movielens,
    "movietweetings": _tweetings,
    "criteo-kaggle": lambda raw: _criteo(raw, "criteo_kaggle_first10k.txt"),
    "criteo-1tb": lambda raw: _criteo(raw, "criteo_1tb_day0_10k.txt"),
}
BY_ORDER = ("hotel", "ml-100k", "movietweetings", "criteo-kaggle", "criteo-1tb")
"""Sets whose rows are in the order of time."""
PARTS = ("train", "validation", "test")


def write_files(name: str, raw: Path, folder: Path) -> list[pd.DataFrame]:
    """Split a set into three files, once, and return their rows."""
    rows = SETS[name](raw).reset_index(drop=True)
    if name not in BY_ORDER:
        rows = rows.sample(frac=1, random_state=np.random.RandomState(0)).head(MOST_ROWS)
    ends = (round(0.64 * len(rows)), round(0.8 * len(rows)), len(rows))
    parts = [rows[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]
    folder.mkdir(parents=True, exist_ok=True)
    for part, chunk in zip(PARTS, parts, strict=True):
        if not (folder / f"{part}.csv").exists():
            chunk.to_csv(folder / f"{part}.csv", index=False)
    return parts


def peers_of(name: str, parts: list[pd.DataFrame]) -> dict[str, Any]:
    """Return the test AUC of logistic regression and of LightGBM, and LightGBM's shares of gain by column."""
    import lightgbm
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    train, validation, test = (part.drop(columns="label") for part in parts)
    labels = [part["label"].to_numpy() for part in parts]
    numbers = [column for column in train if column not in IDS.get(name, ())
               and pd.api.types.is_numeric_dtype(train[column])]
    words = [column for column in train if column not in numbers]
    unique = [column for column in train if train[column].nunique() > 0.95 * len(train)
              and (column in words or pd.api.types.is_integer_dtype(train[column]))]
    numbers, words = ([column for column in some if column not in unique] for some in (numbers, words))
    scores = []
    for part in (train, validation, test):
        part[words] = part[words].astype(object).fillna("missing").astype(str)
    for strength in (0.01, 0.1, 1.0, 10.0):
        model = make_pipeline(
            ColumnTransformer([
                ("numbers", make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), numbers),
                ("words", OneHotEncoder(handle_unknown="ignore", min_frequency=2), words)]),
            LogisticRegression(C=strength, max_iter=300)).fit(train, labels[0])
        scores.append([roc_auc_score(label, model.predict_proba(rows)[:, 1])
                       for label, rows in zip(labels[1:], (validation, test), strict=True)])
    logistic = max(scores)[1]
    known = {column: sorted(set(train[column])) for column in words}

    def native(rows: pd.DataFrame) -> pd.DataFrame:
        kinds = {column: pd.Categorical(rows[column].where(rows[column].isin(values)), values)
                 for column, values in known.items()}
        # LightGBM refuses names with punctuation that JSON uses.
        return rows[numbers + words].assign(**kinds).set_axis(range(len(numbers + words)), axis="columns")

    trees = lightgbm.LGBMClassifier(verbose=-1, num_threads=2, importance_type="gain")
    trees.fit(native(train), labels[0])
    boosted = roc_auc_score(labels[2], trees.predict_proba(native(test))[:, 1])
    gains = trees.feature_importances_ / trees.feature_importances_.sum()
    return {"logistic": float(logistic), "lightgbm": float(boosted), "left out": unique,
            "gain": dict(zip(numbers + words, map(float, gains), strict=True))}


def spec_of(name: str, out: Path, settings: list[str]) -> Any:
    """A spec that says what the data is, and nothing of how to train."""
    from embark import prepare_data
    from embark.spec import resolve

    folder, data = out / "files" / name, out / "prepared" / name
    spec = resolve({
        "name": name, "place": {"device": "cpu"}, "store": {"root": str(out / "runs")},
        "watch": {"tensorboard": False, "every": 1000},
        "data": {"kind": "prepared", "path": str(data), "label": "label", "prepare": {
            "input": [str(folder / f"{part}.csv") for part in PARTS], "split": "file", "num_workers": 1,
            "validation_files": ["validation.csv"], "test_files": ["test.csv"]}}}, settings)
    if not data.exists():
        prepare_data(spec, data)
    return spec


def measured(spec: Any, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train with a seed; return the test AUC, the units that live and the columns' importance."""
    from embark import evaluate, feature_importance, train
    from embark.spec import resolve

    started = time.perf_counter()
    given = resolve({**spec.model_dump(exclude_unset=True), "name": f"{spec.name}-{seed}"},
                    [*settings, f"train.seed={seed}"])
    ended = train(given, fresh=True)
    seconds = time.perf_counter() - started
    run = str(ended["run_dir"])
    best = f"{run}@best" if (ended.get("early_stopping") or {}).get("best_step") else run
    importance: dict[str, float] = {}
    for one in feature_importance(best, split="test", rows=10_000).features:
        importance[one.feature] = max(importance.get(one.feature, -1.0), one.auc_drop.mean)
    return {"auc": evaluate(best, split="test").auc, "alive": share_alive(best), "importance": importance,
            "step": ended["step"], "seconds": seconds}


def share_alive(run: str) -> float | None:
    """Return the share of the units of the layers over numbers that differ between test rows: of the bottom MLP, or of
    all members of TabM, which has none. None without such layers."""
    import torch

    from embark.data.evaluation_rows import open_rows
    from embark.run.evaluate_run import loaded
    from embark.run.evaluation import Evaluation
    from embark.store.checkpoint_inspect import find_trained
    from embark.trainers import open_backend

    lowest, highest = dict[Any, Any](), dict[Any, Any]()

    def look(layer: Any, _: Any, values: Any) -> None:
        low, high = values.float().amin(dim=0), values.float().amax(dim=0)
        lowest[layer] = torch.minimum(low, lowest.get(layer, low))
        highest[layer] = torch.maximum(high, highest.get(layer, high))

    trained = find_trained(run)
    with (open_rows(trained.spec, trained.fingerprint, "", "test", run_uri=trained.run_dir.uri) as rows,
          loaded(trained, open_backend(trained.spec), rows) as model):
        network = model.trainer.model.module.dense  # type: ignore[attr-defined]
        layers = network.after if trained.spec.model.kind == "tabm" else getattr(network, "bottom", None) or ()
        for layer in layers:
            if not isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(look)
        Evaluation(rows.source, rows.spec.train.batch_size, model.world).run(model.trainer, model.step, lambda: False)
        differ = [highest[layer] > lowest[layer] for layer in lowest]
        return float(torch.cat(differ).double().mean()) if differ else None


def standard_error(auc: float, labels: Any) -> float:
    """Return that of an AUC, after Hanley and McNeil (1982)."""
    positives = float(labels.sum())
    negatives = len(labels) - positives
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    return math.sqrt((auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2))
                     / (positives * negatives))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", choices=["choose", "report"], default="choose")
    parser.add_argument("--only", choices=[*SETS], nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], help="fields of the spec, to compare with the defaults")
    given = parser.parse_args()
    table = []
    print(f"{'set':<15} {'rows':>6} {'logistic':>8} {'LightGBM':>8} {'Embark':>8} {'seeds':>8} {'se':>6} {'alive':>6} "
          f"{'least':>8} {'s':>5}", flush=True)
    for name in given.only or HALVES[given.half]:
        parts = write_files(name, given.raw, given.out / "files" / name)
        cache = given.out / "peers" / f"{name}.json"
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps(peers_of(name, parts)))
        peers = json.loads(cache.read_text())
        spec = spec_of(name, given.out, given.set)
        runs = [measured(spec, seed, given.set) for seed in given.seeds]
        aucs = [run["auc"] for run in runs]
        important = [column for column, gain in peers["gain"].items() if gain >= 0.05]
        least = min(((run["importance"].get(column, 0.0), column) for run in runs for column in important),
                    default=(math.nan, ""))
        alive = [run["alive"] for run in runs if run["alive"] is not None]
        row = {"set": name, "rows": sum(map(len, parts)), **peers, "embark": statistics.fmean(aucs), "runs": runs,
               "seeds": statistics.stdev(aucs) if len(aucs) > 1 else 0.0,
               "se": standard_error(statistics.fmean(aucs), parts[2]["label"]),
               "alive": min(alive, default=None), "least": least, "ids": name in WITH_IDS}
        table.append(row)
        shown = f"{row['alive']:6.2f}" if alive else "     –"
        print(f"{name:<15} {row['rows']:>6} {row['logistic']:8.4f} {row['lightgbm']:8.4f} {row['embark']:8.4f} "
              f"{row['seeds']:8.4f} {row['se']:6.4f} {shown} {least[0]:8.4f} "
              f"{statistics.fmean(run['seconds'] for run in runs):5.1f} {least[1]} {[run['step'] for run in runs]}",
              flush=True)
        (given.out / f"{given.half}.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
