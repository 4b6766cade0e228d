"""EMB4xx, EMB5xx: EKS, EFA and FSx for Lustre; AKS and InfiniBand."""

import json
import re
from collections.abc import Iterator, Mapping

from embark.catalog.machine import Machine
from embark.kubernetes.yaml_nodes import Node, Span
from embark.lint.edits import set_key, set_scalar
from embark.lint.manifests import Manifests, Setting, TrainingJob
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits, Located
from embark.lint.shell import Command

_CREATE = {"eks": ("eksctl create cluster", "aws eks create-cluster"), "aks": ("az aks create",)}
_VERSION_FLAGS = ("--version", "--kubernetes-version", "-k")
EFA = "vpc.amazonaws.com/efa"
_NOT_WITH_EFA = {
    "FI_PROVIDER": "libfabric finds EFA by itself",
    "FI_EFA_USE_DEVICE_RDMA": "it is the default where the device can",
    "NCCL_PROTO": "the plugin chooses, and Simple alone is slow for small messages"
}


def old_kubernetes(manifests: Manifests, *, product: str) -> Hits:
    support = manifests.catalog.support
    known = [name for name in support if name.startswith(f"{product}-")]  # the oldest first
    for name, location in kubernetes_versions(manifests):
        is_refused = support[name].is_refused(manifests.today) if name in support else name < known[0]
        if name.startswith(f"{product}-") and is_refused:
            yield Hit(location, f"a cluster of {name} cannot be created any more", f"{known[-1]} or newer")


def support_ends(manifests: Manifests) -> Hits:
    """Support ends of a version that a file names, or its project does not support it on the cluster's Kubernetes."""
    support, clusters = manifests.catalog.support, list(kubernetes_versions(manifests))
    for name, where in (*clusters, *operator_versions(manifests)):
        found = support.get(name)
        if found and not found.is_refused(manifests.today) and (notice := found.notice(manifests.today)):
            yield Hit(where, notice)
        for cluster in {one.rpartition("-")[2] for one, _ in clusters}:
            if found and found.kubernetes and _number(cluster) > _number(found.kubernetes):
                yield Hit(where, f"{found.title} supports Kubernetes up to {found.kubernetes}, and the cluster's is "
                          f"{cluster}")


def operator_versions(manifests: Manifests) -> Iterator[tuple[str, Located]]:
    """Yield each version in the catalog that a command installs or an image has."""
    texts: list[tuple[str, Located]] = [(" ".join(command.argv), command) for command in manifests.commands]
    texts += [(one.node["image"].text, one) for pod in manifests.pods for one in pod.containers]
    for name, one in manifests.catalog.support.items():
        pattern = rf"(^|[ /]){re.escape(one.named)}(.*[ /=v])?{re.escape(name.rpartition('-')[2])}\b"
        yield from ((name, where) for text, where in texts if one.named and re.search(pattern, text))


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def kubernetes_versions(manifests: Manifests) -> Iterator[tuple[str, Span]]:
    """Yield each version that a file creates a cluster with, as the catalog names it: `eks-1.35`."""
    found = [("eks", node.text, node.location) for document in manifests.of_kind("ClusterConfig")
             if (node := document.at("metadata.version"))]
    for command in manifests.commands:
        for product, words in _CREATE.items():
            if any(map(command.begins, words)):
                found.append((product, command.flag(*_VERSION_FLAGS) or "", command.value_location(*_VERSION_FLAGS)))
    for product, version, location in found:
        if match := re.match(r"\d+\.\d+", version):
            yield f"{product}-{match[0]}", location


def device_plugin_moved(command: Command) -> Hits:
    for word in command.words:
        match = re.search(r"NVIDIA/k8s-device-plugin/(v?[\w.]+)/(deployments/static/)?nvidia-device-plugin\.ya?ml",
                          word.text)
        if command.name != "kubectl" or not match:
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", match[1])[:2])
        if match[2] is None and (not numbers or numbers >= (0, 15)):
            yield Hit(word, f"{match[1]} has no manifest at that path: it is under deployments/static/",
                      "…/v0.19.3/deployments/static/nvidia-device-plugin.yml; eksctl needs none")
        elif numbers < (0, 15):
            yield Hit(word, f"{match[1]} is old, and eksctl has installed a newer one for GPU node groups",
                      "leave it out after eksctl; elsewhere v0.19.3 of deployments/static/nvidia-device-plugin.yml")


