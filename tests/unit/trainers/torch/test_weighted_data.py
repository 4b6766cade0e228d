"""Weights of ids beside the ids of raw files: prepared, trained on, exported and scored."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from exported_runs import validation_rows
from served_models import while_serving

from embark import export_run, score_file
from embark.data import Batch, open_source, resolve_from_data
from embark.data.check import check
from embark.data.evaluation_rows import open_rows
from embark.data.make import make
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.errors import DataError
from embark.export.artifact import open_artifact
from embark.run.evaluate_run import loaded
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend
from embark.trainers.torch.networks.dlrm import DotNetwork
from embark.trainers.torch.scoring.cpu_model import ExportedModel

COLUMNS = ("click", "price", "seen", "seconds", "shop")
TABLES = ("model.tables=[{{name='seen', rows=12, multi_hot=4, pooling='{pooling}', weights_column='seconds'}}, "
          "{{name='shop', rows=6, pooling='mean'}}]")
SETS = ("model.num_dense=1", "data.dense_columns=['price']", "data.label=click", "train.batch_size=32",
        "train.num_steps=8", "train.engine=pipeline", "train.learning_rate=0.5")


DATA = ("data.kind=prepared", "features.numbers=none")


def draw(num_rows: int, seed: int) -> list[tuple[int, float, list[str], list[float], str]]:
    """Rows of at most five items, one more than the model takes, some with none."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        num = int(rng.integers(0, 6))
        weights = np.round(rng.gamma(1.5, size=num), 3).tolist()
        rows.append((int(rng.integers(2)), round(float(rng.normal()), 3), [f"w{i}" for i in rng.integers(0, 9, num)],
                     weights, f"s{rng.integers(0, 4)}"))
    return rows


def write(path: Path, rows: list[tuple[int, float, list[str], list[float], str]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))), path)
        return path
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *((click, price, "|".join(ids), "|".join(map(str, weights)), shop)
                                               for click, price, ids, weights, shop in rows)])
    return path


def prepared(tiny, folder: Path, suffix: str, ids: str, pooling: str):
    files = [write(folder / f"{name}{suffix}", draw(*what)) for name, what in {"train": (320, 1), "later": (96, 2)}
             .items()]
    spec = tiny(*SETS, TABLES.format(pooling=pooling), *DATA, f"data.path={folder / 'prepared'}",
                f"data.prepare.input={[str(file) for file in files]}", "data.prepare.split=file",
                f"data.prepare.validation_files=['later{suffix}']", f"data.prepare.ids={ids}",
                "data.shuffle=rows", "store.checkpoint_at_end=true")
    prepare_from_spec(spec, folder / "prepared")
    return spec


OWN = """
import json, pathlib
import numpy as np

class Source:
    def __init__(self, data, model):
        self.kept = {split: [tuple(row) for row in rows] for split, rows in
                     json.loads(pathlib.Path("rows.json").read_text()).items()}
        self.num_train_samples, self.num_eval_samples = len(self.kept["train"]), len(self.kept["eval"])

    def rows(self, split, positions):
        some = [self.kept[split][i] for i in positions]
        lengths = np.array([len(row[2]) for row in some])
        return np.array([row[0] for row in some]), np.array([[row[1]] for row in some]), {
            "seen": (np.array([i for row in some for i in row[2]], np.int64), lengths),
            "seconds": np.array([w for row in some for w in row[3]]), "shop": np.array([row[4] for row in some])}
"""


@pytest.mark.parametrize(("suffix", "ids", "pooling"), [(".csv", "frequency", "sum"), (".parquet", "hash", "mean")])
def test_prepared_weights_train_and_score_as_an_own_source(
        train_tiny, tiny, tmp_path, monkeypatch, suffix, ids, pooling):
    spec = prepared(tiny, tmp_path, suffix, ids, pooling)
    sets = (*SETS, TABLES.format(pooling=pooling), "store.checkpoint_at_end=true")
    run = train_tiny(*sets, *DATA, f"data.path={spec.data.path}", "data.shuffle=rows")
    # The same rows, cut to four items, by a source of one's own.
    encoder = open_artifact(export_run(run.values["run_dir"], str(tmp_path / "models")).uri).encoder
    maps = {one.feature.name: one for one in encoder.maps}
    source = open_source(resolve_from_data(spec))
    batch = source.eval_rows(0, 96)
    kept = [(row[0], row[1], row[2][-4:], row[3][-4:], row[4]) for row in draw(96, 2)]
    assert batch.weights is not None
    assert batch.weights[:-96].tolist() == np.float32([w for row in kept for w in row[3]]).tolist()
    assert batch.weights[-96:].tolist() == [1] * 96
    assert batch.lengths[0].tolist() == [len(row[2]) for row in kept]
    assert set(maps) == {"seen", "seen.seconds", "shop"}

    def flat(found: Batch) -> list[tuple[float, float, list[int], list[float], int]]:
        num = len(found.label)
        seen, seconds = (np.split(values[:-num], np.cumsum(found.lengths[0])[:-1])
                         for values in (found.ids, found.weights))
        return [(float(found.label[i]), float(found.dense[i, 0]), seen[i].tolist(), seconds[i].tolist(),
                 int(found.ids[i - num])) for i in range(num)]

    in_order = open_source(resolve_from_data(tiny(*sets, *DATA, f"data.path={spec.data.path}", "data.shuffle=none")))
    monkeypatch.chdir(tmp_path)
    Path("rows.json").write_text(json.dumps({"train": flat(in_order.train_rows(0, 0, 320)), "eval": flat(batch)}))
    Path("my_rows.py").write_text(OWN)
    own = train_tiny(*sets, "data.kind=my_rows:Source", "name=own")
    assert own.losses() == run.losses()
    assert own.of("eval")[-1]["log_loss"] == run.of("eval")[-1]["log_loss"]

    pooled, logits = _evaluated(run.values["run_dir"])
    artifact = open_artifact(str(tmp_path / "models"))
    score_file(artifact.uri, str(tmp_path / f"later{suffix}"), tmp_path / "out.parquet")
    scores = pq.read_table(tmp_path / "out.parquet").column("score").to_numpy()
    assert len(np.unique(logits)) > 50
    expected = 1 / (1 + np.exp(-logits.astype(np.float64)))
    rows, model = validation_rows(spec.data.path), ExportedModel(artifact)
    # Sums of at most four products: one lookup may round a product before it is added, another may not.
    np.testing.assert_allclose(model._pooled(rows).numpy(), pooled, rtol=1e-6, atol=1e-6)
    assert np.abs(scores - expected).max() <= 1e-6
    requests = [dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in draw(96, 2)]
    answer = while_serving(artifact, lambda client: client("POST", "/score", {"rows": requests})[1])
    assert np.array_equal(np.array(answer["scores"], np.float32).view(np.uint32), scores.view(np.uint32))


