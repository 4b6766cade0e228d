"""Variables and references as the kubelet makes them."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from embark.kubernetes.objects import Objects
from embark.kubernetes.pods import POD_IP, PodIdentity, expand, variables

POD = PodIdentity(name="job-1", namespace="train", labels={"app": "x"},
                  annotations={"batch.kubernetes.io/job-completion-index": "1"})


@pytest.mark.parametrize(("text", "expected"), [
    ("--rdzv_endpoint=$(MASTER_ADDR):29500", "--rdzv_endpoint=$(MASTER_ADDR):29500"),
    ("$(HOST):$(PORT)", "pod-0:29500"),
    ("$$(HOST)", "$(HOST)"),
    ("$HOST and ${HOST}", "$HOST and ${HOST}"),
    ("costs $5 $(", "costs $5 $("),
    ("$([ \"$HOST\" = 0 ] && echo true)", "$([ \"$HOST\" = 0 ] && echo true)"),
])
def test_a_reference_becomes_its_value_and_stays_where_there_is_none(text, expected):
    assert expand(text, {"HOST": "pod-0", "PORT": "29500"}) == expected


def test_a_variable_may_refer_only_to_those_before_it():
    env = [{"name": "LATE", "value": "$(NEXT)"}, {"name": "NEXT", "value": "n"}, {"name": "THEN", "value": "$(NEXT)!"}]
    found = variables({"env": env}, Objects(()), replace(POD, env={"JOB_COMPLETION_INDEX": "1"})).values
    assert found == {"LATE": "$(NEXT)", "NEXT": "n", "THEN": "n!", "JOB_COMPLETION_INDEX": "1"}


def test_values_come_from_fields_config_maps_and_secrets():
    objects = Objects((
        {"kind": "ConfigMap", "metadata": {"name": "c", "namespace": "train"}, "data": {"RATE": "0.1"}},
        {"kind": "Secret", "metadata": {"name": "s", "namespace": "train"},
         "data": {"TOKEN": base64.b64encode(b"hidden").decode()}},
    ))
    container = {
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "A_"}],
        "env": [
            {"name": "INDEX", "valueFrom": {"fieldRef": {
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "TOKEN"}}},
            {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
        "resources": {"limits": {"cpu": "4"}},
    }
    found = variables(container, objects, POD)
    assert found.values == {"A_RATE": "0.1", "INDEX": "1", "IP": POD_IP, "TOKEN": "hidden", "CPUS": "4"}
    assert (found.missing, found.unset_secrets) == ((), ())


def test_a_lacking_config_map_is_missing_and_a_lacking_secret_is_unset():
    container = {"env": [
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}},
    ], "envFrom": [{"configMapRef": {"name": "d"}}, {"secretRef": {"name": "t"}}]}
    found = variables(container, Objects(()), POD)
    assert found.missing == ("ConfigMap d", "ConfigMap c, key k")
    assert found.unset_secrets == ("secret t", "Secret s, key k")
    assert found.values == {}
