"""One spec, three clouds, every target: valid, clean, and different only where the clouds are."""

from __future__ import annotations

import ast
import datetime
import shlex
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_jobs import documents_of, job_of

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.lint.read import kind_of
from embark.render.job import make_job
from embark.render.render import TARGETS as ALL_TARGETS
from embark.render.render import own_files, render
from embark.render.serving import ENDPOINTS, SERVE_TARGETS
from embark.render.targets.vm_node import node_program
from embark.render.wheel import wheel_name
from embark.spec import load_spec, resolve

TARGETS = {name: one for name, one in ALL_TARGETS.items() if name != "follow"}  # which has a file of its own
CLOUDS = {"aws": ("p5.48xlarge", "g5.12xlarge"), "azure": ("Standard_ND96isr_H100_v5",),
          "gcp": ("a2-highgpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g")}
MACHINES = [machine for machines in CLOUDS.values() for machine in machines]
BUILT_IN = ("Namespace", "ServiceAccount", "ConfigMap", "Service", "Job")
ELSEWHERE = {"EMB505"}
"""Findings that another file of the cluster answers."""


RENDERED_ON = datetime.date(2026, 11, 18)  # The support of no version in the files ends soon after.
IDENTITY = "arn:aws:iam::123456789012:role/server"


def place_of(target: str, machine: str, **place) -> dict:
    if target == "vertex" or ENDPOINTS.get(target) == "gcp":
        place["account"] = "my-project"
    if target == "sagemaker":
        place["identity"] = IDENTITY
    return {"target": target, **place}


def fits(target: str, machine: str) -> bool:
    if target == "vertex":
        return machine.startswith(("a2", "a3"))
    if target in ENDPOINTS:
        return machine == {"aws": "p5.48xlarge", "azure": "Standard_ND96isr_H100_v5", "gcp": "a3-megagpu-8g"}[
            ENDPOINTS[target]]
    return target == "job" or machine in ("p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g")


PAIRS = [(target, machine) for target in TARGETS for machine in MACHINES if fits(target, machine)]
PAIR = dict(PAIRS)
"""One machine a target."""


def documents(files) -> list[dict]:
    texts = [file.text for file in files if file.path.endswith(".yaml") and file.path != "vertex_job.yaml"]
    return [document for text in texts for document in documents_of(text)]


@pytest.mark.parametrize(("target", "machine"), [pair for pair in PAIRS if pair[0] not in ENDPOINTS])
def test_every_built_in_object_fits_its_schema(target, machine):
    job = job_of(machine, **place_of(target, machine, spot=True, queue="team", max_hours=2.0))
    found = documents(own_files(job))
    assert found or target in ("torchx", "vertex", "slurm")
    for document in found:
        if document["kind"] in BUILT_IN and document["kind"] != "Job":  # which has its own test
            kubernetes_validate.validate(document, "1.36", strict=True)


@pytest.mark.parametrize(("target", "machine", "nodes"), [
    *((target, machine, 2) for target, machine in PAIRS), *((target, PAIR[target], 1) for target in TARGETS)])
def test_every_file_is_clean(target, machine, nodes):
    job = job_of(machine, **place_of(target, machine, nodes=nodes, spot=True, queue="team"))
    kinds = (".yaml", ".sh", ".py", "Dockerfile")
    found = lint_texts({file.path: file.text for file in own_files(job) if file.path.endswith(kinds)})
    assert not [f"{one.code} {one.path}: {one.what}" for one in found if one.code not in ELSEWHERE]


