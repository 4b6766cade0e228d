"""Machines are bought as the spec says: on demand, in a reservation or a block, or by flex-start."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from recorded_commands import run_script
from render_jobs import documents_of, job_of

from embark.errors import SpecError
from embark.lint.rendered import refuse_faults
from embark.render.render import render
from embark.render.targets.tpu_vm import create_words
from embark.render.targets.vertex import render_vertex

GROUP = ("/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/capacity/providers/Microsoft.Compute/"
         "capacityReservationGroups/a100")
AWS = {"capacity": "reserved", "reservation": "cr-0123456789abcdef0", "zone": "us-west-2b", "region": "us-west-2"}
AZURE = {"capacity": "reserved", "reservation": GROUP, "zone": "1"}
GCP = {"capacity": "reserved", "reservation": "training", "zone": "us-central1-a"}


def texts_of(machine: str, **place) -> dict[str, str]:
    files = render(job_of(machine, **place))
    refuse_faults(files)
    return {file.path: file.text for file in files}


def gpu_group(texts: dict[str, str]) -> dict:
    return yaml.safe_load(texts["eks_cluster.yaml"])["managedNodeGroups"][1]


@pytest.mark.parametrize(("machine", "capacity"), [("p4d.24xlarge", "reserved"), ("p5e.48xlarge", "block")])
def test_eks_takes_the_machines_of_the_reservation(machine, capacity):
    group = gpu_group(texts_of(machine, **{**AWS, "capacity": capacity}))
    assert group["capacityReservation"]["capacityReservationTarget"] == {"capacityReservationID": AWS["reservation"]}
    assert group.get("instanceMarketOptions") == ({"marketType": "capacity-block"} if capacity == "block" else None)


NOT_YET = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" '' >>"$RECORD"
case "$*" in *describe-capacity-reservations*) printf 'scheduled\\t2026-12-01T11:30:00Z\\n' ;; esac
"""


def test_a_block_that_has_not_begun_starts_no_machines(tmp_path):
    files = render(job_of("p5e.48xlarge", **{**AWS, "capacity": "block"}))
    done = run_script(files, "eks_cluster.sh", ["machines"], tmp_path, stub=NOT_YET)
    assert done.code == 64
    assert "is scheduled" in done.output
    assert "2026-12-01T11:30:00Z" in done.output
    assert done.of("eksctl") == []


def test_plain_machines_of_aws_are_those_of_the_reservation(tmp_path):
    script = texts_of("p5e.48xlarge", target="vm", **{**AWS, "capacity": "block"})["vm.sh"]
    start = re.search(r"aws ec2 run-instances.*?(?=\n\n|\n})", script, re.S).group(0)
    assert f"CapacityReservationId={AWS['reservation']}" in start
    assert "MarketType=capacity-block" in start
    assert "GroupName=" not in start, "a block is not in a placement group"


def test_aks_takes_the_machines_of_the_group_by_an_identity_of_its_own():
    script = texts_of("Standard_ND96asr_v4", **AZURE)["aks_cluster.sh"]
    pool = re.search(r"az aks nodepool add(.*?)\n  elif", script, re.S).group(1)
    assert f"--crg-id {GROUP}" in pool
    assert "--ppg" not in script
    create = re.search(r"az aks create(.*?)\n  fi", script, re.S).group(1)
    assert '--assign-identity "$CLUSTER_IDENTITY"' in create
    role = re.search(r"--role Contributor(.*?)\n    #", script, re.S).group(1)
    assert role.strip().endswith(f"--scope {GROUP.partition('/providers')[0]}")


def test_a_plain_machine_of_azure_is_one_of_the_group():
    script = texts_of("Standard_ND96asr_v4", target="vm", nodes=1, **AZURE)["vm.sh"]
    assert f"--capacity-reservation-group {GROUP}" in script


def test_gke_takes_the_machines_of_the_reservation_alone():
    script = texts_of("a2-highgpu-8g", **GCP)["gke_cluster.sh"]
    assert "--reservation-affinity=specific --reservation=training" in script
    assert "--placement-type" not in script, "the reservation decides where its machines stand"
    plain = texts_of("a3-ultragpu-8g", target="vm", **{**GCP, "capacity": "block", "zone": "europe-west1-b"})["vm.sh"]
    assert "--provisioning-model=RESERVATION_BOUND" in plain
    assert "--reservation=training" in plain


def test_tpus_of_gke_are_those_of_the_reservation():
    script = texts_of("v5litepod-16", target="jobset", nodes=1, **{**GCP, "zone": "us-central1-a"})["gke_cluster.sh"]
    pool = re.search(r"node-pools create.*?--project", script, re.S).group(0)
    assert "--tpu-topology=4x4" in pool
    assert "--reservation-affinity=specific --reservation=training" in pool


@pytest.mark.parametrize(("name", "words"), [
    ("training", ["--reserved"]),
    ("projects/shared/reservations/training", ["--reserved", "--reservation-host-project=shared"])])
def test_a_tpu_vm_takes_a_reservation_that_fits(name, words):
    job = job_of("v5litepod-16", target="tpu-vm", nodes=1, **{**GCP, "reservation": name})
    assert [word for word in create_words(job, "start.sh") if word.startswith("--reserv")] == words


@pytest.mark.parametrize(("name", "project"), [
    ("training", "my-project"), ("projects/shared/reservations/training/reservationBlocks/b-1", "shared")])
