"""A server's whole life on Kubernetes: kubectl itself, against an API over HTTP."""

from __future__ import annotations

import pytest
from integration.cloud.kubernetes_api import kubernetes_api
from integration.cloud.kubernetes_launch import settle, spec_of

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.errors import UserError
from embark.launch.backend import backend_of
from embark.launch.run_registry import find_run
from embark.launch.shell import Shell

SERVE = ("place.target=serve", "place.machine=", "place.nodes=1")
LABELS = {"app.kubernetes.io/component": "serve"}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        server.put("namespaces", "embark", "")
        server.put("secrets", "dlrm-serve-token")
        yield server


def node(api, name, memory="16Gi", **labels):
    api.put("nodes", name, "", metadata={"labels": labels}, status={"allocatable": {
        "cpu": "8", "memory": memory, "ephemeral-storage": "90Gi"}})


def replica(api, number, on):
    requests = {"cpu": "2", "memory": "10Gi", "ephemeral-storage": "3Gi"}
    api.put("pods", f"dlrm-serve-{number}", metadata={"labels": {"app.kubernetes.io/instance": "dlrm", **LABELS}},
            status={"phase": "Running"},
            spec={"nodeName": on, "containers": [{"name": "server", "resources": {"requests": requests}}]})


def launch(*sets):
    return launch_run(Console(), spec_of(*SERVE, "serve.memory_gib=10", *sets), yes=True, dry_run=False)


def test_without_its_secret_nothing_is_launched_and_the_command_is_named(api):
    del api.objects[("secrets", "embark", "dlrm-serve-token")]
    with pytest.raises(UserError, match="no Secret dlrm-serve-token") as caught:
        launch()
    assert 'kubectl create secret generic dlrm-serve-token --namespace embark --from-literal=token="$TOKEN"' in \
        caught.value.fix
    assert api.names("deployments") == set()
    assert launch("serve.auth=none") == 0
    api.forbidden = ("secrets",)  # who may not look is not refused
    assert launch() == 0


def test_a_rollout_that_does_not_fit_the_nodes_is_refused_before_it_starts(api, capsys):
    node(api, "a")
    assert launch() == 0
    assert "it starts 2 replicas of 10 GiB, and the nodes have room for 1 more" in capsys.readouterr().err
    node(api, "b")
    for number, on in enumerate("ab"):
        replica(api, number, on)
    assert launch() == 0  # a replica ends before the next one starts
    assert "room" not in capsys.readouterr().err
    with pytest.raises(UserError, match=r"would not end: it starts 1 replica of 10 GiB.* room for 0 more") as caught:
        launch("serve.max_surge=1")
    assert "serve.max_surge=0" in caught.value.fix
    api.put("configmaps", "cluster-autoscaler-status", "kube-system")
    assert launch("serve.max_surge=1") == 0
    assert "the others wait for nodes" in capsys.readouterr().err
    del api.objects[("configmaps", "kube-system", "cluster-autoscaler-status")]
    node(api, "small", "4Gi")
    api.put("nodes", "gpu", "", spec={"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, status={
        "allocatable": {"cpu": "96", "memory": "900Gi", "ephemeral-storage": "900Gi"}})
    with pytest.raises(UserError, match="would not end"):
        launch("serve.max_surge=1")
    node(api, "c")
    assert launch("serve.max_surge=1") == 0
    with pytest.raises(UserError, match="would not end"):  # it may not run on any of them
        launch("serve.max_surge=1", "serve.machine=m7i.2xlarge")


def test_an_autoscaler_by_custom_metrics_needs_who_serves_them(api):
    with pytest.raises(UserError, match="no custom metrics"):
        launch("serve.autoscaler=adapter")
    api.put("apiservices", "v1beta1.custom.metrics.k8s.io", "")
    assert launch("serve.autoscaler=adapter") == 0


def test_prometheus_reads_the_metrics_where_the_cluster_has_one(api):
    assert launch() == 0
    assert api.names("podmonitors") == set()
    api.put("customresourcedefinitions", "podmonitors.monitoring.coreos.com", "")
    assert launch() == 0
    assert api.names("podmonitors") == {"dlrm-serve"}


FOLLOW = ("place.target=follow", "place.machine=g5.xlarge", "place.nodes=1", "stream.source=nats", "train.decay=none",
          "stream.topics=['events.shown']")


