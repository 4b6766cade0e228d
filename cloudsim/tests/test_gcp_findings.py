"""An empty project refuses what scripts for Google Cloud once did wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from account_shell import run_shell

from cloudsim.account import Account
from cloudsim.gcp import open_account, project_of
from cloudsim.gcp.machines import boot

CLUSTER = """
gcloud components install gke-gcloud-auth-plugin kubectl
gcloud services enable container.googleapis.com compute.googleapis.com
gcloud container clusters create embark --location=us-central1 --node-locations=us-central1-a --num-nodes=2 \
  --machine-type=e2-standard-4 --workload-pool="$PROJECT.svc.id.goog" --addons=GcpFilestoreCsiDriver
"""
MEMBER = ("principal://iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/"
          "your-project.svc.id.goog/subject/ns/embark/sa/embark")
BIND = f"gcloud storage buckets add-iam-policy-binding gs://our-runs --member={MEMBER} --role=roles/storage.objectUser"
BUCKET = "gcloud storage buckets create gs://our-runs --location=us-central1"
IMAGE = "us-central1-docker.pkg.dev/your-project/embark/embark:1"
REGISTRY = f"""
gcloud services enable artifactregistry.googleapis.com
gcloud artifacts repositories create embark --repository-format=docker --location=us-central1
gcloud auth configure-docker us-central1-docker.pkg.dev --quiet
printf 'FROM scratch\\n' >Dockerfile
docker build --tag {IMAGE} . && docker push {IMAGE}
"""
SETUP = f"""#cloud-config
write_files:
- path: /usr/local/bin/embark-setup
  content: |
    #!/usr/bin/env bash
    set -euo pipefail
    LOGIN
    docker pull {IMAGE}
- path: /usr/local/bin/embark-node
  content: |
    #!/usr/bin/env bash
    exec docker run {IMAGE} python -m embark.torchrun -m embark train /etc/embark/spec.toml
- path: /etc/systemd/system/embark.service
  content: |
    [Service]
    ExecStart=/usr/local/bin/embark-node
runcmd:
- [/usr/local/bin/embark-setup]
- [systemctl, enable, --now, embark.service]
"""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    opened = open_account(tmp_path)
    yield opened
    opened.close()  # The object store's threads would keep this process alive.


def said(account: Account, text: str) -> str:
    """Return the output of a script that must fail."""
    done = run_shell(account, f"set -e\ngcloud config set project $PROJECT\n{text}", account.folder,
                     {"PROJECT": "your-project"})
    assert done.code != 0, done.output
    return done.output


def does(account: Account, text: str) -> str:
    done = run_shell(account, f"set -e\ngcloud config set project $PROJECT\n{text}", account.folder,
                     {"PROJECT": "your-project"})
    assert done.code == 0, done.output
    return done.output


def test_a_role_on_a_bucket_that_does_not_exist_is_refused(account):
    assert "HTTPError 404: The specified bucket does not exist." in said(account, CLUSTER + BIND)
    does(account, f"{BUCKET}\n{BIND}")


def test_a_pod_identity_has_no_pool_before_the_first_cluster(account):
    assert "Identity Pool does not exist (your-project.svc.id.goog)" in said(account, f"{BUCKET}\n{BIND}")


def test_the_placeholder_bucket_belongs_to_somebody_else(account):
    assert "bucket name is not available" in said(account, BUCKET.replace("our-runs", "embark-example"))


@pytest.mark.parametrize(("command", "service"), [
    ("gcloud compute regions describe us-central1", "compute"),
    ("gcloud billing projects describe $PROJECT", "cloudbilling"),
    ("gcloud ai custom-jobs list --region=us-central1", "aiplatform"),
    ("gcloud container clusters list", "container"),
])
def test_a_service_answers_only_when_it_is_enabled(account, command, service):
    assert f"{service}.googleapis.com has not been used" in said(account, command)
    does(account, f"gcloud services enable {service}.googleapis.com\n{command}")


def test_a_machine_pulls_no_image_without_login_and_role(account):
    does(account, "gcloud services enable compute.googleapis.com" + REGISTRY)
    project = project_of(account)
    scopes = ("cloud-platform",)

    def trouble(login: str) -> str:
        return boot(project, "dlrm-0", {"user-data": SETUP.replace("LOGIN", login)}, project.compute_account,
                    scopes).trouble

    assert "Unauthenticated request" in trouble("true")
    assert "artifactregistry.repositories.downloadArtifacts" in trouble(
        "gcloud auth configure-docker us-central1-docker.pkg.dev --quiet")
    does(account, "gcloud projects add-iam-policy-binding $PROJECT --role=roles/artifactregistry.reader "
                  f"--member=serviceAccount:{project.compute_account}")
    assert not trouble("gcloud auth configure-docker us-central1-docker.pkg.dev --quiet")


def test_nodes_pull_no_image_without_a_role(account):
    does(account, CLUSTER + REGISTRY)
    cluster = account.clusters["us-central1/embark"]
    pool = cluster.pools["default-pool"]
    assert "403 Forbidden" in cluster.cloud.pull_error(IMAGE, pool, "embark")
    does(account, "gcloud projects add-iam-policy-binding $PROJECT --role=roles/artifactregistry.reader "
                  f"--member=serviceAccount:{project_of(account).compute_account}")
    assert not cluster.cloud.pull_error(IMAGE, pool, "embark")
    assert "not found" in cluster.cloud.pull_error(IMAGE.replace(":1", ":2"), pool, "embark")


def test_a_regional_cluster_counts_its_machines_per_zone(account):
    does(account, CLUSTER.replace("--node-locations=us-central1-a", ""))
    assert len(account.clusters["us-central1/embark"].nodes) == 6


def test_what_destroy_leaves_is_still_paid(account):
    does(account, CLUSTER + """
