"""Azure: the AKS cluster, plain machines, NetApp Files, Managed Lustre and BlobFuse."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embark.render.folder import File
from embark.render.job import Job
from embark.render.location import Bucket, Location, buckets, location_of
from embark.render.scripts import script_file
from embark.render.shell_text import Shell, Step, Words, quote, variable
from embark.render.targets.vm_node import about_machines, cloud_init, find_by_name, refuse_volume
from embark.render.yaml_text import note, yaml_text

IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"
"""Microsoft's image with NVIDIA's driver, InfiniBand's and Docker."""
_GROUP = ("--resource-group", variable("RESOURCE_GROUP"))
NETWORK_OPERATOR_VERSION = "26.4.0"
DOCA_DRIVER_VERSION = "doca3.4.0-26.04-0.8.4.0-0"
GPU_OPERATOR_VERSION = "v26.3.3"
POOL = "gpu"
"""AKS takes at most 12 small letters and digits."""
SPOT_TAINT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot",
              "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
FILLED_BY = "storage.sh substitutes its address."
BUCKET_NEEDS = "It needs az aks update --enable-blob-driver."


def render_vm(job: Job) -> list[File]:
    """`vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    location = location_of(job)
    words = start_words(job, location, ["--generate-ssh-keys", "--custom-data", "cloud_init.yaml"])
    about = about_machines(job) + " A machine that is only shut down is still billed."
    return [
        script_file("vm.sh", "azure/vm.sh.j2", job, about=about, vm_image=IMAGE, steps=network_steps(job, location),
                    start_words=words, grants=grant_words(job), end_words=end_words()),
        cloud_init(job, find_by_name(job)),
    ]


def network_steps(job: Job, location: Location) -> list[Step]:
    """What the machines stand in. All of it is in one resource group, and goes with it."""
    steps = [
        Step("the resource group, with all that is in it",
             (("az", "group", "create", "--name", variable("RESOURCE_GROUP"), "--location", variable("LOCATION")),),
             remove=(end_words(),)),
        Step("", (("az", "network", "vnet", "create", *_GROUP, "--name", "embark", "--subnet-name", "machines"),)),
        Step("", (("az", "network", "nsg", "create", *_GROUP, "--name", "embark"),),
             why="Machines of one network may talk; from outside nothing comes in. The public address is for their way "
                 "out."),
    ]
    if _has_set(job):
        steps += [
            Step("", (("az", "ppg", "create", *_GROUP, "--name", job.name, "--location", variable("LOCATION"),
                       "--intent-vm-sizes", location.machine_type),),
                 why="In one availability set the machines share an InfiniBand fabric; in one proximity group they are "
                     "near."),
            Step("", (("az", "vm", "availability-set", "create", *_GROUP, "--name", job.name, "--ppg", job.name,
                       "--platform-fault-domain-count", "1", "--platform-update-domain-count", "1"),)),
        ]
    return steps


def start_words(job: Job, location: Location, given: Sequence[str]) -> Words:
    """One machine, number `$rank`. `given` says who may log in and what it does at its first start."""
    words: list[str] = [
        "az", "vm", "create", *_GROUP, "--name", Shell(f'"{job.name}-$rank"'), "--size", location.machine_type,
        "--image", variable("VM_IMAGE"), "--admin-username", "embark", *given,
        "--os-disk-size-gb", "256", "--assign-identity", "[system]",
        "--vnet-name", "embark", "--subnet", "machines", "--nsg", "embark", "--public-ip-sku", "Standard",
        "--tags", f"embark-run={job.name}",
    ]
    if _has_set(job):
        words += ["--availability-set", job.name, "--ppg", job.name]
    if job.spec.place.spot:
        words += ["--priority", "Spot", "--eviction-policy", "Delete", "--max-price=-1"]
    return tuple(words)


@dataclass(frozen=True, slots=True)
class Grants:
    """Roles of a machine's own identity, `$principal`, in the storage account, `$account`."""

    principal: Words
    account: Words
    grants: tuple[Words, ...]


def grant_words(job: Job) -> Grants:
    """The machine's own identity may use the run's containers."""
    grants = []
    for bucket in buckets(job):
        if bucket.scheme != "az":
            continue
        role = "Storage Blob Data Contributor" if bucket.is_written else "Storage Blob Data Reader"
        grants.append(("az", "role", "assignment", "create", "--role", role, "--assignee-object-id",
                       Shell('"$principal"'), "--assignee-principal-type", "ServicePrincipal", "--scope",
                       Shell(f'"$account"/blobServices/default/containers/{quote(bucket.name)}')))
    return Grants(
        principal=("az", "vm", "show", *_GROUP, "--name", Shell(f'"{job.name}-$rank"'),
                   "--query", "identity.principalId", "--output", "tsv"),
        account=("az", "storage", "account", "show", "--name", variable("STORAGE_ACCOUNT"),
                 "--query", "id", "--output", "tsv"),
        grants=tuple(grants))


def end_words() -> Words:
    return ("az", "group", "delete", "--name", variable("RESOURCE_GROUP"), "--yes")


def _has_set(job: Job) -> bool:
    return job.num_nodes > 1 and not job.spec.place.spot


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


def capacity_gib(job: Job, least_gib: int) -> int:
    return least_gib


def volume_source(job: Job) -> dict[str, Any]:
    if "lustre" in job.spec.place.volume:
        return {"mountOptions": ["noatime", "flock"],
                "csi": {"driver": "azurelustre.csi.azure.com", "volumeHandle": "lustre#10.225.0.4#lustrefs",
                        "volumeAttributes": {"mgs-ip-address": "10.225.0.4", "fs-name": "lustrefs"}}}
    # Several connections: one alone carries a fraction of what the volume can.
    return {"mountOptions": ["vers=3", "nconnect=8", "rsize=262144", "wsize=262144", "hard"],
            "nfs": {"server": "10.225.0.4", "path": "/data"}}


def bucket_source(job: Job, bucket: Bucket) -> dict[str, Any]:
    account = job.spec.place.storage_account
    return {"mountOptions": ["-o allow_other", "--use-attr-cache=true", "--cancel-list-on-mount-seconds=10"],
            "csi": {"driver": "blob.csi.azure.com", "volumeHandle": f"{account}_{bucket.name}", "readOnly": True,
                    "volumeAttributes": {"storageAccount": account, "containerName": bucket.name,
                                         "protocol": "fuse2", "AzureStorageAuthType": "msi"}}}


def script_values(job: Job) -> dict[str, Any]:
    return {"level": job.spec.place.volume.rpartition("-")[2].capitalize()}
