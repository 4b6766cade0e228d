"""The cluster of an account refuses what a real one refuses, and runs what a real one runs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cluster_account import CPU, GPU, apply, events, job, make_account, run, scaler, server
from render_jobs import job_of

from cloudsim.account import Account, Call
from cloudsim.kubernetes import programs
from cloudsim.kubernetes.cloud import NodePool
from cloudsim.kubernetes.controllers import pods_of
from cloudsim.kubernetes.volumes import add_storage_class
from embark.catalog import load_catalog
from embark.rehearse import processes
from embark.render.render import render


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return make_account(tmp_path)


def test_an_unknown_flag_a_misspelt_kind_and_a_missing_cluster_are_refused(account: Account):
    assert "unknown flag: --name-space" in run(account, "kubectl", "get", "pods", "--name-space", "x").err
    assert "doesn't have a resource type" in run(account, "kubectl", "get", "jobsets").err
    account.context = ""
    assert "connection to the server" in run(account, "kubectl", "get", "pods").err


def test_an_object_needs_its_namespace(account: Account):
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "embark"},
             "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    assert 'namespaces "embark" not found' in apply(account, claim)
    assert "created" in run(account, "kubectl", "create", "namespace", "embark").out
    assert "created" in apply(account, claim)


def test_a_field_that_kubernetes_does_not_know_is_refused(account: Account):
    assert "strict decoding error" in apply(account, job(nodeSelectr={"a": "b"}))


def test_a_kind_comes_with_its_operator_and_answers_when_that_runs(account: Account):
    url = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"},
              "spec": {"replicatedJobs": []}}
    assert "ensure CRDs are installed first" in apply(account, jobset)
    assert "Too long" in run(account, "kubectl", "apply", "-f", url).err
    assert "404" in run(account, "kubectl", "apply", "--server-side", "-f", url.replace("0.12", "0.99")).err
    assert run(account, "kubectl", "apply", "--server-side", "-f", url).code == 0
    assert "failed calling webhook" in apply(account, jobset)
    assert run(account, "kubectl", "wait", "deployment", "--all", "--namespace", "jobset-system",
               "--for=condition=Available", "--timeout=300s").code == 0
    assert "created" in apply(account, jobset)


def test_pods_need_their_service_account(account: Account):
    apply(account, job(serviceAccountName="embark"))
    assert 'serviceaccount "embark" not found' in events(account)
    run(account, "kubectl", "create", "serviceaccount", "embark")
    run(account, "sleep", "30")
    assert run(account, "kubectl", "get", "pods", "-o", "name").out.startswith("pod/one-")


@pytest.mark.parametrize(("spec", "message"), [
    ({"nodeSelector": {"node.kubernetes.io/instance-type": "p4d.24xlarge"}}, "untolerated taint {nvidia.com/gpu"),
    ({"nodeSelector": {"topology.kubernetes.io/zone": "us-west-2a"}}, "node affinity/selector"),
    ({"containers": [{"name": "main", "image": "app:1", "resources": {"requests": {"cpu": "2"}}}]}, "Insufficient cpu"),
    ({"containers": [{"name": "main", "image": "app:1", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
     "Insufficient nvidia.com/gpu"),
    ({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]},
     'persistentvolumeclaim "data" not found'),
])
def test_a_pod_that_fits_no_node_says_why(account: Account, spec: dict, message: str):
    apply(account, job(**spec))
    assert message in events(account)
    assert "timed out" in run(account, "kubectl", "wait", "job/one", "--for=condition=Complete", "--timeout=1h").err
    assert account.clock.now > 3600, "the clock advanced, and nobody waited"


def test_an_image_that_cannot_be_pulled_keeps_the_pod_waiting(account: Account):
    account.cluster().cloud.refused_images = ("app:1",)
    apply(account, job())
    assert "no basic auth credentials" in events(account)
    assert "ImagePullBackOff" in run(account, "kubectl", "get", "pods").out


def test_a_device_is_there_when_its_plugin_tolerates_the_nodes(account: Account):
    cluster = account.cluster()
    cluster.remove_pool("gpu")
    cluster.add_pool(NodePool(**{**{name: getattr(GPU, name) for name in GPU.__slots__},
                                 "devices_after": {"vpc.amazonaws.com/efa": "aws-efa-k8s-device-plugin"}}))
    run(account, "sleep", "120")
    assert "vpc.amazonaws.com/efa" not in cluster.allocatable(cluster.nodes[-1])
    repository = ("helm", "repo", "add", "eks", "https://aws.github.io/eks-charts")
    chart = ("helm", "upgrade", "--install", "aws-efa-k8s-device-plugin", "eks/aws-efa-k8s-device-plugin", "-n",
             "kube-system")
    assert "repo eks not found" in run(account, *chart).err
    assert run(account, *repository).code == 0
    assert run(account, *chart).code == 0
    run(account, "sleep", "60")
    assert "vpc.amazonaws.com/efa" not in cluster.allocatable(cluster.nodes[-1]), "its pods do not tolerate the taint"
    assert run(account, *chart, "--set-json", 'tolerations=[{"operator":"Exists"}]').code == 0
    run(account, "sleep", "60")
    assert cluster.allocatable(cluster.nodes[-1])["vpc.amazonaws.com/efa"] == 4


def test_helm_does_not_take_over_what_others_made(account: Account):
    account.cluster().add_daemon_set("aws-efa-k8s-device-plugin")
    run(account, "helm", "repo", "add", "eks", "https://aws.github.io/eks-charts")
    done = run(account, "helm", "upgrade", "--install", "aws-efa-k8s-device-plugin",
               "eks/aws-efa-k8s-device-plugin", "-n", "kube-system")
    assert "invalid ownership metadata" in done.err


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pods that have started succeed at once; the tests of the guides train."""

    def end(cluster, job):
        pods = [pod.name for pod in pods_of(cluster, job, job["kind"])]
        return programs.Outcome(True, "", logs=dict.fromkeys(pods, "trained\n"))

    monkeypatch.setattr(programs, "_train", end)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, warm_ray_python: str) -> None:
    """Fork the pods' programs from a process that has imported torch and Ray."""
    monkeypatch.setattr(processes, "sys", SimpleNamespace(executable=warm_ray_python))