def efa_not_enabled(manifests: Manifests) -> Hits:
    for group, machine in node_groups(manifests):
        if group["efaEnabled"].value is not True and _has_fabric(machine):
            yield Hit(group["name"] or group, f"{machine.name} has {machine.num_fabric_devices} EFA "
                      "devices, and efaEnabled is not set",
                      "efaEnabled: true, privateNetworking: true and one availabilityZone",
                      set_key(group, "efaEnabled", "true"))
    for command in manifests.commands:
        if command.begins("eksctl create cluster") or command.begins("eksctl create nodegroup"):
            found = manifests.machine(command.flag("--node-type", "-t", "--instance-types") or "")
            if found and _has_fabric(found) and not command.has("-f", "--config-file"):
                yield Hit(command.value_location("--node-type", "-t", "--instance-types"),
                          f"{found.name} has {found.num_fabric_devices} EFA devices, and flags cannot enable them",
                          "a cluster file with efaEnabled: true: eksctl create cluster -f eks_cluster.yaml")


def efa_in_several_zones(group: Node) -> Hits:
    zones = group["availabilityZones"] or group["subnets"]
    num_zones = len(zones.items or zones.names)
    if group["efaEnabled"].value is True and num_zones > 1:
        yield Hit(zones, f"{num_zones} zones or subnets for a node group with EFA")


def efa_in_any_zone(group: Node) -> Hits:
    is_placed = group["availabilityZones"] or group["subnets"] or group["capacityReservation"]
    if group["efaEnabled"].value is True and not is_placed:
        yield Hit(group["name"] or group)


def efa_in_public(group: Node) -> Hits:
    if group["efaEnabled"].value is True and group["privateNetworking"].value is not True:
        yield Hit(group["name"] or group, edits=set_key(group, "privateNetworking", "true"))


def efa_not_requested(job: TrainingJob) -> Hits:
    machine = job.machine
    is_meant = any(name.startswith("FI_") for name in job.container.environment) or (
        machine is not None and _has_fabric(machine) and machine.gpus_per_host == job.gpus)
    if job.is_distributed and job.gpus and job.cloud == "aws" and is_meant and not job.container.amount(EFA):
        number = machine.num_fabric_devices if machine is not None else None
        yield Hit(job.container.limits or job,
                  fix=f"limits: {{{EFA}: {number or '4 on p4d, 32 on p5, 16 on p5en, 8 on p6-b200'}}}")


def wrong_number_of_efa(manifests: Manifests) -> Hits:
    efa = [one for one in manifests.catalog.machines.values() if one.fabric.name == "efa"]
    for job in manifests.jobs:
        node = job.container.amount(EFA)
        machines = [one for one in job.machines if one.fabric.name == "efa"] or efa
        known = {one.num_fabric_devices for one in machines if one.gpus_per_host == job.gpus}
        if node and job.gpus and known and node.integer not in known:
            wanted = sorted(number for number in known if number)
            yield Hit(node, f"{node.text} EFA devices with {job.gpus} GPUs, and "
                      f"{machines[0].name if len(machines) == 1 else 'machines of that size'} have "
                      f"{' or '.join(map(str, wanted))}",
                      f"{EFA}: {wanted[-1]}", set_scalar(node, str(wanted[0])) if len(wanted) == 1 else ())


def no_huge_pages(job: TrainingJob) -> Hits:
    asks = job.container.amount(EFA)
    off = job.container.env_values.get("FI_EFA_USE_HUGE_PAGE") == "0"
    if asks and not off and not job.container.amount("hugepages-2Mi"):
        yield Hit(asks)


def outdated_efa_setting(setting: Setting) -> Hits:
    if setting.name in _NOT_WITH_EFA and setting.is_on_efa:
        yield Hit(setting, f"{setting.name}={setting.value}: {_NOT_WITH_EFA[setting.name]}",
                  f"leave {setting.name} out")


def block_without_reservation(group: Node) -> Hits:
    market = group.at("instanceMarketOptions.marketType")
    if market.text == "capacity-block" and not group["capacityReservation"]:
        yield Hit(market)


def fsx_without_throughput(lustre: Mapping[str, str], location: Span) -> Hits:
    kind = lustre.get("DeploymentType", "")
    if kind.startswith("PERSISTENT") and "PerUnitStorageThroughput" not in lustre:
        yield Hit(location, f"{kind} without PerUnitStorageThroughput is refused")


