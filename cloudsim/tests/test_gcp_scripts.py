"""Scripts for Google Cloud in an empty project: each can be repeated, and deletion leaves only the buckets."""

from __future__ import annotations

import pytest
from account_shell import run_shell, write_files

from cloudsim.gcp import open_account, project_of
from embark.catalog import load_catalog
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import load_spec

pytestmark = pytest.mark.slow

SPEC = ["name=dlrm", "place.nodes=2", "place.image=ghcr.io/me/embark:1", "store.root=gs://our-embark/runs",
        "data.kind=prepared", "data.path=/mnt/data/criteo", "watch.prometheus_port=9464"]
ENV = {"PROJECT": "your-project", "EMAIL": "me@example.com"}
TWICE = ("./budget.sh budget", "./storage.sh", "./gke_cluster.sh", "./storage.sh volume", "./monitoring.sh",
         "./gke_cluster.sh machines", "./gke_cluster.sh stop", "./storage.sh delete", "./gke_cluster.sh delete")


@pytest.mark.parametrize(("machine", "volume"), [
    ("a2-highgpu-8g", "filestore-zonal"), ("a3-highgpu-8g", "managed-lustre-500"),
    ("a3-ultragpu-8g", "filestore-regional")])
def test_every_step_can_be_repeated_and_deletion_leaves_the_bucket(machine, volume, tmp_path):
    folder = tmp_path / "run"
    write_files(render(make_job(load_spec("quickstart", [*SPEC, f"place.machine={machine}", f"place.volume={volume}"]),
                                load_catalog())), folder)
    account = open_account(tmp_path / "account")
    try:
        lines = ["set -e", "gcloud components install gke-gcloud-auth-plugin alpha beta",
                 *(line for step in TWICE for line in (step, step))]
        done = run_shell(account, "\n".join(lines), folder, ENV)
        assert done.code == 0, done.output[-3000:]
        assert account.paid() == ["bucket our-embark"]
        assert {one.name for one in account.resources.of_kind("network")} == {"default"}
    finally:
        account.close()


def test_quota_that_is_missing_is_said_before_anything_is_created(tmp_path):
    folder = tmp_path / "run"
    spec = load_spec("quickstart", [*SPEC, "place.machine=a2-highgpu-8g", "place.volume=filestore-zonal"])
    write_files(render(make_job(spec, load_catalog())), folder)
    account = open_account(tmp_path / "account")
    try:
        project_of(account).quotas["NVIDIA_A100_GPUS"] = 8
        done = run_shell(account, "./train_dlrm_gcp.sh --yes", folder, ENV)
        assert done.code != 0
        assert "NVIDIA_A100_GPUS: 8 of the 16 that the run needs" in done.output
        assert account.paid() == []
    finally:
        account.close()