def test_the_rendered_job_is_placed_and_started(account: Account, tmp_path: Path, untrained: None):
    """A plain Job passes the queue, the claim, the nodes and the image."""
    rendered = {file.path: file.text for file in render(job_of(
        "p4d.24xlarge", image="app:1", queue="ml", zone="us-west-2b"))}
    for name in ("kubernetes_job.yaml", "kueue.yaml"):
        (tmp_path / name).write_text(rendered[name])
    kueue = "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml"
    assert run(account, "kubectl", "apply", "--server-side", "--force-conflicts", "-f", kueue).code == 0
    run(account, "sleep", "60")
    done = run(account, "kubectl", "apply", "-f", "kubernetes_job.yaml")
    assert done.code == 0, done.err
    name = yaml.safe_load_all(rendered["kubernetes_job.yaml"])
    job_name = next(one["metadata"]["name"] for one in name if one["kind"] == "Job")
    held = run(account, "kubectl", "get", "job", job_name, "-n", "embark", "-o", "json").out
    assert "LocalQueue ml-p4d-24xlarge doesn't exist" in held
    assert run(account, "kubectl", "apply", "-f", "kueue.yaml").code == 0
    done = run(account, "kubectl", "wait", f"job/{job_name}", "-n", "embark", "--for=condition=Complete",
               "--timeout=2h")
    assert done.code == 0, done.err + events(account) + run(account, "kubectl", "describe", "job", job_name,
                                                       "-n", "embark").out
    logs = run(account, "kubectl", "logs", "-n", "embark", "-l", f"batch.kubernetes.io/job-name={job_name}", "--prefix",
               "--max-log-requests", "10").out
    assert "[pod/" in logs
    nodes = run(account, "kubectl", "get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}", "-n", "embark").out
    assert set(nodes.split()) == {"gpu-0", "gpu-1"}


