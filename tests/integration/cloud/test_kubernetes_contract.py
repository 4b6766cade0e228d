"""The contract of a cluster that exists, asked by kubectl itself over HTTP."""

from __future__ import annotations

import pytest
from integration.cloud.kubernetes_api import KubernetesApi, kubernetes_api
from integration.cloud.kubernetes_launch import settle, spec_of

from embark.doctor.cluster import check_cluster
from embark.doctor.host import Check
from embark.launch.shell import Shell

SETTINGS = ("place.cluster=existing", "place.claim=shared", "place.queue=ads", "place.pull_secret=login",
            'place.node_selector=["pool=h100"]')
NEEDS = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "20Gi", "cpu": "191",
         "memory": "2000Gi", "ephemeral-storage": "900Gi"}
LOGIN = "eyJhdXRocyI6IHsicmVnaXN0cnkuZXhhbXBsZS5jb20iOiB7fX19"  # of registry.example.com


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        server.put("namespaces", "embark", "")
        server.put("serviceaccounts", "embark")
        server.put("persistentvolumeclaims", "shared", spec={"accessModes": ["ReadWriteMany"]},
                   status={"phase": "Bound"})
        server.put("localqueues", "ads", status={"conditions": [{"type": "Active", "status": "True"}]})
        server.put("secrets", "login", data={".dockerconfigjson": LOGIN}, metadata={"namespace": "embark"})
        for name in ("one", "two"):
            server.put("nodes", name, "", metadata={"labels": {"pool": "h100"}}, spec={},
                       status={"allocatable": NEEDS, "conditions": [{"type": "Ready", "status": "True"}]})
        yield server


def checks(*settings: str) -> dict[str, Check]:
    spec = spec_of(*SETTINGS, "place.image=ghcr.io/team/embark:1", *settings)
    return {one.name: one for one in check_cluster(spec, Shell())}


def wrong(found: dict[str, Check]) -> list[str]:
    return [name for name, one in found.items() if one.verdict != "ok"]


def test_kubectl_finds_all_that_the_contract_wants(api: KubernetesApi):
    api.objects[("secrets", "embark", "login")]["data"] = {".dockerconfigjson": "eyJhdXRocyI6IHsiZ2hjci5pbyI6IHt9fX0="}
    found = checks()
    assert wrong(found) == [], found
    assert found["version"].found == "1.36"
    assert found["rights"].found == "all 12 that the run needs"


def test_kubectl_s_answers_are_read_where_something_is_missing(api: KubernetesApi):
    api.denied = ("create jobsets", "get pods/log")
    del api.objects[("nodes", "", "two")]
    del api.objects[("serviceaccounts", "embark", "embark")]
    found = checks("place.target=jobset")
    assert wrong(found) == ["rights", "account", "registry", "labels"]
    assert found["rights"].found == "you may not create jobsets.jobset.x-k8s.io, get pods/log"
    assert "no login for" in found["registry"].found


def test_a_kind_that_the_server_does_not_have_is_missing(tmp_path, monkeypatch):
    with kubernetes_api(without=("jobset.x-k8s.io/v1alpha2",)) as server:
        settle(server, tmp_path, monkeypatch)
        found = checks("place.target=jobset")
    assert "JobSet of jobset.x-k8s.io/v1alpha2" in found["kinds"].found
    assert found["namespace"].verdict == "wrong"


def test_the_check_only_reads_reviews_and_dry_runs(api: KubernetesApi):
    checks()
    writes = [path for verb, path in api.requests if verb != "GET"]
    assert writes
    assert all("selfsubjectaccessreviews" in path or "dryRun=All" in path for path in writes)
    assert not api.names("pods")
