"""TPUs as pods of GKE: what they ask for, how many there are, and the node pools that are their slices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from limits import HANG_S
from recorded_commands import STUB, run_script
from render_jobs import job_of

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.rendered import refuse_faults
from embark.render.render import render

CASES = [
    ("v5litepod-16", {"target": "jobset", "nodes": 2, "spot": True}), ("v6e-8", {"target": "job", "nodes": 1}),
    ("v5litepod-16", {"target": "job", "nodes": 1}), ("v5p-32", {"target": "jobset", "nodes": 1}),
    ("v6e-8", {"target": "jobset", "nodes": 2, "queue": "ml", "image": "ghcr.io/me/embark:1"}),
]


def files_of(machine: str, **place):
    return render(job_of(machine, **place))


def objects(machine: str, **place) -> dict[str, dict]:
    name = {"job": "kubernetes_job.yaml", "jobset": "jobset.yaml"}[place["target"]]
    text = next(file.text for file in files_of(machine, **place) if file.path == name)
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def pod_of(found: dict[str, dict]) -> tuple[dict, dict]:
    """The Job's spec, and its pod's."""
    job = (found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"] if "JobSet" in found
           else found["Job"]["spec"])
    return job, job["template"]["spec"]


@pytest.mark.parametrize(("machine", "place"), CASES)
def test_the_linter_finds_nothing(machine, place):
    findings = refuse_faults(files_of(machine, **place))
    assert not [(one.code, one.what) for one in findings]


@pytest.mark.parametrize(("machine", "place"), CASES)
def test_a_pod_asks_for_all_chips_of_its_host_and_trains_there(machine, place):
    found = objects(machine, **place)
    job, pod = pod_of(found)
    (container,) = pod["containers"]
    catalog = load_catalog().machines[machine]
    assert container["resources"]["limits"]["google.com/tpu"] == catalog.gpus_per_host
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == catalog.gke_accelerator
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == job_of(machine, **place).topology
    assert container["command"][:4] == ["python", "-m", "embark", "train"]
    assert container["command"][-1] == "place.device=tpu"
    assert not [row["name"] for row in container["env"] if row["name"].startswith(("NCCL_", "TORCH_"))]
    assert job["completions"] == job["parallelism"] == catalog.num_hosts
    assert job["completionMode"] == "Indexed"


def test_each_slice_is_a_job_of_a_jobset_on_its_own_pool():
    found = objects("v5litepod-16", target="jobset", nodes=2)
    jobset = found["JobSet"]
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    topology = jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert topology == "cloud.google.com/gke-nodepool"


def test_the_hosts_of_a_slice_find_one_another_by_their_service():
    found = objects("v5litepod-16", target="job", nodes=1)
    _, pod = pod_of(found)
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert {port["containerPort"] for port in pod["containers"][0]["ports"]} == {8471, 8476}
    assert "Service" not in objects("v6e-8", target="job", nodes=1), "one host needs no other"


@pytest.mark.parametrize(("machine", "nodes", "pools"), [
    ("v5litepod-16", 2, [("v5litepod-16-0", "4", "4x4"), ("v5litepod-16-1", "4", "4x4")]),
    ("v6e-8", 2, [("v6e-8", "2", "2x4")]), ("v5p-32", 1, [("v5p-32", "4", "2x2x4")])])
def test_each_slice_is_a_node_pool_of_its_topology(machine, nodes, pools, tmp_path):
    files = files_of(machine, target="jobset", nodes=nodes)
    ran = run_script(files, "gke_cluster.sh", ["machines"], tmp_path, {"PROJECT": "my-project"})
    assert ran.code == 0, ran.output
    made = [words for words in ran.of("gcloud") if words[1:4] == ["container", "node-pools", "create"]]
    options = [dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word) for words in made]
    assert [(words[4], given["--num-nodes"], given["--tpu-topology"])
            for words, given in zip(made, options, strict=True)] == pools
    assert not any("--accelerator" in given for given in options)
    gone = run_script(files, "train_dlrm_gcp.sh", ["--yes", "clean"], tmp_path, {"PROJECT": "my-project"},
                      stub=STUB.replace("exit 1", "exit 0"))
    assert [words[4] for words in gone.of("gcloud") if "delete" in words] == [pool[0] for pool in pools]


@pytest.mark.parametrize("machine", [m.name for m in load_catalog().machines.values()
                                     if m.name.startswith(("v4-", "v5litepod-", "v5p-", "v6e-"))])
def test_a_topology_has_as_many_chips_as_the_slice(machine):
    text = job_of(machine, nodes=1, target="tpu-vm").topology
    num = 1
    for side in text.split("x"):
        num *= int(side)
    assert num == load_catalog().machines[machine].num_gpus


@pytest.mark.parametrize(("machine", "place", "field"), [
    ("v2-8", {"target": "jobset"}, "place.machine"), ("v6e-8", {"target": "job", "nodes": 2}, "place.nodes"),
    ("v6e-8", {"target": "trainjob"}, "place.target"), ("v6e-8", {"target": "vm"}, "place.target")])
def test_what_cannot_be_is_refused_with_its_field(machine, place, field):
    with pytest.raises(SpecError) as raised:
        job_of(machine, **{"nodes": 1, **place})
    assert field in [mistake.field for mistake in raised.value.mistakes]


def test_on_vertex_the_trainer_learns_that_it_is_on_tpus():
    text = next(f.text for f in files_of("v5litepod-16", target="vertex", nodes=1, account="my-project")
                if f.path == "vertex_job.yaml")
    (pool,) = yaml.safe_load(text)["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "4x4"}
    assert pool["containerSpec"]["command"][-1].endswith("--set place.device=tpu")


def test_the_image_has_jax_and_no_cuda():
    text = next(f.text for f in files_of("v6e-8", target="job", nodes=1) if f.path == "Dockerfile")
    assert "jax[tpu]" in text
    assert "cuda" not in text
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), "-"], input=text, text=True,
                          capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout
