"""EMB5xx: AKS and InfiniBand."""

import json
from collections.abc import Iterator

from embark.catalog.machine import Machine
from embark.lint.job import TrainingJob
from embark.lint.rule import Hit, World
from embark.lint.shell import Command
from embark.lint.source import Node, set_scalar

RESOURCES = ("rdma/ib", "rdma/shared_ib")
_SIZE_FLAGS = ("--node-vm-size", "-s")


def gpus_in_the_system_pool(command: Command, world: World) -> Iterator[Hit]:
    machine = world.machine(command.flag(*_SIZE_FLAGS) or "") if command.begins("az", "aks", "create") else None
    if machine is not None:
        yield Hit(command.value_place(*_SIZE_FLAGS), f"{machine.name} becomes the system pool",
                  f"az aks create with a small size, then az aks nodepool add --node-vm-size {machine.name}")


def no_infiniband_feature(aks_pool: Command, machine: Machine, world: World) -> Iterator[Hit]:
    if machine.fabric.name == "infiniband" and "AKSInfinibandSupport" not in world.all_words:
        yield Hit(aks_pool.value_place(*_SIZE_FLAGS),
                  f"{machine.name} has InfiniBand, and registering the feature is not among the files given")


def no_device_plugin(aks_pool: Command, machine: Machine, world: World) -> Iterator[Hit]:
    installed = any("gpu-operator" in word or "nvidia-device-plugin" in word for word in world.all_words)
    if not installed and aks_pool.flag("--enable-managed-gpu") in (None, "false"):
        yield Hit(aks_pool.value_place(*_SIZE_FLAGS), f"nothing offers the GPUs of {machine.name} to pods")


def no_nic_policy(world: World) -> Iterator[Hit]:
    offered = {name for document in world.of_kind("NicClusterPolicy") for name in _offered(document.root["spec"])}
    for pod in world.pods:
        for container in pod.containers:
            for name in RESOURCES:
                node = container.amount(name)
                if node.place is not None and name not in offered:
                    have = f"the NicClusterPolicy offers {', '.join(sorted(offered))}" if offered else \
                        "a NicClusterPolicy is not among the files given"
                    yield Hit(node.place, f"{name} is asked for, and {have}",
                              f"a NicClusterPolicy with ofedDriver and a device plugin that offers {name}")
    if not world.of_kind("NicClusterPolicy"):
        for command in world.commands:
            if command.name == "helm" and any("network-operator" in word for word in command.argv[1:]) and \
                    {"install", "upgrade"} & set(command.argv):
                yield Hit(command.place, "the network operator alone offers nothing, and a NicClusterPolicy is not "
                          "among the files given", "a NicClusterPolicy with ofedDriver and sriovDevicePlugin")


def infiniband_not_requested(job: TrainingJob) -> Iterator[Hit]:
    machine = job.machine
    asks = any(job.container.amount(name) for name in RESOURCES)
    if job.is_distributed and machine is not None and machine.fabric.name == "infiniband" and not asks:
        yield Hit(job.container.limits.place or job.place, f"{machine.name} has InfiniBand and no pod asks for it",
                  f"limits: {{rdma/ib: {machine.num_fabric_devices}}}, or rdma/shared_ib: 1 with the shared plugin")


def wrong_number_of_infiniband(job: TrainingJob) -> Iterator[Hit]:
    node, machine = job.container.amount("rdma/ib"), job.machine
    wanted = machine.num_fabric_devices if machine is not None and machine.fabric.name == "infiniband" else 8
    if node.place is not None and job.gpus == 8 and wanted and node.integer != wanted:
        yield Hit(node.place, f"{node.text} InfiniBand devices for {job.gpus} GPUs", f"rdma/ib: {wanted}",
                  set_scalar(node, str(wanted)))


def infiniband_settings(job: TrainingJob) -> Iterator[Hit]:
    asks = any(job.container.amount(name) for name in RESOURCES)
    if not asks or not job.is_distributed or job.cloud != "azure" or job.container.has_env_from:
        return
    missing = [name for name in ("NCCL_TOPO_FILE", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_SOCKET_IFNAME")
               if name not in job.container.environment]
    if missing:
        yield Hit(job.place, f"{', '.join(missing)} not set")


def node_pools(world: World) -> Iterator[tuple[Command, Machine]]:
    """Commands that make a pool of GPU machines."""
    for command in world.commands:
        if command.begins("az", "aks", "create") or command.begins("az", "aks", "nodepool", "add"):
            machine = world.machine(command.flag(*_SIZE_FLAGS) or "")
            if machine is not None:
                yield command, machine


def _offered(spec: Node) -> Iterator[str]:
    """The resources that a policy's device plugins offer, from the JSON inside."""
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
