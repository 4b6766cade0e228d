"""From a spec to a job: names, shares and everything that cannot be rendered, told at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_jobs import job_of

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.kubernetes.names import dns_label
from embark.render.job import DEFAULT_MACHINES, Job, make_job
from embark.render.targets.tpu_vm import environment
from embark.run.budget import PRICE
from embark.spec import load_spec


def mistakes_of(*sets: str, preset: str = "quickstart") -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        make_job(load_spec(preset, sets), load_catalog())
    return {mistake.field: str(mistake) for mistake in raised.value.mistakes}


@given(st.text(st.characters(codec="utf-8"), max_size=300)
       | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True))
def test_any_name_becomes_a_dns_label_with_room_for_more(name):
    label = dns_label(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", label)
    assert len(f"{label}-node-0-1023") <= 63


def test_two_long_names_stay_two():
    assert dns_label("x" * 90 + "1") != dns_label("x" * 90 + "2")


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_a_cloud_alone_names_its_usual_machine(cloud):
    job = make_job(load_spec("quickstart", [f"place.cloud={cloud}"]), load_catalog())
    assert job.machine.name == DEFAULT_MACHINES[cloud]
    assert (job.cloud, job.num_processes, job.world_size) == (cloud, 8, 8)


def test_a_pod_fits_on_its_machine_beside_what_runs_on_every_node():
    for machine in load_catalog().machines.values():
        if machine.gpu.kind != "gpu":
            continue
        job = Job.of(job_of("g5.xlarge", nodes=1).spec, machine)
        if job.num_cpus is not None:
            assert 0 < job.num_cpus < job.machine.allocatable_vcpus, machine.name
        if job.memory_gib is not None:
            assert 0 < job.memory_gib < job.machine.allocatable_gib, machine.name
            assert job.shm_gib < job.memory_gib or job.memory_gib == 1, machine.name


def test_all_mistakes_are_reported_at_once():
    found = mistakes_of("place.machine=p5.48xlarge", "place.nodes=3", "place.volume=managed-lustre-500",
                        "place.identity=someone@example.com", "train.batch_size=1000")
    assert set(found) == {"store.root", "place.volume", "place.identity", "train.batch_size"}
    assert "does not divide over 24 ranks (3 × 8)" in found["train.batch_size"]
    assert "s3://BUCKET/runs" in found["store.root"]
    assert "arn:aws:iam::" in found["place.identity"]


@pytest.mark.parametrize(("sets", "field", "words"), [
    ((), "place.machine", "none is named"),
    (("place.machine=p5.49xlarge",), "place.machine", "p5.48xlarge"),
    (("place.machine=p5.48xlarge", "place.cloud=gcp"), "place.cloud", "belongs to aws"),
    (("place.machine=v5e-4", "place.target=trainjob"), "place.target", "is a TPU"),
    (("place.machine=v5e-16", "place.target=job"), "store.root", "its own part"),
    (("place.cloud=aws", "place.target=tpu-vm"), "place.target", "is not a TPU"),
    (("place.cloud=aws", "place.target=vertex", "place.account=p"), "place.target", "no machines of aws"),
    (("place.cloud=gcp", "place.target=vertex"), "place.account", "project"),
    (("place.cloud=aws", "data.kind=prepared", "data.path=criteo"), "data.path", "embark data copy criteo s3://BUCKET/"),
    (("place.cloud=aws", "train.warm_start=january@40"), "train.warm_start",
     "embark data copy runs/january s3://BUCKET/runs/january"),
    (("place.cloud=azure", "store.root=az://c/runs"), "place.storage_account", "storage account"),
    (("place.cloud=aws", "place.device=cpu"), "place.device", "8 accelerators"),
    (("place.cloud=aws", "place.volume=s3-standard"), "place.volume", "not mounted"),
    (("place.cloud=aws", "place.volume=fsx-lustre-25"), "place.volume", "fsx-lustre-250"),
    (("place.machine=p5.48xlarge", "place.region=af-south-1", "place.budget_usd=5"), "place.budget_usd", "no price"),
    (("place.machine=v4-8", "place.target=tpu-vm", "place.zone=us-central2-a"), "place.zone", "us-central2-b"),
    (("place.machine=v4-8", "place.target=tpu-vm", "place.region=us-central1"), "place.region", "us-central2-b"),
    (("place.machine=v6e-8", "place.zone=us-east5-b", "place.region=us-east1"), "place.zone", "is in us-east5"),
    (("place.machine=p5.48xlarge", "place.zone=us-east-1b", "place.region=us-west-2"), "place.zone", "is in us-east-1"),
    (("place.machine=p5.48xlarge", "place.zone=use1-az1"), "place.zone", "is no zone of aws"),
    (("place.cloud=azure", "place.zone=eastus-1"), "place.zone", "such as 1"),
])
def test_each_mistake_has_its_field_and_its_fix(sets, field, words):
    found = mistakes_of(*sets)
    assert words in found[field]
    assert "fix:" in found[field]


@pytest.mark.parametrize(("machine", "zone", "region"), [
    ("p5en.48xlarge", "us-east-1b", "us-east-1"), ("p4d.24xlarge", "us-west-2-lax-1a", "us-west-2"),
    ("a3-highgpu-8g", "asia-southeast1-c", "asia-southeast1"), ("v6e-8", "us-south1-ai1b", "us-south1"),
])
def test_a_zone_without_a_region_decides_the_region(machine, zone, region):
    location = job_of(machine, nodes=1, zone=zone).location
    assert (location.region, location.zone) == (region, zone)


def test_a_budget_on_tpus_needs_only_a_price():
    """The training loop counts the dollars, whichever library trains; each host gets the price."""
    job = job_of("v5litepod-4", nodes=1, target="tpu-vm", budget_usd=5.0)
    assert job.usd_per_hour is not None
    assert float(environment(job)[PRICE]) == pytest.approx(job.usd_per_hour)


def test_a_folder_of_the_mounted_volume_is_seen_by_all():
    job = job_of("p5.48xlarge", volume="fsx-lustre-250", root="/mnt/data/runs", data="/mnt/data/criteo")
    assert job.claim_name == "dlrm-data"


@pytest.mark.parametrize("image", [
    "embark", "embark:1", "registry.example.com:5000/team/embark:v1.0-x", f"a.b/c@sha256:{'0' * 64}",
    "123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:v1", "us-docker.pkg.dev/my-project/repo/embark:v1",
])
def test_real_image_names_are_taken(image):
    assert job_of("p5.48xlarge", image=image).image == image


def test_an_elastic_run_needs_a_batch_that_every_number_of_ranks_divides():
    sets = ("place.machine=p5.48xlarge", "place.nodes={min=2, max=3}", "store.root=s3://b/runs")
    said = mistakes_of(*sets, "train.batch_size=4104")["train.batch_size"]
    assert "does not divide over 16 ranks (8 on each machine), and the run may have 16 to 24" in said
    assert "use 4080 or 4128" in said
    job = make_job(load_spec("quickstart", [*sets, "train.batch_size=4128"]), load_catalog())
    assert (job.num_nodes, job.min_nodes, job.nnodes) == (3, 2, "2:3")
    assert job.title == "quickstart on 2 to 3 x p5.48xlarge: up to 24 ranks"
    fixed = make_job(load_spec("quickstart", [*sets, "train.batch_size=4128", "place.nodes=3"]), load_catalog())
    assert job.usd_per_hour == fixed.usd_per_hour


def test_a_slice_of_a_tpu_is_not_elastic():
    assert "is a TPU" in mistakes_of("place.machine=v5litepod-16", "place.nodes={min=1, max=2}",
                                     "store.root=gs://b/runs", "train.batch_size=4128")["place.nodes"]
