"""Quantities are read as Kubernetes reads them, and conditions count only if they hold."""

from __future__ import annotations

import pytest

from embark.kubernetes.objects import Objects, condition_of, quantity, split_quantity, texts


@pytest.mark.parametrize(("text", "number"), [
    ("500m", 0.5), ("8", 8.0), ("1.5", 1.5), ("64Gi", 64 * 2**30), ("64G", 64e9), ("2Ei", 2**61), (" 1Ki ", 1024.0),
    ("", None), ("64GiB", None), ("-1", None), ("${MEMORY}", None), ("m", None),
])
def test_a_quantity_is_a_number_with_kubernetes_units(text, number):
    assert quantity(text) == number


def test_a_quantity_can_be_multiplied_in_its_own_unit():
    assert split_quantity("64Gi") == (64.0, "Gi")
    assert split_quantity("8") == (8.0, "")
    assert split_quantity("many") is None


def test_a_condition_counts_only_with_its_value():
    status = {"conditions": [{"type": "Failed", "status": "False"}, {"type": "PodScheduled", "status": "False"}]}
    assert condition_of(status, "Failed") is None
    assert condition_of(status, "PodScheduled", "False") == {"type": "PodScheduled", "status": "False"}
    assert condition_of({}, "Failed") is None


def test_labels_are_texts_whatever_yaml_made_of_them():
    assert texts({"a": 1, "b": None, "c": "x"}) == {"a": "1", "b": "", "c": "x"}
    assert texts(None) == {}


def test_a_secret_says_in_plain_text_what_is_there_twice():
    secret = {"kind": "Secret", "metadata": {"name": "s"}, "data": {"a": "b2xk", "b": "b2s="},
              "stringData": {"a": "new"}}
    assert Objects((secret,)).data_of("Secret", "s", "default") == {"a": "new", "b": "ok"}
    assert Objects((secret,)).data_of("ConfigMap", "s", "default") is None
