"""What [train] is where a spec leaves it out."""

import pytest

from embark.plan.workload import resolve_data
from embark.spec import resolve
from embark.spec.train import suited_batch, with_train_defaults


@pytest.mark.parametrize(("num_samples", "batch"), [
    (10, 10), (4_000, 64), (60_000, 128), (100_000, 128), (409_600, 1024), (1_000_000, 2048), (10**9, 2048)])
def test_the_batch_goes_by_the_number_of_training_samples(num_samples, batch):
    assert suited_batch(num_samples) == batch


def test_what_a_spec_names_stays():
    spec = resolve({"name": "a", "train": {"batch_size": 512, "learning_rate": 0.02}})
    assert with_train_defaults(spec, 4_000) is spec
    rates = resolve({"name": "a", "train": {"dense_optimizer": "sgd"}})
    found = with_train_defaults(rates, 4_000).train
    assert found.model_copy(update={"batch_size": 2048}) == rates.train
    assert found.batch_size == 64


@pytest.mark.parametrize(("train", "num_samples", "steps"), [
    ({}, 4_000, 15), ({}, 60_000, 100), ({}, 10**9, 100), ({}, 10, 0), ({"batch_size": 500}, 20_000, 10),
    ({"num_epochs": 7, "num_steps": 9}, 4_000, 15), ({"warmup_steps": 3}, 60_000, 3), ({"warmup_steps": 0}, 60_000, 0),
    ({"learning_rate": 0.01}, 60_000, 0), ({"dense_learning_rate": 0.01}, 60_000, 0),
    ({"dense_optimizer": "adam"}, 60_000, 0)])
def test_adagrad_warms_up_unless_a_rate_or_a_warm_up_is_named(train, num_samples, steps):
    assert with_train_defaults(resolve({"name": "a", "train": train}), num_samples).train.warmup_steps == steps
    without_dense = resolve({"name": "a", "train": {"batch_size": 64}, "model": {"num_dense": 0}})
    assert with_train_defaults(without_dense, num_samples) is without_dense


def test_a_second_call_changes_nothing_and_a_plan_has_the_batch_of_the_run():
    spec = resolve({"name": "a", "data": {"num_train_samples": 4_000}})
    found = with_train_defaults(spec, 4_000)
    assert with_train_defaults(found, 1_000_000) is found
    assert resolve_data(spec)[0].train == found.train
    assert resolve_data(spec, 1_000_000)[0].train.batch_size == 2048


def test_retrieval_keeps_its_batch_size():
    spec = resolve({"name": "a", "model": {
        "kind": "two_tower", "num_dense": 0, "two_tower": {"item": "item"},
        "tables": [{"name": "user", "rows": 9}, {"name": "item", "rows": 9}]}})
    assert with_train_defaults(spec, 4_000) is spec
