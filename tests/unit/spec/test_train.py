"""What [train] is where a spec leaves it out."""

import pytest

from embark.catalog import load_catalog
from embark.plan.workload import resolve_data
from embark.spec import resolve
from embark.spec.train import TPU_MACHINE, suited_batch, with_train_defaults


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


OWN = {"kind": "prepared", "path": "rows"}


def of_own_data(train: dict[str, object], num_train: int, num_eval: int = 1_000, **model: object):
    spec = resolve({"name": "a", "data": OWN, "train": train, "model": model})
    found = with_train_defaults(spec, num_train, num_eval)
    assert with_train_defaults(found, 10 * num_train, num_eval) is found
    return found.train


def test_own_data_is_trained_until_validation_rows_say_it_is_enough():
    found = of_own_data({}, 60_000)
    assert (found.batch_size, found.eval_every, found.early_stopping_patience, found.num_epochs) == (128, 234, 8, 50)
    large = of_own_data({}, 5_000_000)
    assert (large.num_epochs, large.early_stopping_patience) == (4, 4)
    assert of_own_data({"eval_every": 10}, 60_000).eval_every == 10
    ranked = of_own_data({}, 60_000, tables=[{"name": "a", "rows": 9}],
                         tasks=[{"name": "stars", "loss": "regression"}])
    assert ranked.early_stopping_metric == "log_loss"


@pytest.mark.parametrize(("train", "num_train", "num_eval"), [
    ({"num_epochs": 1}, 60_000, 1_000), ({"num_steps": 9}, 60_000, 1_000), ({"decay": "cosine"}, 60_000, 1_000),
    ({"early_stopping_patience": 0}, 60_000, 1_000), ({}, 10_000_001, 1_000), ({}, 60_000, 0)])
def test_a_named_duration_large_data_or_no_validation_rows_keep_one_epoch(train, num_train, num_eval):
    found = of_own_data(train, num_train, num_eval)
    assert (found.num_epochs, found.early_stopping_patience, found.eval_every) == (1, 0, 0)


@pytest.mark.parametrize(("num_train", "batch", "rate"), [
    (4_000, 64, 0.001), (100_000, 128, 0.001), (409_600, 1024, 0.002), (10**9, 2048, 0.001 * 8**0.5)])
def test_without_a_rate_or_an_optimizer_the_batch_decides_the_rate(num_train, batch, rate):
    found = of_own_data({}, num_train)
    assert (found.batch_size, found.dense_optimizer, found.warmup_steps) == (batch, "adam", 0)
    assert (found.learning_rate, found.dense_learning_rate) == (0.03, pytest.approx(rate))
    assert found.dense_init == "centered"


@pytest.mark.parametrize(("share_negatives", "batch"), [(False, 2048), (True, 128)])
def test_samples_that_share_their_negatives_have_small_batches(share_negatives, batch):
    found = of_own_data({}, 10_000_000, kind="sasrec", sequence={"share_negatives": share_negatives})
    assert found.batch_size == batch


@pytest.mark.parametrize("train", [{"learning_rate": 0.01}, {"dense_learning_rate": 0.01}, {"optimizer": "sgd"},
                                   {"dense_optimizer": "sgd"}])
def test_a_named_rate_or_optimizer_of_own_data_stays(train):
    found = of_own_data(train, 60_000)
    assert {name: getattr(found, name) for name in train} == train
    assert (found.dense_init, found.dense_optimizer) == ("uniform", train.get("dense_optimizer", "adagrad"))


def model_of(num_train: int, train: dict[str, object] | None = None, **model: object):
    spec = resolve({"name": "a", "data": OWN, "train": train or {}, "model": model})
    return with_train_defaults(spec, num_train).model


@pytest.mark.parametrize(("num_train", "dim", "layers"), [
    (1, 16, (128, 64)), (4_508, 16, (128, 64)), (31_259, 16, (128, 64)), (65_536, 32, (256, 128)),
    (262_144, 64, (512, 256)), (10**9, 64, (512, 256))])
def test_the_sizes_of_own_data_go_by_its_samples(num_train, dim, layers):
    found = model_of(num_train)
    assert (found.embedding_dim, found.bottom_mlp, found.top_mlp) == (dim, layers, layers)


def test_sizes_that_a_spec_names_stay():
    named = model_of(4_000, embedding_dim=8, top_mlp=[7])
    assert (named.embedding_dim, named.bottom_mlp, named.top_mlp) == (8, (128, 64), (7,))
    assert model_of(4_000, {"learning_rate": 0.1}).bottom_mlp == (512, 256)
    assert model_of(4_000, tables=[{"name": "a", "rows": 9, "dim": 64}]).embedding_dim == 64
    assert model_of(4_000, kind="din", sequence={"history": "a", "candidate": "b"}, tables=[
        {"name": "a", "rows": 9, "pooling": "none", "max_length": 5}, {"name": "b", "shares": "a"}]).embedding_dim == 64


@pytest.mark.parametrize(("num_train", "model", "kind"), [
    (4_000, {}, "tabm"), (262_143, {}, "tabm"), (262_144, {}, "dlrm"),
    (4_000, {"kind": "dlrm"}, "dlrm"), (4_000, {"kind": "dcnv2"}, "dcnv2"), (4_000, {"bottom_mlp": [8]}, "dlrm"),
    (4_000, {"num_dense": 0}, "dlrm"), (4_000, {"tasks": [{"name": "stars"}]}, "dlrm"),
    (4_000, {"tables": [{"name": "a", "rows": 257}]}, "dlrm")])
def test_few_rows_of_numbers_and_words_have_members_unless_the_spec_says(num_train, model, kind):
    assert model_of(num_train, **{"tables": [{"name": "a", "rows": 256}], **model}).kind == kind


@pytest.mark.parametrize("changes", [
    {"place": {"device": "jax"}}, {"place": {"device": "tpu"}}, {"place": {"machine": "v5litepod-8"}},
    {"train": {"learning_rate": 0.1}},
    {"data": {"kind": "columns", "path": "rows", "dense_columns": [f"d{i}" for i in range(13)]}}])
def test_jax_named_rates_and_other_data_keep_the_kind(changes):
    tables = [{"name": "a", "rows": 9}]
    spec = resolve({"name": "a", "data": OWN, "model": {"tables": tables}, **changes})
    assert with_train_defaults(spec, 4_000).model.kind == "dlrm"


def test_the_names_of_tpu_machines_are_told_from_others():
    names = {name: one.gpu.kind for one in load_catalog().machines.values()
             for name in (one.name, *one.also, one.machine_type)}
    assert {name for name in names if TPU_MACHINE.match(name)} == {
        name for name, kind in names.items() if name and kind == "tpu"}


def test_small_tables_of_own_data_begin_with_small_values():
    tables = [{"name": "a", "rows": 3}, {"name": "b", "rows": 400}, {"name": "c", "rows": 3, "init_range": 0.5}]
    assert [table.init_range for table in model_of(4_000, tables=tables).tables] == [0.05, None, 0.5]


def test_named_rates_keep_small_values_with_centered_weights_alone():
    for init, expected in (("centered", 0.05), ("uniform", None)):
        spec = resolve({"name": "a", "data": OWN, "model": {"tables": [{"name": "a", "rows": 3}]},
                        "train": {"learning_rate": 0.1, "dense_init": init}})
        found = with_train_defaults(spec, 4_000).model
        assert found.tables[0].init_range == expected
        assert (found.kind, found.top_mlp) == ("dlrm", spec.model.top_mlp)