def fsx_import_path(lustre: Mapping[str, str], location: Span) -> Hits:
    if "ImportPath" in lustre:
        is_refused = lustre.get("DeploymentType") == "PERSISTENT_2"
        why = "is refused with PERSISTENT_2" if is_refused else "imports once and cannot be changed"
        yield Hit(location, f"ImportPath {why}", "PERSISTENT_2 and aws fsx create-data-repository-association "
                  f"--data-repository-path {lustre['ImportPath'] or 's3://BUCKET'}")


def fsx_too_slow(lustre: Mapping[str, str], location: Span, capacity_gib: int | None) -> Hits:
    each = lustre.get("PerUnitStorageThroughput", "")
    gbyte_per_s = (capacity_gib or 0) / 1000 * (int(each) if each.isdigit() else 1000) / 1000
    if 0 < gbyte_per_s <= 1.2:
        yield Hit(location, f"{capacity_gib} GiB read at most {gbyte_per_s:.1f} GB/s in all")


def fsx_volume_incomplete(document: Document) -> Hits:
    csi = document.at("spec.csi")
    if csi["driver"].text != "fsx.csi.aws.com":
        return
    missing = [] if csi["volumeHandle"] else ["volumeHandle"]
    missing += [name for name in ("dnsname", "mountname") if not csi["volumeAttributes"][name]]
    if missing:
        yield Hit(csi, f"{', '.join(missing)} missing")


def fsx_without_flock(document: Document) -> Hits:
    spec = document["spec"]
    if spec.at("csi.driver").text == "fsx.csi.aws.com" and "flock" not in spec["mountOptions"].words:
        yield Hit(document)


def node_groups(manifests: Manifests) -> Iterator[tuple[Node, Machine]]:
    """eksctl's node groups, each with its machine."""
    for document in manifests.of_kind("", "ClusterConfig"):
        for group in (*document["managedNodeGroups"], *document["nodeGroups"]):
            types = [group["instanceType"].text, *group["instanceTypes"].words,
                     *group.at("instancesDistribution.instanceTypes").words]
            machine = next(filter(None, map(manifests.machine, types)), None)
            if machine:
                yield group, machine


def _has_fabric(machine: Machine) -> bool:
    """Return whether it is a whole machine of eight GPUs or more, which is bought to train over its fabric."""
    return machine.fabric.name == "efa" and machine.gpus_per_host >= 8 and bool(machine.num_fabric_devices) \
        and (machine.fabric_gbit_per_s or 0) >= 400


def file_systems(manifests: Manifests) -> Iterator[tuple[Mapping[str, str], Span, int | None]]:
    """Yield the Lustre configuration of each file system that is created, its location, and its size."""
    for command in manifests.commands:
        if command.begins("aws fsx create-file-system") and command.flag("--file-system-type") == "LUSTRE":
            written = command.flag("--lustre-configuration") or ""
            capacity = command.flag("--storage-capacity") or ""
            yield _pairs(written), command.value_location("--lustre-configuration"), \
                int(capacity) if capacity.isdigit() else None
    for document in manifests.documents:
        for resource in document["Resources"].values():
            lustre = resource.at("Properties.LustreConfiguration")
            if resource["Type"].text == "AWS::FSx::FileSystem" and lustre:
                yield {name: lustre[name].text for name in lustre.names}, lustre.location, \
                    resource.at("Properties.StorageCapacity").integer


def _pairs(text: str) -> dict[str, str]:
    """Read `A=1,B=2`, or JSON."""
    if text.lstrip().startswith("{"):
        try:
            read = json.loads(text)
        except ValueError:
            return {}
        return {str(key): str(value) for key, value in read.items()} if isinstance(read, dict) else {}
    return dict(part.partition("=")[::2] for part in text.split(",") if "=" in part)


RDMA_RESOURCES = ("rdma/ib", "rdma/shared_ib")
_SIZE_FLAGS = ("--node-vm-size", "-s")


def gpus_in_the_system_pool(command: Command, manifests: Manifests) -> Hits:
    machine = manifests.machine(command.flag(*_SIZE_FLAGS) or "") if command.begins("az aks create") else None
    if machine:
        yield Hit(command.value_location(*_SIZE_FLAGS), f"{machine.name} becomes the system pool",
                  f"az aks create with a small size, then az aks nodepool add --node-vm-size {machine.name}")


