"""EMB6xx, EMB7xx: GKE, its GPU networks, Filestore, Cloud Storage; Vertex AI training by Python, gcloud and YAML."""

import ast
import json
import re
from collections.abc import Iterator, Mapping

from embark.catalog.machine import Machine
from embark.errors import nearest
from embark.kubernetes.yaml_nodes import Span
from embark.lint.edits import Edit, replace_within
from embark.lint.manifests import Manifests, TrainingJob
from embark.lint.pods import PodTemplate, launch_of_argv
from embark.lint.read import PythonFile
from embark.lint.rule import Hit, Hits
from embark.lint.shell import Command
from embark.values import frozen

_TCPX_WORDS = re.compile(r"tcpx|fastrak", re.IGNORECASE)
_DAEMONS = re.compile(r"tcpgpudmarxd|tcpx-daemon|tcpxo-daemon|fastrak")
_CURRENT = {"tcpgpudmarxd-dev": (2, 0, 12), "nccl-plugin-gpudirecttcpx-dev": (3, 1, 9),
            "tcpgpudmarxd-dev/tcpxo": (1, 0, 21), "nccl-plugin-gib": (1, 1, 1)}
"""Current versions, 2026-11."""
_PROFILES = {"gpudirect-tcpxo": ("nccl-env-profile.sh", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"),
             "gpudirect-rdma": ("set_nccl_env.sh", "NCCL_NET")}


def tcpx_on_a2(job: TrainingJob) -> Hits:
    if not job.machines or any(one.fabric.name.startswith("gpudirect") for one in job.machines):
        return
    names = [*job.container.environment, *job.pod.annotations,
             *(one.name for one in (*job.pod.containers, *job.pod.sidecars))]
    wrong = next((name for name in names if _TCPX_WORDS.search(name)), "")
    if wrong:
        yield Hit(job, f"{wrong} is for A3, and the pods run on {job.machines[0].name}")


def no_gpu_networks(fabric_job: TrainingJob, machine: Machine) -> Hits:
    pod = fabric_job.pod
    missing = [name for name in machine.fabric.kubernetes_annotations if name not in pod.annotations]
    if missing and not pod.spec["hostNetwork"].value:
        yield Hit(fabric_job, f"{machine.name} needs the annotations {', '.join(missing)}",
                  f"networking.gke.io/interfaces with eth0 and {machine.num_fabric_devices} more, as the page "
                  "of the fabric shows them")


def too_few_gpu_networks(fabric_job: TrainingJob, machine: Machine) -> Hits:
    node = fabric_job.pod.metadata["annotations"]["networking.gke.io/interfaces"]
    if not node:
        return
    try:
        read = json.loads(node.text)
    except ValueError:
        yield Hit(node, "the list of interfaces is no JSON", '[{"interfaceName":"eth0","network":"default"}, …]')
        return
    number = len(read) if isinstance(read, list) else 0
    if number < 1 + (machine.num_fabric_devices or 0):
        yield Hit(node, f"{number} interfaces, and {machine.name} has 1 + {machine.num_fabric_devices}",
                  f"{1 + (machine.num_fabric_devices or 0)} interfaces, eth0 first")


def sidecar_never_ends(pod: PodTemplate) -> Hits:
    if pod.kind in ("DaemonSet", "Deployment", "StatefulSet", "Pod"):
        return
    for container in pod.containers:
        if _DAEMONS.search(container.name) or _DAEMONS.search(container.image.text):
            yield Hit(container, f"{container.name} outlives the training")


def old_gpu_network_image(pod: PodTemplate) -> Hits:
    for node in pod.spec.walk():
        match = re.search(r"/([\w-]+):v(\d+)\.(\d+)\.(\d+)", node.text) if len(node.text) < 300 else None
        if not match:
            continue
        is_tcpxo = match[1] == "tcpgpudmarxd-dev" and "tcpxo" in node.text + str(pod.annotations)
        current = _CURRENT.get(match[1] + ("/tcpxo" if is_tcpxo else ""))
        if current and tuple(map(int, match.groups()[1:])) < current:
            yield Hit(node, f"{match[1]} {match[0].rpartition(':')[2]} is old", f"v{'.'.join(map(str, current))}")


def nccl_profile_not_read(fabric_job: TrainingJob, machine: Machine) -> Hits:
    script, variable = _PROFILES.get(machine.fabric.name, ("", ""))
    container = fabric_job.container
    text = " ".join(container.argv)
    if script and script not in text and variable not in container.environment and not container.has_env_from:
        yield Hit(fabric_job, f"{script} is not read before the training starts",
                  f"source /usr/local/…/{script} in the command, before torchrun")


def preemptible(manifests: Manifests) -> Hits:
    for command in manifests.commands:
        found = command.flag_word("--preemptible") if command.name == "gcloud" else None
        if found is not None:
            edits: tuple[Edit, ...] = replace_within(found[1].location, "--preemptible", "--spot")
            yield Hit(found[1], "the nodes are gone after 24 hours", "--spot",
                      edits if command.argv[1:2] == ["container"] else ())
    for pod in manifests.pods:
        location = pod.spec["nodeSelector"].key("cloud.google.com/gke-preemptible").location
        if location:
            yield Hit(location, "it selects preemptible nodes", "cloud.google.com/gke-spot: \"true\"")


def no_driver_version(gke_pool: Command) -> Hits:
    value, location = gke_pool.flag("--accelerator") or "", gke_pool.value_location("--accelerator")
    if value and "gpu-driver-version" not in value:
        yield Hit(location, fix=f"--accelerator {value},gpu-driver-version=default",
                  edits=replace_within(location, value, f"{value},gpu-driver-version=default"))


def nodes_per_zone(gke_pool: Command) -> Hits:
    location = gke_pool.flag("--location", "--region") or ""
    is_region = gke_pool.has("--region") or re.fullmatch(r"[a-z]+-[a-z]+\d+", location) is not None
    zones = [zone for zone in (gke_pool.flag("--node-locations") or "").split(",") if zone]
    number = gke_pool.flag("--num-nodes")
    if is_region and number and number != "1" and len(zones) != 1:
        yield Hit(gke_pool.value_location("--num-nodes"), f"{number} nodes in each of {len(zones) or 'three'} zones",
                  f"--node-locations ZONE --num-nodes {number}")


def no_location(gke_pool: Command, manifests: Manifests) -> Hits:
    if not gke_pool.has("--zone", "--region", "--location", "-z") and _gpu_machine(manifests, gke_pool):
        yield Hit(gke_pool)


def gpus_in_the_default_pool(command: Command, manifests: Manifests) -> Hits:
    if command.begins("gcloud container clusters create"):
        machine = _gpu_machine(manifests, command)
        if machine:
            yield Hit(command.value_location("--machine-type"), f"{machine.name} is the default pool")


def gpus_do_not_fit_machine(command: Command, manifests: Manifests) -> Hits:
    machine = _gpu_machine(manifests, command) if command.name == "gcloud" else None
    count = re.search(r"count=(\d+)", command.flag("--accelerator") or "")
    if machine and count and int(count[1]) != machine.num_gpus:
        yield Hit(command.value_location("--accelerator"), f"count={count[1]}, and {machine.name} has "
                  f"{machine.num_gpus} GPUs", f"count={machine.num_gpus}")


def filestore_too_slow(manifests: Manifests) -> Hits:
    volume = manifests.catalog.volumes.get("filestore-zonal")
    for command in manifests.commands:
        size = re.search(r"capacity=(\d+)\s*(TB|TiB|T|GB|GiB|G)?", command.flag("--file-share") or "", re.IGNORECASE)
        if not command.begins("gcloud filestore instances create") or not size or not volume:
            continue
        tib = float(size[1]) / (1 if (size[2] or "G").upper().startswith("T") else 1024)
        speed = volume.gbyte_per_s(tib)
        if speed and speed < 5:
            yield Hit(command.value_location("--file-share"), f"{tib:g} TiB read about {speed:.1f} GB/s")


def gsutil(command: Command) -> Hits:
    if command.name == "gsutil":
        rest = " ".join(word for word in command.argv[1:] if word != "-m")
        yield Hit(command, fix="gcloud storage " + rest.replace("mb -l", "buckets create --location", 1))


def jobs_on_fabrics(manifests: Manifests) -> Iterator[tuple[TrainingJob, Machine]]:
    """Yield jobs over several machines that have GPU networks of their own."""
    for job in manifests.jobs:
        machine = job.machine
        if job.is_distributed and machine and machine.fabric.name.startswith("gpudirect") \
                and job.gpus == machine.gpus_per_host and job.pod.is_complete:
            yield job, machine


def node_pools(manifests: Manifests) -> Iterator[Command]:
    for command in manifests.commands:
        if command.begins("gcloud container clusters create") or \
                command.begins("gcloud container node-pools create"):
            yield command


def _gpu_machine(manifests: Manifests, command: Command) -> Machine | None:
    return manifests.machine(command.flag("--machine-type") or "")


ACCELERATORS = ("NVIDIA_TESLA_T4", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_P4", "NVIDIA_TESLA_A100",
                "NVIDIA_A100_80GB", "NVIDIA_L4", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB",
                "NVIDIA_B200", "NVIDIA_GB200", "NVIDIA_RTX_PRO_6000", "TPU_V2", "TPU_V3", "TPU_V4_POD",
                "TPU_V5_LITEPOD", "ACCELERATOR_TYPE_UNSPECIFIED")
_PREBUILT = re.compile(r"(?:docker\.pkg\.dev/vertex-ai|gcr\.io/cloud-aiplatform)/training/"
                       r"((pytorch|tf)-(?:gpu|cpu|xla|tpu)\.(\d+)-(\d+))(\.py\d+)?(?::|$)")
_SUFFIX_SINCE = {"pytorch": (1, 12), "tf": (2, 12)}  # Older images have no Python version in their names.


@frozen
class Pool:
    """A worker pool of a custom job."""

    location: Span
    machine_type: str
    accelerator: str
    num_accelerators: int
    command: tuple[str, ...]
    is_script: bool = False  # A local script that Vertex runs with `python`.


def no_staging_bucket(file: PythonFile) -> Hits:
    starts = [call for call in file.calls("aiplatform.init") if "staging_bucket" in _keywords(call)]
    for call in file.calls("CustomJob.from_local_script", "CustomTrainingJob"):
        if not starts and "staging_bucket" not in _keywords(call):
            yield Hit(file.location(call.func))


def no_such_training_image(text: str, location: Span) -> Hits:
    match = _PREBUILT.search(text)
    if match and match[5] is None and (int(match[3]), int(match[4])) >= _SUFFIX_SINCE[match[2]]:
        yield Hit(location, f"there is no image {match[1]}", f"{match[1]}.py310, or an image of your own by digest")


def one_process_a_replica(pool: Pool) -> Hits:
    launch = launch_of_argv(pool.command)
    is_python = pool.is_script or (launch is not None and launch.program == "python")
    if pool.num_accelerators > 1 and pool.accelerator.startswith("NVIDIA") and is_python:
        yield Hit(pool, f"one process for {pool.num_accelerators} GPUs",
                  f"a container that runs torchrun --nproc-per-node={pool.num_accelerators} --nnodes=$WORLD_SIZE "
                  "--node-rank=$RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT")


def command_of_one_word(manifests: Manifests) -> Hits:
    for command in manifests.commands:
        value = command.flag("--command") or ""
        if command.begins("gcloud ai custom-jobs create") and " " in value.strip():
            location, listed = command.value_location("--command"), ",".join(value.split())
            edits: tuple[Edit, ...] = () if "," in value else replace_within(location, value, listed)
            yield Hit(location, f"the program would be {value!r}", f"--command={listed}", edits)
    for document in manifests.documents:
        for node in document.root.walk():
            for first in list(node.at("containerSpec.command"))[:1]:
                if len(first.text.split()) > 1:
                    yield Hit(first, f"the program would be {first.text!r}", f"{first.text.split()}")


def unknown_accelerator(pool: Pool) -> Hits:
    if pool.accelerator and pool.accelerator not in ACCELERATORS and "$" not in pool.accelerator:
        gpu = pool.accelerator.rpartition("_")[2]
        near = [name for name in ACCELERATORS if gpu in name.split("_")]
        yield Hit(pool, f"{pool.accelerator} is no accelerator of Vertex",
                  f"one of: {', '.join(near)}" if near else nearest(pool.accelerator, ACCELERATORS))


def tpu_not_for_training(pool: Pool) -> Hits:
    if pool.accelerator == "TPU_V4_POD":
        yield Hit(pool, f"{pool.machine_type or 'a machine'} with TPU_V4_POD")


def gpus_do_not_fit_vertex_machine(pool: Pool, manifests: Manifests) -> Hits:
    machine = manifests.machine(pool.machine_type)
    if machine and pool.num_accelerators and pool.num_accelerators != machine.num_gpus:
        yield Hit(pool, f"{pool.num_accelerators} GPUs, and {machine.name} has {machine.num_gpus}",
                  f"accelerator count {machine.num_gpus}")


def training_image_not_pinned(text: str, location: Span) -> Hits:
    image = re.search(r"[\w.-]+(?:/[\w.-]+)*/(?:training/)[\w.-]+:latest\b", text)
    if image is not None:
        yield Hit(location, f"{image[0]} is not one image")


def vertex_pools(manifests: Manifests) -> Iterator[Pool]:
    for file in manifests.files.pythons:
        yield from _python_pools(file)
    for command in manifests.commands:
        if not command.begins("gcloud ai custom-jobs create"):
            continue
        said = (command.flag("--command") or "").replace(" ", ",").split(",")
        for word in command.words:
            name, _, value = word.text.partition("=")
            if name == "--worker-pool-spec":
                pairs = dict(part.partition("=")[::2] for part in value.split(","))
                yield _pool(word.location, {key.replace("-", "_"): text for key, text in pairs.items()}, tuple(said))
    for document in manifests.documents:
        for node in document.root.walk():
            for pool in node["workerPoolSpecs"]:
                machine, container = pool["machineSpec"], pool["containerSpec"]
                values = {"machine_type": machine["machineType"].text,
                          "accelerator_type": machine["acceleratorType"].text,
                          "accelerator_count": machine["acceleratorCount"].text}
                location = machine.location or document.location
                yield _pool(location, values, (*container["command"].words, *container["args"].words))


def _python_pools(file: PythonFile) -> Iterator[Pool]:
    is_script = bool(file.calls("CustomJob.from_local_script", "CustomTrainingJob"))
    for _, call in file.all_calls:
        values = {name: str(value.value) for name, value in _keywords(call).items() if isinstance(value, ast.Constant)}
        if "accelerator_type" in values and "machine_type" in values:
            location = next(file.location(key.value) for key in call.keywords if key.arg == "accelerator_type")
            yield _pool(location, values, (), is_script=is_script)
    for node in file.nodes:
        contents = _entries(node)
        if isinstance(contents.get("machine_spec"), ast.Dict):
            values = {key: str(value.value) for key, value in _entries(contents["machine_spec"]).items()
                      if isinstance(value, ast.Constant)}
            words = [str(item.value) for key, value in _entries(contents.get("container_spec")).items()
                     if key in ("command", "args") and isinstance(value, ast.List)
                     for item in value.elts if isinstance(item, ast.Constant)]
            yield _pool(file.location(node), values, tuple(words))


def _entries(node: ast.AST | None) -> dict[str, ast.expr]:
    """Return the entries of a dict in the code whose keys are literals."""
    return {str(key.value): value for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)} if isinstance(node, ast.Dict) else {}


def _pool(location: Span, values: Mapping[str, str], command: tuple[str, ...], *, is_script: bool = False) -> Pool:
    count = values.get("accelerator_count", "")
    return Pool(location, values.get("machine_type", ""), values.get("accelerator_type", ""),
                int(count) if count.isdigit() and len(count) < 9 else 0, tuple(filter(None, command)), is_script)


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {key.arg: key.value for key in call.keywords if key.arg}


def texts(manifests: Manifests) -> Iterator[tuple[str, Span]]:
    """Yield texts in Python, gcloud commands and YAML that may name an image."""
    for file in manifests.files.pythons:
        for node in file.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 500:
                yield node.value, file.location(node)
    for command in manifests.commands:
        for word in command.words if command.name == "gcloud" else ():
            yield word.text, word.location
    for document in manifests.documents:
        for contents in document.root.walk():
            if contents.text and len(contents.text) < 500:
                yield contents.text, contents.location