@pytest.mark.slow
def test_a_rayjob_fails_with_the_exit_code_of_its_driver(
    account: Account, tmp_path: Path, forked: None
):
    """A real Ray cluster of a head and two workers runs the driver; KubeRay's status follows from its end."""
    rendered = {file.path: file.text for file in render(job_of(
        "p4d.24xlarge", target="ray", image="app:1", zone="us-west-2b"))}
    text, count = re.subn(r'(name: EMBARK_GRACE_S\n +value: )"120"', r'\1"soon"', rendered["rayjob.yaml"])
    assert count == 1
    (tmp_path / "rayjob.yaml").write_text(text.replace("backoffLimit: 1", "backoffLimit: 0"))
    run(account, "helm", "repo", "add", "kuberay", "https://ray-project.github.io/kuberay-helm/")
    run(account, "helm", "upgrade", "kuberay-operator", "kuberay/kuberay-operator", "--install", "--version",
        load_catalog().versions["kuberay"], "--namespace", "kuberay-system", "--create-namespace")
    run(account, "sleep", "120")
    done = run(account, "kubectl", "apply", "-f", "rayjob.yaml")
    assert done.code == 0, done.err
    get = ("kubectl", "get", "rayjob", "dlrm", "-n", "embark", "-o", "yaml")
    assert yaml.safe_load(run(account, *get).out)["status"]["jobStatus"] == "RUNNING"
    run(account, "sleep", "300")
    status = yaml.safe_load(run(account, *get).out)["status"]
    assert (status["jobDeploymentStatus"], status["jobStatus"], status["reason"]) == ("Failed", "FAILED", "AppFailed")
    log = run(account, "kubectl", "logs", "-n", "embark", "-l", "batch.kubernetes.io/job-name=dlrm").out
    assert "failed with exit code 64" in status["message"], log[-6000:]
    assert "EMBARK_GRACE_S is 'soon', not a number of seconds" in log
    pods = ("kubectl", "get", "pods", "-n", "embark", "-o", "name")
    assert len(run(account, *pods).out.split()) == 4, "a head, two workers and the submitter"
    run(account, "sleep", "600")
    assert run(account, *pods).out.split() == ["pod/dlrm-submitter-0"], "the cluster is deleted after its time to live"


@pytest.mark.slow
def test_torchx_submits_a_job_that_volcano_runs(account: Account, tmp_path: Path, untrained: None):
    """The real TorchX makes the request; its pods have the service account, the tolerations and the spec."""
    rendered = {file.path: file.text for file in render(job_of(
        "p4d.24xlarge", target="torchx", image="app:1", zone="us-west-2b"))}
    (tmp_path / "cloud_component.py").write_text(rendered["cloud_component.py"])
    words = ("torchx", "run", "--workspace", "", "-s", "kubernetes", "-cfg", "queue=default,namespace=embark",
             "cloud_component.py:train")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def submit():
        return account.run(Call(words[0], words[1:], tmp_path, environment))

    assert "Volcano is not installed" in submit().err
    url = "https://raw.githubusercontent.com/volcano-sh/volcano/v1.15.1/installer/volcano-development.yaml"
    assert run(account, "kubectl", "apply", "-f", url).code == 0
    run(account, "sleep", "120")
    assert 'namespaces "embark" not found' in submit().err
    run(account, "kubectl", "create", "namespace", "embark")
    done = submit()
    assert done.code == 0, done.err
    assert 'serviceaccount "embark" not found' in run(account, "kubectl", "get", "events", "-n", "embark").out
    run(account, "kubectl", "create", "serviceaccount", "embark", "-n", "embark")
    done = run(account, "kubectl", "wait", "vcjob", "--all", "-n", "embark",
               "--for=jsonpath={.status.state.phase}=Completed", "--timeout=2h")
    assert done.code == 0, done.err + run(account, "kubectl", "get", "events", "-n", "embark").out + run(
        account, "kubectl", "get", "vcjob", "-n", "embark", "-o", "yaml").out[-3000:]


@pytest.mark.parametrize(("change", "message"), [
    ({"metadata": {"name": "Dlrm"}}, "lowercase RFC 1123"),
    ({"metadata": {"name": "x" * 70}}, "no more than 63"),
    ({"metadata": {"name": "one", "labels": {"run": "x" * 70}}}, "no more than 63"),
    ({"metadata": {"name": "one", "labels": {"a/b/c": "x"}}}, "qualified name"),
    ({"spec": {"backoffLimit": -1, "template": job()["spec"]["template"]}}, "greater than or equal to 0"),
])
def test_names_and_numbers_of_an_object_are_checked(account: Account, change: dict, message: str):
    assert message in apply(account, {**job(), **change})


@pytest.mark.parametrize(("container", "message"), [
    ({"volumeMounts": [{"name": "data", "mountPath": "/data"}]}, 'Not found: "data"'),
    ({"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}}, "less than or equal to cpu limit"),
    ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, "non overcommitable"),
    ({"resources": {"limits": {"memory": "4GB"}}}, "quantities must match"),
    ({"resources": {"limits": {"gpu": 1}}}, "must be a standard resource"),
    ({"ports": [{"containerPort": 70000}]}, "between 1 and 65535"),
    ({"imagePullPolicy": "Sometimes"}, "Unsupported value"),
    ({"name": "Main"}, "lowercase RFC 1123 label"),
])
def test_fields_of_a_container_are_checked(account: Account, container: dict, message: str):
    assert message in apply(account, job(containers=[{"name": "main", "image": "app:1", **container}]))


@pytest.mark.parametrize(("action", "message"), [
    ("FailJobSet", "one created"), ("FailJob", 'Unsupported value: "FailJob"')])
def test_the_rules_of_a_jobset_have_actions_of_their_own(account: Account, action: str, message: str):
    release = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
    assert run(account, "kubectl", "apply", "--server-side", "-f", release).code == 0
    run(account, "sleep", "60")
    node = {"name": "node", "replicas": 1, "template": {"spec": job()["spec"]}}
    spec = {"failurePolicy": {"rules": [{"action": action}]}, "replicatedJobs": [node]}
    assert message in apply(account, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
                                      "metadata": {"name": "one"}, "spec": spec})


