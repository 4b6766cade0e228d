"""EMB6xx: GKE, its GPU networks, Filestore and Cloud Storage."""

import json
import re
from collections.abc import Iterator

from embark.catalog.machine import Machine
from embark.lint.edit import replace_within
from embark.lint.job import TrainingJob
from embark.lint.pods import Pod
from embark.lint.rule import Hit, World
from embark.lint.settings import Setting
from embark.lint.shell import Command
from embark.lint.source import Edit

TCPX = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"
_TCPX_WORDS = re.compile(r"tcpx|fastrak", re.IGNORECASE)
_DAEMONS = re.compile(r"tcpgpudmarxd|tcpx-daemon|tcpxo-daemon|fastrak")
_CURRENT = {"tcpgpudmarxd-dev": (2, 0, 12), "nccl-plugin-gpudirecttcpx-dev": (3, 1, 9),
            "tcpgpudmarxd-dev/tcpxo": (1, 0, 21), "nccl-plugin-gib": (1, 1, 1)}
"""Of 2026-11."""
_PROFILES = {"gpudirect-tcpxo": ("nccl-env-profile.sh", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"),
             "gpudirect-rdma": ("set_nccl_env.sh", "NCCL_NET")}


def tcpx_on_a2(job: TrainingJob) -> Iterator[Hit]:
    if not job.machines or any(one.fabric.name.startswith("gpudirect") for one in job.machines):
        return
    names = [*job.container.environment, *job.pod.annotations,
             *(one.name.text for one in (*job.pod.containers, *job.pod.sidecars))]
    wrong = next((name for name in names if _TCPX_WORDS.search(name)), "")
    if wrong:
        yield Hit(job.place, f"{wrong} is for A3, and the pods run on {job.machines[0].name}")


def no_gpu_networks(world: World) -> Iterator[Hit]:
    for job, machine in _on_fabric(world):
        missing = [name for name in machine.fabric.kubernetes_annotations if name not in job.pod.annotations]
        if missing and not job.pod.spec["hostNetwork"].value:
            yield Hit(job.place, f"{machine.name} needs the annotations {', '.join(missing)}",
                      f"networking.gke.io/interfaces with eth0 and {machine.num_fabric_devices} more, as the page "
                      "of the fabric shows them")


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


def sidecar_never_ends(pod: Pod) -> Iterator[Hit]:
    if pod.kind in ("DaemonSet", "Deployment", "StatefulSet", "Pod"):
        return
    for container in pod.containers:
        if _DAEMONS.search(container.name.text) or _DAEMONS.search(container.image.text):
            yield Hit(container.place, f"{container.name.text} outlives the training")


def old_gpu_network_image(pod: Pod) -> Iterator[Hit]:
    for node in pod.spec.walk():
        match = re.search(r"/([\w-]+):v(\d+)\.(\d+)\.(\d+)", node.text) if len(node.text) < 300 else None
        if match is None or node.place is None:
            continue
        is_tcpxo = match[1] == "tcpgpudmarxd-dev" and "tcpxo" in node.text + str(pod.annotations)
        current = _CURRENT.get(match[1] + ("/tcpxo" if is_tcpxo else ""))
        if current is not None and tuple(map(int, match.groups()[1:])) < current:
            yield Hit(node.place, f"{match[1]} {match[0].rpartition(':')[2]} is old", f"v{'.'.join(map(str, current))}")


def nccl_profile_not_read(world: World) -> Iterator[Hit]:
    for job, machine in _on_fabric(world):
        script, variable = _PROFILES.get(machine.fabric.name, ("", ""))
        text = " ".join(node.text for node in job.container.argv_nodes)
        if script and script not in text and variable not in job.container.environment \
                and not job.container.has_env_from:
            yield Hit(job.place, f"{script} is not read before the training starts",
                      f"source /usr/local/…/{script} in the command, before torchrun")


def gdr_off(setting: Setting) -> Iterator[Hit]:
    if setting.name == "NCCL_NET_GDR_LEVEL" and setting.value.upper() in ("0", "LOC"):
        yield Hit(setting.place, f"{setting.name}={setting.value}: every byte goes through the host's memory",
                  f"leave {setting.name} out; with TCPX it is PIX", setting.removal)


def fabric_off(setting: Setting) -> Iterator[Hit]:
    machines = setting.job.machines if setting.job is not None else ()
    has_rdma = any(machine.fabric.transport == "verbs" for machine in machines)
    if setting.name == "NCCL_IB_DISABLE" and setting.value == "1" and has_rdma:
        yield Hit(setting.place, f"{machines[0].name} has nothing but RDMA between machines", edits=setting.removal)


def fabric_off_everywhere(setting: Setting) -> Iterator[Hit]:
    unknown = (setting.pod is None and not setting.is_with_efa) or \
        (setting.job is not None and not setting.job.machines and setting.job.cloud == "")
    if setting.name == "NCCL_IB_DISABLE" and setting.value == "1" and unknown:
        yield Hit(setting.place, edits=setting.removal)


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


def driver_daemonset(command: Command) -> Iterator[Hit]:
    for word in command.words:
        if command.name == "kubectl" and "container-engine-accelerators" in word.text and \
                "nvidia-driver-installer" in word.text:
            yield Hit(word.place)


def no_driver_version(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        value = command.flag("--accelerator") or ""
        if value and "gpu-driver-version" not in value:
            place = command.value_place("--accelerator")
            yield Hit(place, fix=f"--accelerator {value},gpu-driver-version=default",
                      edits=replace_within(place, value, f"{value},gpu-driver-version=default"))


def nodes_per_zone(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        location = command.flag("--location", "--region") or ""
        is_region = command.has("--region") or re.fullmatch(r"[a-z]+-[a-z]+\d+", location) is not None
        zones = [zone for zone in (command.flag("--node-locations") or "").split(",") if zone]
        number = command.flag("--num-nodes")
        if is_region and number and number != "1" and len(zones) != 1:
            yield Hit(command.value_place("--num-nodes"), f"{number} nodes in each of "
                      f"{len(zones) or 'three'} zones", f"--node-locations ZONE --num-nodes {number}")


def no_location(world: World) -> Iterator[Hit]:
    for command in _pools(world):
        if not command.has("--zone", "--region", "--location", "-z") and _gpu_machine(world, command):
            yield Hit(command.place)


def gpus_in_the_default_pool(command: Command, world: World) -> Iterator[Hit]:
    if command.begins("gcloud", "container", "clusters", "create"):
        machine = _gpu_machine(world, command)
        if machine is not None:
            yield Hit(command.value_place("--machine-type"), f"{machine.name} is the default pool")


def gpus_do_not_fit_machine(command: Command, world: World) -> Iterator[Hit]:
    machine = _gpu_machine(world, command) if command.name == "gcloud" else None
    count = re.search(r"count=(\d+)", command.flag("--accelerator") or "")
    if machine is not None and count and int(count[1]) != machine.num_gpus:
        yield Hit(command.value_place("--accelerator"), f"count={count[1]}, and {machine.name} has "
                  f"{machine.num_gpus} GPUs", f"count={machine.num_gpus}")


def old_filestore_tier(command: Command) -> Iterator[Hit]:
    tier = command.flag("--tier") or ""
    if command.begins("gcloud", "filestore", "instances", "create") and tier.upper() == "HIGH_SCALE_SSD":
        place = command.value_place("--tier")
        yield Hit(place, f"there is no tier {tier}", edits=replace_within(place, tier, "ZONAL"))


def filestore_too_slow(world: World) -> Iterator[Hit]:
    volume = world.catalog.volumes.get("filestore-zonal")
    for command in world.commands:
        size = re.search(r"capacity=(\d+)\s*(TB|TiB|T|GB|GiB|G)?", command.flag("--file-share") or "", re.IGNORECASE)
        if not command.begins("gcloud", "filestore", "instances", "create") or size is None or volume is None:
            continue
        tib = float(size[1]) / (1 if (size[2] or "G").upper().startswith("T") else 1024)
        speed = volume.gbyte_per_s(tib)
        if speed is not None and speed < 5:
            yield Hit(command.value_place("--file-share"), f"{tib:g} TiB read about {speed:.1f} GB/s")


def gsutil(command: Command) -> Iterator[Hit]:
    if command.name == "gsutil":
        rest = " ".join(word for word in command.argv[1:] if word != "-m")
        yield Hit(command.place, fix="gcloud storage " + rest.replace("mb -l", "buckets create --location", 1))


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
