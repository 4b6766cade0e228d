"""`[features]`: read from specs of today and of before, and refused in words."""

from __future__ import annotations

import pytest

from embark.errors import SpecError
from embark.features.numbers import Numbers, recorded_numbers
from embark.spec import resolve, to_toml
from embark.spec.features import FeaturesSpec, legacy_features
from embark.spec.load import parse_spec

DATA = {"kind": "prepared", "path": "x"}


def test_earlier_specs_and_records_keep_their_transform():
    assert resolve({"data": DATA | {"prepare": {"dense": "auto"}}}).features == FeaturesSpec()
    before = resolve({"data": DATA | {"prepare": {"dense": "none"}}})
    assert before.features.numbers == "none"
    assert parse_spec(to_toml(before)) == before
    for how in ("log", "mlperf", "none"):
        features = FeaturesSpec.model_validate(legacy_features({"dense": how}))
        assert recorded_numbers(None, features, ["a"]) == Numbers.plain(how, ["a"])


def test_columns_are_named_in_the_mistakes_of_their_features():
    columns = {"age": {"min": 9.0, "max": 1.0},
               "price": {"num_buckets": 8, "transform": "log", "bucket_table": False}, "b": {"transfrm": "log"}}
    with pytest.raises(SpecError) as caught:
        resolve({"data": DATA, "features": {"columns": columns}})
    assert "features.columns.b.transfrm" in str(caught.value)
    assert "transform" in str(caught.value)
    del columns["b"]
    with pytest.raises(SpecError) as caught:
        resolve({"data": DATA, "features": {"columns": columns}})
    assert "features.columns.age.max" in str(caught.value)
    assert "features.columns.price.num_buckets" in str(caught.value)


def test_a_spec_without_features_is_stored_as_before():
    assert "[features" not in to_toml(resolve({"data": DATA}))
    spec = resolve({"data": DATA, "features": {"columns": {"a.b": {"transform": "log"}}}})
    assert parse_spec(to_toml(spec)) == spec
    assert hash(spec) != hash(resolve({"data": DATA}))
