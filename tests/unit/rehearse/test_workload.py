"""The pods of every kind of job on every cloud: as many, so called, told so much, and able to find each other."""

from __future__ import annotations

import pytest
import yaml
from render_jobs import job_of

from embark.kubernetes.objects import Objects
from embark.rehearse.downscale import launch_of
from embark.rehearse.manifest import find_training_job, read_texts
from embark.rehearse.workload import Workload, make_workload
from embark.render.targets.kubernetes import render_job, render_jobset, render_pytorchjob, render_trainjob

MACHINES = {"aws": "p4d.24xlarge", "azure": "Standard_ND96asr_v4", "gcp": "a2-highgpu-8g"}
RENDERERS = {"Job": render_job, "JobSet": render_jobset, "TrainJob": render_trainjob, "PyTorchJob": render_pytorchjob}
FIRST_NAMES = {"Job": "dlrm-0", "JobSet": "dlrm-node-0-0", "TrainJob": "dlrm-node-0-0", "PyTorchJob": "dlrm-worker-0"}
VOLUMES = {"aws": "fsx-lustre-250", "azure": "azure-netapp-premium", "gcp": "filestore-zonal"}


def rendered(kind: str, cloud: str, **place) -> Workload:
    files = RENDERERS[kind](job_of(MACHINES[cloud], volume=VOLUMES[cloud], **place))
    return workload_of("".join(file.text for file in files))


def workload_of(text: str) -> Workload:
    objects = read_texts({"a.yaml": text})
    return make_workload(find_training_job(objects, "a.yaml"), objects)[0]


@pytest.mark.parametrize("cloud", MACHINES)
@pytest.mark.parametrize("kind", RENDERERS)
def test_the_pods_of_a_rendered_job_find_the_first_of_them(kind, cloud):
    workload = rendered(kind, cloud)
    first = FIRST_NAMES[kind]
    assert (workload.kind, workload.refusal) == (kind, None)
    assert [pod.name for pod in workload.pods] == [first, f"{first.removesuffix('0')}1"]
    for pod in workload.pods:
        launch = launch_of(pod)
        assert launch is not None
        assert workload.names[launch.endpoint_host] == [first]
        assert not pod.missing
        assert launch.nnodes == (2, 2)
        assert pod.grace_s == float(pod.env["EMBARK_GRACE_S"])
        assert pod.workdir == "/scratch"
        kinds = {mount.path: mount.kind for mount in pod.mounts if not mount.path.startswith("/dev/infiniband")}
        assert kinds == {"/etc/embark": "files", "/dev/shm": "scratch", "/scratch": "scratch", "/mnt/data": "shared"}
        assert any("nvidia.com/gpu: 8" in one for one in pod.devices)


def test_an_indexed_job_tells_each_pod_its_number():
    pods = rendered("Job", "aws").pods
    assert [pod.env["JOB_COMPLETION_INDEX"] for pod in pods] == ["0", "1"]
    assert [pod.hostname for pod in pods] == ["dlrm-0", "dlrm-1"]
    assert pods[1].labels["batch.kubernetes.io/job-name"] == "dlrm"


def test_trainer_tells_each_pod_what_torchrun_needs():
    pods = rendered("TrainJob", "gcp").pods
    result = [{name: pod.env[name] for name in pod.env if name.startswith("PET_")} for pod in pods]
    assert result == [{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": str(rank),
                     "PET_MASTER_ADDR": "dlrm-node-0-0.dlrm", "PET_MASTER_PORT": "29500"} for rank in (0, 1)]
    assert [pod.container for pod in pods] == ["node", "node"]


def test_the_training_operator_tells_an_elastic_job_where_to_meet():
    env = rendered("PyTorchJob", "azure").pods[1].env
    assert env["PET_RDZV_ENDPOINT"] == "dlrm-worker-0:23456"
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"], env["PET_RDZV_BACKEND"]) == ("2:2", "8", "c10d")
    assert "join_timeout=1800" in env["PET_RDZV_CONF"]
    assert "MASTER_ADDR" not in env


def test_a_master_is_rank_0_and_workers_look_for_it():
    workload = workload_of("""
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: j}
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Master: {replicas: 1, template: {spec: {containers: [{name: pytorch, image: i, command: [torchrun, t.py]}]}}}
    Worker: {replicas: 2, template: {spec: {containers: [{name: pytorch, image: i, command: [torchrun, t.py]}]}}}
""")
    assert [pod.name for pod in workload.pods] == ["j-master-0", "j-worker-0", "j-worker-1"]
    assert [pod.env["RANK"] for pod in workload.pods] == ["0", "1", "2"]
    assert [pod.env["MASTER_ADDR"] for pod in workload.pods] == ["localhost", "j-master-0", "j-master-0"]
    assert {pod.env["WORLD_SIZE"] for pod in workload.pods} == {"12"}
    assert {pod.env["PET_NNODES"] for pod in workload.pods} == {"3"}
    assert workload.names["j-master-0"] == ["j-master-0"]