def test_a_deployment_that_follows_a_stream_is_launched_and_cancelled(api, capsys):
    with pytest.raises(UserError, match="no Secret dlrm-nats") as caught:
        launch_run(Console(), spec_of(*FOLLOW), yes=True, dry_run=False)
    assert '--from-literal=options.toml="token = \\"$TOKEN\\""' in caught.value.fix
    api.put("secrets", "dlrm-nats")
    assert launch_run(Console(), spec_of(*FOLLOW), yes=True, dry_run=False) == 0
    assert api.names("statefulsets") == {"dlrm", "dlrm-nats"}
    assert api.names("deployments") == {"dlrm-publish", "dlrm-serve"}
    handle = find_run("dlrm").handle
    deployed = backend_of(handle, Shell(), print)
    assert deployed.status(handle).state == "pending"

    parts = {"dlrm-0": "trainer", "dlrm-nats-0": "broker", "dlrm-publish-aa": "publisher", "dlrm-serve-bb": "serve"}
    for name, component in parts.items():
        api.pod(name, "dlrm", index=0, container=component, phase="Running",
                labels={"app.kubernetes.io/component": component})
    for plural, name in (("statefulsets", "dlrm"), ("statefulsets", "dlrm-nats"), ("deployments", "dlrm-publish")):
        api.put(plural, name, status={"readyReplicas": 1})
    api.put("deployments", "dlrm-serve", status={"readyReplicas": 0}, spec={"replicas": 2})
    status = deployed.status(handle)
    assert (status.state, len(status.replicas)) == ("running", 4)
    assert status.reason == "dlrm-serve: 0 of 2 replicas ready"
    api.log("dlrm-0", "step 1")
    api.log("dlrm-serve-bb", "serving dlrm")
    capsys.readouterr()
    assert logs_command("dlrm", console=Console()) == 0
    output = capsys.readouterr().out
    assert "dlrm-0 | step 1" in output
    assert "dlrm-serve-bb | serving dlrm" in output

    api.put("persistentvolumeclaims", "data-dlrm-nats-0")
    for name in parts:
        del api.objects[("pods", "embark", name)]
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    output = capsys.readouterr().out
    for kind in ("statefulsets", "deployments", "services", "networkpolicies", "configmaps"):
        assert api.names(kind) == set(), kind
    assert api.names("persistentvolumeclaims") == {"data-dlrm-nats-0"}  # the records stay, and their price is said
    assert "the broker's disk, claim data-dlrm-nats-0, which is paid" in output
    assert deployed.status(handle).state == "gone"


def test_a_server_is_launched_changed_and_cancelled(api, capsys):
    assert launch_run(Console(), spec_of(*SERVE), yes=True, dry_run=False) == 0
    output = capsys.readouterr().out
    assert "dlrm-serve: 2 to 10 replicas of" in output
    assert "a month on demand" in output
    assert api.names("deployments") == api.names("horizontalpodautoscalers") == {"dlrm-serve"}
    handle = find_run("dlrm-serve").handle
    server = backend_of(handle, Shell(), print)
    assert handle.run_uri == "s3://training/runs/dlrm/export"
    assert server.status(handle).state == "pending"

    for number in (0, 1):
        api.pod(f"dlrm-serve-{number}", "dlrm", index=number, container="server", phase="Running", labels=LABELS)
    api.pod("dlrm-0-aaaaa", "dlrm", index=0, phase="Running")  # of the training, which has the same name
    api.put("deployments", "dlrm-serve", status={"readyReplicas": 2})
    status = server.status(handle)
    assert (status.state, [one.name for one in status.replicas]) == ("running", ["dlrm-serve-0", "dlrm-serve-1"])
    api.log("dlrm-serve-1", "serving dlrm, version 3, on http://0.0.0.0:8000")
    assert logs_command("dlrm-serve", console=Console()) == 0
    assert "dlrm-serve-1 | serving dlrm, version 3" in capsys.readouterr().out

    # Again, with other settings: the same object is changed.
    assert launch_run(Console(), spec_of(*SERVE, "serve.tables=int8"), yes=True, dry_run=False) == 0
    assert api.names("deployments") == {"dlrm-serve"}
    for number in (0, 1):
        del api.objects[("pods", "embark", f"dlrm-serve-{number}")]
    capsys.readouterr()
    assert cancel_command("dlrm-serve", yes=True, console=Console()) == 0
    output = capsys.readouterr().out
    for kind in ("deployments", "horizontalpodautoscalers", "poddisruptionbudgets", "services", "networkpolicies"):
        assert api.names(kind) == set()
    assert "the exported model in s3://training/runs/dlrm/export" in output
    assert ("pods", "embark", "dlrm-0-aaaaa") in api.objects
    assert server.status(handle).state == "gone"

