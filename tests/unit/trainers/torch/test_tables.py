"""Features that share a table: one set of rows, which the lookups of all of them train. Settings of single tables."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from embark.data import open_source
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays

FIRST = 'model.tables=[{ name = "item", rows = 40 }, { name = "shop", rows = 9 }, { name = "seen", multi_hot = 3, '
SHARED, APART = FIRST + 'shares = "item" }]', FIRST + "rows = 40 }]"
TABLES = ('model.tables=[{ name = "a", rows = 9 }, { name = "b", rows = 9%s }, '
          '{ name = "c", rows = 9, pooling = "mean"%s }]')


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name.split(".")[-2]: value.local_shards()[0].tensor for name, value in trainer.model.state_dict().items()
            if "embedding_bags" in name}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
def test_a_step_moves_the_shared_rows_by_the_gradients_of_all_features(built, optimizer):
    sets = (f"train.optimizer={optimizer}", "train.learning_rate=0.5", "data.ragged=true")
    shared, apart = built(*sets, SHARED), built(*sets, APART)
    assert weights(shared).keys() == {"item", "shop"}
    before = weights(shared)["item"].clone()
    weights(apart)["seen"].copy_(before)
    for trainer in (shared, apart):
        with trainer.feed(open_source(shared.spec), 0, 1) as batches:
            trainer.step(batches, 0)
    assert shared.window_metrics() == apart.window_metrics()
    assert torch.equal(weights(shared)["shop"], weights(apart)["shop"])
    # A step of SGD is its gradient times the rate: the sum of both; Adagrad divides it by what it is.
    moves = weights(apart)["item"] + weights(apart)["seen"] - 2 * before
    if optimizer == "sgd":
        assert torch.allclose(weights(shared)["item"], before + moves, atol=1e-7)
    else:
        gradients = sgd_gradients(built, sets, shared)
        scale = gradients.abs() if optimizer == "adagrad" else gradients.square().mean(dim=1, keepdim=True).sqrt()
        wanted = before - 0.5 * gradients / (scale + 1e-8)
        touched = gradients.abs().amin(dim=1) > 1e-5  # below, rounding decides
        assert touched.any()
        assert torch.allclose(weights(shared)["item"][touched], wanted[touched], atol=5e-3)  # a step is 0.5


def sgd_gradients(built, sets, shared) -> torch.Tensor:
    trainer = built(*sets, "train.optimizer=sgd", "train.learning_rate=1.0", "train.dense_learning_rate=0.0", SHARED)
    before = weights(trainer)["item"].clone()
    with trainer.feed(open_source(shared.spec), 0, 1) as batches:
        trainer.step(batches, 0)
    return before - weights(trainer)["item"]


def test_a_resumed_run_is_bit_exact_and_saves_rows_once(train_tiny):
    sets = (SHARED, "data.ragged=true", "train.num_steps=6", "store.checkpoint_every=3", "store.checkpoint_at_end=true",
            "store.keep_checkpoints=9")
    undisturbed = train_tiny(*sets)
    run_dir = Path(undisturbed.values["run_dir"])
    checkpoints = RunDir(str(run_dir)).checkpoints
    arrays = CheckpointArrays(checkpoints.store, checkpoints.committed()[-1].name)
    assert {name for name in arrays.entries if name.startswith("model.tables")} == {
        "model.tables.embedding_bags.item.weight", "model.tables.embedding_bags.shop.weight"}
    shutil.rmtree(run_dir / "checkpoints" / "step-000000006")
    (run_dir / "events.jsonl").unlink()
    resumed = train_tiny(*sets, fresh=False)
    assert resumed.losses() == undisturbed.losses()[3:]
    assert resumed.values["log_loss"] == undisturbed.values["log_loss"]


def test_the_rows_are_planned_once_and_looked_up_by_each_feature(built):
    trainer = built(SHARED)
    assert [(one["table"], one["rows"], one["bytes"]) for one in trainer.layout["tables"]] == [
        ("item", 40, 40 * 8 * 4), ("shop", 9, 9 * 8 * 4)]
    assert trainer.engine.name == "pipeline"


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_table_trains_with_its_own_rate_under_the_schedule(built, optimizer):
    sets = (f"train.optimizer={optimizer}", "train.learning_rate=0.25", "train.dense_learning_rate=0.0",
            "train.warmup_steps=2")
    moves = []
    for tables in (TABLES % ("", ""), TABLES % (", learning_rate = 1.0", ", learning_rate = 0.0")):
        trainer = built(*sets, tables)
        before = {name: rows.clone() for name, rows in weights(trainer).items()}
        with trainer.feed(open_source(trainer.spec), 0, 1) as batches:
            assert trainer.step(batches, 0) == 0.125  # that of tables without a rate of their own
        moves.append({name: rows - before[name] for name, rows in weights(trainer).items()})
    plain, own = moves
    assert plain["b"].abs().max() > 0
    assert torch.allclose(own["a"], plain["a"], atol=1e-6)
    assert torch.allclose(own["b"], 4 * plain["b"], atol=1e-6)
    assert not own["c"].any()


def test_a_table_begins_with_values_of_its_own_range(built):
    plain, own = (weights(built(TABLES % more)) for more in (("", ""), (", init_range = 0.01", ", init_range = 0.0")))
    assert torch.equal(own["a"], plain["a"])
    assert plain["b"].abs().max() > 0.9 * math.sqrt(1 / 9)
    assert 0.009 < own["b"].abs().max() <= 0.01
    assert not own["c"].any()


def test_a_resumed_run_with_table_settings_is_bit_exact(train_tiny):
    sets = (TABLES % (", learning_rate = 0.5", ", init_range = 0.2"), "train.num_steps=6", "store.checkpoint_every=3",
            "store.checkpoint_at_end=true", "store.keep_checkpoints=9", "train.decay=linear")
    undisturbed = train_tiny(*sets)
    run_dir = Path(undisturbed.values["run_dir"])
    shutil.rmtree(run_dir / "checkpoints" / "step-000000006")
    (run_dir / "events.jsonl").unlink()
    resumed = train_tiny(*sets, fresh=False)
    assert resumed.losses() == undisturbed.losses()[3:]
    assert resumed.values["log_loss"] == undisturbed.values["log_loss"]
