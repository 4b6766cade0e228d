"""A finished run on other rows: the same code, ids and normalisation as in training, and nothing of it is written."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from embark import evaluate, feature_importance
from embark.__main__ import run as embark
from embark.data.evaluation_rows import open_rows
from embark.data.permuted_rows import RowsInMemory
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import DataError, UserError
from embark.run.feature_metrics import feature_names, slices_of
from embark.spec import resolve
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import train

METRICS = ("auc", "log_loss", "normalized_entropy", "calibration", "num_samples")
COLUMNS = ["likes it", "city", "tags", "age", "noise", "bought"]


def write_csv(path: Path, num_rows: int, seed: int, likes=("no", "maybe", "yes")) -> Path:
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for _ in range(num_rows):
            liked = draw.choice(likes)
            chance = {"no": 0.05, "maybe": 0.5, "yes": 0.95}.get(liked, 0.5)
            tags = "|".join(draw.sample(["a", "b", "c"], draw.randrange(1, 4)))
            rows.writerow([liked, draw.choice(["Oslo", "Rome", ""]), tags, draw.randrange(1, 900) / 10,
                           draw.randrange(7_000, 7_009), int(draw.random() < chance)])
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on prepared data in which one feature says nearly all, and one nothing."""
    folder = tmp_path_factory.mktemp("evaluated")
    raw = write_csv(folder / "rows.csv", 6_000, 1)
    spec = resolve({
        "name": "bought", "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "data": {"kind": "prepared", "path": str(folder / "prepared"), "label": "bought", "eval_fraction": 0.2,
                 "dense_columns": ["age"],
                 "prepare": {"input": str(raw), "test_fraction": 0.2, "sparse_columns": ["likes it", "city", "noise"],
                             "list_columns": ["tags"]}},
        "train": {"batch_size": 128, "precision": "fp32", "num_steps": 40, "learning_rate": 0.3,
                  "dense_learning_rate": 0.03},
        "place": {"device": "cpu"}, "store": {"root": str(folder), "checkpoint_every": 25},
        "watch": {"every": 40, "tensorboard": False},
    })
    prepare_from_spec(spec, folder / "prepared")
    return folder, train(spec)


@pytest.fixture(scope="module")
def splits(trained):
    """Its evaluation on each of its splits."""
    return [evaluate(str(trained[0] / "bought"), split=split) for split in ("train", "validation", "test")]


def files_of(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in sorted(folder.rglob("*"))}


def metrics_of(result) -> dict[str, float]:
    return {name: getattr(result, name) for name in METRICS}


def test_evaluate_repeats_the_recorded_metrics_and_only_reads(trained):
    folder, ended = trained
    before = files_of(folder / "bought")
    found = evaluate(str(folder / "bought"))
    assert (found.auc, found.log_loss) == (ended["auc"], ended["log_loss"])
    recorded = [json.loads(line) for line in (folder / "bought/events.jsonl").read_text().splitlines()]
    last = [event for event in recorded if event["event"] == "eval"][-1]
    assert metrics_of(found) == {name: last[name] for name in METRICS}
    assert (found.step, found.split, found.data) == (40, "validation", str(folder / "prepared"))
    assert files_of(folder / "bought") == before


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_a_raw_file_gets_the_ids_and_normalisation_of_the_run(trained, splits, tmp_path, form):
    """The raw file of the run itself is all splits together, so its loss is theirs weighted by their rows."""
    folder, _ = trained
    raw = folder / "rows.csv"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(raw), tmp_path / "rows.parquet")
        raw = tmp_path / "rows.parquet"
    elif form == "jsonl":
        lines = [json.dumps(row) for row in csv.DictReader(raw.read_text().splitlines())]
        raw = tmp_path / "rows.jsonl"
        raw.write_text("\n".join(lines) + "\n")
    whole = evaluate(str(folder / "bought"), data=str(raw))
    assert whole.num_samples == sum(one.num_samples for one in splits) == 6_000
    assert whole.log_loss == pytest.approx(sum(one.log_loss * one.num_samples for one in splits) / 6_000, rel=1e-6)
    assert whole.split == ""
    assert str(raw) in whole.rows