@pytest.mark.parametrize("target", [*TARGETS, "vm"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_cloud_is_one_setting_and_all_that_is_written_for_it_is_clean(cloud, target):
    if cloud != ENDPOINTS.get(target, "gcp" if target == "vertex" else cloud):
        return
    root = {"aws": "s3://b/runs", "azure": "az://c/runs", "gcp": "gs://b/runs"}[cloud]
    sets = [f"place.cloud={cloud}", f"place.target={target}", f"store.root={root}", "place.storage_account=account1",
            "place.account=my-project", "place.nodes=2",
            *([f"place.identity={IDENTITY}"] if target == "sagemaker" else [])]
    files = render(make_job(load_spec("quickstart", sets), load_catalog()))
    texts = {file.path: file.text for file in files if kind_of(Path(file.path), file.text[:200].encode())}
    assert [f"{one.code} {one.path}: {one.what}" for one in lint_texts(texts, RENDERED_ON)] == []
    assert target == "vm" or {"Dockerfile", ".dockerignore", "entrypoint.sh"} <= {file.path for file in files}


def test_clouds_differ_only_where_they_do():
    """With the words of each cloud taken out, the three Jobs say the same."""
    messages = []
    for machine in ("p4d.24xlarge", "Standard_NC96ads_A100_v4", "a2-highgpu-8g"):
        job = documents(TARGETS["job"](job_of(machine, root="s3://b/r", storage_account="")))[-1]
        del job["metadata"]["annotations"]["embark/spec"]
        pod = job["spec"]["template"]["spec"]
        container = pod["containers"][0]
        for key in ("nodeSelector", "tolerations"):
            del pod[key]
        for key in ("resources", "securityContext", "env"):
            del container[key]
        container["command"] = [word.replace("per-node=4", "per-node=8") for word in container["command"]]
        for volume in pod["volumes"]:
            volume.get("emptyDir", {}).pop("sizeLimit", None)
        messages.append(job)
    assert messages[0] == messages[1] == messages[2]


@pytest.mark.parametrize("target", [t for t in TARGETS if t not in SERVE_TARGETS])
def test_another_number_of_nodes_changes_every_file_that_counts(target):
    def texts(nodes: int) -> dict[str, str]:
        job = job_of("a3-megagpu-8g", **place_of(target, "a3-megagpu-8g", nodes=nodes, queue="team"))
        return {file.path: file.text for file in own_files(job)}

    two, five = texts(2), texts(5)
    changed = {path for path in two if two[path] != five[path]}
    still = {"Dockerfile", ".dockerignore", "entrypoint.sh", "dist/README.md", f"dist/{wheel_name()}", "vertex_job.sh"}
    assert changed >= set(two) - still
    assert "--nnodes=2" not in "".join(five.values())


def test_the_numbers_of_each_target():
    assert _at("jobset", "spec", "replicatedJobs", 0, "template", "spec")["parallelism"] == 5
    assert _at("trainjob", "spec", "trainer")["numNodes"] == 5
    assert _at("trainjob", "spec", "trainer")["numProcPerNode"] == 8
    pytorch = _at("pytorchjob", "spec")
    assert pytorch["nprocPerNode"] == "8"
    assert pytorch["elasticPolicy"]["minReplicas"] == pytorch["elasticPolicy"]["maxReplicas"] == 5
    worker = pytorch["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 5
    assert [container["name"] for container in worker["template"]["spec"]["containers"]] == ["pytorch"]
    workers = _at("ray", "spec", "workerGroupSpecs", 0)
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 5


def _at(target: str, *path):
    found = documents(TARGETS[target](job_of("p5.48xlarge", nodes=5, target=target)))[-1]
    for key in path:
        found = found[key]
    return found


def test_a_jobset_starts_all_again_and_tells_wrong_from_preempted():
    jobset = documents(TARGETS["jobset"](job_of("p5.48xlarge", target="jobset")))[-1]["spec"]
    rules = {rule["name"]: rule for rule in jobset["failurePolicy"]["rules"]}
    message = "Container trainer for pod embark/dlrm-node-0-1 failed with exit code {} matching FailJob rule at index 1"
    pattern = rules["wrong"]["onJobFailureMessagePatterns"][0]
    assert pattern in message.format(64)
    assert pattern not in message.format(75)
    assert rules["preempted"]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    child = jobset["replicatedJobs"][0]["template"]["spec"]
    assert child["backoffLimit"] == 0
    command = child["template"]["spec"]["containers"][0]["command"][2]
    assert f"--rdzv-endpoint=dlrm-node-0-0.{jobset['network']['subdomain']}:29500" in command


@pytest.mark.parametrize("machine", ["p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g"])
def test_the_queue_covers_all_that_the_pods_ask_for(machine):
    described = job_of(machine, queue="team", spot=True)
    files = own_files(described)
    job = next(d for d in documents(files) if d["kind"] == "Job")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == f"team-{described.location.pool}"
    queue = next(d for d in documents(files) if d["kind"] == "ClusterQueue")["spec"]["resourceGroups"][0]
    pod = job["spec"]["template"]["spec"]
    requests = {name for one in (*pod.get("initContainers", []), *pod["containers"])
             for kind in ("requests", "limits") for name in one["resources"][kind]}
    assert set(queue["coveredResources"]) == requests
    quota = {row["name"]: row["nominalQuota"] for row in queue["flavors"][0]["resources"]}
    assert quota["nvidia.com/gpu"] == 16
    flavor = next(d for d in documents(files) if d["kind"] == "ResourceFlavor")
    assert flavor["spec"]["nodeLabels"] == pod["nodeSelector"]


HOSTILE = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=60) | st.sampled_from([
    "$(touch x)", "`id`", "'; id #", '" && id', "a\nb: c", "!!python/object:os.system", "{{x}}", "${HOME}", "x" * 300,
    "*", "&a", "%s", "\\", "é ü", "a b/c d", "--set", "'''", '"""', "\u2028", "- x", "]]>", "$$", "EOF",
])


@given(name=HOSTILE, label=HOSTILE, root=HOSTILE, table=HOSTILE, target=st.sampled_from(sorted(TARGETS)))
@settings(max_examples=30)
def test_hostile_words_are_refused_or_quoted(name, label, root, table, target):
    raw = {
        "name": name, "data": {"label": label},
        "model": {"tables": [{"name": table or "t", "rows": 10}]},
        "train": {"batch_size": 64},
        "place": {"machine": "a3-megagpu-8g", "target": target, "account": "my-project", "nodes": 2},
        "store": {"root": f"gs://bucket/{root}"},
    }
    try:
        job = make_job(resolve(raw), load_catalog())
    except SpecError:
        raw["name"] = "safe"  # a hostile name is always refused; the other words may not be
        try:
            job = make_job(resolve(raw), load_catalog())
        except SpecError:
            return
    files = own_files(job)
    assert files
    assert [file.path for file in files if not _reads_back(file, job)] == []


def _reads_back(file, job) -> bool:
    """Return whether a file is what its ending says, runs nothing of the words and holds the spec unchanged."""
    if file.path.endswith(".yaml"):
        configs = [document["data"] for document in documents_of(file.text)
                   if document.get("kind") == "ConfigMap" and document.get("data")]
        return all(resolve(tomllib.loads(config["spec.toml"])) == job.spec for config in configs)
    if file.path.endswith(".py"):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.text)) if isinstance(node, ast.Call)}
        return not calls & {"exec", "eval", "os.system", "__import__"}
    if file.path.endswith(".sh"):
        return bool(shlex.split(file.text, comments=True))
    return file.path != "spec.toml" or resolve(tomllib.loads(file.text)) == job.spec


