"""Models that read sequences, trained: they learn, resume bit for bit, and evaluate the same every time."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from embark.model.work import dense_work_of
from embark.spec import ModelSpec
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays
from embark.trainers.torch.networks.sequences import sequence_network

ITEM = '{ name = "item", rows = 40, pooling = "none", max_length = 8 }'
NEXT = ("model.num_dense=0", f'model.tables=[{ITEM}, {{ name = "negatives", shares = "item", pooling = "none", '
        "max_length = 10 }]", "model.sequence.history=item", "model.sequence.negatives=negatives",
        "data.kind=interactions", "train.learning_rate=0.3", "train.dense_optimizer=adam",
        "train.dense_learning_rate=0.01")
RANKED = (f'model.tables=[{ITEM}, {{ name = "shown", shares = "item" }}, {{ name = "shop", rows = 9 }}]',
          "model.sequence.history=item", "model.sequence.candidate=shown", "data.ragged=true")
OWN = """
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.top = nn.Linear(24 + model.num_dense, 1)

    def forward(self, dense, pooled, sequences):
        values, offsets, ids = sequences["item"]
        lengths = offsets.diff()
        assert len(values) == len(ids) == int(offsets[-1])
        mean = torch.segment_reduce(values, "mean", offsets=offsets, initial=0.0)
        return self.top(torch.cat([dense, mean, pooled["shown"], pooled["shop"]], dim=1))
"""


@pytest.fixture
def log(tmp_path) -> str:
    """Users who go round the items 1 to 39, each from a place of its own: the next item follows from the last."""
    path = tmp_path / "log.txt"
    generator = np.random.default_rng(1)
    with path.open("w") as file:
        for user in range(300):
            first, length = generator.integers(39), generator.integers(4, 14)
            file.writelines(f"{user} {1 + (first + step) % 39}\n" for step in range(length))
    return f"data.path={path}"


COLUMNS = 'data.interactions.column_names=["user", "item"]'


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_next_item_is_learned_and_ranked_the_same_later(train_tiny, log, kind):
    from embark.trainers import evaluate

    result = train_tiny(*NEXT, log, COLUMNS, f"model.kind={kind}", "train.num_steps=60", "model.dropout=0.1",
                        "store.checkpoint_at_end=true")
    held = result.of("eval")[-1]
    assert held["hit_at_k"] > 0.95
    assert held["ndcg_at_k"] > 0.8
    assert (held["num_users"], held["k"]) == (300, 10)
    again = evaluate(result.values["run_dir"])
    assert again.ranking == {name: held[name] for name in again.ranking}
    tested = evaluate(result.values["run_dir"], split="test")
    assert tested.ranking["hit_at_k"] > 0.95
    assert tested.log_loss != again.log_loss


def test_hit_rate_does_not_rise_with_rows_that_are_no_item(train_tiny, tmp_path):
    path, generator = tmp_path / "log.txt", np.random.default_rng(2)
    path.write_text("".join(f"{user} {item}\n" for user in range(400) for item in generator.integers(40, size=8)))
    exact, wide = (train_tiny(*(one.replace("rows = 40", f"rows = {rows}") for one in NEXT), f"data.path={path}",
                              COLUMNS, "model.kind=sasrec", "train.num_steps=30").of("eval")[-1]["hit_at_k"]
                   for rows in (40, 4000))
    assert wide == pytest.approx(exact, abs=0.05)  # the items are random: about 10 of 101 candidates


def test_a_tie_or_nan_counts_against_the_chosen_item():
    from embark.run.retrieval_metrics import ranking_sums, ranks_of_first, sums_of_ranks

    assert ranks_of_first(np.array([[3.0, 1, 2], [1.0, 1, 0], [0.0, 5, 5], [np.nan, 0, 0]])).tolist() == [0, 1, 2, 2]
    ranks = np.array([0, 3, 7])
    lists = np.array([[9 if place == rank else place + 10 for place in range(5)] for rank in ranks])
    assert sums_of_ranks(ranks, 5) == pytest.approx(ranking_sums(lists, [np.array([9])] * 3))


@pytest.mark.parametrize("sets", [
    (*NEXT, COLUMNS, "model.kind=hstu", "model.dropout=0.3"), (*RANKED, "model.kind=din"),
    (*RANKED, "model.kind=hstu", "model.sequence.num_heads=2"), (*NEXT, COLUMNS, "model.kind=sasrec"),
], ids=["next item", "din", "hstu ranker", "sasrec"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(train_tiny, log, sets, device):
    sets = (*sets, f"place.device={device}", *([log] if COLUMNS in sets else []), "train.num_steps=6",
            "store.checkpoint_every=3", "store.checkpoint_at_end=true", "store.keep_checkpoints=9")
    undisturbed = train_tiny(*sets)
    run_dir = Path(undisturbed.values["run_dir"])
    checkpoints = RunDir(str(run_dir)).checkpoints
    arrays = CheckpointArrays(checkpoints.store, checkpoints.committed()[-1].name)
    assert "model.sequences.embeddings.item.weight" in arrays.entries
    shutil.rmtree(run_dir / "checkpoints" / "step-000000006")
    (run_dir / "events.jsonl").unlink()
    resumed = train_tiny(*sets, fresh=False)
    assert all(map(math.isfinite, undisturbed.losses()))
    assert resumed.losses() == undisturbed.losses()[3:]
    assert resumed.values["log_loss"] == undisturbed.values["log_loss"]


def test_a_model_of_your_own_gets_sequences_with_their_offsets(train_tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mean_model.py").write_text(OWN)
    result = train_tiny(RANKED[0], "data.ragged=true", "model.kind=mean_model:Mean", "train.num_steps=3")
    assert all(map(math.isfinite, result.losses()))


@pytest.mark.parametrize("kind", ["sasrec", "hstu", "din"])
def test_a_plan_counts_the_weights_that_the_trainer_builds(tiny, kind):
    sets = RANKED if kind == "din" else (*NEXT[:4], 'data.kind=interactions', "data.path=log")
    model: ModelSpec = tiny(*sets, f"model.kind={kind}").model
    assert dense_work_of(model).num_values == sum(p.numel() for p in sequence_network(model).parameters())


def test_dropout_of_a_row_depends_on_its_sample_and_place_alone():
    from embark.trainers.torch.networks.layers import SequenceDropout

    layer = SequenceDropout(0.5)
    layer.key = 12345
    rows, values = torch.arange(64), torch.ones(64, 16)
    together = layer(values, rows, 8)
    layer.first_sample = 4
    assert torch.equal(layer(values[32:], rows[:32], 8), together[32:])
    assert 0.4 < (together == 0).float().mean() < 0.6


def test_mlperf_s_ranker_trains_at_a_reduced_size(tmp_path):
    from embark.spec import load_spec
    from embark.trainers import train

    spec = load_spec("mlperf-hstu", ["model.embedding_dim=16", "model.top_mlp=[16]", "data.num_train_samples=256",
                                     "data.num_eval_samples=64", "train.batch_size=64", "train.num_steps=2",
                                     "place.device=cpu", "train.precision=fp32", f"store.root={tmp_path}"])
    assert sum(table.rows for table in spec.model.stored_tables()) == 293_050_000
    small = tuple(t.model_copy(update={"rows": 100, "multi_hot": min(64, t.multi_hot),
                                       "max_length": 64 if t.is_sequence else None, "mean_length": None})
                  for t in spec.model.tables)
    small_spec = spec.model_copy(update={"model": spec.model.model_copy(update={"tables": small})})
    assert math.isfinite(train(small_spec)["log_loss"])