def test_a_pod_waits_for_its_secret_and_starts_with_it(account: Account):
    secret = {"name": "main", "image": "app:1", "command": ["embark", "data", "copy", "s3://a/b", "/tmp/x"],
              "envFrom": [{"secretRef": {"name": "keys"}}]}
    apply(account, job(containers=[secret]))
    assert 'secret "keys" not found' in events(account)
    assert account.causes == ['Job one: one-xxxx0 waits: CreateContainerConfigError: Error: secret "keys" not found']
    run(account, "kubectl", "create", "secret", "generic", "keys", "--from-literal=a=b")
    assert run(account, "kubectl", "wait", "job/one", "--for=condition=Complete", "--timeout=1h").code == 0


def test_a_secret_is_read_back_in_base64(account: Account):
    run(account, "kubectl", "create", "secret", "generic", "keys", "--from-literal=token=abc")
    assert run(account, "kubectl", "get", "secret", "keys", "--output", "jsonpath={.data.token}").out == "YWJj"


@pytest.mark.parametrize(("port", "message"), [("8000:80", "selects no pod"), ("8000:81", "service port 81")])
def test_no_port_is_forwarded_without_a_server(account: Account, port: str, message: str):
    apply(account, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}})
    assert message in run(account, "kubectl", "port-forward", "service/web", port).err