def no_infiniband_feature(aks_pool: Command, machine: Machine, manifests: Manifests) -> Hits:
    if machine.fabric.name == "infiniband" and "AKSInfinibandSupport" not in manifests.all_words:
        yield Hit(aks_pool.value_location(*_SIZE_FLAGS),
                  f"{machine.name} has InfiniBand, and registering the feature is not among the files given")


def no_device_plugin(aks_pool: Command, machine: Machine, manifests: Manifests) -> Hits:
    installed = any("gpu-operator" in word or "nvidia-device-plugin" in word for word in manifests.all_words)
    if not installed and aks_pool.flag("--enable-managed-gpu") in (None, "false"):
        yield Hit(aks_pool.value_location(*_SIZE_FLAGS), f"nothing offers the GPUs of {machine.name} to pods")


def no_nic_policy(manifests: Manifests) -> Hits:
    offered = {name for document in manifests.of_kind("NicClusterPolicy") for name in _offered(document["spec"])}
    for pod in manifests.pods:
        for container in pod.containers:
            for name in RDMA_RESOURCES:
                node = container.amount(name)
                if node and name not in offered:
                    have = f"the NicClusterPolicy offers {', '.join(sorted(offered))}" if offered else \
                        "a NicClusterPolicy is not among the files given"
                    yield Hit(node, f"{name} is asked for, and {have}",
                              f"a NicClusterPolicy with ofedDriver and a device plugin that offers {name}")
    if not manifests.of_kind("NicClusterPolicy"):
        for command in manifests.commands:
            if command.name == "helm" and any("network-operator" in word for word in command.argv[1:]) and \
                    {"install", "upgrade"} & set(command.argv):
                yield Hit(command, "the network operator alone offers nothing, and a NicClusterPolicy is not "
                          "among the files given", "a NicClusterPolicy with ofedDriver and sriovDevicePlugin")


def infiniband_not_requested(job: TrainingJob) -> Hits:
    machine = job.machine
    asks = any(job.container.amount(name) for name in RDMA_RESOURCES)
    if job.is_distributed and machine and machine.fabric.name == "infiniband" and not asks:
        yield Hit(job.container.limits or job, f"{machine.name} has InfiniBand and no pod asks for it",
                  f"limits: {{rdma/ib: {machine.num_fabric_devices}}}, or rdma/shared_ib: 1 with the shared plugin")


def wrong_number_of_infiniband(job: TrainingJob) -> Hits:
    node, machine = job.container.amount("rdma/ib"), job.machine
    wanted = machine.num_fabric_devices if machine and machine.fabric.name == "infiniband" else 8
    if node and job.gpus == 8 and wanted and node.integer != wanted:
        yield Hit(node, f"{node.text} InfiniBand devices for {job.gpus} GPUs", f"rdma/ib: {wanted}",
                  set_scalar(node, str(wanted)))


def infiniband_settings(job: TrainingJob) -> Hits:
    asks = any(job.container.amount(name) for name in RDMA_RESOURCES)
    if not asks or not job.is_distributed or job.cloud != "azure" or job.container.has_env_from:
        return
    missing = [name for name in ("NCCL_TOPO_FILE", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_SOCKET_IFNAME")
               if name not in job.container.environment]
    if missing:
        yield Hit(job, f"{', '.join(missing)} not set")


def aks_pools(manifests: Manifests) -> Iterator[tuple[Command, Machine]]:
    """Yield commands that make a pool of GPU machines."""
    for command in manifests.commands:
        if command.begins("az aks create") or command.begins("az aks nodepool add"):
            machine = manifests.machine(command.flag(*_SIZE_FLAGS) or "")
            if machine:
                yield command, machine


def _offered(spec: Node) -> Iterator[str]:
    """Yield the resources that a policy's device plugins offer, from the JSON inside."""
    for plugin, lists in (("sriovDevicePlugin", "resourceList"), ("rdmaSharedDevicePlugin", "configList")):
        text = spec.at(f"{plugin}.config").text
        try:
            read = json.loads(text) if text else {}
        except ValueError:
            continue
        contents = read.get(lists, []) if isinstance(read, dict) else []
        for one in contents if isinstance(contents, list) else []:
            if isinstance(one, dict):
                default = "rdma" if plugin == "rdmaSharedDevicePlugin" else "nvidia.com"
                yield f"{one.get('resourcePrefix', default)}/{one.get('resourceName', '')}"
