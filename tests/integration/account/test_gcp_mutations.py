"""Scripts of Google Cloud with one mistake each: the project refuses them, and names the cause."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration.account.scripts import ScriptResult, run_shell, write_files

from embark.catalog import load_catalog
from embark.rehearse.account.gcp import object_store, open_account
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import load_spec

pytestmark = pytest.mark.slow

PROJECT, BUCKET = "your-project", "your-project-embark"
IMAGE = f"us-central1-docker.pkg.dev/{PROJECT}/embark/embark:1"
DATA = "criteo-1tb"
BEFORE = f"""
gcloud components install gke-gcloud-auth-plugin kubectl alpha beta
gcloud config set project {PROJECT}
gcloud services enable artifactregistry.googleapis.com
gcloud artifacts repositories create embark --repository-format=docker --location=us-central1
gcloud auth configure-docker us-central1-docker.pkg.dev --quiet
docker build --tag {IMAGE} . && docker push {IMAGE}
./storage.sh buckets
"""
TRAIN = "START_LIMIT_S=240 ./train_dlrm_gcp.sh --yes"
COMMON = ["name=dlrm", "place.machine=a2-highgpu-8g", "place.nodes=2", "place.region=us-central1",
          "place.zone=us-central1-a", f"place.image={IMAGE}", f"store.root=gs://{BUCKET}/runs"]
ON_MACHINES = [*COMMON, f"data.path=gs://{BUCKET}/data/{DATA}", "data.kind=prepared"]
SPECS = {
    "job": [*COMMON, "place.volume=filestore-zonal", f"data.path=/mnt/data/{DATA}", "data.kind=prepared"],
    "vm": [*ON_MACHINES, "place.target=vm"],
    "vertex": [*ON_MACHINES, "place.target=vertex", f"place.account={PROJECT}"],
    "tpu": [*ON_MACHINES, "place.machine=v5litepod-16", "place.nodes=1", "place.target=tpu-vm", "place.image="],
}


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    old: str
    new: str
    words: str  # Of the message.
    run: str = TRAIN
    spec: str = "job"


VM = {"run": "./vm.sh up && ./vm.sh logs 0", "spec": "vm"}
VERTEX = {"run": "./vertex_job.sh", "spec": "vertex"}
TPU = {"run": "./tpu_vm.sh up && ./tpu_vm.sh logs 0", "spec": "tpu"}
MUTATIONS = [
    Mutation("roles before the cluster", "gke_cluster.sh", "up() {\n", "up() {\n  roles\n",
             "Identity Pool does not exist"),
    Mutation("no workload identity", "gke_cluster.sh", '      --workload-pool="$PROJECT.svc.id.goog" \\\n', "",
             "Identity Pool does not exist"),
    Mutation("pods may only read", "gke_cluster.sh", "roles/storage.objectUser", "roles/storage.objectViewer",
             "does not have storage.objects.create access"),
    Mutation("another service account", "gke_cluster.sh", "embark/sa/embark", "embark/sa/default",
             "does not have storage.objects.get access"),
    Mutation("nodes may not pull", "gke_cluster.sh", " roles/artifactregistry.reader", "", "403 Forbidden"),
    Mutation("no driver of Filestore", "gke_cluster.sh", ",GcpFilestoreCsiDriver", "",
             "driver name filestore.csi.storage.gke.io not found"),
    Mutation("a zone that does not exist", "train_dlrm_gcp.sh", "us-central1-a", "us-central1-d",
             'Location "us-central1-d" does not exist'),
    Mutation("a zone of another region", "train_dlrm_gcp.sh", "us-central1-a", "us-east1-b",
             "is not in the cluster's region"),
    Mutation("GPUs of another machine", "gke_cluster.sh", "nvidia-tesla-a100", "nvidia-tesla-t4",
             "is not supported by machine type"),
    Mutation("a flag that does not exist", "gke_cluster.sh", "--enable-gvnic", "--enable-gvnics",
             "unrecognized arguments: --enable-gvnics"),
    Mutation("too few machines", "gke_cluster.sh", "--total-max-nodes=2", "--total-max-nodes=1",
             "not all pods have started for 240 seconds"),
    Mutation("no objects of the cluster", "gke_cluster.sh", "  run kubectl apply -f gke_cluster.yaml\n", "",
             'namespaces "embark" not found'),
    Mutation("too little Filestore", "storage.sh", "CAPACITY_GIB:-1024", "CAPACITY_GIB:-512", "between 1024 and"),
    Mutation("Filestore's service is off", "storage.sh", " file.googleapis.com", "",
             "file.googleapis.com has not been used"),
    Mutation("Filestore in a region", "storage.sh", 'instances create dlrm-data \\\n      --location="$ZONE"',
             'instances create dlrm-data \\\n      --location="$REGION"', "it needs a zone"),
    Mutation("another network", "storage.sh", "NETWORK:-default", "NETWORK:-training",
             "networks/training' was not found"),
    Mutation("no address of the volume", "storage.sh", "ipAddresses[0]", "ipAddress", "FailedMount"),
    Mutation("an image that was not pushed", "kubernetes_job.yaml", "embark/embark:1", "embark/embark:2", "not found"),
    Mutation("no data in the bucket", "data_copy_job.yaml", f"data/{DATA}", "data/other", "no such object"),
    Mutation("a misspelt service account", "data_copy_job.yaml", "serviceAccountName: embark",
             "serviceAccountName: embarks", 'serviceaccount "embarks" not found'),
    Mutation("no login to the registry", "cloud_init.yaml", "gcloud auth configure-docker", "true",
             "Unauthenticated request", **VM),
    Mutation("machines without scopes", "vm.sh", "        --scopes=cloud-platform \\\n", "", "403", **VM),
    Mutation("machines without the bucket", "vm.sh", "--role=roles/storage.objectUser",
             "--role=roles/storage.objectCreator", "does not have storage.objects", **VM),
    Mutation("a service account that does not exist", "vm.sh", "service-accounts create embark-machines",
             "service-accounts create embark-machine",
             "embark-machines@your-project.iam.gserviceaccount.com does not exist", **VM),
    Mutation("an image family that does not exist", "vm.sh", "common-cu129", "common-cu99", "was not found", **VM),
    Mutation("two first machines", "vertex_job.yaml", "replicaCount: 1", "replicaCount: 2",
             "must have exactly one replica", **VERTEX),
    Mutation("other GPUs on Vertex AI", "vertex_job.yaml", "NVIDIA_TESLA_A100", "NVIDIA_TESLA_V100", "is not supported",
             **VERTEX),
    Mutation("Vertex AI is off", "vertex_job.sh", "gcloud services enable", "true",
             "aiplatform.googleapis.com has not been used", **VERTEX),
    Mutation("the system of another TPU", "tpu_vm.sh", "v2-alpha-tpuv5-lite", "tpu-ubuntu2204-base",
             "Runtime version tpu-ubuntu2204-base is not valid", **TPU),
    Mutation("a zone without the TPU", "tpu_vm.sh", "us-central1-a", "us-central1-b", "in location us-central1-b",
             **TPU),
    Mutation("no wheel in the bucket", "tpu_vm.sh", "run gcloud storage cp", "true", "No such file", **TPU),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, sets in SPECS.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_files(render(make_job(load_spec("quickstart", sets), load_catalog())), found[name])
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.what.replace(" ", "-"))
def test_a_script_with_a_mistake_is_refused_with_its_cause(mutation: Mutation, folders, tmp_path):
    done = run_changed(mutation, folders[mutation.spec], tmp_path)
    assert done.code != 0, done.output[-3000:]
    assert mutation.words in done.output, done.output[-3000:]


@pytest.mark.parametrize(("file", "how"), [("gke_cluster.sh", {}), ("vm.sh", VM), ("vertex_job.sh", VERTEX),
                                           ("tpu_vm.sh", TPU)])
def test_the_same_script_without_a_mistake_is_not_refused(file, how, folders, tmp_path):
    done = run_changed(Mutation("", file, "", "", "", **how), folders[how.get("spec", "job")], tmp_path)
    assert done.code == 0, done.output[-3000:]


def run_changed(mutation: Mutation, rendered: Path, tmp_path: Path) -> ScriptResult:
    """In an account with an image, the buckets and data in one of them."""
    folder = tmp_path / "run"
    shutil.copytree(rendered, folder)
    account = open_account(tmp_path / "account")
    try:
        before = run_shell(account, f"set -e\n{BEFORE}", folder, {"PROJECT": PROJECT})
        assert before.code == 0, before.output
        data = object_store.folder(account, BUCKET) / "data" / DATA
        data.mkdir(parents=True)
        (data / "part-0").write_text("x")
        path = folder / mutation.file
        text = path.read_text()
        assert mutation.old in text, "the script has changed"
        path.write_text(text.replace(mutation.old, mutation.new) if mutation.old else text)
        return run_shell(account, mutation.run, folder, {"PROJECT": PROJECT})
    finally:
        account.close()
