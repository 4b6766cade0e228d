"""GKE: clusters and node pools."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from cloudsim.gcp.compute import check_name, check_quota, gpu_need, network_of
from cloudsim.gcp.gke_cloud import GkeCloud
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.kubernetes.admission import install
from cloudsim.kubernetes.cloud import NodePool
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.kinds import releases
from cloudsim.kubernetes.validation import label_error
from cloudsim.kubernetes.volumes import add_storage_class
from cloudsim.state import Key, Resource
from embark.catalog import load_catalog
from embark.values import JsonDict

MAX_CLUSTER_NAME = 40
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TPU_TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}


def allocatable(project: Project, machine_type: str, disk_gib: float) -> dict[str, str]:
    """Return what a node leaves to pods, without devices."""
    vcpus, gib = project.size(machine_type) or (0.0, 0.0)
    reserve = next(one.reserve for one in load_catalog().machines.values() if one.cloud == "gcp")
    cpu_m = reserve.allocatable_vcpus(vcpus) * 1000 - facts()["system_pods"]["cpu_m"]
    disk = facts()["disk"]
    reserved_gib = min(disk["reserved_gib"] + disk["reserved_share"] * disk_gib, disk_gib / 2, disk["max_reserved_gib"])
    return {"cpu": f"{int(cpu_m)}m", "memory": f"{int(reserve.allocatable_gib(gib) * 1024)}Mi", "pods": "110",
            "ephemeral-storage": f"{int((disk_gib * disk['share'] * 0.9 - reserved_gib) * 1024)}Mi"}


def _error(command: Invocation, code: int, text: str) -> NoReturn:
    command.fail(f"ResponseError: code={code}, message={text}")


def _find(project: Project, command: Invocation, name: str) -> Resource:
    location = command.location("--location", "--region", "--zone")
    found = project.resources.find("cluster", f"{location}/{name}")
    if found is None:
        _error(command, 404, f"Not found: {project.path}/locations/{location}/clusters/{name}.")
    return found


def _zones(project: Project, command: Invocation, location: str) -> list[str]:
    zones = command.words("--node-locations")
    if not zones and project.is_zone(location):
        zones = [location]
    zones = zones or [f"{location}-{letter}" for letter in facts()["zones"][location][:3]]
    for zone in zones:
        if not project.is_zone(zone):
            _error(command, 400, f'Location "{zone}" does not exist.')
        if zone.rpartition("-")[0] != (location if not project.is_zone(location) else location.rpartition("-")[0]):
            _error(command, 400, f"node_locations {zone} is not in the cluster's region {location}.")
    return zones


def _create_cluster(project: Project, command: Invocation) -> None:
    location, name = command.location("--location", "--region", "--zone"), command.name()
    if location not in facts()["zones"] and not project.is_zone(location):
        _error(command, 400, f'Location "{location}" does not exist.')
    check_name(command, name)
    if len(name) > MAX_CLUSTER_NAME:
        _error(command, 400, f"Invalid value for field \"cluster.name\": \"{name}\": must be at most "
                             f"{MAX_CLUSTER_NAME} characters.")
    for word in command.words("--monitoring"):
        if word not in facts()["monitoring"]["components"]:
            command.fail(f"argument --monitoring: [{word}] is not one of "
                         f"{', '.join(facts()['monitoring']['components'])}", 2)
    if project.resources.find("cluster", f"{location}/{name}"):
        _error(command, 409, f"Already exists: {project.path}/locations/{location}/clusters/{name}.")
    network = network_of(project, command, command.text("--network", "default"))
    workload_pool = command.text("--workload-pool")
    if workload_pool and workload_pool != f"{project.id}.svc.id.goog":
        _error(command, 400, f"Workload pool {workload_pool} is not {project.id}.svc.id.goog.")
    addons = command.words("--addons")
    for addon in addons:
        if addon not in facts()["addons"]["names"]:
            command.fail(f"argument --addons: unknown addon [{addon}]", 2)
    machine_type = command.text("--machine-type", "e2-medium")
    zones = _zones(project, command, location)
    for zone in zones:
        if not project.is_sold(machine_type, zone):
            _error(command, 400, f"Machine type {machine_type} is not available in zone {zone}.")
    if command.has("--enable-multi-networking") and not (command.has("--enable-dataplane-v2") and
                                                         command.has("--enable-ip-alias")):
        _error(command, 400, "Multi-networking needs --enable-dataplane-v2 and --enable-ip-alias.")
    made = project.resources.add(
        "cluster", f"{location}/{name}", location=location, uses={network.key}, is_paid=True, network=network.name,
        workload_pool=workload_pool, has_networks=command.has("--enable-multi-networking"),
        has_prometheus=command.has("--enable-managed-prometheus"), takes_s=facts()["takes_s"]["cluster"])
    if workload_pool:
        project.resources.add("identity pool", workload_pool)
    cluster = Cluster(name, GkeCloud(project, made), project.account.clock, project.account.folder / "clusters" / name)
    for addon in [*addons, "GcePersistentDiskCsiDriver"]:
        driver = facts()["addons"]["drivers"].get(addon)
        if driver:
            cluster.add_csi_driver(driver)
    for name in ("standard-rwo", "premium-rwo", "standard"):
        add_storage_class(cluster, name, "pd.csi.storage.gke.io", is_default=name == "standard-rwo")
    cluster.tolerates_extended_resources = True
    cluster.has_autoscaler = not addons or "HorizontalPodAutoscaling" in addons  # --addons disables all others.
    for release in releases():
        if command.has(facts()["own_releases"].get(release.name, "")):
            install(cluster, release, "kube-system")
    project.account.clusters[made.name] = cluster
    _add_pool(project, command, made, "default-pool", machine_type, zones, {})
    project.account.clock.advance(facts()["takes_s"]["cluster"])
    project.account.context = made.name  # gcloud writes the credentials by itself.


def _add_pool(project: Project, command: Invocation, cluster: Resource, name: str, machine_type: str,
              zones: list[str], labels: Mapping[str, str], **more: Any) -> None:
    taints = tuple(more.pop("taints", ()))
    for key, value in labels.items():
        if why := label_error(key, value):
            _error(command, 400, f"Invalid node label: {why}")
    disk_gib = float(command.text("--disk-size", str(facts()["disk"]["gib"])).upper().rstrip("GBI"))
    resources = {**allocatable(project, machine_type, disk_gib), **more.pop("devices", {})}
    uses: set[Key] = {cluster.key, *more.pop("networks", ())}
    count, max_nodes = int(command.text("--num-nodes", "3")), more.pop("max_nodes", 0)
    metrics = more.pop("metrics", {})
    short = check_quota(project, metrics, cluster.location, count * len(zones))
    if short:
        _error(command, 403, f"Insufficient regional quota to satisfy request: {short}")
    account = command.text("--service-account") or project.compute_account
    made = project.resources.add(
        "node pool", f"{cluster.name}/{name}", location=zones[0], uses=uses, pool=name, zones=zones, metrics=metrics,
        machine_type=machine_type, service_account=account, max_nodes=max_nodes,
        has_metadata_server=command.text("--workload-metadata", "GKE_METADATA") == "GKE_METADATA",
        quota={metric: each * count for metric, each in metrics.items()}, is_paid=count > 0)
    kube = project.account.clusters[cluster.name]
    for zone in zones:  # --num-nodes is the count of each zone.
        pool = NodePool(name if len(zones) == 1 else f"{name}-{zone[-1]}", machine_type, zone, count, resources,
                        {"cloud.google.com/gke-nodepool": name, **labels}, taints, max_nodes)
        kube.add_pool(pool)
    made.attributes["names"] = [name] if len(zones) == 1 else [f"{name}-{zone[-1]}" for zone in zones]


def _create_pool(project: Project, command: Invocation) -> None:
    cluster, name = _find(project, command, command.text("--cluster")), command.name()
    check_name(command, name)
    if project.resources.find("node pool", f"{cluster.name}/{name}"):
        _error(command, 409, f"Already exists: {project.path}/locations/{cluster.location}/clusters/"
                                      f"{cluster.name.partition('/')[2]}/nodePools/{name}.")
    machine_type, zones = command.text("--machine-type", "e2-medium"), _zones(project, command, cluster.location)
    for zone in zones:
        if not project.is_sold(machine_type, zone):
            _error(command, 400, f"Machine type {machine_type} is not available in zone {zone}.")
    labels = {key: value for pair in command.pairs("--node-labels") for key, value in pair.items()}
    if command.has("--spot"):
        labels["cloud.google.com/gke-spot"] = "true"
    more: JsonDict = {**_devices(project, command, machine_type, labels),
                            "networks": _networks(project, command, cluster)}
    if command.has("--enable-autoscaling"):
        most = command.text("--total-max-nodes") or command.text("--max-nodes") or "0"
        more["max_nodes"] = int(most)
        if int(most) < int(command.text("--num-nodes", "3")):
            _error(command, 400, f"maximum number of nodes {most} is smaller than the initial size.")
    if command.text("--placement-type") == "COMPACT" and machine_type in facts()["machines"]:
        _error(command, 400, f"Machine type {machine_type} does not support compact placement.")
    _add_pool(project, command, cluster, name, machine_type, zones, labels, **more)
    if not command.has("--async"):
        project.account.clock.advance(facts()["takes_s"]["node_pool"])


def _devices(project: Project, command: Invocation, machine_type: str, labels: dict[str, str]) -> JsonDict:
    """Return the GPUs or TPUs of a pool: what its nodes offer, their label, their taint and the quota they take."""
    machines = project.machines(machine_type)
    if not machines:
        return {}
    is_spot, machine = command.has("--spot"), machines[0]
    metrics = gpu_need(project, machine_type, 0, is_spot=is_spot)
    if machine.gpu.name.startswith("TPU"):
        topology = command.text("--tpu-topology")
        labels |= {"cloud.google.com/gke-tpu-accelerator": machine.gke_accelerator,
                   "cloud.google.com/gke-tpu-topology": topology}
        return {"devices": {"google.com/tpu": str(machine.gpus_per_host)}, "taints": [TPU_TAINT], "metrics": metrics}
    given = (command.pairs("--accelerator") or [{}])[0]
    count = given.get("count", "1")
    if (driver := given.get("gpu-driver-version", "default")) not in facts()["monitoring"]["drivers"]:
        command.fail(f"argument --accelerator: Invalid gpu-driver-version [{driver}]: it is one of "
                     f"{', '.join(facts()['monitoring']['drivers'])}", 2)
    fits = [one for one in machines if one.gke_accelerator == given.get("type") and str(one.gpus_per_host) == count]
    if given and not fits:
        known = ", ".join(f"{one.gke_accelerator} x {one.gpus_per_host}" for one in machines)
        _error(command, 400, f"Accelerator type \"{given.get('type')}\" with count {count} is not supported "
                                      f"by machine type {machine_type}; it has {known}.")
    if not given and not machine_type.startswith(("a", "g")):
        return {}
    labels["cloud.google.com/gke-accelerator"] = (fits or machines)[0].gke_accelerator
    return {"devices": {"nvidia.com/gpu": str((fits or machines)[0].gpus_per_host)}, "taints": [GPU_TAINT],
            "metrics": metrics}


def _networks(project: Project, command: Invocation, cluster: Resource) -> set[Key]:
    found: set[Key] = set()
    for pair in command.pairs("--additional-node-network"):
        if not cluster.attributes["has_networks"]:
            _error(command, 400, "Additional node networks need a cluster with --enable-multi-networking.")
        for kind, key, name in (("network", "network", pair.get("network", "")), (
                "subnetwork", "subnetwork", f"{cluster.location}/{pair.get('subnetwork', '')}")):
            if project.resources.find(kind, name) is None:
                _error(command, 400, f"The referenced {key} \"{pair.get(key)}\" was not found.")
            found.add((kind, name))
    return found


def _pool(project: Project, command: Invocation, name: str = "") -> Resource:
    cluster = _find(project, command, command.text("--cluster"))
    found = project.resources.find("node pool", f"{cluster.name}/{name or command.name()}")
    if found is None:
        _error(command, 404, f"Not found: {project.path}/locations/{cluster.location}/clusters/"
                                      f"{cluster.name.partition('/')[2]}/nodePools/{name or command.name()}.")
    return found


def _show_pool(project: Project, one: Resource) -> JsonDict:
    kube = project.account.clusters[one.name.rpartition("/")[0]]
    return {"name": one.attributes["pool"], "status": "RUNNING", "locations": one.attributes["zones"],
            "config": {"machineType": one.attributes["machine_type"]},
            "initialNodeCount": kube.pools[one.attributes["names"][0]].num_nodes,
            "autoscaling": {"enabled": one.attributes["max_nodes"] > 0}}


def _delete_pool(project: Project, command: Invocation) -> None:
    _drop_pool(project, _pool(project, command))


def _update_pool(project: Project, command: Invocation) -> None:
    found = _pool(project, command)
    most = command.text("--total-max-nodes") or command.text("--max-nodes")
    if most:
        found.attributes["max_nodes"] = int(most)
        kube = project.account.clusters[found.name.rpartition("/")[0]]
        for name in found.attributes["names"]:
            kube.pools[name] = replace(kube.pools[name], max_nodes=int(most))


def _drop_pool(project: Project, found: Resource) -> None:
    for name in found.attributes["names"]:
        project.account.clusters[found.name.rpartition("/")[0]].remove_pool(name)
    project.resources.remove(*found.key)


def _delete_cluster(project: Project, command: Invocation) -> None:
    found = _named(project, command)
    for pool in [one for one in project.resources.of_kind("node pool") if found.key in one.uses]:
        _drop_pool(project, pool)
    project.account.clusters.pop(found.name)
    project.resources.remove(*found.key)
    if project.account.context == found.name:
        project.account.context = ""


def _resize(project: Project, command: Invocation) -> None:
    cluster = _find(project, command, command.name())
    found = project.resources.find("node pool", f"{cluster.name}/{command.text('--node-pool', 'default-pool')}")
    if found is None:
        command.fail(f"No node pool named '{command.text('--node-pool')}' in {cluster.name.partition('/')[2]}.")
    kube, count = project.account.clusters[cluster.name], int(command.text("--num-nodes") or command.text("--size"))
    for name in found.attributes["names"]:
        short = kube.cloud.on_pool_change(kube.pools[name], count)
        if short:
            _error(command, 403, f"Insufficient regional quota to satisfy request: {short}")
        kube.pools[name] = replace(kube.pools[name], num_nodes=count)
        kube.resize_pool(name, count)


def _credentials(project: Project, command: Invocation) -> None:
    found = _find(project, command, command.name())
    if "gke-gcloud-auth-plugin" not in project.components:
        command.fail("gke-gcloud-auth-plugin, which is needed for continued use of kubectl, was not found or is not "
                     "executable. Install it with: gcloud components install gke-gcloud-auth-plugin")
    project.account.context = found.name


def _show_cluster(project: Project, one: Resource) -> JsonDict:
    return {"name": one.name.partition("/")[2], "location": one.location, "status": "RUNNING",
            "network": one.attributes["network"],
            "workloadIdentityConfig": {"workloadPool": one.attributes["workload_pool"]}}


def _named(project: Project, command: Invocation) -> Resource:
    return _find(project, command, command.name())


def _pools(project: Project, command: Invocation) -> list[JsonDict]:
    cluster = _find(project, command, command.text("--cluster"))
    return [_show_pool(project, one) for one in project.resources.of_kind("node pool") if cluster.key in one.uses]
