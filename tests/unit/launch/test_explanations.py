"""The scheduler's sentences, as its sources write them, in words that say what to do."""

from __future__ import annotations

import pytest

from embark.launch.backend import explain_exit, explain_preemption, explain_unschedulable, explain_waiting


@pytest.mark.parametrize(
    ("message", "text", "fix"),
    [
        ("0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available",
         "no node has enough GPUs free", "quota"),
        ("0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa.", "EFA", "aws-efa-k8s-device-plugin"),
        ("0/4 nodes are available: 4 Insufficient rdma/ib, 1 Insufficient cpu.", "InfiniBand devices free (rdma/ib)",
         "NicClusterPolicy"),
        ("0/4 nodes are available: 4 Insufficient hugepages-2Mi.", "huge pages", "node pool"),
        ("0/4 nodes are available: 4 node(s) had untolerated taint {sku: gpu}.", "taint", "describe node"),
        ("0/4 nodes are available: 4 node(s) had untolerated taint(s).", "taint", "describe node"),
        ("0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector.", "right machine type", "pool"),
        ('persistentvolumeclaim "dlrm-data" not found', "claim dlrm-data does not exist", "storage.sh"),
        ("pod has unbound immediate PersistentVolumeClaims.", "not bound", "storage.sh"),
        ("no nodes available to schedule pods", "no nodes", "node pool"),
    ],
)
def test_a_pod_that_is_not_scheduled_says_why_and_what_to_do(message, text, fix):
    reason = explain_unschedulable(message)
    assert text in reason.text
    assert message in reason.text
    assert fix in reason.fix


def test_every_cause_in_the_sentence_is_reported():
    reason = explain_unschedulable("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 Insufficient memory.")
    assert reason.text.startswith("no node has enough GPUs free (nvidia.com/gpu); no node has enough memory free (0/3")


def test_what_is_not_known_is_passed_on_as_it_is():
    assert explain_unschedulable("a new sentence").text == "a new sentence"
    assert explain_waiting("NewReason", "said so").text == "NewReason: said so"
    assert explain_preemption("NewReason", "said so") == "said so"
    assert "exit code 3" in explain_exit(3, "").text


def test_a_missing_config_map_is_reported_by_name():
    assert "ConfigMap dlrm-spec does not exist" in explain_waiting("CreateContainerConfigError",
                                                             'configmap "dlrm-spec" not found').text
