"""What the pods of every Kubernetes target share: where they may run, what they request, and their environment."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from embark.catalog import load_catalog
from embark.kubernetes.names import CONFIG_CHECKSUM, GKE_ACCELERATOR, INSTANCE_TYPE, SPOT_LABELS, SPOT_TAINTS
from embark.kubernetes.pods import NVIDIA_GPU, TPU
from embark.values import JsonDict
from .command import SPEC_PATH
from .job import PORT, SCRATCH, Job, Setting
from .settings import TOPOLOGY_PATH, fabric_needs, grace_reason, grace_s, settings_of, topology_xml
from .yaml_text import note

CONTAINER = "trainer"
GIVEN = "embark-lint: ignore EMB505, EMB508: the nodes of the cluster that exists offer it"
TPU_PORTS = {"tpu": 8471, "coordinator": 8476}  # Ports at which the hosts' runtimes and JAX's processes meet.


def pod_values(job: Job) -> JsonDict:
    """Return values for `kubernetes/pod.yaml.j2`. GKE's webhook tells each pod of a TPU its index in the slice
    (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES), and each slice its index in a JobSet (MEGASCALE_…); JAX reads these
    itself."""
    ports = {"rendezvous": PORT} if job.num_nodes > 1 else {}
    if job.is_tpu:
        ports = dict(TPU_PORTS) if job.num_pods > 1 else {}
    if job.spec.watch.prometheus_port:
        ports["metrics"] = job.spec.watch.prometheus_port
    return {
        "needs": fabric_needs(job), "env": environment(job), "resources": resources(job), "ports": ports,
        "selector": node_selector(job), "tolerations": tolerations(job), "grace_s": grace_s(job),
        "grace_why": grace_reason(job),
        "spec_folder": SPEC_PATH.rpartition("/")[0], "identity_label": identity_label(job)
    }


def environment(job: Job) -> list[Any]:
    others = ("NCCL_", "TORCH_") if job.is_tpu else ()
    own = [setting for setting in settings_of(job) if not setting.name.startswith(others)]
    home = Setting("HOME", SCRATCH, "caches and local files go to the pod's own disk")
    return env_rows([*own, home, *storage_settings(job)])


def env_rows(settings: Iterable[Setting]) -> list[Any]:
    """Return a container's `env`, with the reason above each variable."""
    return [note({"name": name, "value": value}, why) for name, value, why in settings]


def secret_variable(name: str, secret: str, why: str) -> Any:
    """Return a row of a container's `env` whose value is the `token` of a Secret."""
    return note({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}, why)


def config_checksum(data: Mapping[str, str]) -> dict[str, str]:
    """Return an annotation for pods that read a ConfigMap: other files in it replace the pods."""
    text = json.dumps(data, sort_keys=True)
    return {CONFIG_CHECKSUM: hashlib.sha256(text.encode()).hexdigest()[:16]} if data else {}


def storage_settings(job: Job) -> list[Setting]:
    account = job.place.storage_account
    return [Setting("AZURE_STORAGE_ACCOUNT_NAME", account, "the account of the az:// containers")] if account else []


def identity_label(job: Job, identity: str = "") -> dict[str, str]:
    """Return the label without which AKS gives a pod no token."""
    is_known = identity or job.place.identity or job.place.storage_account
    return {"azure.workload.identity/use": "true"} if job.cloud == "azure" and is_known else {}


def resources(job: Job) -> JsonDict:
    """Requests leave room for what runs on every node; GPUs and fabric devices are asked for by their limits."""
    requests: JsonDict = {}
    limits: JsonDict = {accelerator(job): job.num_processes}
    machine, needs = job.machine, fabric_needs(job)
    if machine.fabric.kubernetes_resource and machine.num_fabric_devices and job.num_nodes > 1:
        is_given = job.place.is_existing and machine.fabric.kubernetes_resource.startswith("rdma/")
        limits[machine.fabric.kubernetes_resource] = note(machine.num_fabric_devices, GIVEN if is_given else (
            f"all of {machine.name}'s; without them NCCL falls back to TCP, in silence"))
    if needs.hugepages_2mi:
        limits["hugepages-2Mi"] = note(needs.hugepages_2mi, needs.why)
    share = job.num_processes / machine.gpus_per_host  # of fewer than all: pods of the others have the rest
    if job.num_cpus is not None:
        total, num_cpus = "?" if machine.vcpus is None else f"{machine.vcpus:g}", max(1, int(share * job.num_cpus))
        requests["cpu"] = note(str(num_cpus), f"of the {total} of {machine.name}, what is left beside the kubelet and "
                                              "the agents on every node")
    if job.memory_gib is not None:
        requests["memory"] = limits["memory"] = f"{max(1, int(share * job.memory_gib))}Gi"
    for name, amount in (text.split("=") for text in job.place.resources):
        if name in ("cpu", "memory"):
            requests[name] = amount
        if name != "cpu":
            limits[name] = note(amount, GIVEN) if name.startswith("rdma/") else amount
    return {"requests": requests, "limits": limits}


def accelerator(job: Job) -> str:
    """Return the resource name of its accelerators."""
    return TPU if job.is_tpu else NVIDIA_GPU


def node_selector(job: Job) -> JsonDict:
    machine, place = job.machine, job.place
    if place.node_selector or machine.name not in load_catalog().machines:
        return dict(label.split("=") for label in place.node_selector)
    selector: JsonDict = {INSTANCE_TYPE: machine.machine_type or machine.name}
    if job.is_tpu:
        selector = {"cloud.google.com/gke-tpu-accelerator": machine.gke_accelerator,
                    "cloud.google.com/gke-tpu-topology": job.topology}
    elif job.cloud == "gcp" and machine.gke_accelerator:
        selector[GKE_ACCELERATOR] = machine.gke_accelerator
    if job.is_spot:
        selector |= dict(SPOT_LABELS[job.cloud][:1])
    if place.zone and job.cloud != "azure":
        selector["topology.kubernetes.io/zone"] = place.zone
    return selector


def tolerations(job: Job) -> list[Any]:
    kind = "TPU" if job.is_tpu else "GPU"
    found: list[Any] = [note({"key": accelerator(job), "operator": "Exists", "effect": "NoSchedule"},
                             f"{kind} nodes are tainted, so that nothing else lands on them")]
    if job.is_spot and job.cloud in SPOT_TAINTS:
        name, value = SPOT_LABELS[job.cloud][0]
        found.append({"key": name, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    for taint in job.place.tolerations:
        label, _, effect = taint.rpartition(":")
        name, has_value, value = label.partition("=")
        found.append({"key": name, **({"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}),
                      "effect": effect})
    return found


def config_data(job: Job) -> dict[str, str]:
    """Return the files that the pod reads under /etc/embark."""
    data = {SPEC_PATH.rpartition("/")[2]: job.spec_toml}
    topology = topology_xml(job)
    return {**data, TOPOLOGY_PATH.rpartition("/")[2]: topology} if topology else data