def test_an_unseen_value_of_a_raw_file_has_id_0_as_a_missing_one(trained, tmp_path):
    folder, _ = trained
    losses = []
    for value in ("never seen", ""):
        path = write_csv(tmp_path / f"later{value}.csv", 300, 5, likes=(value,))
        losses.append(evaluate(str(folder / "bought"), data=str(path)).log_loss)
    assert losses[0] == losses[1]


def test_another_checkpoint_is_another_model(trained):
    folder, ended = trained
    found = evaluate(str(folder / "bought"), step=25)
    assert found.step == 25
    assert found.log_loss != ended["log_loss"]
    with pytest.raises(UserError, match="step 7: no committed checkpoint"):
        evaluate(str(folder / "bought"), step=7)


def test_rows_without_the_label_or_a_feature_are_refused_by_name(trained, tmp_path):
    folder, _ = trained
    text = (folder / "rows.csv").read_text()
    for was, now in (("bought", "paid"), ("city", "town")):
        path = tmp_path / f"{now}.csv"
        path.write_text(text.replace(was, now, 1))
        with pytest.raises(DataError, match=f"has no column '{was}'"):
            evaluate(str(folder / "bought"), data=str(path))


def test_data_with_other_id_maps_is_refused(trained, tmp_path):
    folder, _ = trained
    raw = write_csv(tmp_path / "other.csv", 400, 9, likes=("perhaps", "yes"))
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "other"), "label": "bought",
                             "dense_columns": ["age"],
                             "prepare": {"input": str(raw), "sparse_columns": ["likes it", "city", "noise"],
                                         "list_columns": ["tags"]}}})
    prepare_from_spec(spec, tmp_path / "other")
    with pytest.raises(DataError, match="other id maps"):
        evaluate(str(folder / "bought"), data=str(tmp_path / "other"))
    same = resolve(spec.model_dump(exclude_unset=True), [f"data.prepare.id_map_from={folder / 'prepared'}",
                                       "data.prepare.max_rows=1", f"data.path={tmp_path / 'same'}"])
    prepare_from_spec(same, tmp_path / "same")
    found = [evaluate(str(folder / "bought"), data=str(tmp_path / "same"), split=split)
             for split in ("train", "validation")]
    whole = evaluate(str(folder / "bought"), data=str(raw))
    assert whole.log_loss == pytest.approx(sum(one.log_loss * one.num_samples for one in found) / 400, rel=1e-6)


def test_an_id_map_that_was_changed_is_refused(trained, tmp_path):
    folder, _ = trained
    ids = folder / "prepared/ids/city.ids.npy"
    saved = ids.read_bytes()
    changed = np.load(ids)
    changed[:2] = changed[1::-1]
    try:
        np.save(ids, changed)
        with pytest.raises(DataError, match="id map of table city was changed"):
            evaluate(str(folder / "bought"), data=str(folder / "rows.csv"))
    finally:
        ids.write_bytes(saved)


def test_the_deciding_feature_comes_first_and_noise_includes_0(trained):
    folder, _ = trained
    found = feature_importance(str(folder / "bought"))
    first, rest = found.features[0], found.features[1:]
    assert first.feature == "likes it"
    assert first.table == "likes_it"
    assert first.log_loss_increase.low > 0.1
    assert first.auc_drop.low > 0.1
    assert {one.feature: one.kind for one in rest} == {
        "city": "sparse", "noise": "sparse", "tags": "sparse", "age": "dense"}
    by_name = {one.feature: one for one in rest}
    assert by_name["noise"].log_loss_increase.includes_zero
    assert by_name["noise"].auc_drop.includes_zero


def test_importance_takes_the_given_rows_and_refuses_too_few(trained):
    folder, _ = trained
    few = feature_importance(str(folder / "bought"), rows=300)
    assert few.num_samples == 300
    assert few == feature_importance(str(folder / "bought"), rows=300)
    with pytest.raises(DataError, match="too few rows"):
        feature_importance(str(folder / "bought"), rows=8)


