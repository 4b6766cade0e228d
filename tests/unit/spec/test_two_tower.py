"""What is wrong with `[model.two_tower]` is said with the field and the fix."""

import pytest

from embark.errors import SpecError
from embark.spec import resolve, to_toml

GOOD = {"model": {"kind": "two_tower", "num_dense": 0,
                  "tables": [{"name": "user", "rows": 9}, {"name": "item", "rows": 9}, {"name": "genre", "rows": 3}],
                  "two_tower": {"item": "item", "user": "user", "item_tables": ["genre"]}}}


@pytest.mark.parametrize(("change", "field"), [
    ('model.two_tower.item="itm"', "model.two_tower.item"),
    ('model.two_tower.item=""', "model.two_tower.item"),
    ('model.two_tower.user="genre"', "model.two_tower.user"),
    ('model.two_tower.item_tables=["genre", "user"]', "model.two_tower.item_tables"),
    ("model.two_tower.num_item_dense=1", "model.two_tower.num_item_dense"),
    ("model.two_tower.item_layers=[32]", "model.two_tower.item_layers"),
    ("model.num_dense=2", "model.two_tower.user_layers"),
    ('model.kind="dlrm"', "model.two_tower.item"),
    ("store={ keep_best = 2, best_by = \"auc\" }", "store.best_by"),
    ("model.dropout=0.1", "model.dropout"),
    ('data={ kind = "prepared", path = "x", label = "" }', "data.label"),
])
def test_a_mistake_names_its_field(change, field):
    with pytest.raises(SpecError) as refused:
        resolve(GOOD, [change])
    assert field in [mistake.field for mistake in refused.value.mistakes]


def test_a_spec_survives_its_own_file():
    import tomllib

    spec = resolve(GOOD, ["model.two_tower.num_sampled_negatives=64"])
    assert resolve(tomllib.loads(to_toml(spec))) == spec
