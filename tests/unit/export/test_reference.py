"""What an artifact says about the rows that its model was evaluated on: counted by a server in the same bins."""

from __future__ import annotations

import json

import numpy as np
import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv

from embark import export_run
from embark.events.drift import NUM_SCORE_BINS, SCORES, logit_counts, score_bins
from embark.export.artifact import open_artifact
from embark.export.reference import REFERENCE
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.trainers.torch.scoring.cpu_model import ExportedModel


@pytest.fixture(scope="module", params=["standardize", "piecewise_linear"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    rows = draw_rows(1_500, 7)
    train, later = write_csv(folder / "train.csv", rows), write_csv(folder / "later.csv", rows[:40])
    spec = prepared_spec(folder, train, later, features={"numbers": request.param})
    return rows, open_artifact(export_run(save_run(spec).uri, str(folder / "at")).uri)


def test_raw_rows_of_training_are_counted_as_the_reference_is(exported):
    rows, artifact = exported
    reference, taken = artifact.reference, []
    scorer = RequestScorer(artifact, ExportedModel(artifact).score)
    scorer.on_rows = lambda _, raw, __: taken.append((raw, raw.dense.copy()))
    scorer.score([JsonColumns([dict(zip(COLUMNS, row, strict=True)) for row in rows])])
    (raw, dense), = taken
    raw.dense[:] = dense
    counts = reference.count(artifact.encoder.encode(raw), artifact.encoder, np.random.default_rng(0))
    assert (reference.rows, reference.num_rows) == ("training", 1_500)  # 40 held-out rows are too few
    assert {(one.kind, one.name) for one in reference.columns} == {
        ("dense", "price"), ("dense", "seen at_age"), ("ids", "word"), ("ids", "number"), ("ids", "tags"),
        ("length", "tags"), ("ids", "seen_at_hour"), ("ids", "seen_at_weekday")}
    for column, now in zip(reference.columns, counts, strict=True):
        assert len(column.labels) == len(column.counts)
        if (column.kind, column.name) != ("ids", "tags"):  # one id of each list is drawn
            assert now.tolist() == list(column.counts), column.name
            assert sum(column.counts) == 1_500
    price = next(one for one in reference.columns if one.name == "price")
    is_none = [row[3] in ("", "nan") for row in rows]
    assert price.labels[0] == "missing"
    assert price.counts[0] == sum(is_none)
    cells = sorted(float(row[3]) for row, missing in zip(rows, is_none, strict=True) if not missing)
    assert float(price.labels[1].removeprefix("up to ")) == pytest.approx(cells[len(cells) // 10], rel=0.05)


def test_a_reference_that_has_each_bin_as_a_column_counts_no_rows_for_them(exported):
    rows, artifact = exported
    reference, column = artifact.reference, artifact.reference.columns[0]
    other = reference.model_copy(update={"columns": (column.model_copy(update={"name": "price_bin_1"}),)})
    raw = RequestScorer(artifact, None).parse(JsonColumns([dict(zip(COLUMNS, row, strict=True)) for row in rows[:9]]))
    counts, = other.count(artifact.encoder.encode(raw), artifact.encoder, np.random.default_rng(0))
    assert counts.tolist() == [0] * len(column.counts)


def test_no_value_of_the_rows_is_in_the_reference(exported):
    _, artifact = exported
    text = (artifact.folder / REFERENCE).read_text()
    assert "日本" not in text
    assert len(text) < 50_000
    assert json.loads(text)["scores"] == []  # the run has no evaluation


def test_an_artifact_without_a_reference_is_served(exported, tmp_path):
    _, artifact = exported
    (tmp_path / REFERENCE).write_text('{"rows": "tomorrow"}')
    assert "earlier Embark" in type(artifact)("", 1, tmp_path / "none", artifact.info, 0).reference.why_none
    assert "later Embark" in type(artifact)("", 1, tmp_path, artifact.info, 0).reference.why_none


def test_probabilities_and_logits_are_counted_in_the_same_bins():
    logits = np.random.default_rng(1).normal(0, 4, 10_000)
    by_score = np.bincount(score_bins(1 / (1 + np.exp(-logits))), minlength=NUM_SCORE_BINS)
    assert logit_counts(logits) == by_score.tolist()
    assert SCORES[len(SCORES) // 2] == 0.5
