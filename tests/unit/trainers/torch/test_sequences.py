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


def test_early_stopping_of_the_next_item_keeps_the_best_ndcg(train_tiny, log):
    result = train_tiny(*NEXT, log, COLUMNS, "model.kind=sasrec", "train.num_steps=60", "train.eval_every=5",
                        "train.early_stopping_patience=2")
    best, evaluated = result.values["early_stopping"], result.of("eval")
    highest = max(evaluated, key=lambda one: one["ndcg_at_k"])
    assert (best["metric"], best["best"], best["best_step"]) == ("ndcg_at_k", highest["ndcg_at_k"], highest["step"])


def test_ranks_do_not_change_with_rows_that_are_no_item(train_tiny, tmp_path):
    path, generator = tmp_path / "log.txt", np.random.default_rng(2)
    path.write_text("".join(f"{user} {item}\n" for user in range(400) for item in generator.integers(40, size=8)))
    exact, wide = (train_tiny(*(one.replace("rows = 40", f"rows = {rows}, init_range = 0.1") for one in NEXT), COLUMNS,
                              f"data.path={path}", "model.kind=sasrec", "train.num_steps=30").of("eval")[-1]["rankings"]
                   for rows in (40, 400))
    assert wide == exact
    assert exact["unseen_items"]["hit_at_10"] > exact["unseen_items"]["ndcg_at_10"] > 0


def test_ranks_among_all_items_are_those_of_a_plain_sort(train_tiny, tmp_path):
    from embark import evaluate
    from embark.data.evaluation_rows import open_rows
    from embark.run.evaluate_run import loaded
    from embark.store.checkpoint_inspect import find_trained
    from embark.trainers import open_backend

    path, draw = tmp_path / "log.txt", np.random.default_rng(3)
    path.write_text("".join(f"{user} {item}\n" for user in range(60) for item in draw.integers(3, 33, size=12)))
    run = train_tiny(*NEXT, f"data.path={path}", COLUMNS, "model.kind=sasrec", "train.num_steps=20",
                     "train.batch_size=30", "store.checkpoint_at_end=true").values["run_dir"]
    found = find_trained(run)
    with open_rows(found.spec, found.fingerprint) as rows, loaded(found, open_backend(found.spec), rows) as model, \
            model.trainer.evaluating(model.step) as evaluator, torch.no_grad():
        source = rows.source
        _, (_, vectors, _) = evaluator._model(evaluator._to_device(source.eval_rows(0, 60)))
        scores = (vectors[:, :-1] @ evaluator._rows(source.catalog).T).numpy()
    histories, lengths = source.eval_seen(0, 60)
    batch = source.eval_rows(0, 60)
    targets = batch.by_feature(batch.ids)[0][np.cumsum(batch.lengths[0]) - 1]
    every, unseen = [], []
    for user, seen in enumerate(np.split(histories, np.cumsum(lengths)[:-1])):
        order = source.catalog[np.argsort(-scores[user])].tolist()
        every.append(order.index(targets[user]))
        if targets[user] not in seen:
            unseen.append([item for item in order if item not in seen].index(targets[user]))
    assert 0 < len(unseen) < 60  # some chose an item again
    rankings = evaluate(run).rankings
    for name, ranks in (("all_items", every), ("unseen_items", unseen)):
        assert rankings[name]["num_users"] == len(ranks)
        assert rankings[name]["hit_at_5"] == pytest.approx(np.mean(np.array(ranks) < 5))
        assert rankings[name]["mrr_at_50"] == pytest.approx(np.mean(1 / (1.0 + np.array(ranks))))
    assert rankings["all_items"]["num_candidates"] == len(source.catalog) == 30
    assert rankings["sampled_negatives"]["num_candidates"] == 101


def test_ranks_do_not_depend_on_how_much_is_scored_at_once(train_tiny, log, monkeypatch):
    from embark import evaluate
    from embark.trainers.torch import next_items

    run = train_tiny(*NEXT, log, COLUMNS, "model.kind=hstu", "train.num_steps=10", "store.checkpoint_at_end=true")
    whole = evaluate(run.values["run_dir"]).rankings
    for name, value in (("ITEMS_AT_ONCE", 7), ("USERS_AT_ONCE", 100), ("SCORES_AT_ONCE", 40)):
        monkeypatch.setattr(next_items, name, value)
    assert evaluate(run.values["run_dir"]).rankings == whole


def test_a_tie_or_nan_counts_against_the_chosen_item(train_tiny, log):
    from embark.run.retrieval_metrics import metrics_of_ranks, ranking_sums, sums_of_ranks

    ranks = np.array([0, 3, 7])
    lists = np.array([[9 if place == rank else place + 10 for place in range(5)] for rank in ranks])
    assert sums_of_ranks(ranks, 5) == pytest.approx(ranking_sums(lists, [np.array([9])] * 3))
    found = metrics_of_ranks(ranks, 40)
    assert (found["hit_at_5"], found["hit_at_10"], found["mrr_at_5"]) == (2 / 3, 1, pytest.approx((1 + 1 / 4) / 3))
    alike = train_tiny(*NEXT, log, COLUMNS, "model.kind=sasrec", "train.num_steps=1", "train.learning_rate=0.0",
                       *(f"model.tables.{table}.init_range=0.0" for table in (0,))).of("eval")[-1]
    assert alike["rankings"]["all_items"]["hit_at_20"] == 0


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
