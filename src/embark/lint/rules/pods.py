"""EMB1xx, last part: does each pod land on a node of its own, with what it needs?"""

import re
from collections.abc import Iterator

from embark.lint.edit import set_scalar
from embark.lint.job import GKE_LABEL, SPOT_LABELS, TrainingJob
from embark.lint.launch import SHELLS
from embark.lint.pods import Pod, quantity
from embark.lint.rule import Hit, World
from embark.lint.yaml_nodes import Node

KUBERNETES = "https://kubernetes.io/docs/"
GPUS = KUBERNETES + "tasks/manage-gpus/scheduling-gpus/"
STOCK_IMAGES = re.compile(r"^(?:docker\.io/)?(?:pytorch/pytorch|nvcr\.io/nvidia/(?:pytorch|cuda)|nvidia/cuda|python)"
                          r"[:@]")


def no_requests(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or pod.main is None or not pod.main.is_accelerated:
        return
    missing = [name for name in ("cpu", "memory") if not pod.main.amount(name)]
    if missing:
        yield Hit(pod.main.limits.place or pod.place, f"{' and '.join(missing)} not requested")


def no_gpu_toleration(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or not pod.num_gpus or not pod.is_whole:
        return
    # GKE adds this toleration itself to pods that ask for GPUs.
    on_gke = any(name.startswith("cloud.google.com/") for name in pod.selector)
    if not on_gke and not pod.tolerates("nvidia.com/gpu"):
        yield Hit(pod.place)


def no_spot_toleration(pod: Pod) -> Iterator[Hit]:
    key, value = SPOT_LABELS["azure"][0]
    if pod.selector.get(key) == value and not pod.tolerates(key, value):
        yield Hit(pod.spec["nodeSelector"][key].place or pod.place,
                  fix=f"tolerations: [{{key: {key}, operator: Equal, value: {value}, effect: NoSchedule}}]")


def no_anti_affinity(job: TrainingJob) -> Iterator[Hit]:
    spec = job.pod.spec
    spread = spec.at("affinity.podAntiAffinity") or spec["topologySpreadConstraints"]
    exclusive = job.document.root.at("metadata.annotations")["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    # Pods of one GPU may share a node. A pod that takes all of a node's fabric, or all of its GPUs, is alone anyway.
    if not job.is_distributed or spread or exclusive or not job.pod.is_whole or job.gpus < 2:
        return
    has_fabric = any(job.container.amount(name) for name in ("vpc.amazonaws.com/efa", "rdma/ib"))
    if not job.takes_whole_node and not has_fabric:
        larger = [one.name for one in job.machines if one.gpus_per_host > job.gpus]
        why = f": {larger[0]} has room for two" if larger else ""
        yield Hit(job.place, f"nothing keeps two pods off one node{why}")


def small_dev_shm(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or pod.main is None or (pod.num_gpus < 2 and not pod.main.starts_torchrun):
        return
    if not pod.is_whole or pod.spec["hostIPC"].value is True or not pod.num_gpus:
        return
    volume = pod.mounted(pod.main, "/dev/shm")
    if not volume:
        yield Hit(pod.place, "nothing is mounted at /dev/shm, which is 64 MB then",
                  "an emptyDir with medium: Memory and a sizeLimit, mounted at /dev/shm")
    elif volume["emptyDir"] and volume.at("emptyDir.medium").text != "Memory":
        yield Hit(volume.place or pod.place, "what is mounted at /dev/shm lies on disk",
                  "emptyDir: {medium: Memory, sizeLimit: 64Gi}")


def no_ipc_lock(job: TrainingJob) -> Iterator[Hit]:
    security = job.container.node["securityContext"]
    is_allowed = "IPC_LOCK" in security.at("capabilities.add").words or security["privileged"].value is True
    if job.is_distributed and job.pod.is_whole and not is_allowed and _is_rdma(job):
        yield Hit(job.place)


def processes_differ_from_gpus(job: TrainingJob) -> Iterator[Hit]:
    processes, gpus = job.num_processes, job.gpus
    if not gpus or processes is None or processes == gpus:
        return
    node = job.document.root.at("spec.nprocPerNode" if job.kind == "PyTorchJob" else "spec.trainer.numProcPerNode")
    quoted = f'"{gpus}"' if job.kind == "PyTorchJob" else str(gpus)
    yield Hit(node.place or job.place, f"{processes} processes and {gpus} GPUs in each pod",
              f"{gpus} processes a pod, one for each GPU", set_scalar(node, quoted) if node else ())


def more_than_a_node_has(job: TrainingJob) -> Iterator[Hit]:
    if not job.machines:
        return
    cpu, memory = job.container.amount("cpu"), job.container.amount("memory")
    vcpus, gib = quantity(cpu.text), quantity(memory.text)
    most_vcpus = max(one.allocatable_vcpus or float("inf") for one in job.machines)
    most_gib = max(one.allocatable_gib or float("inf") for one in job.machines)
    most_gpus = max(one.gpus_per_host for one in job.machines)
    name = job.machines[0].name if len(job.machines) == 1 else "any machine it may run on"
    if vcpus is not None and vcpus > most_vcpus:
        yield Hit(cpu.place or job.place, f"cpu {cpu.text}: {name} has {most_vcpus:.4g} for pods",
                  f"cpu: {int(most_vcpus * 0.95)}")
    if gib is not None and gib / 2**30 > most_gib:
        yield Hit(memory.place or job.place, f"memory {memory.text}: {name} has {most_gib:,.0f} GiB for pods",
                  f"memory: {int(most_gib * 0.95)}Gi")
    if job.gpus > most_gpus:
        yield Hit(job.place, f"{job.gpus} GPUs: {name} has {most_gpus}", f"nvidia.com/gpu: {most_gpus}")


def script_not_in_image(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or pod.main is None or pod.spec["initContainers"].items:
        return
    launch, image = pod.main.launch, pod.main.image
    if launch is None or launch.is_module or not launch.script.endswith(".py"):
        return
    if not STOCK_IMAGES.match(image.text):
        return
    folder = launch.script.rpartition("/")[0] if launch.script.startswith("/") else pod.main.node["workingDir"].text
    mounts = [mount["mountPath"].text.rstrip("/") for mount in pod.main.node["volumeMounts"]]
    if not folder or not any(folder == path or folder.startswith(path + "/") for path in mounts):
        yield Hit(image.place or pod.place, f"{image.text} holds no {launch.script}")


def command_is_one_word(pod: Pod) -> Iterator[Hit]:
    for container in pod.containers:
        first: Node = next(iter(container.command), container.command)
        if first.place is not None and len(first.text.split()) > 1 and first.text.split()[0] not in SHELLS:
            words = ", ".join(f'"{word}"' for word in first.text.split())
            yield Hit(first.place, f"the program would be {first.text!r}", f"command: [{words}]")


def one_process_on_many_gpus(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or pod.main is None or pod.kind == "PyTorchJob":
        return
    launch = pod.main.launch
    if launch is not None and launch.program == "python" and pod.main.num_gpus > 1:
        yield Hit(pod.main.command.place or pod.place, f"one process has {pod.main.num_gpus} GPUs",
                  f"torchrun --nproc-per-node={pod.main.num_gpus} {launch.script}")


def claim_not_given(pod: Pod, world: World) -> Iterator[Hit]:
    if not pod.is_training:
        return
    for volume in pod.spec["volumes"]:
        node = volume.at("persistentVolumeClaim.claimName")
        if node.place is not None and not world.named("PersistentVolumeClaim", node.text, pod.document.namespace):
            yield Hit(node.place, f"the PersistentVolumeClaim {node.text} is not among the files given",
                      f"a PersistentVolumeClaim {node.text} in namespace {pod.document.namespace}")


def unknown_accelerator_label(pod: Pod, world: World) -> Iterator[Hit]:
    known = {one.gke_accelerator for one in world.catalog.machines.values() if one.gke_accelerator}
    node = pod.spec["nodeSelector"][GKE_LABEL]
    gpu = re.search(r"a100|h100|h200|b200", node.text)
    if node.place is not None and node.text.startswith("nvidia") and node.text not in known and gpu is not None:
        near = sorted(label for label in known if gpu[0] in label)
        yield Hit(node.place, f"GKE labels no node {GKE_LABEL}: {node.text}", f"one of: {', '.join(near)}")


def runs_as_root(pod: Pod) -> Iterator[Hit]:
    if not pod.is_training or pod.main is None:
        return
    for holder in (pod.spec["securityContext"], pod.main.node["securityContext"]):
        user, privileged = holder["runAsUser"], holder["privileged"]
        if user.whole == 0 and user.place is not None:
            yield Hit(user.place, "the container runs as root", "runAsUser: 1000, runAsNonRoot: true",
                      set_scalar(user, "1000"))
        if privileged.value is True and privileged.place is not None:
            yield Hit(privileged.place, "the training container is privileged",
                      "capabilities: {add: [IPC_LOCK]} instead")


def _is_rdma(job: TrainingJob) -> bool:
    asks = any(job.container.amount(name) for name in ("vpc.amazonaws.com/efa", "rdma/ib", "rdma/shared_ib"))
    fabric = job.machine.fabric.transport if job.machine is not None and job.machine.gpus_per_host >= 8 else ""
    means = any(name.startswith("FI_") for name in job.container.environment)
    return asks or means or (fabric in ("libfabric", "verbs") and job.cloud != "gcp")
