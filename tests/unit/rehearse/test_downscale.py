"""What is smaller here than in the cluster is told, and nothing else is touched."""

from __future__ import annotations

from functools import cache

import pytest
import yaml
from render_jobs import job_of

from embark.kubernetes.objects import Objects
from embark.rehearse.downscale import BUCKETS, Downscaled, downscale, downscale_pods, downscale_spec
from embark.rehearse.manifest import find_training_job, read_texts
from embark.rehearse.workload import make_workload
from embark.render.targets.kubernetes import render_job, render_jobset, render_pytorchjob, render_trainjob
from embark.spec import RunSpec, parse_spec
from embark.spec.load import resolve

RENDERERS = {"job": render_job, "jobset": render_jobset, "trainjob": render_trainjob, "pytorchjob": render_pytorchjob}


@cache
def objects_of(target: str) -> Objects:
    return read_texts({"a.yaml": RENDERERS[target](job_of("p4d.24xlarge", volume="fsx-lustre-250"))[0].text})


def downscaled(target: str = "job", processes: int = 2, steps: int = 30) -> Downscaled:
    objects = objects_of(target)
    return downscale(find_training_job(objects, ""), objects, num_processes=processes, num_pods=2, num_steps=steps)


@pytest.mark.parametrize("target", RENDERERS)
def test_pods_start_so_many_processes_and_it_is_reported(target):
    small = downscaled(target, processes=3)
    assert "processes in a pod: 8 → 3" in map(str, small.changes)
    for pod in make_workload(small.job, small.objects)[0].pods:
        text = " ".join(pod.words) + pod.env.get("PET_NPROC_PER_NODE", "")
        assert "--nproc-per-node=3" in text or text.endswith("3")
        assert "=8" not in text
        assert pod.env["OMP_NUM_THREADS"] == "1"
        assert "EMBARK_USD_PER_HOUR" not in pod.env  # nothing is paid here, and no budget is reached
    assert "variable EMBARK_USD_PER_HOUR: a price → not set: this machine costs nothing" in map(str, small.changes)


def test_the_objects_that_were_given_stay_as_they_were():
    before = repr(objects_of("job"))
    downscaled()
    assert repr(objects_of("job")) == before


def test_only_what_is_listed_differs():
    small = downscaled()
    old = {one["kind"]: one for one in objects_of("job").all}
    new = {one["kind"]: one for one in small.objects.all}
    assert {kind for kind in old if old[kind] != new[kind]} == {"Job", "ConfigMap"}
    words = ("nproc-per-node=8", "value: '11'")
    text = yaml.safe_dump(old["Job"])
    assert all(word in text for word in words)
    expected = text.replace("nproc-per-node=8", "nproc-per-node=2").replace("value: '11'", "value: '1'")
    left = yaml.safe_load(expected)
    container = left["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [row for row in container["env"] if row["name"] != "EMBARK_USD_PER_HOUR"]
    assert left == new["Job"]


def test_the_spec_is_one_that_a_cpu_trains_in_a_minute_and_still_a_spec():
    small = downscaled(steps=40)
    assert small.run is not None
    spec = small.run.spec
    assert (spec.place.device, spec.train.num_steps, spec.data.kind) == ("cpu", 40, "synthetic")
    assert spec.train.batch_size == 128
    assert spec.store.checkpoint_every == 4
    assert max(table.rows for table in spec.model.table_list()) <= 1000
    assert small.run.folder == f"{BUCKETS}/s3/training/runs/dlrm"
    assert resolve(spec.model_dump()) == spec
    values = {change.what: change for change in small.changes}
    assert values["store.root"].there == "s3://training/runs"
    assert values["data.path"].there == "/mnt/data/criteo"
    assert values["train.num_steps"].here == "40"


@pytest.mark.parametrize("world_size", [1, 3, 4, 7])
def test_the_batch_divides_over_any_number_of_ranks(world_size):
    assert downscale_spec(RunSpec(), world_size, 10).train.batch_size % world_size == 0


def test_what_a_cpu_cannot_do_is_changed():
    spec = resolve({"train": {"optimizer": "adam", "engine": "cuda_graph", "warm_start": "s3://b/runs/january"}})
    small = downscale_spec(spec, 2, 10)
    assert (small.train.optimizer, small.train.engine, small.train.warm_start) == ("rowwise_adagrad", "auto", "")
    assert not list(small.mistakes())


def test_devices_and_volumes_are_reported_once_for_all_pods():
    small = downscaled()
    changes = list(small.changes)
    pods = downscale_pods(make_workload(small.job, small.objects)[0].pods, changes)
    result = [str(change) for change in changes]
    assert [line for line in result if line.startswith("devices")] == [
        "devices: nvidia.com/gpu: 8, vpc.amazonaws.com/efa: 4, hugepages-2Mi: 5120Mi → none"]
    assert "/mnt/data: claim dlrm-data → a folder of this machine, empty at first" in result
    assert all(pod.mounts[-1].path == BUCKETS for pod in pods)


def test_a_bucket_on_a_command_line_becomes_a_folder_that_all_see():
    text = """
apiVersion: batch/v1
kind: Job
metadata: {name: p}
spec:
  template:
    spec:
      containers:
      - {name: c, image: i, command: [python, t.py, "--out=gs://bucket/a b"], env: [{name: IN, value: "s3://in/x"}]}
"""
    objects = read_texts({"p.yaml": text})
    changes = []
    pod = downscale_pods(make_workload(find_training_job(objects, ""), objects)[0].pods, changes)[0]
    assert pod.command[2] == f"--out={BUCKETS}/gs/bucket/a b"
    assert pod.env["IN"] == f"{BUCKETS}/s3/in/x"
    assert [change.there for change in changes] == ["gs://bucket/a", "s3://in/x"]


def test_a_script_of_the_node_is_there_and_empty():
    text = render_job(job_of("a3-megagpu-8g"))[0].text
    objects = read_texts({"a.yaml": text})
    changes = []
    pod = downscale_pods(make_workload(find_training_job(objects, ""), objects)[0].pods, changes)[0]
    assert pod.command[0] == "/bin/bash"
    script = pod.command[2].split(";")[1].split()[1]
    assert f"{script}: a script of the node → an empty one" in map(str, changes)
    rows = [f"{mount.path}/{name}" for mount in pod.mounts if mount.kind == "host" for name in mount.files]
    assert rows == [script]
    assert any("not started" in str(change) for change in changes)  # the fabric's daemon


def test_the_batch_of_an_elastic_run_divides_over_every_number_of_pods():
    text = render_pytorchjob(job_of("p4d.24xlarge", nodes={"min": 2, "max": 3}))[0].text
    objects = read_texts({"a.yaml": text})
    small = downscale(find_training_job(objects, ""), objects, num_processes=2, num_pods=3, num_steps=30)
    assert small.run.spec.place == objects_spec(objects).place.model_copy(update={"device": "cpu"})
    assert all(small.run.spec.train.batch_size % ranks == 0 for ranks in (4, 6))


def objects_spec(objects: Objects) -> RunSpec:
    return parse_spec(next(one for one in objects.all if one["kind"] == "ConfigMap")["data"]["spec.toml"])


def test_a_run_with_a_budget_is_rehearsed_without_one():
    """The machines' price is left out, and a run whose price is unknown refuses its budget."""
    spec = job_of("p4d.24xlarge", budget_usd=100.0).spec
    assert downscale_spec(spec, 2, 4).place.budget_usd is None
