"""An AKS cluster: the `az` commands that make it, and the objects that give its pods InfiniBand."""

import json
from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.scripts import script_file
from embark.render.yaml_text import note, yaml_text

NETWORK_OPERATOR_VERSION = "26.4.0"
DOCA_DRIVER_VERSION = "doca3.4.0-26.04-0.8.4.0-0"
GPU_OPERATOR_VERSION = "v26.3.3"
POOL = "gpu"
"""AKS takes at most 12 small letters and digits."""
SPOT_TAINT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot",
              "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def render_aks(job: Job) -> list[File]:
    """`aks_cluster.sh` makes the cluster; `aks_cluster.yaml` and the two values files are what it applies."""
    location = location_of(job)
    about = (f"What an AKS cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: aks_cluster.sh runs them and applies this.")
    files = [
        File("aks_cluster.yaml", yaml_text(cluster_objects(job), about=about)),
        script_file("aks_cluster.sh", "azure/cluster.sh.j2", job, pool=pool_name(job),
                    network_operator_version=NETWORK_OPERATOR_VERSION, gpu_operator_version=GPU_OPERATOR_VERSION),
        File("gpu_operator_values.yaml", yaml_text([gpu_operator_values(job)],
             about="Helm values of NVIDIA's GPU operator: driver, device plugin and metrics.")),
    ]
    if location.has_fabric:
        files.append(File("network_operator_values.yaml", yaml_text([network_operator_values(job)],
                          about="Helm values of NVIDIA's network operator, which installs the InfiniBand driver.")))
    return files


def pool_name(job: Job) -> str:
    return f"{POOL}spot" if job.spec.place.spot else POOL


def cluster_objects(job: Job) -> list[dict[str, Any]]:
    """Everything declarative: who may use the cluster's GPUs for what, and InfiniBand where the machine has it."""
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace}},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "embark-training"},
         "value": 1000, "globalDefault": False, "preemptionPolicy": "Never",
         "description": "Training runs: before what has no priority, and never at the cost of what runs."},
    ]
    if location_of(job).has_fabric:
        objects.append(_nic_cluster_policy(job))
    return objects


def gpu_operator_values(job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {
        "driver": {"enabled": note(True, "The pool is made with --gpu-driver None, so this is the only driver.")},
        "daemonsets": {"tolerations": _tolerations(job)},
        "dcgmExporter": {"enabled": True},
        "migManager": {"enabled": False},
        "vgpuDeviceManager": {"enabled": False},
        "vfioManager": {"enabled": False},
        "sandboxDevicePlugin": {"enabled": False},
    }
    if location_of(job).has_fabric:
        values["nfd"] = {"enabled": note(False, "The network operator brings it.")}
        values["driver"]["rdma"] = note({"enabled": True}, "GPUDirect RDMA: NCCL moves memory from GPU to network card "
                                        "without the processor.")
    else:
        values["node-feature-discovery"] = {"worker": {"tolerations": _tolerations(job)}}
    return values


def network_operator_values(job: Job) -> dict[str, Any]:
    not_system = {"key": "kubernetes.azure.com/mode", "operator": "NotIn", "values": ["system"]}
    return {
        "nfd": {"enabled": True},
        "deployCR": note(False, "The policy is in aks_cluster.yaml."),
        "node-feature-discovery": {"worker": {
            "tolerations": _tolerations(job),
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [not_system]}]}}},
        }},
    }


def _nic_cluster_policy(job: Job) -> dict[str, Any]:
    has_nic = {"key": "feature.node.kubernetes.io/pci-15b3.present", "operator": "In", "values": ["true"]}
    resource = job.machine.fabric.kubernetes_resource
    prefix, _, name = resource.partition("/")
    config = {"resourceList": [{"resourcePrefix": prefix, "resourceName": name, "selectors": {
        "vendors": ["15b3"], "linkTypes": ["infiniband"], "isRdma": True}}]}
    return {
        "apiVersion": "mellanox.com/v1alpha1",
        "kind": "NicClusterPolicy",
        "metadata": {"name": note("nic-cluster-policy", "The operator reads the one of this name.")},
        "spec": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [has_nic]}]}},
            "tolerations": _tolerations(job),
            "ofedDriver": {
                "repository": "nvcr.io/nvidia/mellanox",
                "image": "doca-driver",
                "version": note(DOCA_DRIVER_VERSION, "Of the network operator's release; see its platform support page "
                                "when you change one of them."),
                "startupProbe": {"initialDelaySeconds": 10, "periodSeconds": 20},
                "livenessProbe": {"initialDelaySeconds": 30, "periodSeconds": 30},
                "readinessProbe": {"initialDelaySeconds": 10, "periodSeconds": 30},
                "upgradePolicy": {"autoUpgrade": note(False, "An upgrade drains the machine under a run.")},
            },
            "sriovDevicePlugin": {
                "repository": "nvcr.io/nvidia/mellanox",
                "image": "sriov-network-device-plugin",
                "version": f"network-operator-v{NETWORK_OPERATOR_VERSION}",
                "config": note(json.dumps(config, indent=2) + "\n",
                               f"Pods ask for {resource}: {job.machine.num_fabric_devices} on each machine."),
            },
        },
    }


def _tolerations(job: Job) -> list[dict[str, str]]:
    return [GPU_TAINT, SPOT_TAINT] if job.spec.place.spot else [GPU_TAINT]
