"""An exported model gives ids of dynamic tables the rows that they have in the run, and all others the default row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exported_runs import write_csv

from embark import export_run
from embark.data.evaluation_rows import open_rows
from embark.errors import UserError
from embark.export.artifact import open_artifact
from embark.run.evaluate_run import loaded
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.spec import resolve
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend, train
from embark.trainers.torch.scoring.cpu_model import ExportedModel

COLUMNS = ("user", "item", "shop", "label")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("dynamic")
    rows = [(f"user {i % 90}", str(2**62 + i % 70), str(i % 5), str(i % 2)) for i in range(600)]
    write_csv(folder / "rows.csv", rows, COLUMNS)
    spec = resolve({
        "model": {"num_dense": 0, "embedding_dim": 4, "top_mlp": [8], "tables": [
            {"name": "user", "ids": "dynamic", "capacity": 64}, {"name": "item", "ids": "dynamic", "capacity": 64},
            {"name": "shop", "rows": 5}]},
        "data": {"kind": "columns", "path": str(folder / "rows.csv")},
        "train": {"batch_size": 32, "num_steps": 12, "precision": "fp32"}, "place": {"device": "cpu"},
        "store": {"root": str(folder)}, "watch": {"tensorboard": False}})
    return str(train(spec, fresh=True)["run_dir"])


def test_raw_rows_score_as_in_the_run_and_unseen_ids_as_the_default(run, tmp_path):
    artifact = open_artifact(export_run(run, str(tmp_path / "export")).uri)
    scorer = RequestScorer(artifact, ExportedModel(artifact).score)
    trained = find_trained(run, None)
    lines = Path(trained.spec.data.path).read_text().splitlines()[1:]
    with (open_rows(trained.spec, trained.fingerprint, "", "") as rows,
          loaded(trained, open_backend(trained.spec), rows) as model):
        held_out = rows.source.eval_rows(0, rows.source.num_eval_samples)
        mapped = model.trainer.dynamic.look_up(held_out)
        with model.trainer.evaluating(model.step) as evaluator:
            evaluator.add(held_out)
            expected = evaluator._held_out._logits[0].sigmoid().numpy()
        cells = [dict(zip(COLUMNS, lines[at].split(","), strict=True)) for at in rows.source._eval_rows]
    found, = scorer.score([JsonColumns(cells)])
    assert np.allclose(found.scores, expected, rtol=0, atol=1e-6)
    users = mapped.ids[: len(cells)]
    assert (users == 0).any()  # more ids than rows
    assert len(set(users.tolist())) > 30
    unseen, other, known = (dict(cells[int(users.argmax())], **changed) for changed in (
        {"user": "nobody"}, {"user": "somebody else"}, {}))
    (answer,) = scorer.score([JsonColumns([unseen, other, known])])
    assert answer.scores[0] == answer.scores[1] != answer.scores[2]
    (refused,) = scorer.score([JsonColumns([{**known, "shop": "9"}])])  # a table whose ids are its rows
    assert "not in 0 to 4" in refused.errors[0][1]


def test_dynamic_tables_over_prepared_ids_are_refused(run):
    from embark.export import export_run as module

    trained = find_trained(run, None)
    spec = trained.spec.model_copy(update={"data": trained.spec.data.model_copy(update={"kind": "prepared"})})
    with pytest.raises(UserError, match="dynamic tables over prepared ids"):
        module._row_format(type("Trained", (), {"spec": spec, "run_dir": trained.run_dir}), None)
