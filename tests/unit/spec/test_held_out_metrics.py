"""A spec goes by metrics that the evaluation of its model measures."""

from typing import get_args, get_type_hints

import pytest

from embark.errors import SpecError
from embark.spec import parse_spec, resolve, to_toml
from embark.spec.train import HeldOutMetric, measured_metrics, with_train_defaults

TABLES = [{"name": "user", "rows": 9}, {"name": "item", "rows": 9}]
TOWERS = {"kind": "two_tower", "num_dense": 0, "tables": TABLES, "two_tower": {"item": "item", "user": "user"}}
NEXT = {"kind": "sasrec", "num_dense": 0, "sequence": {"history": "seen", "negatives": "others"}, "tables": [
    {"name": "seen", "rows": 9, "pooling": "none", "max_length": 4},
    {"name": "others", "shares": "seen", "pooling": "none", "max_length": 4}]}
RATING = {"tasks": [{"name": "rating", "loss": "regression"}]}


@pytest.mark.parametrize(("model", "measured"), [
    ({}, ("auc", "log_loss", "normalized_entropy")), (RATING, ("log_loss",)),
    (TOWERS, ("recall_at_k", "ndcg_at_k", "hit_at_k")),
    (NEXT, ("ndcg_at_k", "recall_at_k", "hit_at_k", "auc", "log_loss"))], ids=["dlrm", "tasks", "two towers", "sasrec"])
def test_early_stopping_and_the_best_checkpoint_go_by_what_is_measured(model, measured):
    assert measured_metrics(resolve({"model": model}).model) == measured
    for metric in get_args(HeldOutMetric):
        settings = [f"store.best_by={metric}", "store.keep_best=1", f"train.early_stopping_metric={metric}",
                    "train.early_stopping_patience=1", "train.eval_every=10"]
        if metric in measured:
            assert resolve({"model": model}, settings).store.best_by == metric
            continue
        with pytest.raises(SpecError, match="is not measured of") as refused:
            resolve({"model": model}, settings)
        assert [mistake.field for mistake in refused.value.mistakes] == ["train.early_stopping_metric", "store.best_by"]
        assert refused.value.mistakes[0].fix == f"use {', '.join(measured)}"


@pytest.mark.parametrize(("model", "default"), [
    ({}, "auc"), (RATING, "log_loss"), (TOWERS, "recall_at_k"), (NEXT, "ndcg_at_k")])
def test_without_a_name_the_default_metric_of_the_model_is_taken(model, default):
    settings = ["store.keep_best=1", "train.early_stopping_patience=1", "train.eval_every=10"]
    spec = with_train_defaults(resolve({"model": model}, settings), 1_000)
    assert (spec.train.early_stopping_metric, spec.store.best_by) == (default, default)
    last = measured_metrics(spec.model)[-1]
    named = resolve({"model": model}, [*settings, f"train.early_stopping_metric={last}", f"store.best_by={last}"])
    kept = with_train_defaults(named, 1_000)
    assert (kept.train.early_stopping_metric, kept.store.best_by) == (last, last)


@pytest.mark.parametrize("model", [RATING, TOWERS, NEXT])
def test_a_spec_that_is_written_and_read_again_names_no_new_metric(model):
    settings = ["store.keep_best=2", "train.early_stopping_patience=2", "train.eval_every=10"]
    again = parse_spec(to_toml(resolve({"model": model}, settings)))
    assert again is not None
    assert "best_by" not in again.store.model_fields_set
    assert "early_stopping_metric" not in again.train.model_fields_set


def test_the_command_that_searches_settings_offers_all_of_them():
    from embark.cli.tune import tune

    assert get_args(get_args(get_type_hints(tune)["metric"])[0]) == get_args(HeldOutMetric)