gcloud services enable file.googleapis.com
gcloud filestore instances create data --location=us-central1-a --tier=zonal --file-share=name=data,capacity=1024GiB \
  --network=name=default
gcloud container clusters delete embark --location=us-central1 --quiet
""")
    assert account.paid() == ["filestore us-central1-a/data"]


@pytest.mark.parametrize(("text", "words"), [
    ("gcloud compute tpus queued-resources create x --zone=us-central2-a --accelerator-type=v4-8 --node-id=x "
     "--runtime-version=tpu-ubuntu2204-base", "in location us-central2-a"),
    ("gcloud compute tpus queued-resources create x --zone=us-central2-b --accelerator-type=v4-8 --node-id=x "
     "--runtime-version=tpu-vm-pt-2.1", "Runtime version tpu-vm-pt-2.1 is not valid"),
    ("gcloud filestore instances create data --location=us-central1 --tier=zonal --network=name=default "
     "--file-share=name=data,capacity=1024GiB", "it needs a zone"),
    ("gcloud filestore instances create data --location=us-central1-a --tier=zonal --network=name=default "
     "--file-share=name=data,capacity=1000GiB", "between 1024 and"),
    ("gcloud container node-pools create x --cluster=embark --location=us-central1 --machine-type=a2-highgpu-8g "
     "--accelerator=type=nvidia-a100-80gb,count=8", "is not supported by machine type a2-highgpu-8g"),
    ("gcloud container node-pools create x --cluster=embark --location=us-central1 --machine-type=a2-highgpu-8g "
     "--node-locations=us-central1-d", 'Location "us-central1-d" does not exist.'),
    ("gcloud container node-pools create x --cluster=other --location=us-central1",
     "Not found: projects/your-project/locations/us-central1/clusters/other."),
    ("gcloud container node-pools create x --cluster=embark --location=us-central1 --preemptable",
     "unrecognized arguments: --preemptable"),
    ("gcloud container clusters create embark --location=us-central1", "Already exists"),
    ("gcloud compute instances create x --zone=us-east5-a --machine-type=a2-highgpu-8g "
     "--maintenance-policy=TERMINATE", "does not exist in zone 'us-east5-a'"),
    ("gcloud compute instances create x --zone=us-central1-a --machine-type=a2-highgpu-8g",
     "do not support live migration"),
    ("gcloud projects add-iam-policy-binding $PROJECT --role=roles/artifactregistry.readers "
     "--member=serviceAccount:123456789012-compute@developer.gserviceaccount.com",
     "is not supported for this resource"),
    ("gcloud iam service-accounts add-iam-policy-binding x@your-project.iam.gserviceaccount.com "
     "--role=roles/iam.workloadIdentityUser --member='serviceAccount:your-project.svc.id.goog[embark/embark]'",
     "Unknown service account"),
])
def test_what_google_cloud_refuses_is_refused_in_its_words(account, text, words):
    does(account, CLUSTER + "gcloud services enable file.googleapis.com tpu.googleapis.com")
    assert words in said(account, text)
