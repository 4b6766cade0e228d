"""Several tasks in a spec: what is refused, and that a spec without them is stored as before."""

import tomllib

import pytest

from embark.errors import SpecError
from embark.spec import resolve, to_toml
from embark.spec.tasks import HEAD_FIELDS, label_columns, main_task

CLICK, RATING = {"name": "click"}, {"name": "stars", "label": "rating", "loss": "regression", "weight": 0.5}
KIND = {"name": "kind", "loss": "softmax", "num_classes": 3}
LIKED = {"name": "liked", "label": "rating", "above": 0.0}


def test_a_spec_with_tasks_is_the_same_after_it_was_written_and_read():
    spec = resolve({"model": {"tasks": [RATING, CLICK, KIND, LIKED], "task_head": "ple", "num_experts": 3},
                    "data": {"kind": "columns", "path": "a.csv", "dense_columns": [f"d{i}" for i in range(13)]}})
    again = resolve(tomllib.loads(to_toml(spec)))
    assert again.model == spec.model
    assert [task.column for task in again.model.tasks] == ["rating", "click", "kind", "rating"]
    assert label_columns(again.model.tasks) == ("rating", "click", "kind")
    assert [task.num_outputs for task in again.model.tasks] == [1, 1, 3, 1]
    assert again.model.tasks[3].above == 0.0
    assert (main_task(again.model.tasks), main_task(again.model.tasks[:1])) == (1, -1)


def test_a_spec_without_tasks_is_written_without_their_fields():
    values = resolve({}).model_dump(mode="json")
    assert not {"tasks", *HEAD_FIELDS} & set(values["model"])
    assert "task_conflict" not in values["data"]


@pytest.mark.parametrize(("model", "field", "what"), [
    ({"num_experts": 2}, "model.num_experts", "has no effect without [[model.tasks]]"),
    ({"tasks": [CLICK], "num_experts": 2}, "model.num_experts", 'while model.task_head is "shared_bottom"'),
    ({"tasks": [CLICK], "task_head": "mmoe", "num_task_experts": 3}, "model.num_task_experts", '"mmoe"'),
    ({"tasks": [CLICK, CLICK]}, "model.tasks", "two tasks have this name"),
    ({"tasks": [KIND | {"num_classes": 1}]}, "model.tasks.0.num_classes", "needs at least 2"),
    ({"tasks": [RATING | {"above": 3.0}]}, "model.tasks.0.above", 'has no effect on "regression"'),
    ({"tasks": [CLICK | {"weight": 0.0}]}, "model.tasks", "nothing to minimize"),
    ({"tasks": [LIKED]}, "model.tasks", "synthetic data draws the label of each"),
])
def test_what_has_no_effect_or_contradicts_itself_is_refused(model, field, what):
    with pytest.raises(SpecError) as raised:
        resolve({"model": model})
    assert raised.value.mistakes[0].field == field
    assert what in raised.value.mistakes[0].what


def test_a_label_that_is_also_a_feature_is_refused():
    data = {"kind": "columns", "path": "a.csv", "dense_columns": ["rating"]}
    with pytest.raises(SpecError) as raised:
        resolve({"model": {"num_dense": 1, "tasks": [RATING]}, "data": data,
                 "store": {"keep_best": 1, "best_by": "auc"}})
    assert [mistake.field for mistake in raised.value.mistakes] == ["model.tasks.0.label", "store.best_by"]