def test_a_service_leads_to_a_port_of_the_container(account: Account):
    thing = server(memory="1Gi")
    thing["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 8000}]
    apply(account, thing, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
                           "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}})
    assert "web leads to port 8080" in run(account, "kubectl", "port-forward", "service/web", "8000:80").err


def test_time_passes_for_a_program_that_only_asks_again(account: Account, untrained: None):
    (cluster,) = account.clusters.values()
    cluster.resize_pool("system", 0)
    cluster.resize_pool("system", 1)  # Its machine starts while the job waits.
    apply(account, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}, job())
    asked = [run(account, "kubectl", "get", "job", "one", "--output=json").out for _ in range(8)]
    assert '"Complete"' not in asked[0]
    assert '"Complete"' in asked[-1]


def test_a_script_that_waits_for_ever_is_stopped(account: Account):
    apply(account, job(nodeSelector={"topology.kubernetes.io/zone": "nowhere"}))
    naps = 0
    while run(account, "sleep", "600").code == 0:
        naps += 1
        assert naps < 100
    assert naps >= 24, "a script may wait for four hours and say why it stops"
    assert "node affinity/selector" in account.causes[0]


def rolling(surge: int, missing: int) -> dict:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": missing}}


def rollout(account: Account):
    return run(account, "kubectl", "rollout", "status", "deployment/web")


def images(account: Account) -> list[str]:
    return run(account, "kubectl", "get", "pods", "-o", "jsonpath={.items[*].spec.containers[0].image}").out.split()


def test_a_rollout_that_does_not_fit_never_ends(account: Account):
    """Each of two nodes has room for one replica, so a third one has none."""
    apply(account, server(strategy=rolling(1, 0)))
    assert rollout(account).code == 0
    apply(account, server("app:2", strategy=rolling(1, 0)))
    assert "exceeded its progress deadline" in rollout(account).err
    assert "Insufficient memory" in account.causes[0]
    assert sorted(images(account)) == ["app:1", "app:1", "app:2"], "the old replicas serve on"
    apply(account, server("app:2", strategy=rolling(1, 1)))
    assert rollout(account).code == 0
    assert images(account) == ["app:2", "app:2"]


def test_a_recreated_server_has_no_replica_meanwhile(account: Account):
    apply(account, server(strategy={"type": "Recreate"}))
    account.cluster().cloud.refused_images = ("app:2",)
    apply(account, server("app:2", strategy={"type": "Recreate"}))
    assert images(account) == ["app:2", "app:2"]
    assert "ImagePullBackOff" in account.causes[0]


REQUESTS = {"type": "Pods", "pods": {"metric": {"name": "requests_in_flight"},
                                     "target": {"type": "AverageValue", "averageValue": "8"}}}


def replicas_under_load(account: Account, *loads: float) -> list[int]:
    found = []
    for load in loads:
        account.cluster().load["default", "web"] = load
        run(account, "sleep", "60")
        found.append(len(images(account)))
    return found


def test_an_autoscaler_follows_the_load(account: Account):
    apply(account, server(memory="1Gi"), scaler(CPU))
    assert replicas_under_load(account, 2.5, 9, 0.5) == [3, 4, 1]


def test_an_autoscaler_without_a_metric_only_scales_up(account: Account):
    apply(account, server(memory="1Gi"), scaler(CPU, REQUESTS))
    assert replicas_under_load(account, 2.5, 0.5) == [3, 3]
    assert "unable to get metric requests_in_flight" in events(account)
    assert "invalid metrics (1 invalid out of 2)" in events(account)


def test_an_autoscaler_needs_the_metrics_server(account: Account):
    account.cluster().has_metrics_server = False
    apply(account, server(memory="1Gi"), scaler(CPU))
    assert replicas_under_load(account, 3) == [2], "it stays at the replicas that there are"
    waited = run(account, "kubectl", "wait", "hpa/web", "--for=condition=ScalingActive", "--timeout=10m")
    assert waited.code == 1
    assert "HorizontalPodAutoscaler web: invalid metrics (1 invalid out of 1)" in account.causes[0]
    assert "the cluster has no metrics-server" in account.causes[0]


@pytest.mark.parametrize("port", [8080, "web"])
def test_a_probe_asks_a_port_that_the_server_has(account: Account, port: object):
    thing = server(memory="1Gi")
    thing["spec"]["template"]["spec"]["containers"][0] |= {
        "command": ["embark", "serve", "s3://own-7/export"], "ports": [{"name": "http", "containerPort": 8000}],
        "startupProbe": {"httpGet": {"path": "/v2/health/ready", "port": port}}}
    apply(account, thing)
    assert "exceeded its progress deadline" in rollout(account).err
    assert re.search(rf"startupProbe .*{port}", account.causes[0])


def test_a_device_s_toleration_is_of_the_effect_no_schedule(account: Account):
    """The admission plugin adds it, so that pods do not fit machines which are tainted with NoExecute."""
    cluster = account.cluster()
    cluster.tolerates_extended_resources = True
    cluster.pools["gpu"] = replace(GPU, taints=({**GPU.taints[0], "effect": "NoExecute"},))
    apply(account, job(containers=[{"name": "main", "image": "app:1", "resources": {"limits": {"nvidia.com/gpu": 8}}}]))
    assert "untolerated taint {nvidia.com/gpu" in events(account)


def test_an_autoscaler_whose_controller_is_off_does_nothing(account: Account):
    account.cluster().has_autoscaler = False
    apply(account, server(memory="1Gi"), scaler(CPU))
    assert replicas_under_load(account, 9) == [2]


BROKER = {
    "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "nats", "namespace": "default"},
    "spec": {"replicas": 2, "serviceName": "nats", "selector": {"matchLabels": {"app": "nats"}},
             "template": {"metadata": {"labels": {"app": "nats"}}, "spec": {"containers": [
                 {"name": "nats", "image": "nats:2", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}},
             "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {
                 "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}}]}}


def test_a_claim_needs_a_class_and_its_driver(account: Account):
    cluster = account.cluster()
    apply(account, BROKER)
    assert "no storage class is set" in account.causes[0]
    add_storage_class(cluster, "fast", "ebs.csi.aws.com", is_default=True)
    run(account, "sleep", "60")
    assert "external provisioner 'ebs.csi.aws.com'" in account.causes[0]
    assert len(run(account, "kubectl", "get", "pods", "-o", "name").out.split()) == 1, "the second waits for the first"
    cluster.add_csi_driver("ebs.csi.aws.com")
    run(account, "sleep", "60")
    assert account.causes == []
    assert len(cluster.cloud.disks) == 2


def test_disks_of_claims_outlive_their_pods(account: Account):
    cluster = account.cluster()
    add_storage_class(cluster, "fast", "ebs.csi.aws.com", is_default=True)
    cluster.add_csi_driver("ebs.csi.aws.com")
    apply(account, BROKER)
    run(account, "kubectl", "delete", "statefulset", "nats")
    assert len(cluster.cloud.disks) == 2
    run(account, "kubectl", "delete", "pvc", "--all")
    assert cluster.cloud.disks == []
