"""A cluster that exists: the manifests use what it has, and nothing else is rendered."""

from __future__ import annotations

import pytest
from render_jobs import documents_of

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.rendered import render_spec
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import load_spec

EXISTING = ["name=ads", "place.cluster=existing", "place.machine=8xH100", "place.nodes=2", "train.batch_size=16384",
            "place.image=ghcr.io/team/embark:1", "store.root=/mnt/data/runs", "place.claim=shared"]
OWN = {"Namespace", "ServiceAccount", "PersistentVolumeClaim", "ClusterQueue", "LocalQueue", "ResourceFlavor"}


def files_of(*settings: str) -> dict[str, str]:
    return {file.path: file.text for file in render_spec(load_spec("quickstart", [*EXISTING, *settings]))}


@pytest.mark.parametrize("target", ["job", "jobset", "trainjob", "pytorchjob", "ray", "torchx"])
def test_only_the_run_s_own_objects_are_rendered(target):
    files = files_of(f"place.target={target}", "place.queue=ads")
    assert not any(path.endswith(".sh") for path in files if path != "entrypoint.sh")
    manifests = [one for path, text in files.items() if path.endswith(".yaml") for one in documents_of(text)]
    assert not OWN & {one["kind"] for one in manifests}
    assert (target == "torchx") == (not manifests)


def test_the_pods_follow_the_fields_of_place():
    text = files_of('place.node_selector=["pool=h100"]', 'place.tolerations=["team=ads:NoSchedule", "gpu:NoExecute"]',
                    'place.resources=["rdma/ib=1", "cpu=96", "memory=900Gi"]', "place.pull_secret=ghcr",
                    "place.service_account=trainer")["kubernetes_job.yaml"]
    pod = documents_of(text)[-1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["tolerations"][1:] == [
        {"key": "team", "operator": "Equal", "value": "ads", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]
    assert container["resources"] == {"requests": {"cpu": "96", "memory": "900Gi"},
                                      "limits": {"nvidia.com/gpu": 8, "rdma/ib": "1", "memory": "900Gi"}}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert pod["imagePullSecrets"] == [{"name": "ghcr"}]
    assert pod["serviceAccountName"] == "trainer"
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]


def test_a_machine_of_the_catalog_keeps_its_labels_and_devices():
    text = files_of("place.machine=p5.48xlarge", "store.root=s3://ads/runs")["kubernetes_job.yaml"]
    pod = documents_of(text)[-1]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert pod["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == 32


@pytest.mark.parametrize(("settings", "field", "said"), [
    (["place.cluster=create", "place.claim="], "place.machine", "describes a machine of a cluster that exists"),
    (["place.cluster=create"], "place.claim", "has no effect"),
    (["place.target=vm"], "place.cluster", "does not run in a cluster"),
    (["place.volume=fsx-lustre-250", "place.claim="], "place.volume", "no volume is created"),
    (["place.claim="], "store.root", "each machine would keep its own part"),
    (["place.machine=8xH1000"], "place.machine", "no such machine"),
    (["place.capacity=reserved"], "place.capacity", "has no effect in a cluster that exists"),
    (["place.budget_usd=5"], "place.budget_usd", "no price"),
    (["place.identity=arn:aws:iam::123456789012:role/a"], "place.identity", "is not an identity"),
    (['place.tolerations=["team=ads"]'], "place.tolerations.0", "match"),
])
def test_what_does_not_go_with_an_existing_cluster_is_refused(settings, field, said):
    with pytest.raises(SpecError) as refused:
        render(make_job(load_spec("quickstart", [*EXISTING, *settings]), load_catalog()))
    assert (field, True) in {(one.field, said in one.what) for one in refused.value.mistakes}, refused.value.mistakes
