"""EMB6xx: GKE, its GPU networks, Filestore and Cloud Storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from embark.catalog.machine import Machine
from embark.lint.edit import replace_within
from embark.lint.job import TrainingJob
from embark.lint.rule import Hit, Rules, World
from embark.lint.settings import settings
from embark.lint.shell import Command
from embark.lint.source import Edit

RULES = Rules()
TCPX = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"
GIB = "https://cloud.google.com/ai-hypercomputer/docs/create/gke-ai-hypercompute-custom"
GKE_GPUS = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpus"
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TCPX_WORDS = re.compile(r"tcpx|fastrak", re.IGNORECASE)
_DAEMONS = re.compile(r"tcpgpudmarxd|tcpx-daemon|tcpxo-daemon|fastrak")
_CURRENT = {"tcpgpudmarxd-dev": (2, 0, 12), "nccl-plugin-gpudirecttcpx-dev": (3, 1, 9),
            "tcpgpudmarxd-dev/tcpxo": (1, 0, 21), "nccl-plugin-gib": (1, 1, 1)}
"""Of 2026-11."""
_PROFILES = {"gpudirect-tcpxo": ("nccl-env-profile.sh", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"),
             "gpudirect-rdma": ("set_nccl_env.sh", "NCCL_NET")}


@RULES.add("EMB601", "tcpx-on-a2", "error", "A2 machines have no GPUDirect-TCPX: the plugin finds no device and NCCL "
           "fails to start.", TCPX)
def tcpx_on_a2(world: World) -> Iterator[Hit]:
    for job in world.jobs:
        if not job.machines or any(one.fabric.name.startswith("gpudirect") for one in job.machines):
            continue
        names = [*job.container.environment, *job.pod.annotations,
                 *(one.name.text for one in (*job.pod.containers, *job.pod.sidecars))]
        wrong = next((name for name in names if _TCPX_WORDS.search(name)), "")
        if wrong:
            yield Hit(job.place, f"{wrong} is for A3, and the pods run on {job.machines[0].name}",
                      "leave TCPX out, or select cloud.google.com/gke-accelerator: nvidia-h100-80gb")


@RULES.add("EMB602", "no-gpu-networks", "error",
           "The machine's GPU networks are attached by annotations; without them NCCL has one card and is many times "
           "slower.", TCPX)
def no_gpu_networks(world: World) -> Iterator[Hit]:
    for job, machine in _on_fabric(world):
        missing = [name for name in machine.fabric.kubernetes_annotations if name not in job.pod.annotations]
        if missing and not job.pod.spec["hostNetwork"].value:
            yield Hit(job.place, f"{machine.name} needs the annotations {', '.join(missing)}",
                      f"networking.gke.io/interfaces with eth0 and {machine.num_fabric_devices} more, as the page "
                      "of the fabric shows them")


@RULES.add("EMB603", "too-few-gpu-networks", "error",
           "Each network that is not attached leaves GPUs without a card of their own.", TCPX)
def too_few_gpu_networks(world: World) -> Iterator[Hit]:
    for job, machine in _on_fabric(world):
        node = job.pod.metadata["annotations"]["networking.gke.io/interfaces"]
        if node.place is None:
            continue
        try:
            read = json.loads(node.text)
        except ValueError:
            yield Hit(node.place, "the list of interfaces is no JSON",
                      '[{"interfaceName":"eth0","network":"default"}, …]')
            continue
        number = len(read) if isinstance(read, list) else 0
        if number < 1 + (machine.num_fabric_devices or 0):
            yield Hit(node.place, f"{number} interfaces, and {machine.name} has 1 + {machine.num_fabric_devices}",
                      f"{1 + (machine.num_fabric_devices or 0)} interfaces, eth0 first")


@RULES.add("EMB604", "sidecar-never-ends", "error",
           "A daemon among the containers never ends, so the Job never completes.",
           "https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/")
def sidecar_never_ends(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        if pod.document.kind in ("DaemonSet", "Deployment", "StatefulSet", "Pod"):
            continue
        for container in pod.containers:
            if _DAEMONS.search(container.name.text) or _DAEMONS.search(container.image.text):
                yield Hit(container.place, f"{container.name.text} outlives the training",
                          "an initContainer with restartPolicy: Always: a native sidecar")


@RULES.add("EMB605", "old-gpu-network-image", "warning", "An older daemon or plugin does not go with today's drivers.",
           TCPX)
def old_gpu_network_image(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        for node in pod.spec.walk():
            match = re.search(r"/([\w-]+):v(\d+)\.(\d+)\.(\d+)", node.text) if len(node.text) < 300 else None
            if match is None or node.place is None:
                continue
            is_tcpxo = match[1] == "tcpgpudmarxd-dev" and "tcpxo" in node.text + str(pod.annotations)
            current = _CURRENT.get(match[1] + ("/tcpxo" if is_tcpxo else ""))
            if current is not None and tuple(map(int, match.groups()[1:])) < current:
                yield Hit(node.place, f"{match[1]} {match[0].rpartition(':')[2]} is old",
                          f"v{'.'.join(map(str, current))}")


@RULES.add("EMB606", "nccl-profile-not-read", "warning",
           "NCCL needs the settings that come with the machine's plugin; without them it does not use the fabric.", GIB)
def nccl_profile_not_read(world: World) -> Iterator[Hit]:
    for job, machine in _on_fabric(world):
        script, variable = _PROFILES.get(machine.fabric.name, ("", ""))
        text = " ".join(node.text for node in job.container.argv_nodes)
        if script and script not in text and variable not in job.container.environment \
                and not job.container.has_env_from:
            yield Hit(job.place, f"{script} is not read before the training starts",
                      f"source /usr/local/…/{script} in the command, before torchrun")


@RULES.add("EMB607", "gdr-off", "error",
           "NCCL_NET_GDR_LEVEL=0 turns off the direct path from GPU to network that the fabric is for.", NCCL,
           can_fix=True)
def gdr_off(world: World) -> Iterator[Hit]:
    for one in settings(world):
        if one.name == "NCCL_NET_GDR_LEVEL" and one.value.upper() in ("0", "LOC"):
            yield Hit(one.place, f"{one.name}={one.value}: every byte goes through the host's memory",
                      f"leave {one.name} out; with TCPX it is PIX", one.removal)


@RULES.add("EMB608", "fabric-off", "error",
           "NCCL_IB_DISABLE=1 turns off the only fast network of the machine: NCCL goes over TCP.", NCCL, can_fix=True)
def fabric_off(world: World) -> Iterator[Hit]:
    for one in settings(world):
        machines = one.job.machines if one.job is not None else ()
        if one.name == "NCCL_IB_DISABLE" and one.value == "1" and any(m.fabric.transport == "verbs" for m in machines):
            yield Hit(one.place, f"{machines[0].name} has nothing but RDMA between machines", "leave it out",
                      one.removal)


@RULES.add("EMB609", "fabric-off-everywhere", "warning",
           "NCCL_IB_DISABLE=1 for all machines turns the network off on those with InfiniBand or RoCE.", NCCL,
           can_fix=True)
def fabric_off_everywhere(world: World) -> Iterator[Hit]:
    for one in settings(world):
        unknown = (one.pod is None and not one.is_with_efa) or \
            (one.job is not None and not one.job.machines and one.job.cloud == "")
        if one.name == "NCCL_IB_DISABLE" and one.value == "1" and unknown:
            yield Hit(one.place, "on A3 Ultra, A4 and ND machines NCCL then goes over TCP",
                      "leave it out: without InfiniBand NCCL finds none", one.removal)


@RULES.add("EMB610", "preemptible", "warning",
           "Preemptible machines end after 24 hours at the latest; Spot has no such limit at the same price.",
           "https://cloud.google.com/compute/docs/instances/spot", can_fix=True)
def preemptible(world: World) -> Iterator[Hit]:
    for command in world.commands:
        found = command.flag_word("--preemptible") if command.name == "gcloud" else None
        if found is not None:
            edits: tuple[Edit, ...] = replace_within(found[1].place, "--preemptible", "--spot")
            yield Hit(found[1].place, "the nodes are gone after 24 hours", "--spot",
                      edits if command.argv[1:2] == ["container"] else ())
    for pod in world.pods:
        place = pod.spec["nodeSelector"].key("cloud.google.com/gke-preemptible").place
        if place is not None:
            yield Hit(place, "it selects preemptible nodes", "cloud.google.com/gke-spot: \"true\"")


@RULES.add("EMB611", "driver-daemonset", "warning",
           "GKE installs drivers itself; the DaemonSet beside it is legacy, and follows a branch that moves.", GKE_GPUS)
def driver_daemonset(world: World) -> Iterator[Hit]:
    for command in world.commands:
        for word in command.words:
            if command.name == "kubectl" and "container-engine-accelerators" in word.text and \
                    "nvidia-driver-installer" in word.text:
                yield Hit(word.place, "the driver is installed by hand",
                          "--accelerator type=…,count=8,gpu-driver-version=default on the node pool")


@RULES.add("EMB612", "no-driver-version", "warning",
           "Without gpu-driver-version it depends on GKE's version whether a driver is installed at all.", GKE_GPUS,
           can_fix=True)
def no_driver_version(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        value = command.flag("--accelerator") or ""
        if value and "gpu-driver-version" not in value:
            place = command.value_place("--accelerator")
            yield Hit(place, "no gpu-driver-version", f"--accelerator {value},gpu-driver-version=default",
                      replace_within(place, value, f"{value},gpu-driver-version=default"))


@RULES.add("EMB613", "nodes-per-zone", "warning",
           "In a regional cluster --num-nodes counts for each zone: 2 means 6 nodes, and their price.",
           "https://cloud.google.com/kubernetes-engine/docs/concepts/regional-clusters")
def nodes_per_zone(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        location = command.flag("--location", "--region") or ""
        is_region = command.has("--region") or re.fullmatch(r"[a-z]+-[a-z]+\d+", location) is not None
        zones = [zone for zone in (command.flag("--node-locations") or "").split(",") if zone]
        number = command.flag("--num-nodes")
        if is_region and number and number != "1" and len(zones) != 1:
            yield Hit(command.value_place("--num-nodes"), f"{number} nodes in each of "
                      f"{len(zones) or 'three'} zones", f"--node-locations ZONE --num-nodes {number}")


@RULES.add("EMB614", "no-location", "warning",
           "Where the cluster is made depends on who runs the command, and A100 and H100 are in few zones.",
           "https://cloud.google.com/compute/docs/gpus/gpu-regions-zones")
def no_location(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        if not command.has("--zone", "--region", "--location", "-z") and _gpu_machine(world, command):
            yield Hit(command.place, "no zone is named", "--zone ZONE, one that has the GPUs")


@RULES.add("EMB615", "gpus-in-the-default-pool", "warning",
           "A cluster's first pool runs the system's pods, so its GPU machines can never be scaled to zero.", GKE_GPUS)
def gpus_in_the_default_pool(world: World) -> Iterator[Hit]:
    for command in world.commands:
        if command.begins("gcloud", "container", "clusters", "create"):
            machine = _gpu_machine(world, command)
            if machine is not None:
                yield Hit(command.value_place("--machine-type"), f"{machine.name} is the default pool",
                          "a small default pool, and gcloud container node-pools create for the GPUs")


@RULES.add("EMB616", "gpus-do-not-fit-machine", "error",
           "The machine type has its number of GPUs built in: another count is refused.",
           "https://cloud.google.com/compute/docs/accelerator-optimized-machines")
def gpus_do_not_fit_machine(world: World) -> Iterator[Hit]:
    for command in world.commands:
        machine = _gpu_machine(world, command) if command.name == "gcloud" else None
        count = re.search(r"count=(\d+)", command.flag("--accelerator") or "")
        if machine is not None and count and int(count[1]) != machine.num_gpus:
            yield Hit(command.value_place("--accelerator"), f"count={count[1]}, and {machine.name} has "
                      f"{machine.num_gpus} GPUs", f"count={machine.num_gpus}")


@RULES.add("EMB617", "old-filestore-tier", "warning", "Filestore's tiers were renamed: HIGH_SCALE_SSD is ZONAL now.",
           "https://cloud.google.com/filestore/docs/service-tiers", can_fix=True)
def old_filestore_tier(world: World) -> Iterator[Hit]:
    for command in world.commands:
        tier = command.flag("--tier") or ""
        if command.begins("gcloud", "filestore", "instances", "create") and tier.upper() == "HIGH_SCALE_SSD":
            place = command.value_place("--tier")
            yield Hit(place, f"there is no tier {tier}", "--tier ZONAL, or REGIONAL",
                      replace_within(place, tier, "ZONAL"))


@RULES.add("EMB618", "filestore-too-slow", "warning",
           "Filestore reads as fast as it is large: 10 TiB do not read 10 GB/s.",
           "https://cloud.google.com/filestore/docs/performance")
def filestore_too_slow(world: World) -> Iterator[Hit]:
    volume = world.catalog.volumes.get("filestore-zonal")
    for command in world.commands:
        size = re.search(r"capacity=(\d+)\s*(TB|TiB|T|GB|GiB|G)?", command.flag("--file-share") or "", re.IGNORECASE)
        if not command.begins("gcloud", "filestore", "instances", "create") or size is None or volume is None:
            continue
        tib = float(size[1]) / (1 if (size[2] or "G").upper().startswith("T") else 1024)
        speed = volume.gbyte_per_s(tib)
        if speed is not None and speed < 5:
            yield Hit(command.value_place("--file-share"), f"{tib:g} TiB read about {speed:.1f} GB/s",
                      "Managed Lustre, or Cloud Storage FUSE, for what every rank reads")


@RULES.add("EMB619", "gsutil", "warning", "gsutil is succeeded by `gcloud storage`, which copies many times faster.",
           "https://cloud.google.com/storage/docs/gsutil")
def gsutil(world: World) -> Iterator[Hit]:
    for command in world.commands:
        if command.name == "gsutil":
            rest = " ".join(word for word in command.argv[1:] if word != "-m")
            yield Hit(command.place, "gsutil is legacy", "gcloud storage "
                      + rest.replace("mb -l", "buckets create --location", 1))


def _on_fabric(world: World) -> Iterator[tuple[TrainingJob, Machine]]:
    """Jobs over several machines that have GPU networks of their own."""
    for job in world.jobs:
        machine = job.machine
        if job.is_distributed and machine is not None and machine.fabric.name.startswith("gpudirect") \
                and job.gpus == machine.gpus_per_host and job.pod.is_whole:
            yield job, machine


def _pools(world: World) -> Iterator[Command]:
    for command in world.commands:
        if command.begins("gcloud", "container", "clusters", "create") or \
                command.begins("gcloud", "container", "node-pools", "create"):
            yield command


def _gpu_machine(world: World, command: Command) -> Machine | None:
    return world.machine(command.flag("--machine-type") or "")


