"""The Job's pods meet, fit, save in time and fail as the exit codes say."""

from __future__ import annotations

import json
import shlex
import tomllib

import kubernetes_validate
import pytest
import shell_words
import yaml
from render_jobs import MACHINES, documents_of, job_of

from embark.render.job import EXITS
from embark.render.settings import grace_s
from embark.render.targets.kubernetes import render_job
from embark.spec import resolve

VERSION = "1.36"


def objects(job) -> dict[str, dict]:
    (file,) = render_job(job)
    return {document["kind"]: document for document in documents_of(file.text)}


def pod_of(job) -> dict:
    return objects(job)["Job"]["spec"]["template"]["spec"]


def words_of(job, index: str = "0") -> list[str]:
    """The command as the shell of the pod would run it."""
    command = pod_of(job)["containers"][0]["command"]
    if command[1] != "-c":
        return command
    return shell_words.words_of(command[2].partition("exec ")[2], JOB_COMPLETION_INDEX=index)


@pytest.mark.parametrize(("machine", "place"), [
    *((machine, {"spot": True}) for machine in MACHINES), ("p5.48xlarge", {"nodes": 1}), ("a2-highgpu-8g", {}),
    ("Standard_ND96asr_v4", {"queue": "team", "max_hours": 5.0, "volume": "azure-netapp-premium"}),
], ids=str)
def test_the_api_server_s_schemas_take_every_object(machine, place):
    found = objects(job_of(machine, **place))
    assert {"Namespace", "ServiceAccount", "ConfigMap", "Job"} <= set(found)
    for document in found.values():
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_schemas_would_refuse_a_field_that_is_not_there():
    document = objects(job_of("p5.48xlarge"))["Job"]
    document["spec"]["paralelism"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("machine", ["p5.48xlarge", "Standard_ND96asr_v4", "a3-megagpu-8g"])
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_one_number_makes_every_number(machine, nodes):
    job = job_of(machine, nodes=nodes)
    spec = objects(job)["Job"]["spec"]
    assert spec["completions"] == spec["parallelism"] == nodes
    assert spec["backoffLimit"] == 3 * nodes
    assert f"--nnodes={nodes}" in words_of(job)
    assert f"--nproc-per-node={job.num_processes}" in words_of(job)


def test_pods_find_the_first_by_the_headless_service():
    job = job_of("p5.48xlarge")
    found = objects(job)
    service, spec = found["Service"]["spec"], found["Job"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == {"batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["subdomain"] == found["Service"]["metadata"]["name"]
    assert "--rdzv-endpoint=dlrm-0.dlrm:29500" in words_of(job)


@pytest.mark.parametrize(("index", "is_host"), [("0", "true"), ("1", "false"), ("10", "false")])
def test_the_pod_with_index_0_alone_holds_the_store(index, is_host):
    conf = next(word for word in words_of(job_of("p5.48xlarge"), index) if word.startswith("--rdzv-conf"))
    assert f"is_host={is_host}," in conf


def test_torchrun_understands_the_command():
    from torch.distributed.run import config_from_args, parse_args

    words = words_of(job_of("p5.48xlarge"))
    assert words[:3] == ["python", "-m", "embark.torchrun"]
    config, _, arguments = config_from_args(parse_args(words[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 8, 3)
    assert config.rdzv_configs["is_host"] == "true"
    assert list(arguments)[-4:] == ["-m", "embark", "train", "/etc/embark/spec.toml"]


def test_one_node_needs_no_meeting_place():
    job = job_of("p5.48xlarge", nodes=1)
    found = objects(job)
    assert "Service" not in found
    assert "--standalone" in words_of(job)
    assert "affinity" not in pod_of(job)
    assert "vpc.amazonaws.com/efa" not in pod_of(job)["containers"][0]["resources"]["limits"]


def test_the_failure_policy_says_what_the_exit_codes_mean():
    spec = objects(job_of("p5.48xlarge"))["Job"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert {row.code for row in EXITS if not row.must_retry} == {c for c, does in by_code.items() if does == "FailJob"}
    assert by_code[75] == "Ignore"
    assert 70 not in by_code, "a fault counts against backoffLimit"
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert {rule["onExitCodes"]["containerName"] for rule in rules[1:]} == {"trainer"}


@pytest.mark.parametrize(("machine", "resource", "count"), [
    ("p4d.24xlarge", "vpc.amazonaws.com/efa", 4), ("p5.48xlarge", "vpc.amazonaws.com/efa", 32),
    ("p5en.48xlarge", "vpc.amazonaws.com/efa", 16), ("p6-b200.48xlarge", "vpc.amazonaws.com/efa", 8),
    ("Standard_ND96isr_H100_v5", "rdma/ib", 8),
])
def test_fabric_devices_are_asked_for(machine, resource, count):
    container = pod_of(job_of(machine))["containers"][0]
    assert container["resources"]["limits"][resource] == count
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    if resource.endswith("efa"):
        assert container["resources"]["limits"]["hugepages-2Mi"] == "5120Mi"


@pytest.mark.parametrize(("machine", "daemon", "networks"), [
    ("a3-highgpu-8g", "tcpx-daemon", 4), ("a3-megagpu-8g", "tcpxo-daemon", 8), ("a3-ultragpu-8g", "", 8),
    ("a4-highgpu-8g", "", 8), ("a2-highgpu-8g", "", 0),
])
def test_google_s_fabrics_have_their_networks_and_their_daemon(machine, daemon, networks):
    template = objects(job_of(machine))["Job"]["spec"]["template"]
    annotations = template["metadata"].get("annotations", {})
    found = json.loads(annotations.get("networking.gke.io/interfaces", "[]"))
    assert len(found) == (networks + 1 if networks else 0)
    assert len({row["interfaceName"] for row in found}) == len(found)
    sidecars = template["spec"].get("initContainers", [])
    assert [one["name"] for one in sidecars] == ([daemon] if daemon else [])
    assert all(one["restartPolicy"] == "Always" for one in sidecars), "else the Job never ends"
    if daemon:
        devices = yaml.safe_load(annotations[f"devices.gke.io/container.{daemon}"])
        assert {"path": "/dev/nvidia7"} in devices
    names = {volume["name"] for volume in template["spec"]["volumes"]}
    mounted = {mount["name"] for one in (*sidecars, *template["spec"]["containers"]) for mount in one["volumeMounts"]}
    assert mounted == names


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("spot", [True, False])
def test_the_pod_has_the_grace_that_the_ranks_are_reported(machine, spot):
    job = job_of(machine, spot=spot)
    pod = pod_of(job)
    values = {row["name"]: row["value"] for row in pod["containers"][0]["env"]}
    assert pod["terminationGracePeriodSeconds"] == int(values["EMBARK_GRACE_S"]) == grace_s(job)


@pytest.mark.parametrize(("machine", "label", "toleration"), [
    ("p5.48xlarge", ("eks.amazonaws.com/capacityType", "SPOT"), None),
    ("Standard_ND96asr_v4", ("kubernetes.azure.com/scalesetpriority", "spot"), "kubernetes.azure.com/scalesetpriority"),
    ("a2-highgpu-8g", ("cloud.google.com/gke-spot", "true"), "cloud.google.com/gke-spot"),
])
def test_spot_pods_go_to_spot_nodes(machine, label, toleration):
    pod = pod_of(job_of(machine, spot=True))
    assert pod["nodeSelector"][label[0]] == label[1]
    keys = [one["key"] for one in pod["tolerations"]]
    assert keys == ["nvidia.com/gpu", *([toleration] if toleration else [])]
    assert label[0] not in pod_of(job_of(machine))["nodeSelector"]


@pytest.mark.parametrize(("machine", "identity", "annotation"), [
    ("p5.48xlarge", "arn:aws:iam::123456789012:role/train", "eks.amazonaws.com/role-arn"),
    ("Standard_ND96asr_v4", "01234567-89ab-cdef-0123-456789abcdef", "azure.workload.identity/client-id"),
    ("a2-highgpu-8g", "trainer@my-project.iam.gserviceaccount.com", "iam.gke.io/gcp-service-account"),
])
def test_the_service_account_is_who_the_spec_says(machine, identity, annotation):
    found = objects(job_of(machine, identity=identity))
    assert found["ServiceAccount"]["metadata"]["annotations"] == {annotation: identity}
    template = found["Job"]["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    uses = template["metadata"]["labels"].get("azure.workload.identity/use")
    assert uses == ("true" if machine.startswith("Standard") else None)


@pytest.mark.parametrize("machine", ["a3-highgpu-8g", "a3-megagpu-8g"])
def test_only_beside_a_daemon_whose_sockets_are_root_s_the_trainer_is_root(machine):
    assert pod_of(job_of(machine, nodes=2))["securityContext"]["runAsUser"] == 0
    assert pod_of(job_of(machine, nodes=2))["securityContext"]["fsGroup"] == 1000
    assert pod_of(job_of(machine, nodes=1))["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("machine", MACHINES)
def test_the_trainer_is_not_root_and_gains_nothing(machine):
    pod = pod_of(job_of(machine, nodes=1))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    security = pod["containers"][0]["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"]


def test_shared_memory_is_in_memory_and_within_the_limit():
    job = job_of("p5.48xlarge")
    pod = pod_of(job)
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_the_spec_that_travels_is_the_spec():
    job = job_of("p5.48xlarge", data="s3://training/data it's \"quoted\" $(id) é")
    config = objects(job)["ConfigMap"]
    assert resolve(tomllib.loads(config["data"]["spec.toml"])) == job.spec
    assert config["metadata"]["name"] == pod_of(job)["volumes"][0]["configMap"]["name"]


def test_a_volume_of_the_spec_is_mounted():
    pod = pod_of(job_of("p5.48xlarge", volume="fsx-lustre-250", volume_path="/fsx", data="/fsx/criteo"))
    assert {"name": "data", "mountPath": "/fsx"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "dlrm-data"}} in pod["volumes"]


def test_the_command_is_one_shell_line_and_quoted():
    command = pod_of(job_of("p5.48xlarge"))["containers"][0]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    assert len(command) == 3
    assert "$(" in command[2]
    assert shlex.split(command[2].replace("$(", "").replace(")", ""))[0] == "exec"