def test_replicated_jobs_are_numbered_by_job_and_by_pod():
    workload = workload_of("""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: s}
spec:
  replicatedJobs:
  - name: w
    replicas: 2
    template: {spec: {parallelism: 2, completions: 2, template: {spec: {containers: [{name: c, image: i}]}}}}
""")
    assert [pod.hostname for pod in workload.pods] == ["s-w-0-0", "s-w-0-1", "s-w-1-0", "s-w-1-1"]
    assert [pod.index for pod in workload.pods] == [0, 1, 2, 3]
    assert workload.names["s-w-1-0.s"] == ["s-w-1-0"]
    assert workload.pods[0].restart_policy == "OnFailure"  # JobSet's default


def test_a_job_that_is_not_indexed_has_pods_with_random_names():
    workload = workload_of("""
apiVersion: batch/v1
kind: Job
metadata: {name: j}
spec:
  parallelism: 2
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: i, command: [torchrun, t.py]}]}}
""")
    assert all(not pod.hostname.endswith(("-0", "-1")) and pod.hostname.startswith("j-") for pod in workload.pods)
    assert len({pod.hostname for pod in workload.pods}) == 2
    assert all("JOB_COMPLETION_INDEX" not in pod.env for pod in workload.pods)


@pytest.mark.parametrize(("change", "sentence"), [
    (("      containers:\n      - name: trainer", "      containers:\n      - name: trainer"), None),
    (("restartPolicy: Never", "restartPolicy: OnFailure"), "podFailurePolicy with restartPolicy OnFailure"),
    (("restartPolicy: Never", "restartPolicy: Always"), "restartPolicy Always"),
])
def test_what_the_api_server_refuses_of_a_job_starts_no_pod(change, sentence):
    text = render_job(job_of("p4d.24xlarge"))[0].text.replace(*change)
    refusal = workload_of(text).refusal
    assert (refusal is None) if sentence is None else (sentence in refusal.what)


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("- name: pytorch", "- name: torchrec", "container named pytorch, and has torchrec"),
    ("  elasticPolicy:\n", "  elasticPolicy:\n    nProcPerNode: 8\n", "nprocPerNode is set twice"),
])
def test_what_the_training_operators_webhook_refuses_starts_no_pod(old, new, sentence):
    text = render_pytorchjob(job_of("p4d.24xlarge"))[0].text
    assert old in text
    refusal = workload_of(text.replace(old, new)).refusal
    assert refusal is not None
    assert sentence in refusal.what


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda job: job["spec"]["runtimeRef"].update(name="other"), "there is no TrainingRuntime other"),
    (lambda job: job["spec"]["trainer"].update(numProcPerNode="auto"), "'auto' is no number"),
    (lambda job: job["spec"]["trainer"]["env"].append({"name": "PET_NNODES", "value": "2"}), "PET_NNODES is a var"),
])
def test_what_trainer_refuses_starts_no_pod(change, sentence):
    documents = list(yaml.safe_load_all(render_trainjob(job_of("p4d.24xlarge"))[0].text))
    job = next(one for one in documents if one["kind"] == "TrainJob")
    change(job)
    refusal = make_workload(job, Objects(tuple(documents)))[0].refusal
    assert refusal is not None
    assert sentence in refusal.what


def test_the_runtime_that_every_cluster_has_need_not_be_in_the_files():
    workload = workload_of("""
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: t}
spec:
  runtimeRef: {kind: ClusterTrainingRuntime, name: torch-distributed}
  trainer: {numNodes: 2, numProcPerNode: 4, command: [torchrun, t.py]}
""")
    assert workload.refusal is None
    assert [pod.env["PET_NPROC_PER_NODE"] for pod in workload.pods] == ["4", "4"]
    assert workload.names["t-node-0-0.t"] == ["t-node-0-0"]


def test_a_config_map_that_no_file_has_is_missing():
    text = render_job(job_of("p4d.24xlarge"))[0].text
    renamed = text.replace("name: dlrm-spec\n  namespace", "name: other\n  namespace")
    assert workload_of(renamed).pods[0].missing == ("ConfigMap dlrm-spec",)
    assert workload_of(text).pods[0].missing == ()