def test_slices_of_lists_overlap_and_of_numbers_and_missing_values_do_not(trained):
    folder, _ = trained
    run = find_trained(str(folder / "bought"), None)
    with open_rows(run.spec, run.fingerprint, "", "") as opened:
        rows = RowsInMemory(opened.source.eval_rows(0, opened.source.num_eval_samples))
        by_column = {column: slices_of(rows, opened, number, 2 if column == "city" else 20)
                     for number, (column, _, _) in enumerate(feature_names(opened))}
    sizes = {column: sum(len(part.samples) for part in parts) for column, parts in by_column.items()}
    labels = {column: [part.label for part in parts] for column, parts in by_column.items()}
    assert {*labels["likes it"]} == {"no", "maybe", "yes"}
    assert {*labels["tags"]} == {"a", "b", "c"}
    assert sizes["tags"] > rows.num_eval_samples
    assert labels["city"][-1] == "other values"
    assert "missing, rare or unseen" in labels["city"]
    assert sizes["likes it"] == sizes["city"] == sizes["age"] == rows.num_eval_samples
    assert len(by_column["age"]) == 10


def test_rows_with_one_label_say_why_they_have_no_auc(trained, tmp_path, capsys):
    header, *rows = write_csv(tmp_path / "rows.csv", 300, 5).read_text().splitlines()
    alike = tmp_path / "alike.csv"
    alike.write_text("\n".join([header, *(row for row in rows if row.endswith(",0"))]))
    assert embark(["evaluate", str(trained[0] / "bought"), "--data", str(alike)]) == 0
    assert "AUC is undefined on these rows: it needs both labels." in capsys.readouterr().out


def test_the_command_says_which_rows_and_which_step_in_text_and_json(trained, capsys):
    folder, ended = trained
    assert embark(["evaluate", str(folder / "bought"), "--split", "train"]) == 0
    text = capsys.readouterr().out
    assert "step 40" in text
    assert "training rows of" in text
    assert "trained on these rows" in text
    assert embark(["evaluate", str(folder / "bought"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] == ended["auc"]
    assert embark(["evaluate", str(folder / "bought"), "--rows", "9"]) == 64
    assert "--rows needs --importance" in capsys.readouterr().err
    assert embark(["evaluate", str(folder / "bought"), "--importance", "--rows", "600"]) == 0
    shown = capsys.readouterr().out
    assert "Student's t" in shown
    assert "likes it" in shown


@pytest.mark.parametrize("kind", ["synthetic", "columns"])
def test_unprepared_runs_are_evaluated_on_training_rows_too(tiny, tmp_path, kind):
    sets = ["train.num_steps=2", "store.checkpoint_at_end=true"]
    raw = tmp_path / "rows.csv"
    draw = random.Random(4)
    raw.write_text("a,b,x,label\n" + "".join(
        f"{draw.randrange(9)},{draw.randrange(7)},{draw.random()},{draw.randrange(2)}\n" for _ in range(600)))
    if kind == "columns":
        sets += ["data.kind=columns", f"data.path={raw}", "data.dense_columns=['x']", "model.num_dense=1",
                 "model.tables=[{name='a', rows=9}, {name='b', rows=7}]"]
    ended = train(tiny(*sets))
    held_out = evaluate(ended["run_dir"])
    assert held_out.auc == ended["auc"]
    seen = evaluate(ended["run_dir"], split="train")
    assert seen.num_samples + held_out.num_samples == (600 if kind == "columns" else 4_396)
    with pytest.raises(UserError, match="no test split"):
        evaluate(ended["run_dir"], split="test")
    if kind == "columns":
        assert evaluate(ended["run_dir"], data=str(raw)).num_samples == 600
    else:
        with pytest.raises(DataError, match="synthetic ids"):
            evaluate(ended["run_dir"], data=str(raw))
