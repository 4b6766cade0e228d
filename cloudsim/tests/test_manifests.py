"""A mistake that a person can make in a manifest is refused, or keeps its pods from running, with its cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_account import CPU, GPU, Cloud, apply, events, job, make_account, run, scaler, server

from cloudsim.account import Account
from cloudsim.kubernetes import programs
from cloudsim.kubernetes.cloud import VolumeFacts
from cloudsim.kubernetes.cluster import Outcome
from cloudsim.kubernetes.volumes import add_storage_class

META = {"namespace": "default"}
SPEC = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "spec", **META},
        "data": {"spec.toml": 'name = "a"'}}
KUEUE = "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml"


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return make_account(tmp_path)


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_train", lambda cluster, job: Outcome(True, ""))


def pod(container: dict | None = None, **spec: object) -> dict:
    own = {"name": "main", "image": "app:1", "command": ["embark", "train", "/etc/embark/spec.toml"],
           "volumeMounts": [{"name": "spec", "mountPath": "/etc/embark"}], **(container or {})}
    return {"containers": [own], "volumes": [{"name": "spec", "configMap": {"name": "spec"}}], **spec}


def after(account: Account, seconds: int = 120) -> str:
    """Return the first cause once some time has passed."""
    run(account, "sleep", str(seconds))
    return "".join(account.causes[:1])


@pytest.mark.parametrize(("volume", "cause"), [
    ({"configMap": {"name": "spec", "items": [{"key": "run.toml", "path": "spec.toml"}]}},
     "references non-existent config key: run.toml (ConfigMap default/spec)"),
    ({"secret": {"secretName": "tokens"}}, 'secret "tokens" not found'),
    ({"configMap": {"name": "spec", "items": [{"key": "run.toml", "path": "spec.toml"}], "optional": True}}, ""),
])
def test_a_key_that_is_missing_keeps_the_pod_from_starting(account: Account, untrained: None, volume: dict, cause: str):
    apply(account, SPEC, job(**pod({"command": ["true"]}, volumes=[{"name": "spec", **volume}])))
    assert cause in after(account)
    assert bool(account.causes) is bool(cause)


@pytest.mark.parametrize(("container", "missing"), [
    ({}, ""),
    ({"command": ["embark", "train", "/etc/embark/run.toml"]}, "/etc/embark/run.toml"),
    ({"command": ["sh", "-c", "exec embark train /etc/embark/run.toml"]}, "/etc/embark/run.toml"),
    ({"volumeMounts": [{"name": "spec", "mountPath": "/etc/spec"}]}, "/etc/embark/spec.toml"),
    ({"env": [{"name": "OPTIONS", "value": "/etc/embark/options.toml"}]}, "/etc/embark/options.toml"),
    ({"command": ["nats-server", "--config=/etc/embark/nats.conf"]}, "/etc/embark/nats.conf"),
])
def test_a_program_needs_the_files_that_it_is_given(account: Account, untrained: None, container: dict, missing: str):
    apply(account, SPEC, job(**pod(container)))
    assert (f"No such file or directory: '{missing}'" in after(account)) is bool(missing), account.causes


def volume_and_claim(**claim: object) -> tuple[dict, dict]:
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"}, "spec": {
        "capacity": {"storage": "1200Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": "",
        "claimRef": {"name": "data", **META}, "nfs": {"server": "10.0.0.4", "path": "/data"}}}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "disk",
            "resources": {"requests": {"storage": "1200Gi"}}, **claim}
    return volume, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", **META},
                    "spec": {key: value for key, value in spec.items() if value is not None}}


@pytest.mark.parametrize(("claim", "cause"), [
    ({}, ""),
    ({"volumeName": None}, ""),
    ({"resources": {"requests": {"storage": "2400Gi"}}},
     "requested PV is too small: the claim asks for 2400Gi and the volume has 1200Gi"),
    ({"accessModes": ["ReadWriteOnce"]}, "incompatible accessMode: the claim has ['ReadWriteOnce']"),
    ({"storageClassName": None}, "storageClassName does not match: the claim has 'standard'"),
    ({"volumeName": "disks"}, 'volume "disks" not found'),
])
def test_a_claim_that_does_not_fit_its_volume_says_why(account: Account, untrained: None, claim: dict, cause: str):
    add_storage_class(account.cluster(), "standard", "disk.csi.azure.com", is_default=True)
    users = job(volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    objects = (*volume_and_claim(**claim), users)
    apply(account, *objects)
    assert cause in after(account)
    assert bool(account.causes) is bool(cause)
    assert "immutable" not in apply(account, *objects), "the class that the cluster has set is kept"


def test_a_path_that_is_not_there_says_what_is(account: Account, untrained: None, tmp_path: Path):
    (tmp_path / "disk" / "criteo").mkdir(parents=True)
    cloud = account.cluster().cloud
    assert isinstance(cloud, Cloud)
    cloud.volume_facts = VolumeFacts(tmp_path / "disk", mode=0o777)
    text = 'name = "a"\n[data]\nkind = "prepared"\npath = "/mnt/data/criteo-1tb"\n'
    made = pod({"command": ["python", "-m", "torch.distributed.run", "-m", "embark", "train", "/etc/embark/spec.toml"]})
    made["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/mnt/data"})
    made["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": "data"}})
    apply(account, {**SPEC, "data": {"spec.toml": text}}, *volume_and_claim(), job(**made))
    assert "/mnt/data/criteo-1tb: no such file or directory: the root of the volume has criteo" in after(account)


def queues(flavor: dict | None = None, queue: dict | None = None, local: dict | None = None) -> list[dict]:
    version = "kueue.x-k8s.io/v1beta2"
    quota = [{"name": "cpu", "nominalQuota": 8}, {"name": "memory", "nominalQuota": "8Gi"}]
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "small"}, "spec": flavor or {}},
        {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
            "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": [
                {"name": "small", "resources": quota}]}], **(queue or {})}},
        {"apiVersion": version, "kind": "LocalQueue", "metadata": {"name": "mine", **META},
         "spec": {"clusterQueue": "all", **(local or {})}}]


def groups(*covered: str) -> dict:
    [group] = queues()[1]["spec"]["resourceGroups"]
    return {"resourceGroups": [{**group, "coveredResources": list(covered)}]}


@pytest.mark.parametrize(("change", "message"), [
    ({}, ""),
    ({"queue": groups("cpu")}, "flavors must have the same number of resources as the coveredResources"),
    ({"queue": groups("memory", "cpu")}, "small has cpu, memory, and memory, cpu are covered"),
    ({"queue": {"namespaceSelector": {"matchLabels": {"team": "ml"}}}},
     "Workload namespace doesn't match ClusterQueue selector: default is not selected by"),
    ({"queue": {"namespaceSelector": None}}, "Workload namespace doesn't match ClusterQueue selector"),
    ({"queue": {"stopPolicy": "Hold"}}, "ClusterQueue all is stopped: its stopPolicy is Hold"),
    ({"local": {"stopPolicy": "HoldAndDrain"}}, "LocalQueue mine is stopped"),
    ({"local": {"stopPolicy": "Stop"}}, 'Unsupported value: "Stop"'),
    ({"flavor": {"nodeLabels": {"topology.kubernetes.io/zone": "us-west-2a"}}},
     "flavor small doesn't match node affinity: its nodeLabels have topology.kubernetes.io/zone: us-west-2a"),
])
def test_kueue_admits_only_what_its_queues_are_for(account: Account, untrained: None, change: dict, message: str):
    run(account, "kubectl", "apply", "--server-side", "-f", KUEUE)
    run(account, "sleep", "60")
    said = apply(account, *queues(**change))
    one = job(nodeSelector={"topology.kubernetes.io/zone": "us-west-2b"})
    one["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "mine"}
    apply(account, one)
    assert message in said + after(account)
    assert bool(account.causes) is bool(message)


WEB = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", **META},
       "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}}
PORTS = [{"name": "http", "containerPort": 8000}]


def listening(words: str, ports: list[dict] | None = None, **container: object) -> dict:
    made = server(memory="1Gi")
    own = {"command": words.split(), "ports": ports or PORTS, **container}
    made["spec"]["template"]["spec"]["containers"][0] |= own
    return made


@pytest.mark.parametrize(("words", "selector", "cause"), [
    ("serve --host 0.0.0.0 --port 8000", "web", "pod is not running"),  # In this account no server answers.
    ("serve", "web", "pod is not running"),
    ("serve --port 8080", "web", "Service web leads to port http: dial tcp :8000: connect: connection refused"),
    ("serve --port=8000 --host=127.0.0.1", "web", "the program listens on 127.0.0.1 alone"),
    ("serve", "webs", "Service web selects no pod: none has the labels {'app': 'webs'}"),
])
def test_a_service_leads_to_where_the_program_listens(account: Account, words: str, selector: str, cause: str):
    apply(account, listening(words), {**WEB, "spec": {**WEB["spec"], "selector": {"app": selector}}})
    assert cause in run(account, "kubectl", "port-forward", "service/web", "8000:80").err


@pytest.mark.parametrize(("words", "probe", "cause"), [
    ("nats --port=4222 --http_port=8222", {"httpGet": {"port": "http", "path": "/"}}, "dial tcp :8000"),
    ("serve --port 8000", {"tcpSocket": {"port": 80}}, "livenessProbe failed: dial tcp :80"),
    ("serve", {"httpGet": {"port": "health", "path": "/"}}, "livenessProbe failed: the container has no port health"),
    ("nats --port=4222 --http_port=8000", {"httpGet": {"port": "http", "path": "/"}}, ""),
    ("serve", {"exec": {"command": ["true"]}}, ""),
])
def test_a_probe_asks_where_the_program_listens(account: Account, words: str, probe: dict, cause: str):
    apply(account, listening(words, livenessProbe=probe))
    assert cause in after(account)
    assert bool(account.causes) is bool(cause)


@pytest.mark.parametrize(("servers", "selector", "port", "cause"), [
    ("nats://web:4222", "web", 4222, ""),
    ("nats://nats.example.com:4222", "web", 4222, ""),
    ("nats://nats:4222", "web", 4222, "nats: Name or service not known: namespace default has no Service"),
    ("nats://web:4222", "broker", 4222, "Service web selects no pod"),
    ("nats://web:4222", "web", 4333, "Service web leads to port 4222: dial tcp :4222: connect: connection refused"),
])
def test_a_stream_s_broker_is_reached_by_its_service(
    account: Account, servers: str, selector: str, port: int, cause: str,
):
    text = f'name = "a"\n[stream]\nsource = "nats"\ntopics = ["a"]\nservers = ["{servers}"]\n'
    headless = {"clusterIP": "None", "selector": {"app": selector}, "ports": [{"port": 4222}]}
    apply(account, {**WEB, "spec": headless}, listening(f"nats --port={port}", [{"containerPort": 4222}]))
    reader = server(memory="1Gi")
    reader["metadata"] = {"name": "reader", **META}
    reader["spec"]["template"]["metadata"]["labels"] = reader["spec"]["selector"]["matchLabels"] = {"app": "reader"}
    reader["spec"]["template"]["spec"] = pod({"command": ["embark", "follow", "/etc/embark/spec.toml"]})
    apply(account, {**SPEC, "data": {"spec.toml": text}}, reader)
    assert cause in after(account)
    assert bool(account.causes) is bool(cause)


@pytest.mark.parametrize(("change", "metric", "cause"), [
    ({"kind": "StatefulSet"}, CPU, "the StatefulSet web does not exist"),
    ({"name": "www"}, CPU, "the Deployment www does not exist"),
    ({}, {"type": "Resource", "resource": {**CPU["resource"], "name": "nvidia.com/gpu"}},
     "unable to get metric nvidia.com/gpu: the resource metrics API has cpu and memory"),
    ({}, CPU, "failed to get cpu utilization: missing request for cpu in container main"),
])
def test_an_autoscaler_says_what_it_does_not_know(account: Account, change: dict, metric: dict, cause: str):
    target, own = server(memory="1Gi"), scaler(metric)
    target["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"].pop("cpu")
    own["spec"]["scaleTargetRef"] |= change
    apply(account, target, own)
    assert cause in after(account)


def test_pods_that_avoid_each_other_do_so_in_a_topology(account: Account, untrained: None):
    one = job(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "a"}}, "topologyKey": "topology.kubernetes.io/zone"}]}})
    one["spec"] |= {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    one["spec"]["template"]["metadata"] = {"labels": {"app": "a"}}
    apply(account, one)
    assert "one-1 cannot be scheduled" in after(account)
    assert "2 node(s) didn't match pod anti-affinity rules" in account.causes[0]


def test_a_label_that_no_pool_has_is_named(account: Account):
    apply(account, job(nodeSelector={"node.kubernetes.io/instance-type": "p5.48xlarge", "kubernetes.io/os": "linux"}))
    assert after(account).endswith("; no pool has the label node.kubernetes.io/instance-type: p5.48xlarge")


def test_a_pool_that_is_as_large_as_it_may_be_is_named(account: Account):
    cluster = account.cluster()
    cluster.pools["gpu"] = replace(GPU, max_nodes=2, taints=())
    limits = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    for name in ("one", "two", "three"):
        apply(account, {**job(containers=[{"name": "main", "image": "app:1", **limits}]),
                        "metadata": {"name": name, **META}})
    assert "1 max node group size reached" in events(account)


@pytest.mark.parametrize(("thing", "message"), [
    (scaler({**CPU, "type": "Resources"}), 'Unsupported value: "Resources"'),
    (scaler({**CPU, "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 0}}}),
     "averageUtilization: Invalid value: 0: must be greater than or equal to 1"),
    (listening("serve", [{"name": "http", "containerPort": 80000}]), "must be between 1 and 65535, inclusive"),
    (listening("serve", livenessProbe={"periodSeconds": 5}), "livenessProbe: Required value: must specify a handler"),
    (listening("serve", lifecycle={"preStop": {"sleep": {"seconds": 40}}}),
     "Invalid value: 40: must be less than terminationGracePeriodSeconds"),
    (volume_and_claim(accessModes=None)[1], "spec.accessModes: Required value"),
    (volume_and_claim(resources={"requests": {"storage": "1200GB"}})[1],
     "spec.resources.requests.storage: Invalid value"),
    (queues(queue={"resourceGroups": [{"coveredResources": ["cpu"], "flavors": [
        {"name": "small", "resources": [{"name": "cpu", "nominalQuota": "8GB"}]}]}]})[1],
     "nominalQuota: Invalid value"),
])
def test_the_values_of_fields_are_checked(account: Account, thing: dict, message: str):
    run(account, "kubectl", "apply", "--server-side", "-f", KUEUE)
    run(account, "sleep", "60")
    assert message in apply(account, thing)