def _evaluated(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the held-out rows: what the tables give, and the logits."""
    found, given = find_trained(run), []
    with open_rows(found.spec, found.fingerprint) as rows, loaded(found, open_backend(found.spec), rows) as model, \
            model.trainer.evaluating(model.step) as evaluator, torch.no_grad():
        network = next(one for one in evaluator._model.modules() if isinstance(one, DotNetwork))
        hook = network.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1].numpy()))
        batch = rows.source.eval_rows(0, rows.source.num_eval_samples)
        _, (_, logits, _) = evaluator._model(evaluator._to_device(batch))
        hook.remove()
    return given[0], logits.numpy()


def test_rows_with_mismatched_weights_are_left_out_with_the_reason(tiny, tmp_path):
    rows = draw(40, 3)
    rows[5], rows[6], rows[7] = ((1, 0.5, ["w1", "w2"], weights, "s1") for weights in ([1.0], [1.0, -2.0], [1.0, 2.0]))
    path = write(tmp_path / "train.csv", rows)
    path.write_text(path.read_text().replace("1.0|2.0", "1.0|much"))
    sets = (*SETS, TABLES.format(pooling="sum"), *DATA, f"data.path={tmp_path / 'prepared'}",
            f"data.prepare.input={path}")
    with pytest.raises(DataError) as raised:
        prepare_from_spec(tiny(*sets), tmp_path / "prepared")
    assert "line 7: column 'seconds': '1.0' has another number of weights than seen has ids" in raised.value.what
    assert "line 8: column 'seconds': '1.0|-2.0' has a weight that is negative or empty" in raised.value.what
    assert "line 9: column 'seconds': '1.0|much' is not a number" in raised.value.what
    spec = tiny(*sets, "data.prepare.max_bad_share=0.1")
    shown = {row["column"]: row["taken_for"] for row in preview(spec).schema.describe()}
    assert shown["seconds"] == "weights of the ids of seen"
    assert "seconds" not in preview(spec).toml
    found = prepare_from_spec(spec, tmp_path / "prepared").manifest
    assert sum(found.rows_by_split.values()) == 37
    assert json.loads(found.to_text())["version"] == 3
    assert check(str(tmp_path / "prepared")).problems == ()
    with pytest.raises(DataError, match="seen: weights_column = 'clicks', and the data has no such weights"):
        resolve_from_data(tiny(*sets, TABLES.format(pooling="sum").replace("seconds", "clicks")))


def test_synthetic_weights_are_prepared_and_scored_in_fewer_bits(train_tiny, tiny, tmp_path):
    spec = tiny(*SETS[-3:], TABLES.format(pooling="mean"), "data.num_train_samples=256", "data.num_eval_samples=64")
    make(spec, tmp_path / "made")
    batch, made = open_source(spec).eval_rows(0, 64), open_source(resolve_from_data(
        tiny(TABLES.format(pooling="mean"), "data.kind=prepared", f"data.path={tmp_path / 'made'}"))).eval_rows(0, 64)
    for name in ("ids", "lengths", "weights", "dense", "label"):
        assert np.array_equal(getattr(batch, name), getattr(made, name))
    run = train_tiny(TABLES.format(pooling="mean"), "data.kind=prepared", f"data.path={tmp_path / 'made'}",
                     "train.num_steps=2", "train.batch_size=64", "store.checkpoint_at_end=true").values["run_dir"]
    rows = validation_rows(str(tmp_path / "made"))
    exact, *others = (ExportedModel(open_artifact(export_run(run, str(tmp_path / one), tables=one).uri))
                      .score_encoded(rows) for one in ("fp32", "fp16", "int8", "int4"))
    assert [bool(np.abs(exact - one).max() < 0.02) for one in others] == [True] * 3
    unweighted = replace(rows, ids=(*rows.ids[:-1], np.ones_like(rows.ids[-1])))
    plain = ExportedModel(open_artifact(str(tmp_path / "fp32"))).score_encoded(unweighted)
    assert not np.array_equal(plain, exact)
