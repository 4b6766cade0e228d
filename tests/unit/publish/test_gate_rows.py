"""The gate scores dynamic tables as a server does: by the ids that a version has rows for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exported_runs import write_csv

from embark.__main__ import run as embark
from embark.data.evaluation_rows import open_rows
from embark.export.artifact import open_artifact
from embark.export.export_run import export_run
from embark.publish import publisher
from embark.publish.gate_rows import open_gate_rows
from embark.run.evaluate_run import loaded
from embark.spec import resolve
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend, train

COLUMNS = ("user", "item", "label")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """Published after 6 steps and after 12: other ids came meanwhile."""
    folder, draw = tmp_path_factory.mktemp("dynamic"), np.random.default_rng(0)
    users = draw.integers(90, size=1200) + np.arange(1200) // 4
    write_csv(folder / "rows.csv", [(f"user {user}", str(2**62 + user % 70), str(int(draw.random() < 0.4)))
                                    for user in users], COLUMNS)
    raw = {
        "name": "words", "model": {"num_dense": 0, "embedding_dim": 32, "top_mlp": [8], "tables": [
            {"name": "user", "ids": "dynamic", "capacity": 640}, {"name": "item", "ids": "dynamic", "capacity": 320}]},
        "data": {"kind": "columns", "path": str(folder / "rows.csv")},
        "train": {"batch_size": 16, "num_steps": 40, "precision": "fp32"}, "place": {"device": "cpu"},
        "store": {"root": str(folder)}, "watch": {"tensorboard": False},
        "publish": {"to": str(folder / "at"), "max_calibration_error": 9.0, "max_auc_drop": 0.5, "max_auc_shift": 0.5,
                    "max_loss_increase": 9.0, "max_psi": 9.0, "min_slice_rows": 2}}
    train(resolve(raw), fresh=True)
    uri = str(folder / "words")
    assert publisher.publish(uri).is_current
    train(resolve(raw, ["train.num_steps=44"]))
    return uri


def test_a_delta_has_the_slots_that_changed_and_equals_a_full_export(run, tmp_path, capsys):
    assert embark(["publish", run, "--dry-run", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    result = publisher.publish(run)
    assert (result.version, result.parent, result.is_current, result.refused) == (2, 1, True, "")
    assert result.verdict.auc == checked["verdict"]["auc"]
    assert any(name.startswith("user = ") for name in result.verdict.sums)
    whole, delta = open_artifact(export_run(run, str(tmp_path / "full")).uri), open_artifact(result.uri)
    for file in ("id_maps", "weights"):
        expected, found = getattr(whole, file), getattr(delta, file)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    before = open_artifact(result.uri, 1).id_maps["user.keys"]
    assert 0 < (before != whole.id_maps["user.keys"]).sum() < len(before) / 2
    assert Path(result.uri, "version-000000002", "delta.safetensors").exists()


def test_the_gate_s_scores_are_the_run_s(run, tmp_path):
    trained = find_trained(run, None)
    artifact = open_artifact(export_run(run, str(tmp_path / "full")).uri)
    with open_gate_rows(trained, trained.spec.publish) as rows:
        found = rows.scored(artifact, None, trained.spec.publish)
    with (open_rows(trained.spec, trained.fingerprint) as held_out,
          loaded(trained, open_backend(trained.spec), held_out) as model,
          model.trainer.evaluating(model.step) as evaluator):
        evaluator.add(held_out.source.eval_rows(0, held_out.source.num_eval_samples))
        expected = evaluator._held_out._logits[0].sigmoid().numpy()
    assert np.allclose(found.candidate, expected, rtol=0, atol=1e-6)
    assert len(np.unique(found.candidate)) > 20
