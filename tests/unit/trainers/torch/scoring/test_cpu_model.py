"""An exported model scores as the trainer that wrote the checkpoint, from raw rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from exported_runs import draw_rows, prepared_spec, validation_rows, write_csv

from embark import export_run, score_file
from embark.data import eval_batches
from embark.data.evaluation_rows import open_rows
from embark.export.artifact import open_artifact
from embark.run.evaluate_run import loaded
from embark.store.checkpoint_inspect import find_trained
from embark.trainers import open_backend, train
from embark.trainers.torch.scoring.cpu_model import ExportedModel

MODELS = {
    "dlrm": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
    "dcnv2": {"kind": "dcnv2", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8], "num_cross_layers": 2,
              "cross_rank": 4, "tables": [  # In another order than the columns; ids by hash.
                  {"name": "tags", "shares": "word", "multi_hot": 4}, {"name": "word", "rows": 50, "pooling": "mean"},
                  {"name": "seen_at_weekday", "rows": 8}, {"name": "number", "rows": 40},
                  {"name": "seen_at_hour", "rows": 25}]},
}


@pytest.fixture(scope="module", params=list(MODELS))
def trained(tmp_path_factory, request):
    """A run, the raw rows held out of it, and the trainer's own logits of them."""
    folder = tmp_path_factory.mktemp(request.param)
    raw = write_csv(folder / "train.csv", draw_rows(512, 1))
    later = write_csv(folder / "later.csv", draw_rows(320, 2, new_words=["unseen"]))
    spec = prepared_spec(folder, raw, later, model=MODELS[request.param])
    train(spec)
    found = find_trained(f"{folder}/clicks")
    with open_rows(found.spec, found.fingerprint) as rows, loaded(found, open_backend(found.spec), rows) as model, \
            model.trainer.evaluating(model.step) as evaluator:
        for batch in eval_batches(rows.source, batch_size=64, rank=0, world_size=1):
            evaluator.add(batch)
        logits = torch.cat(evaluator._held_out._logits).numpy()
    return found.run_dir.uri, later, spec.data.path, logits


def test_fp32_scores_of_raw_rows_are_the_trainers_to_1e_6(trained, tmp_path):
    run, later, _, logits = trained
    score_file(export_run(run, str(tmp_path / "models")).uri, str(later), tmp_path / "out.parquet")
    scores = pq.read_table(tmp_path / "out.parquet").column("score").to_numpy()
    assert len(np.unique(logits)) > 100
    assert np.abs(scores - 1 / (1 + np.exp(-logits.astype(np.float64)))).max() <= 1e-6


def test_fp32_logits_are_the_trainers_in_batches_of_the_same_size(trained, tmp_path):
    run, _, prepared, logits = trained
    model = ExportedModel(open_artifact(export_run(run, str(tmp_path / "models")).uri))
    rows = validation_rows(prepared)
    found = np.concatenate([model.logits(rows.cut(start, start + 64)).numpy() for start in range(0, len(rows), 64)])
    assert np.allclose(found, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tables", ["fp16", "int8", "int4"])
def test_looking_up_in_fewer_bits_is_looking_up_what_they_stand_for(trained, tmp_path, tables):
    run, _, prepared, logits = trained
    artifact = open_artifact(export_run(run, str(tmp_path / "models"), tables=tables).uri)
    unpack = {"fp16": torch.Tensor.float, "int8": torch.ops.quantized.embedding_bag_byte_unpack,
              "int4": torch.ops.quantized.embedding_bag_4bit_unpack}[tables]
    unpacked = replace(artifact, info=artifact.info.model_copy(update={"tables": "fp32"}))
    unpacked.__dict__["weights"] = {
        name: unpack(torch.from_numpy(values)).numpy() if name.startswith("tables.") else values
        for name, values in artifact.weights.items()}
    rows = validation_rows(prepared)
    found = ExportedModel(artifact).logits(rows).numpy()
    assert np.abs(found - ExportedModel(unpacked).logits(rows).numpy()).max() <= 2e-5
    assert not np.array_equal(found, logits)


def test_a_score_does_not_depend_on_the_rows_beside_it(trained, tmp_path):
    run, _, prepared, _ = trained
    model = ExportedModel(open_artifact(export_run(run, str(tmp_path / "models"), tables="int8").uri))
    rows = validation_rows(prepared).cut(0, 48)
    together = model.score_encoded(rows)
    alone = np.concatenate([model.score_encoded(rows.cut(row, row + 1)) for row in range(len(rows))])
    assert np.abs(together - alone).max() <= 1e-6
    user = replace(rows, dense=np.repeat(rows.dense[:2], 24, axis=0))
    network = model._dense.bottom.network
    sizes = []
    network.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    shared = model.score_encoded(user)
    assert sizes == [16]  # two users, and at least sixteen rows
    alone = np.concatenate([model.score_encoded(user.cut(row, row + 1)) for row in range(len(rows))])
    assert np.abs(shared - alone).max() <= 1e-6