ELASTIC = {"min": 2, "max": 4}


@pytest.mark.parametrize("machine", ["p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g"])
@pytest.mark.parametrize("target", ["job", "pytorchjob", "vm"])
def test_an_elastic_run_has_the_most_machines_and_meets_with_the_fewest(target, machine):
    files = {file.path: file.text for file in own_files(job_of(machine, target=target, nodes=ELASTIC))}
    warnings = [one.what for one in lint_texts({path: text for path, text in files.items() if path.endswith(".yaml")})
                if one.code not in ELSEWHERE and one.level == "error"]
    assert warnings == []
    objects = {document["kind"]: document for document in documents(own_files(job_of(machine, target=target,
                                                                                     nodes=ELASTIC)))}
    if target == "job":
        spec = objects["Job"]["spec"]
        kubernetes_validate.validate(objects["Job"], "1.36", strict=True)
        assert (spec["parallelism"], spec["completions"]) == (4, 4)
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        assert "--nnodes=2:4 --nproc-per-node=8 --max-restarts=40" in " ".join(
            spec["template"]["spec"]["containers"][0]["command"])
    elif target == "pytorchjob":
        spec = objects["PyTorchJob"]["spec"]
        assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 4
        policy = spec["elasticPolicy"]
        assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 40)
        assert "metrics" not in policy  # with metrics the operator would make an autoscaler
        assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    else:
        program = node_program(job_of(machine, target=target, nodes=ELASTIC), "RANK=0\n")
        assert {"--nnodes=2:4", "--nproc-per-node=8", "--max-restarts=40"} <= set(program.split())


def test_the_linter_knows_a_range_that_the_spec_has():
    text = next(file.text for file in own_files(job_of("p5.48xlarge", target="pytorchjob", nodes=ELASTIC))
                if file.path == "pytorchjob.yaml")
    assert "EMB205" not in {one.code for one in lint_texts({"a.yaml": text})}
    assert "EMB205" in {one.code for one in lint_texts({"a.yaml": text.replace("minReplicas: 2", "minReplicas: 1")})}
