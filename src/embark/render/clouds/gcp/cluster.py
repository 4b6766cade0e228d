"""A GKE cluster: the `gcloud` commands that make it, and the objects that give its pods the fast networks."""

from dataclasses import dataclass
from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.scripts import script_file
from embark.render.targets import tpu_gke
from embark.render.yaml_text import yaml_text

LOCAL_SSD_GB = 375 * 1.073741824
"""Google sells them by 375 GiB; the catalog counts in GB."""
INSTALLERS = "https://raw.githubusercontent.com/GoogleCloudPlatform/container-engine-accelerators/master"
INSTALLER_OF = {
    "gpudirect-tcpx": ["gpudirect-tcpx/nccl-tcpx-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-tcpxo": ["gpudirect-tcpxo/nccl-tcpxo-installer.yaml", "nri_device_injector/nri-device-injector.yaml"],
    "gpudirect-rdma": ["gpudirect-rdma/nccl-rdma-installer.yaml"],
}


@dataclass(frozen=True, slots=True)
class ExtraNetwork:
    """A network card of the machine, and the network it is on."""

    name: str
    """The Kubernetes object's, which pods name in an annotation."""
    network: str
    subnet: str
    range: str
    device_mode: str
    """`NetDevice`, or `RDMA`."""


def render_gke(job: Job) -> list[File]:
    """`gke_cluster.sh` makes networks, cluster and node pool; `gke_cluster.yaml` is what it then applies."""
    machine, place, is_tpu = job.machine, job.spec.place, job.is_tpu
    addons = ["GcsFuseCsiDriver"]
    if place.volume:
        addons.append("GcpFilestoreCsiDriver" if place.volume.startswith("filestore") else "LustreCsiDriver")
    is_compact = (machine.num_hosts > 1 if is_tpu
                  else job.num_nodes > 1 and machine.fabric.name in ("gvnic", "gpudirect-tcpx"))
    about = (f"What a GKE cluster with {job.num_nodes} x {job.machine.name} is given once it stands. The cluster "
             "itself is made by commands, not by a file: gke_cluster.sh runs them and applies this.")
    return [
        File("gke_cluster.yaml", yaml_text(cluster_objects(job), about=about)),
        script_file(
            "gke_cluster.sh", "gcp/cluster.sh.j2", job, networks=extra_networks(job), pools=pool_names(job),
            mtu=8896 if job.machine.fabric.name == "gpudirect-rdma" else 8244, addons=",".join(addons),
            num_disks=round((machine.local_disk_gb or 0) / LOCAL_SSD_GB), is_tpu=is_tpu, is_compact=is_compact,
            is_flex_start=not machine.is_on_demand and not place.spot and "flex-start" in machine.sold,
            nodes_per_pool=tpu_gke.nodes_per_pool(job), topology=job.topology,
            installers=[f"{INSTALLERS}/{path}" for path in INSTALLER_OF.get(machine.fabric.name, [])]),
    ]


def extra_networks(job: Job) -> list[ExtraNetwork]:
    """Of the fabric: one network for each card of TCPX and TCPXO; for RDMA a second ordinary one, and one with a
    subnet for each card."""
    fabric, num = job.machine.fabric.name, job.machine.num_fabric_devices or 0
    prefix = location_of(job).cluster
    if fabric in ("gpudirect-tcpx", "gpudirect-tcpxo"):
        return [ExtraNetwork(f"vpc{i}", f"{prefix}-net-{i}", f"{prefix}-sub-{i}", f"192.168.{i}.0/24", "NetDevice")
                for i in range(1, num + 1)]
    if fabric == "gpudirect-rdma":
        ordinary = ExtraNetwork("gvnic-1", f"{prefix}-gvnic-net", f"{prefix}-gvnic-sub", "192.168.0.0/24", "NetDevice")
        cards = [ExtraNetwork(f"rdma-{i}", f"{prefix}-rdma-net", f"{prefix}-rdma-sub-{i}", f"192.168.{i + 1}.0/24",
                              "RDMA") for i in range(num)]
        return [ordinary, *cards]
    return []


def cluster_objects(job: Job) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace}},
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "embark-training"},
         "value": 1000, "globalDefault": False, "preemptionPolicy": "Never",
         "description": "Training runs: before what has no priority, and never at the cost of what runs."},
    ]
    for extra in extra_networks(job):
        objects.append({
            "apiVersion": "networking.gke.io/v1", "kind": "GKENetworkParamSet", "metadata": {"name": extra.name},
            "spec": {"vpc": extra.network, "vpcSubnet": extra.subnet, "deviceMode": extra.device_mode}})
        objects.append({
            "apiVersion": "networking.gke.io/v1", "kind": "Network", "metadata": {"name": extra.name},
            "spec": {"type": "Device", "parametersRef": {
                "group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": extra.name}}})
    return objects


def pool_names(job: Job) -> list[str]:
    """Of the run's machines."""
    pool = location_of(job).pool
    return tpu_gke.pool_names(job, pool) if job.is_tpu else [pool]
