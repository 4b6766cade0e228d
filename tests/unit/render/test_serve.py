"""`place.target = "serve"`: the server's pods become ready, scale, drain and fit, and their objects are valid."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.lint.rendered import refuse_faults
from embark.plan.serving import replica_bytes, table_bytes, version_bytes, versions_bytes
from embark.render.job import make_job
from embark.render.render import render
from embark.render.targets.serve import render_serve
from embark.spec import load_spec, resolve
from embark.spec.serve import DRAIN_S

VERSION = "1.36"
STORES = {"aws": ("store.root=s3://bucket/runs",), "gcp": ("store.root=gs://bucket/runs",),
          "azure": ("store.root=az://container/runs", "place.storage_account=account")}
OWN = "import torch\n\n\nclass MyModel(torch.nn.Module):\n    pass\n"


def files_of(*sets, target="serve", store=STORES["aws"]):
    files = render(make_job(load_spec("quickstart", [*store, f"place.target={target}", *sets]), load_catalog()))
    assert refuse_faults(files) == []
    return {file.path: file.text for file in files}


def objects(*sets, target="serve", store=STORES["aws"]):
    texts = [text for path, text in files_of(*sets, target=target, store=store).items() if path.endswith(".yaml")]
    return {document["kind"]: document for text in texts for document in yaml.safe_load_all(text)}


def container_of(*sets, **where):
    return objects(*sets, **where)["Deployment"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("sets", [(), ("serve.tables=int8", "serve.machine=m7i.2xlarge"),
                                  ("place.machine=p5.48xlarge", "place.nodes=4", "train.batch_size=7")], ids=str)
@pytest.mark.parametrize("cloud", STORES)
def test_the_api_server_s_schemas_take_every_object(cloud, sets):
    if cloud != "aws" and "place.machine=p5.48xlarge" in sets:
        sets = (f"place.cloud={cloud}",)
    found = objects(*sets, store=STORES[cloud])
    monitors = {"aws": {"PodMonitor"}, "azure": {"PodMonitor"}, "gcp": {"PodMonitoring", "Role", "RoleBinding"}}[cloud]
    assert set(found) == {"Namespace", "ServiceAccount", "Deployment", "Service", "HorizontalPodAutoscaler",
                          "PodDisruptionBudget", "NetworkPolicy", *monitors}
    for kind, document in found.items():
        if not kind.startswith("PodMonitor"):
            kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_probes_ask_routes_that_the_server_has():
    from embark.serve.app import ModelServer

    routes = ModelServer._routes.__code__.co_consts
    container = container_of()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert any(asked["path"] in str(const) for const in routes)
        assert asked["port"] == container["ports"][0]["name"]
    assert container["command"][-6:] == ["--host", "0.0.0.0", "--port", str(container["ports"][0]["containerPort"]),
                                         "--workers", container["resources"]["requests"]["cpu"]]


def test_the_grace_period_has_room_for_the_wait_and_the_drain():
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    slept = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > slept + DRAIN_S


@pytest.mark.parametrize("tables", ["fp32", "int4"])
def test_memory_disk_and_start_follow_from_the_tables(tables):
    sets = ("model.rows_per_table=4000000", f"serve.tables={tables}")
    spec = load_spec("quickstart", [*sets])
    container = container_of(*sets)
    num_bytes = table_bytes(spec, tables)
    for kind in ("requests", "limits"):
        memory = int(container["resources"][kind]["memory"].removesuffix("Gi")) * 2**30
        assert 0 <= memory - replica_bytes(spec, tables) < 2**30
        disk = int(container["resources"][kind]["ephemeral-storage"].removesuffix("Gi")) * 2**30
        assert 0 <= disk - versions_bytes(version_bytes(spec, tables)) < 2**30
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= num_bytes / 50e6 + 60
    assert container_of(*sets, "serve.memory_gib=300")["resources"]["limits"]["memory"] == "300Gi"


def test_either_autoscaler_asks_for_a_metric_that_the_server_has():
    from pathlib import Path

    import embark.serve.server_metrics

    name = "embark_serve_requests_in_flight"
    assert f'"{name}"' in Path(embark.serve.server_metrics.__file__).read_text()
    sets = ("serve.min_replicas=3", "serve.max_replicas=9", "serve.requests_in_flight=5")
    scaler = objects(*sets)["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    assert [one["type"] for one in scaler["metrics"]] == ["Resource"]  # a metric that nobody serves forbids scale-down
    scaler = objects(*sets, "serve.autoscaler=adapter")["HorizontalPodAutoscaler"]["spec"]
    assert scaler["metrics"][0]["pods"] == {"metric": {"name": name},
                                            "target": {"type": "AverageValue", "averageValue": "5"}}
    found = objects(*sets, "serve.autoscaler=keda")
    assert "HorizontalPodAutoscaler" not in found
    keda = found["ScaledObject"]["spec"]
    assert keda["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (3, 9)
    trigger = keda["triggers"][0]["metadata"]
    assert trigger["query"].startswith(f"sum({name}{{")
    assert trigger["threshold"] == "5"
    monitor, pod = found["PodMonitor"]["spec"], found["Deployment"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert monitor["podMetricsEndpoints"][0]["port"] == pod["spec"]["containers"][0]["ports"][0]["name"]


@pytest.mark.parametrize(("sets", "strategy"), [
    ((), (0, 1)), (("serve.min_replicas=1",), (1, 0)), (("serve.max_surge=2",), (2, 0)),
    (("serve.min_replicas=1", "serve.max_surge=0"), (0, 1))], ids=str)
def test_a_rollout_needs_room_for_a_surge_only_where_it_is_asked_for(sets, strategy):
    update = objects(*sets)["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert (update["maxSurge"], update["maxUnavailable"]) == strategy


@pytest.mark.parametrize("target", ["serve", "kserve"])
def test_requests_need_the_secret_s_token_and_probes_do_not(target):
    found = objects(target=target)
    owner = found["InferenceService"]["spec"]["predictor"] if target == "kserve" else \
        found["Deployment"]["spec"]["template"]["spec"]
    token = {"name": "EMBARK_SERVE_TOKEN", "valueFrom": {"secretKeyRef": {
        "name": "quickstart-serve-token", "key": "token"}}}
    assert token in owner["containers"][0]["env"]
    assert "httpHeaders" not in owner["containers"][0]["readinessProbe"]["httpGet"]
    assert "EMBARK_SERVE_TOKEN" not in "".join(files_of("serve.auth=none", target=target).values())


@pytest.mark.parametrize("cloud", STORES)
def test_prometheus_gives_the_token_of_the_same_secret(cloud):
    found = objects(store=STORES[cloud])
    monitor = found["PodMonitoring" if cloud == "gcp" else "PodMonitor"]["spec"]
    endpoint = monitor["endpoints" if cloud == "gcp" else "podMetricsEndpoints"][0]
    given = endpoint["authorization"]["credentials"]
    assert (given["secret"] if cloud == "gcp" else given) == {"name": "quickstart-serve-token", "key": "token"}
    if cloud == "gcp":
        assert found["Role"]["rules"][0]["resourceNames"] == ["quickstart-serve-token"]
    assert "credentials" not in files_of("serve.auth=none", store=STORES[cloud])["serve_metrics.yaml"]


def test_only_named_namespaces_and_prometheus_reach_the_servers():
    found = objects("serve.clients=['web']")
    policy, pod = found["NetworkPolicy"]["spec"], found["Deployment"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": pod["spec"]["containers"][0]["ports"][0]["containerPort"]}]
    assert rule["from"][0] == {"podSelector": {}}
    assert rule["from"][1]["namespaceSelector"]["matchExpressions"][0]["values"] == ["web", "monitoring"]
    (everyone,) = objects("serve.clients=['*']")["NetworkPolicy"]["spec"]["ingress"]
    assert "from" not in everyone


def test_a_certificate_is_used_by_the_server_its_probes_and_prometheus():
    found = objects("serve.tls_secret=films-tls")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    tls = "/etc/embark-tls/tls"
    assert container["command"][-4:] == ["--tls-cert", f"{tls}.crt", "--tls-key", f"{tls}.key"]
    assert {"name": "tls", "secret": {"secretName": "films-tls"}} in pod["volumes"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert found["Service"]["spec"]["ports"][0]["port"] == 443
    assert found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


BALANCERS = {
    ("aws", "public"): {"service.beta.kubernetes.io/aws-load-balancer-type": "nlb"},
    ("aws", "internal"): {"service.beta.kubernetes.io/aws-load-balancer-type": "nlb",
                          "service.beta.kubernetes.io/aws-load-balancer-internal": "true"},
    ("azure", "public"): None, ("gcp", "public"): None,
    ("azure", "internal"): {"service.beta.kubernetes.io/azure-load-balancer-internal": "true"},
    ("gcp", "internal"): {"networking.gke.io/load-balancer-type": "Internal"},
}


@pytest.mark.parametrize(("cloud", "expose"), BALANCERS, ids=str)
def test_a_load_balancer_passes_tls_through_to_the_servers(cloud, expose):
    found = objects(f"serve.expose={expose}", "serve.tls_secret=films-tls", store=STORES[cloud])
    service = found["Service"]
    kubernetes_validate.validate(service, VERSION, strict=True)
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": "http"}]
    assert service["metadata"].get("annotations") == BALANCERS[cloud, expose]
    (everyone,) = found["NetworkPolicy"]["spec"]["ingress"]
    assert "from" not in everyone, "connections come from outside of the cluster"
    assert "type" not in objects("serve.tls_secret=films-tls", store=STORES[cloud])["Service"]["spec"]


def test_servers_have_an_account_of_their_own():
    role = "arn:aws:iam::123456789012:role/"
    found = objects(f"serve.identity={role}read", f"place.identity={role}write")
    account = found["ServiceAccount"]["metadata"]
    assert account["name"] == found["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == "embark-serve"
    assert account["annotations"] == {"eks.amazonaws.com/role-arn": f"{role}read"}


def test_another_model_file_replaces_the_pods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def checksum(code):
        (tmp_path / "my_model.py").write_text(code)
        template = objects("model.kind=my_model:MyModel")["Deployment"]["spec"]["template"]
        return template["metadata"]["annotations"]["embark/config-checksum"]

    assert checksum(OWN) == checksum(OWN) != checksum(f"{OWN}# changed")


def test_names_and_labels_meet():
    found = objects()
    deployment, labels = found["Deployment"], found["Service"]["spec"]["selector"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == found["PodDisruptionBudget"]["spec"]["selector"][
        "matchLabels"]
    assert labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_kserve_has_the_same_server():
    service = objects(target="kserve")["InferenceService"]["spec"]["predictor"]
    mine, plain = service["containers"][0], container_of()
    for field in ("command", "env", "resources", "image", "volumeMounts"):
        assert mine[field] == plain[field]
    assert mine["name"] == "kserve-container"
    annotations = objects(target="kserve")["InferenceService"]["metadata"]["annotations"]
    assert annotations["serving.kserve.io/deploymentMode"] == "Knative"  # the metric is Knative's
    assert (service["scaleMetric"], service["scaleTarget"], service["timeout"]) == ("concurrency", 2, DRAIN_S)


SCALES = {"minReplicas": range(100), "maxReplicas": range(100), "timeout": range(3600), "scaleTarget": range(1000),
          "scaleMetric": ("concurrency", "rps", "cpu", "memory")}
"""KServe's own fields of a predictor, and what they may be; all others are of a pod's spec."""


def as_kubernetes_reads(document: dict) -> dict:
    """Return an InferenceService's pod, whose schema is Kubernetes' own."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(document["spec"]) == {"predictor"}
    predictor = document["spec"]["predictor"]
    assert all(value in SCALES[name] for name, value in predictor.items() if name in SCALES)
    of_pod = {name: predictor.pop(name) for name in ("labels", "annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**document["metadata"], **of_pod},
            "spec": {name: value for name, value in predictor.items() if name not in SCALES}}


@pytest.mark.parametrize(("cloud", "sets"), [
    ("aws", ()), ("gcp", ("serve.tables=int8",)), ("azure", ("serve.auth=none",)), ("aws", ("serve.tls_secret=a",))])
def test_kubernetes_schemas_take_every_object_of_kserve(cloud, sets):
    found = objects(*sets, target="kserve", store=STORES[cloud])
    pod = as_kubernetes_reads(found.pop("InferenceService"))
    for document in (pod, *found.values()):
        if not document["kind"].startswith("PodMonitor"):
            kubernetes_validate.validate(document, VERSION, strict=True)
    pod["spec"]["containers"][0]["readinessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_image_has_the_server_and_no_cuda():
    dockerfile = files_of()["Dockerfile"]
    assert "[cloud,serve]" in dockerfile
    assert "ARG VARIANT=cpu" in dockerfile
    assert "cuda13" not in dockerfile


def test_an_custom_model_travels_with_the_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(OWN)
    found = objects("model.kind=my_model:MyModel")
    assert found["ConfigMap"]["data"] == {"my_model.py": OWN}
    container = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-2:] == ["--model-file", "/etc/embark/my_model.py"]
    assert {"name": "model", "mountPath": "/etc/embark", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("sets", [(), ("serve.autoscaler=keda",)])
def test_what_is_rendered_would_be_found_if_it_were_wrong(sets):
    """The rules look at the rendered objects: each of these mistakes is found in them."""
    files = files_of(*sets)
    for old, new, code in (
        ("readinessProbe:", "otherProbe:", "EMB901"),
        ("terminationGracePeriodSeconds: 45", "dnsPolicy: Default", "EMB902"), ("0.0.0.0", "127.0.0.1", "EMB903"),
        ("            memory: 2Gi\n            ephemeral-storage: 3Gi\n        security",
         "            memory: 512Mi\n        security", "EMB904"),
        ("  strategy:", "  replicas: 2\n  strategy:", "EMB906"), ("maxUnavailable: 1", "minAvailable: 2", "EMB907"),
    ):
        text = files["serve.yaml"]
        assert old in text
        assert code in {one.code for one in lint_texts({"serve.yaml": text.replace(old, new)})}, code
    image = files["Dockerfile"].replace("[cloud,serve]", "[cloud]")
    assert {one.code for one in lint_texts({"serve.yaml": files["serve.yaml"], "Dockerfile": image})} >= {"EMB908"}


RENDERED = {
    "serve": ("place.target=serve", "model.kind=my_model:MyModel", "serve.machine=r7i.2xlarge", "serve.memory_gib=40",
              "serve.tls_secret=films-tls", "serve.expose=public"),
    "keda": ("place.target=serve", "serve.autoscaler=keda"),
    "kserve": ("place.target=kserve",),
    "cloud-run": ("place.target=cloud-run", "place.account=my-project", "store.root=gs://bucket/runs"),
    "follow": ("place.target=follow", "place.machine=g5.xlarge", "stream.source=nats", "stream.topics=['shown']",
               "publish.to=s3://bucket/models", "train.decay=none"),
    "gke": ("place.target=follow", "place.machine=g2-standard-4", "stream.source=nats", "stream.topics=['shown']",
            "store.root=gs://bucket/runs", "train.decay=none"),
}
PLANTED = {
    "a surge that fits no node": ("EMB915", "serve", "serve.yaml", "maxSurge: 0\n      maxUnavailable: 1",
                                  "maxSurge: 1\n      maxUnavailable: 0"),
    "a disk for less than all versions": ("EMB916", "serve", "serve.yaml", "ephemeral-storage: ",
                                          "ephemeral-storage: 1Gi #"),
    "less memory than versions on Cloud Run": ("EMB911", "cloud-run", "cloud_run.yaml", "memory: ", "memory: 16Mi #"),
    "a metric without an adapter": ("EMB918", "serve", "serve.yaml", "  metrics:\n", "  metrics:\n  - type: Pods\n"),
    "KEDA without a PodMonitor": ("EMB918", "keda", "serve_metrics.yaml", "kind: PodMonitor", "kind: OtherMonitor"),
    "GKE's autoscaler switched off": ("EMB620", "gke", "gke_cluster.sh", ",HorizontalPodAutoscaling", ""),
    "no token": ("EMB919", "serve", "serve.yaml", "EMBARK_SERVE_TOKEN", "OTHER_TOKEN"),
    "no NetworkPolicy": ("EMB920", "serve", "serve.yaml", "kind: NetworkPolicy", "kind: OtherPolicy"),
    "no TLS": ("EMB924", "serve", "serve.yaml", "- --tls-cert\n", "- --no-certificate\n"),
    "the trainer's account": ("EMB921", "follow", "serve.yaml", "serviceAccountName: embark-serve",
                              "serviceAccountName: embark"),
    "an identity that may delete": ("EMB921", "follow", "eks_cluster.yaml", "serviceAccountName: embark\n",
                                    "serviceAccountName: embark-serve\n"),
    "a role that may write": ("EMB921", "gke", "gke_cluster.sh", "roles/storage.objectViewer",
                              "roles/storage.objectAdmin"),
    "changed code that replaces no pod": ("EMB922", "serve", "serve.yaml", "embark/config-checksum: ",
                                          "embark/other: "),
    "a changed spec that replaces no trainer": ("EMB922", "follow", "follow.yaml", "embark/config-checksum: ",
                                                "embark/other: "),
    "KServe in the installation's mode": ("EMB923", "kserve", "inference_service.yaml",
                                          "    serving.kserve.io/deploymentMode: Knative\n", ""),
    "a disk without a class": ("EMB917", "follow", "nats.yaml", "      storageClassName: embark-gp3\n", ""),
    "a class without its driver": ("EMB917", "follow", "eks_cluster.yaml", "- name: aws-ebs-csi-driver\n", ""),
    "a broker without a token": ("EMB954", "follow", "nats.yaml", "authorization { token: $NATS_TOKEN }", ""),
    "requests before the tables are there": ("EMB901", "serve", "serve.yaml", "readinessProbe:", "otherProbe:"),
    "a drain that is cut short": ("EMB902", "serve", "serve.yaml", "terminationGracePeriodSeconds: 45",
                                  "terminationGracePeriodSeconds: 30"),
}
"""Mistakes of serving, each with its rule, and planted into a file that is rendered without it."""


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_of_serving_is_found(mistake, tmp_path, monkeypatch):
    code, kind, path, old, new = PLANTED[mistake]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(OWN)
    job = make_job(load_spec("quickstart", ["store.root=s3://bucket/runs", *RENDERED[kind]]), load_catalog())
    files = {file.path: file.text for file in render(job) if file.path.endswith((".yaml", ".sh"))}
    assert lint_texts(files) == []
    assert old in files[path]
    assert {one.code for one in lint_texts({**files, path: files[path].replace(old, new)})} == {code}


@pytest.mark.parametrize("asked", ["serve.auth=none", "serve.autoscaler=adapter", "serve.clients=['*']"])
def test_what_a_spec_asks_for_is_no_finding(asked):
    assert lint_texts({"a.yaml": files_of(asked)["serve.yaml"]}) == []


@pytest.mark.parametrize(("sets", "says"), [
    (["store.root=runs", "place.cloud=aws"], r"serve\.artifact = runs/quickstart/export\n +is on this machine"),
    (["store.root=az://c/runs"], r"place\.storage_account"),
    (["store.root=s3://b/r", "serve.machine=m7i.9xlarge"], "no such machine without accelerators"),
    (["store.root=s3://b/r", "serve.machine=c7i.xlarge", "model.rows_per_table=4000000"], "a replica needs"),
    (["store.root=s3://b/r", "serve.expose=public"], "would pass in plain text"),
    (["store.root=s3://b/r", "serve.expose=public", "serve.tls_secret=a", "serve.auth=none"], "anyone might ask"),
    (["store.root=s3://b/r", "serve.min_replicas=20"], r"is more than serve\.max_replicas"),
], ids=str)
def test_what_cannot_be_deployed_is_refused(sets, says):
    with pytest.raises(SpecError, match=says):
        make_job(load_spec("quickstart", ["place.target=serve", *sets]), load_catalog())


def test_without_the_tables_the_memory_must_be_given():
    raw = {"data": {"kind": "prepared", "path": "s3://b/gone"}, "place": {"target": "serve"},
           "store": {"root": "s3://b/r"}}
    with pytest.raises(SpecError, match=r"serve\.memory_gib"):
        make_job(resolve(raw), load_catalog())
    for target in ("serve", "kserve"):
        job = make_job(resolve({**raw, "place": {"target": target}, "serve": {"memory_gib": 8.0}}), load_catalog())
        text = render_serve(job)[0].text
        assert "memory: 8Gi" in text
        assert "table-bytes" not in text


def test_the_artifact_may_be_elsewhere():
    assert container_of("serve.artifact=gs://models/films", store=())["command"][2] == "gs://models/films"
