"""Which values are searched: what the spec allows, with its own among them, or what the user names."""

from __future__ import annotations

import pytest
from tiny_runs import TINY

from embark.errors import SpecError, UserError
from embark.spec import resolve
from embark.tuning.search_space import Dimension, default_space, own_values, parse_search, with_values

EPOCHS = "train.num_steps=0"


def test_the_default_space_contains_the_specs_own_values():
    spec = resolve(TINY, [EPOCHS, "train.learning_rate=0.5", "train.weight_decay=0.03"])
    space = default_space(spec, has_regularization=True)
    assert [*space] == ["train.learning_rate", "train.dense_learning_rate", "train.optimizer", "train.dense_optimizer",
                        "train.batch_size", "model.dropout", "train.weight_decay", "train.embedding_l2", "model.kind",
                        "model.embedding_dim", "model.top_mlp", "model.bottom_mlp"]
    assert space["model.kind"] == Dimension(("dlrm", "dcnv2", "deepfm", "wide_deep", "finalmlp", "masknet", "tabm"))
    assert space["model.top_mlp"] == Dimension(("[16]", "[64]", "[256, 128]", "[512, 256]"))
    assert with_values(spec, {"model.top_mlp": "[256, 128]"}).model.top_mlp == (256, 128)
    assert space["train.learning_rate"] == Dimension((1e-3, 0.5), is_range=True)
    assert space["train.dense_learning_rate"] == Dimension((3e-4, 0.5), is_range=True)
    assert space["train.batch_size"] == Dimension((128, 32))  # 8 is too small
    own = own_values(spec, space)
    assert own.keys() == space.keys()
    assert (own["train.dense_learning_rate"], own["train.weight_decay"]) == (0.5, 0.03)
    for field, dimension in space.items():
        for value in dimension.values:
            with_values(spec, {field: value})


@pytest.mark.parametrize(("sets", "missing"), [
    ((), {"train.batch_size"}),  # the steps are given: another batch is another number of samples
    ((EPOCHS, "train.eval_every=4"), {"train.batch_size"}),
    ((EPOCHS, "model.tables=[{name='a', rows=10, multi_hot=3}]"), {"train.embedding_l2"}),
    ((EPOCHS, "model.kind=mine:Model", "model.code='x'"),
     {"model.dropout", "model.kind", "model.top_mlp", "model.bottom_mlp"}),
])
def test_what_the_spec_does_not_allow_is_not_searched(sets, missing):
    every = default_space(resolve(TINY, [EPOCHS]), has_regularization=True)
    assert every.keys() - default_space(resolve(TINY, sets), has_regularization=True).keys() == missing
    paced = default_space(resolve(TINY, [EPOCHS, "train.eval_every=4"]), has_regularization=True, has_own_pace=True)
    assert paced.keys() == every.keys()
    plain = default_space(resolve(TINY, [EPOCHS]), has_regularization=False)
    assert every.keys() - plain.keys() == {"model.dropout", "train.weight_decay", "train.embedding_l2"}
    assert plain["model.kind"] == Dimension(("dlrm", "dcnv2"))


def test_other_kinds_are_searched_beside_one_with_fields_of_its_own():
    spec = resolve(TINY, [EPOCHS, "model.kind=tabm", "model.num_members=8"])
    kinds = default_space(spec, has_regularization=True)["model.kind"].values
    assert set(kinds) == {"dlrm", "dcnv2", "deepfm", "wide_deep", "finalmlp", "masknet", "tabm"}
    assert with_values(spec, {"model.dropout": 0.1}).model.num_members == 8
    with pytest.raises(SpecError, match="num_members"):
        with_values(resolve(TINY), {"model.num_members": 8})


def test_features_and_epochs_are_searched_where_the_data_allows_them():
    own = resolve({**TINY, "train": {"batch_size": 128, "num_epochs": 3}, "data": {
        "kind": "columns", "path": "x.csv", "dense_columns": ["a", "b", "c"]}})
    space = default_space(own, has_regularization=True, has_features=True)
    assert space["train.num_epochs"] == Dimension((3, 1, 2, 4))
    assert space["features.numbers"] == Dimension(("auto", "quantiles"))  # which are one value a column
    assert space["features.bucket_tables"] == Dimension(("auto", True))
    paced = default_space(own, has_regularization=True, has_own_pace=True)
    assert not {"train.num_epochs", "features.numbers"} & paced.keys()
    assert parse_search(own, ["model.top_mlp=[64],[128, 32]"]) == {"model.top_mlp": Dimension(("[64]", "[128, 32]"))}


def test_ranges_and_choices_are_read_as_settings_are():
    space = parse_search(resolve(TINY), [
        "train.learning_rate=0.001..1", "train.warmup_steps=0..20", "model.dropout=0..0.5",
        "train.optimizer=sgd,adagrad", "train.batch_size=64, 128"])
    assert space == {
        "train.learning_rate": Dimension((0.001, 1), is_range=True),
        "train.warmup_steps": Dimension((0, 20), is_range=True, is_int=True),
        "model.dropout": Dimension((0, 0.5), is_range=True), "train.optimizer": Dimension(("sgd", "adagrad")),
        "train.batch_size": Dimension((64, 128))}
    assert [dimension.is_log for dimension in space.values() if dimension.is_range] == [True, False, False]
    own = own_values(resolve(TINY), space)
    assert own == {"train.learning_rate": 0.01, "train.warmup_steps": 0, "model.dropout": 0.0,
                   "train.optimizer": "rowwise_adagrad", "train.batch_size": 128}
    assert [field for field, value in own.items() if not space[field].contains(value)] == ["train.optimizer"]


@pytest.mark.parametrize(("argument", "problem"), [
    ("train.learning_rate", r"is not a field of \[train\], \[model\] or \[features\] with"),
    ("data.seed=1,2", r"is not a field of \[train\], \[model\] or"),
    ("train.learning_rat=0.1,1", "no such field"),
    ("train.learning_rate=1..0.1", "is not a range of numbers from low to high"),
    ("train.optimizer=a..b", "train.optimizer"),
    ("train.batch_size=64", "is one value"),
    ("train.dense_optimizer=adam,adma", "train.dense_optimizer"),
    ("model.dropout=0..1", "less than 1"),
])
def test_a_mistake_names_the_field(argument, problem):
    with pytest.raises(UserError, match=problem) as refused:
        parse_search(resolve(TINY), [argument])
    assert argument.partition("=")[0] in str(refused.value)