def test_vertex_takes_the_machines_of_the_reservation(name, project):
    from google.cloud.aiplatform_v1.types import CustomJobSpec  # takes seconds

    job = job_of("a2-highgpu-8g", target="vertex", account="my-project", **{**GCP, "reservation": name})
    text = next(file.text for file in render_vertex(job) if file.path == "vertex_job.yaml")
    spec = CustomJobSpec.from_json(json.dumps(yaml.safe_load(text)), ignore_unknown_fields=False)
    for pool in spec.worker_pool_specs:
        found = pool.machine_spec.reservation_affinity
        assert found.reservation_affinity_type.name == "SPECIFIC_RESERVATION"
        assert found.key == "compute.googleapis.com/reservation-name"
        assert list(found.values) == [f"projects/{project}/zones/us-central1-a/reservations/training"]


def test_several_machines_of_flex_start_come_together_or_not_at_all():
    texts = texts_of("a3-ultragpu-8g", queue="embark", max_hours=48.0)
    assert "--flex-start --reservation-affinity=none" in texts["gke_cluster.sh"]
    assert "--enable-queued-provisioning" in texts["gke_cluster.sh"]
    by_kind = {one["kind"]: one for one in documents_of(texts["kueue.yaml"])}
    check, config = by_kind["AdmissionCheck"], by_kind["ProvisioningRequestConfig"]
    strategy = by_kind["ClusterQueue"]["spec"]["admissionChecksStrategy"]
    assert strategy == {"admissionChecks": [{"name": check["metadata"]["name"]}]}
    assert check["spec"]["controllerName"] == "kueue.x-k8s.io/provisioning-request"
    assert check["spec"]["parameters"]["name"] == config["metadata"]["name"]
    assert config["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
    assert config["spec"]["parameters"] == {"maxRunDurationSeconds": str(48 * 3600)}
    assert "START_LIMIT_S:-86400" in texts["train_dlrm_gcp.sh"], "capacity takes hours"


def test_one_machine_of_flex_start_needs_no_queue():
    texts = texts_of("a3-ultragpu-8g", nodes=1)
    assert "--flex-start" in texts["gke_cluster.sh"]
    assert "--enable-queued-provisioning" not in texts["gke_cluster.sh"]
    plain = texts_of("a3-ultragpu-8g", target="vm", max_hours=10.0)["vm.sh"]
    assert "--provisioning-model=FLEX_START" in plain
    assert "--max-run-duration=36000s" in plain


@pytest.mark.parametrize(("machine", "place", "field", "what"), [
    ("p5e.48xlarge", {}, "place.capacity", "sold"),
    ("p5e.48xlarge", {"capacity": "block", "zone": "us-west-2b"}, "place.reservation", "block"),
    ("p4d.24xlarge", {"capacity": "reserved", "reservation": "my-reservation", "zone": "us-west-2b"},
     "place.reservation", "reservation"),
    ("p4d.24xlarge", {"capacity": "reserved", "reservation": "cr-0123456789abcdef0"}, "place.zone", "one zone"),
    ("p4d.24xlarge", {"reservation": "cr-0123456789abcdef0"}, "place.reservation", "uses none"),
    ("p4d.24xlarge", {**AWS, "spot": True}, "place.capacity", "spot"),
    ("p4d.24xlarge", {"capacity": "flex-start"}, "place.capacity", "aws"),
    ("Standard_ND96asr_v4", {**AZURE, "capacity": "block"}, "place.capacity", "azure"),
    ("Standard_ND96asr_v4", {**AZURE, "target": "vm"}, "place.capacity", "InfiniBand"),
    ("a3-ultragpu-8g", {"capacity": "flex-start"}, "place.queue", "at once"),
    ("a3-ultragpu-8g", {"queue": "embark", "max_hours": 200.0}, "place.max_hours", "7 days"),
    ("a4x-highgpu-4g", {}, "place.capacity", "reserved"),
    ("v5litepod-16", {**GCP, "target": "tpu-vm", "nodes": 1, "capacity": "block"}, "place.capacity", "block"),
])
def test_what_a_cloud_does_not_sell_is_refused(machine, place, field, what):
    with pytest.raises(SpecError) as raised:
        job_of(machine, **place)
    found = [one for one in raised.value.mistakes if one.field == field]
    assert found, raised.value.mistakes
    assert what in found[0].what


def test_a_reservation_is_paid_anyway_and_the_script_says_so():
    texts = texts_of("p4d.24xlarge", **AWS)
    assert "The reservation is paid whether it is used or not." in texts["train_dlrm_aws.sh"]


def test_runs_on_different_machines_wait_in_queues_of_their_own():
    """One queue for both would have the quota of the one that was applied last."""
    names = {}
    for machine in ("p4d.24xlarge", "g5.12xlarge"):
        for spot in (False, True):
            texts = texts_of(machine, queue="embark", spot=spot)
            objects = {one["kind"]: one for one in documents_of(texts["kueue.yaml"])}
            job = next(one for one in documents_of(texts["kubernetes_job.yaml"]) if one["kind"] == "Job")
            queue = objects["LocalQueue"]["metadata"]["name"]
            assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue
            assert objects["LocalQueue"]["spec"]["clusterQueue"] == objects["ClusterQueue"]["metadata"]["name"]
            names[queue] = objects["ClusterQueue"]["metadata"]["name"]
    assert len(names) == len(set(names.values())) == 4
    assert all(name.startswith("embark-") for name in names)


def test_the_queue_of_a_cluster_of_yours_keeps_its_name():
    assert job_of("p4d.24xlarge", queue="team-a", cluster="existing").queue == "team-a"
