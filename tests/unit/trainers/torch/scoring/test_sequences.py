"""An exported model of sequences scores raw rows as the trainer that wrote the checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from served_models import while_serving

from embark import export_run, score_file
from embark.data.evaluation_rows import open_rows
from embark.export.artifact import open_artifact
from embark.run.evaluate_run import loaded
from embark.serve.request_rows import RequestScorer
from embark.spec.serve import ScoringDevice
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend
from embark.trainers.torch.scoring.open_model import open_model

ITEM = '{ name = "item", rows = 40, pooling = "none", max_length = 8 }'
NEGATIVES = '{ name = "negatives", shares = "item", pooling = "none", max_length = 10 }'
AT = '{ name = "at", pooling = "none", max_length = 8, lookup = false }'
NEXT = ("model.num_dense=0", "model.sequence.history=item", "model.sequence.negatives=negatives",
        "data.kind=interactions", "data.interactions.num_eval_negatives=12", "train.learning_rate=0.3",
        "train.batch_size=32")
RANKED = (f'model.tables=[{ITEM}, {{ name = "shown", shares = "item" }}, {{ name = "shop", rows = 9 }}]',
          "model.sequence.history=item", "model.sequence.candidate=shown", "data.ragged=true",
          "data.num_eval_samples=60")
SETS = {
    "sasrec": (*NEXT, "model.kind=sasrec", f"model.tables=[{ITEM}, {NEGATIVES}]"),
    "hstu": (*NEXT, "model.kind=hstu", f"model.tables=[{ITEM}, {NEGATIVES}, {AT}]", "model.sequence.times=at",
             "data.time_column=when"),
    "hstu_ranker": (*RANKED, "model.kind=hstu", "model.sequence.num_heads=2"),
    "din": (*RANKED, "model.kind=din"),
}


@pytest.fixture
def log(tmp_path) -> str:
    """Of users with 3 to 12 items, some with more than a history holds."""
    path, draw = tmp_path / "log.csv", np.random.default_rng(1)
    lines = [f"{user},{item},{1_700_000_000 + when}" for user in range(60) for item, when in zip(
        draw.integers(1, 40, 3 + user % 10), draw.integers(1, 9_000, 3 + user % 10).cumsum(), strict=True)]
    path.write_text("\n".join(["user,item,when", *lines]))
    return f"data.path={path}"


def trained_scores(run: str) -> tuple[dict[str, list[list[int]]], np.ndarray, np.ndarray]:
    """Of the held-out samples: ids by feature, dense values, and the trainer's logits."""
    found = find_trained(run)
    with open_rows(found.spec, found.fingerprint) as rows, loaded(found, open_backend(found.spec), rows) as model, \
            model.trainer.evaluating(model.step) as evaluator, torch.no_grad():
        batch = rows.source.eval_rows(0, rows.source.num_eval_samples)
        _, (_, logits, _) = evaluator._model(evaluator._to_device(batch))
        if found.spec.model.is_next_item:  # a vector for each history: the scores of its last item and the negatives
            history, negatives = batch.by_feature(batch.ids)[:2]
            last = history[np.cumsum(batch.lengths[0]) - 1]
            candidates = np.column_stack([last, negatives.reshape(len(last), -1)])
            rows = evaluator._rows(candidates.reshape(-1)).view(*candidates.shape, -1)
            logits = torch.einsum("bd,bnd->bn", logits[:, :-1], rows)
    ids, start = {}, 0
    for table, lengths in zip(found.spec.model.table_list(), batch.lengths, strict=True):
        ends = start + np.cumsum(lengths)
        ids[table.name] = [one.tolist() for one in np.split(batch.ids[start : ends[-1]], ends[:-1] - start)]
        start = ends[-1]
    return ids, batch.dense, logits.numpy()


@pytest.mark.parametrize("kind", list(SETS))
def test_scores_of_raw_rows_are_those_of_the_trainers_evaluation_to_1e_6(train_tiny, log, tmp_path, kind):
    run = train_tiny(*SETS[kind], *([log] if "data.kind=interactions" in SETS[kind] else []), "train.num_steps=6",
                     "store.checkpoint_at_end=true").values["run_dir"]
    ids, dense, logits = trained_scores(run)
    if logits.ndim == 2:  # the last item of each history, and its negatives
        rows = [{"item": items[:-1], "candidate": candidate, **({"at": ids["at"][user][:-1]} if "at" in ids else {})}
                for user, items in enumerate(ids["item"]) for candidate in (items[-1], *ids["negatives"][user])]
    else:
        whole = [row for row in range(len(logits)) if ids["shown"][row] and ids["shop"][row]]  # no cell is empty
        rows = [{"item": ids["item"][row], "shown": ids["shown"][row][0], "shop": ids["shop"][row][0],
                 **{f"dense_{column}": value for column, value in enumerate(dense[row].tolist())}} for row in whole]
        logits = logits[whole]
        assert any(not row["item"] for row in rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    place = export_run(run, str(tmp_path / "models")).uri
    score_file(place, str(tmp_path / "rows.jsonl"), tmp_path / "out.parquet")
    scores = pq.read_table(tmp_path / "out.parquet").column("score").to_numpy().astype(np.float64)
    assert len(np.unique(scores)) > len(scores) / 3
    if logits.ndim == 2:  # log-odds against the same items: those of a user differ by what the trainer's scores do
        found = np.log(scores / (1 - scores)).reshape(logits.shape)
        scores, logits = (np.exp(one) / np.exp(one).sum(axis=1, keepdims=True) for one in (found, logits))
        assert np.abs(scores - logits).max() <= 1e-6
    else:
        assert np.abs(scores - 1 / (1 + np.exp(-logits.astype(np.float64)))).max() <= 1e-6


def test_a_server_ranks_candidates_given_a_history(train_tiny, log, tmp_path):
    run = train_tiny(*SETS["hstu"], log, "train.num_steps=3", "store.checkpoint_at_end=true").values["run_dir"]
    artifact = open_artifact(export_run(run, str(tmp_path / "models"), tables="int8").uri)
    model = open_model(artifact, "", ScoringDevice("cpu"))
    candidates = [{"candidate": item} for item in (5, 9, 39, 5)]

    def use(client):
        return [client("POST", "/score", {"user": user, "candidates": candidates})[1] for user in (
            {"item": [3, 17, 4], "at": [100, 200, 1_000_000]}, {"item": [], "at": []}, {"item": [3, 17], "at": [100]},
            {"item": [9, 9, 3, 17, 4, 5, 6, 7, 8], "at": list(range(9))},
            {"item": [3, 17, 4, 5, 6, 7, 8], "at": list(range(2, 9))}, {"item": [40], "at": [1]})]

    scorer = RequestScorer(artifact, model.score)
    known, empty, unequal, long, newest, outside = while_serving(artifact, use, scorer=scorer)
    assert len(set(known["scores"])) == 3
    assert known["scores"][0] == known["scores"][3]
    assert all(0 < score < 1 for score in known["scores"])
    assert len(set(empty["scores"])) == 1
    assert empty["scores"][0] == pytest.approx(1 / 11)  # one of 11 items that are alike
    assert "columns 'item' and 'at' have different numbers of values" in str(unequal["errors"])
    assert long["scores"] == newest["scores"]
    assert all(0 < score < 1 for score in long["scores"])
    assert "column 'item': an id is not in 0 to 39" in str(outside["errors"])
