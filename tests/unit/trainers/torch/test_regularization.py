"""Dropout, weight decay and the penalty on looked-up rows: what they do, and that a resumed run does the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from embark.data import open_source
from embark.errors import SpecError
from embark.spec import TrainSpec, resolve
from embark.trainers.torch.networks.layers import ReLUWithDropout, drop, seed_dropout
from embark.trainers.torch.optimizers import DENSE_OPTIMIZERS, _dense_factory

ALL = ("model.dropout=0.3", "train.weight_decay=0.1", "train.embedding_l2=0.01")
SAVING = ("train.num_steps=6", "train.dense_optimizer=adam", "store.checkpoint_every=3",
          "store.checkpoint_at_end=true", "store.keep_checkpoints=9")


def test_units_are_dropped_by_their_share_and_the_mean_stays():
    values = torch.ones(2000, 50, dtype=torch.float64)
    for dropout in (0.1, 0.5, 0.9):
        dropped = drop(values, dropout, 12345, 0)
        assert (dropped == 0).double().mean().item() == pytest.approx(dropout, abs=0.01)
        assert dropped.mean().item() == pytest.approx(1, abs=0.05)
        # and in no pattern: each row and each column by the same share
        assert (dropped == 0).double().mean(dim=0).std().item() < 0.02
        assert (dropped == 0).double().mean(dim=1).std().item() < 0.12


def test_each_step_seed_and_layer_drops_other_units_on_any_ranks():
    layers = torch.nn.Sequential(ReLUWithDropout(0.5), ReLUWithDropout(0.5))
    values, masks = torch.ones(64, 32), []
    for seed, step in ((1, 0), (1, 1), (2, 0)):
        seed_dropout(layers, seed, step, 0)
        masks += [layer(values) > 0 for layer in layers]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert (mask == other).float().mean().item() == pytest.approx(0.5, abs=0.1)
    seed_dropout(layers, 2, 0, 48)
    assert torch.equal(layers[1](values[48:]) > 0, masks[-1][48:])
    layers.eval()
    assert torch.equal(layers(values), values)


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_weight_decay_shrinks_matrices_as_adamw_does(name):
    weight, bias, beside = (torch.nn.Parameter(torch.full(shape, 2.0)) for shape in ((3, 3), (3,), (3, 3)))
    train = TrainSpec(dense_optimizer=name, weight_decay=0.5, learning_rate=0.1)
    decayed = _dense_factory(train, torch.device("cpu"))([weight, bias])
    if name == "adam":
        reference = torch.optim.AdamW([beside], lr=0.1, eps=train.eps, weight_decay=0.5)
    else:
        reference = _dense_factory(train.model_copy(update={"weight_decay": 0.0}), torch.device("cpu"))([beside])
    for step in (1, 2):
        for group in (*decayed.param_groups, *reference.param_groups):
            group["lr"] = 0.1 / step
        if name != "adam":
            with torch.no_grad():
                beside.mul_(1 - 0.1 / step * 0.5)
        for parameter in (weight, bias, beside):
            parameter.grad = torch.full_like(parameter, 0.25)
        decayed.step()
        reference.step()
    assert torch.allclose(weight, beside, rtol=1e-6)
    assert bias.mean() > weight.mean()


def test_the_penalty_pulls_only_looked_up_rows_to_zero(built):
    sets = ("train.num_steps=1", "train.optimizer=sgd", "train.learning_rate=1.0", "train.dense_learning_rate=0.0",
            "model.rows_per_table=2000", "train.batch_size=64")
    moves = []
    for penalty in (0.0, 0.5):
        trainer = built(*sets, f"train.embedding_l2={penalty}")
        source = open_source(trainer.spec)
        before = tables_of(trainer)
        with trainer.feed(source, 0, 1) as batches:
            trainer.step(batches, 0)
        moves.append({name: after - before[name] for name, after in tables_of(trainer).items()})
    ids = source.train_rows(0, 0, 64).ids.reshape(4, 64)
    for table, (name, start) in enumerate(before.items()):
        share = torch.bincount(torch.from_numpy(ids[table]).long(), minlength=2000)[:, None] / 64
        assert torch.allclose(moves[1][name] - moves[0][name], -0.5 * share * start, atol=1e-7), name
    assert share.eq(0).any()


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(train_tiny):
    undisturbed = train_tiny(*SAVING, *ALL)
    run_dir = Path(undisturbed.values["run_dir"])
    shutil.rmtree(run_dir / "checkpoints" / "step-000000006")
    (run_dir / "events.jsonl").unlink()
    resumed = train_tiny(*SAVING, *ALL, fresh=False)
    assert resumed.losses() == undisturbed.losses()[3:]
    assert resumed.values["log_loss"] == undisturbed.values["log_loss"]


@pytest.mark.parametrize(("table", "why"), [
    ({"multi_hot": 2}, "table a pools several rows of a sample: FBGEMM returns their sum or mean alone"),
    ({"pooling": "none", "max_length": 4}, "table a is a sequence")])
def test_a_penalty_is_refused_where_samples_have_several_rows(table, why):
    with pytest.raises(SpecError) as refused:
        resolve({"model": {"kind": "m:M", "code": "x", "tables": [{"name": "a", "rows": 9, **table}]}},
                ["train.embedding_l2=0.1"])
    (mistake,) = refused.value.mistakes
    assert (mistake.field, mistake.what.startswith(why)) == ("train.embedding_l2", True)


def tables_of(trainer):
    return {name: value.local_shards()[0].tensor.clone() for name, value in trainer.model.state_dict().items()
            if "embedding_bags" in name}
