"""EMB1xx, second half: does the Job survive failures, evictions and its own end, and does each pod land on a node with
what it needs?"""

import ast
import re
from collections.abc import Iterator

from embark.catalog.pricing import POD_GRACE_S
from embark.errors import ExitCode
from embark.kubernetes.names import GKE_ACCELERATOR, SPOT_LABELS
from embark.kubernetes.objects import quantity
from embark.kubernetes.pods import DEFAULT_GRACE_S, NVIDIA_GPU
from embark.kubernetes.yaml_nodes import Node
from embark.lint.edits import replace_within, set_key, set_scalar
from embark.lint.manifests import Manifests, TrainingJob
from embark.lint.pods import SHELLS, Container, PodTemplate
from embark.lint.read import Document, PythonFile
from embark.lint.rule import Hit, Hits
from embark.lint.shell import Command

GRACE_FIELD = "terminationGracePeriodSeconds"


def backoff_by_default(job: TrainingJob) -> Hits:
    if not job.spec["backoffLimit"]:
        yield Hit(job.document)


def no_failure_policy(job: TrainingJob) -> Hits:
    rules = job.spec.at("podFailurePolicy.rules")
    answer = [condition["type"].text for rule in rules for condition in rule["onPodConditions"]]
    if "DisruptionTarget" not in answer:
        yield Hit(job.document)


def failure_policy_needs_never(job: TrainingJob) -> Hits:
    policy = job.pod.spec["restartPolicy"]
    if job.spec["podFailurePolicy"] and policy.text != "Never" and policy:
        yield Hit(policy, f"podFailurePolicy with restartPolicy: {policy.text} is refused",
                  edits=set_scalar(policy, "Never"))


def no_restart_policy(pod: PodTemplate) -> Hits:
    policy = pod.spec["restartPolicy"]
    if policy.text not in ("Never", "OnFailure") and pod.spec:
        if pod.kind == "JobSet" and not policy:
            return  # JobSet's webhook fills it in
        yield Hit(policy or pod, f"restartPolicy is {policy.text or 'not set'}",
                  edits=set_key(pod.spec, "restartPolicy", "Never"))


def replaced_while_terminating(job: TrainingJob) -> Hits:
    policy = job.spec["podReplacementPolicy"]
    # With a podFailurePolicy, Failed is the default and the only value allowed.
    if policy.text != "Failed" and not job.spec["podFailurePolicy"]:
        yield Hit(policy or job.document, edits=set_key(job.spec, "podReplacementPolicy", "Failed"))


def never_cleaned_up(job: TrainingJob) -> Hits:
    if not job.spec["ttlSecondsAfterFinished"]:
        yield Hit(job.document, edits=set_key(job.spec, "ttlSecondsAfterFinished", "86400"))


def stop_counts_as_success(manifests: Manifests) -> Hits:
    fix = f"save, then exit with {ExitCode.PREEMPTED}, which the podFailurePolicy ignores"
    for file in manifests.files.pythons:
        for function, call in _handlers_that_succeed(file):
            location = file.location(call)
            edits = replace_within(location, "(0)", f"({ExitCode.PREEMPTED})") if location.text == "sys.exit(0)" else ()
            yield Hit(location, f"{function} handles SIGTERM and ends with {location.text}: the Job counts it as done",
                      fix, edits)
    for command in manifests.commands:
        if command.name == "trap" and len(command.words) > 2 and re.search(r"\bexit\s*(0\b|$|;)", command.argv[1]) \
                and {"TERM", "SIGTERM", "15"} & set(command.argv[2:]):
            yield Hit(command, "the trap ends the script with 0 on SIGTERM: the Job counts it as done", fix)


def grace_by_default(job: TrainingJob) -> Hits:
    node = job.pod.spec[GRACE_FIELD]
    if not job.pod.is_complete or not job.gpus or (job.is_spot and job.cloud in ("gcp", "azure") and node):
        return
    if not node or (node.integer or DEFAULT_GRACE_S) < DEFAULT_GRACE_S:
        have = f"{node.text} s" if node else f"the default of {DEFAULT_GRACE_S} s"
        longest = int(POD_GRACE_S[job.cloud]) if job.cloud and job.is_spot else 120
        yield Hit(node or job, f"a last checkpoint has {have}", f"{GRACE_FIELD}: {longest}",
                  set_key(job.pod.spec, GRACE_FIELD, str(longest)))


def grace_beyond_the_cloud(job: TrainingJob) -> Hits:
    node = job.pod.spec[GRACE_FIELD]
    if not job.is_spot or job.cloud not in POD_GRACE_S:
        return
    longest = int(POD_GRACE_S[job.cloud])
    requested = node.integer if node else DEFAULT_GRACE_S
    if requested and requested > longest:
        said = f"{requested} s" if node else f"the default of {requested} s"
        yield Hit(node or job,
                  f"the pod counts on {said} and a spot machine of {job.cloud} gives {longest} s",
                  f"{GRACE_FIELD}: {longest}, and save often enough",
                  set_key(job.pod.spec, GRACE_FIELD, str(longest)))


def no_gang(job: TrainingJob) -> Hits:
    if job.is_distributed and job.gpus and not _is_gang(job):
        yield Hit(job.document, f"{job.num_nodes} pods are not scheduled together")


def queue_not_given(manifests: Manifests) -> Hits:
    queues, clusters = manifests.of_kind("LocalQueue"), manifests.of_kind("ClusterQueue")
    used = [("LocalQueue", job.document.at("metadata.labels")["kueue.x-k8s.io/queue-name"],
             f" in {job.document.namespace}") for job in manifests.jobs]
    used += [("ClusterQueue", queue.at("spec.clusterQueue"), "") for queue in queues]
    used += [("ResourceFlavor", flavor["name"], "") for cluster in clusters
             for group in cluster.at("spec.resourceGroups") for flavor in group["flavors"]]
    for kind, node, where in used:
        given = manifests.of_kind(kind)
        names = [one.name for one in given if not where or one.namespace == where.removeprefix(" in ")]
        if given and node and node.text not in names:
            also = ", in the Job's namespace" if where else ""
            yield Hit(node, f"{kind} {node.text}{where} is not among the files given",
                      f"one of: {', '.join(sorted({one.name for one in given}))}{also}")


def old_kueue(document: Document) -> Hits:
    group, _, version = document.api.partition("/")
    node = document["apiVersion"]
    if group == "kueue.x-k8s.io" and version in ("v1beta1", "v1alpha1", "v1alpha2"):
        yield Hit(node, f"{document.kind} is written for {version}",
                  edits=set_scalar(node, "kueue.x-k8s.io/v1beta2") if version == "v1beta1" else ())


def logs_of_one_pod(command: Command) -> Hits:
    name = next((word for word in command.argv if re.match(r"jobs?(\.batch)?/", word)), "")
    if command.begins("kubectl logs") and name and not command.has("--all-pods"):
        job = name.partition("/")[2]
        yield Hit(command, f"this follows one pod of {name}",
                  f"kubectl logs -f -l batch.kubernetes.io/job-name={job} --prefix --max-log-requests=64")


def _is_gang(job: TrainingJob) -> bool:
    root = job.document.root
    labels, annotations = root.at("metadata.labels"), root.at("metadata.annotations")
    return bool(
        labels["kueue.x-k8s.io/queue-name"] or annotations["kueue.x-k8s.io/queue-name"]
        or root.at("spec.runPolicy.schedulingPolicy") or job.pod.spec["schedulingGroup"]
        or job.pod.spec["schedulerName"].text in ("volcano", "scheduler-plugins-scheduler", "kai-scheduler")
        or any("pod-group" in name or "group-name" in name for name in (*job.pod.labels, *job.pod.annotations))
        or job.document.api.startswith("batch.volcano.sh")
    )


def _handlers_that_succeed(file: PythonFile) -> Iterator[tuple[str, ast.Call]]:
    handlers = {
        ast.unparse(call.args[1]) for call in file.calls("signal.signal")
        if len(call.args) > 1 and ast.unparse(call.args[0]).endswith("SIGTERM")
    }
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and node.name in {name.rpartition(".")[2] for name in handlers}:
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
                name = ast.unparse(call.func)
                is_zero = not call.args or (isinstance(call.args[0], ast.Constant) and call.args[0].value in (0, None))
                if name in ("sys.exit", "exit", "quit", "os._exit") and is_zero:
                    yield node.name, call


STOCK_IMAGES = re.compile(r"^(?:docker\.io/)?(?:pytorch/pytorch|nvcr\.io/nvidia/(?:pytorch|cuda)|nvidia/cuda|python)"
                          r"[:@]")


def no_requests(trainer: Container, pod: PodTemplate) -> Hits:
    missing = [name for name in ("cpu", "memory") if not trainer.amount(name)]
    if missing and trainer.is_accelerated:
        yield Hit(trainer.limits or pod, f"{' and '.join(missing)} not requested")


def no_gpu_toleration(pod: PodTemplate) -> Hits:
    if not pod.is_training or not pod.num_gpus or not pod.is_complete:
        return
    # GKE adds this toleration itself to pods that ask for GPUs.
    on_gke = any(name.startswith("cloud.google.com/") for name in pod.selector)
    if not on_gke and not pod.tolerates(NVIDIA_GPU):
        yield Hit(pod)


def no_spot_toleration(pod: PodTemplate) -> Hits:
    key, value = SPOT_LABELS["azure"][0]
    if pod.selector.get(key) == value and not pod.tolerates(key, value):
        yield Hit(pod.spec["nodeSelector"][key] or pod,
                  fix=f"tolerations: [{{key: {key}, operator: Equal, value: {value}, effect: NoSchedule}}]")


def no_anti_affinity(job: TrainingJob) -> Hits:
    spec = job.pod.spec
    spread = spec.at("affinity.podAntiAffinity") or spec["topologySpreadConstraints"]
    exclusive = job.document.at("metadata.annotations")["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    # Pods of one GPU may share a node. A pod that takes all of a node's fabric, or all of its GPUs, is alone anyway.
    if not job.is_distributed or spread or exclusive or not job.pod.is_complete or job.gpus < 2:
        return
    has_fabric = any(job.container.amount(name) for name in ("vpc.amazonaws.com/efa", "rdma/ib"))
    larger = [one.name for one in job.machines if one.gpus_per_host > job.gpus]
    if (larger or not job.machines) and not has_fabric:
        why = f": {larger[0]} has room for two" if larger else ""
        yield Hit(job, f"nothing keeps two pods off one node{why}")


def small_dev_shm(trainer: Container, pod: PodTemplate) -> Hits:
    is_one = pod.num_gpus < 2 and not trainer.starts_torchrun
    if is_one or not pod.num_gpus or not pod.is_complete or pod.spec["hostIPC"].value is True:
        return
    volume = pod.mounted(trainer, "/dev/shm")
    if not volume:
        yield Hit(pod, "nothing is mounted at /dev/shm, which is 64 MB then",
                  "an emptyDir with medium: Memory and a sizeLimit, mounted at /dev/shm")
    elif volume["emptyDir"] and volume.at("emptyDir.medium").text != "Memory":
        yield Hit(volume or pod, "what is mounted at /dev/shm lies on disk",
                  "emptyDir: {medium: Memory, sizeLimit: 64Gi}")


def no_ipc_lock(job: TrainingJob) -> Hits:
    security = job.container.node["securityContext"]
    is_allowed = "IPC_LOCK" in security.at("capabilities.add").words or security["privileged"].value is True
    if job.is_distributed and job.pod.is_complete and not is_allowed and _is_rdma(job):
        yield Hit(job)


def processes_differ_from_gpus(job: TrainingJob) -> Hits:
    processes, gpus = job.num_processes, job.gpus
    if not gpus or processes is None or processes == gpus:
        return
    node = job.document.at("spec.nprocPerNode" if job.kind == "PyTorchJob" else "spec.trainer.numProcPerNode")
    quoted = f'"{gpus}"' if job.kind == "PyTorchJob" else str(gpus)
    yield Hit(node or job, f"{processes} processes and {gpus} GPUs in each pod",
              f"{gpus} processes a pod, one for each GPU", set_scalar(node, quoted) if node else ())


def more_than_a_node_has(job: TrainingJob) -> Hits:
    if not job.machines:
        return
    cpu, memory = job.container.amount("cpu"), job.container.amount("memory")
    vcpus, gib = quantity(cpu.text), quantity(memory.text)
    most_vcpus = max(one.allocatable_vcpus or float("inf") for one in job.machines)
    most_gib = max(one.allocatable_gib or float("inf") for one in job.machines)
    most_gpus = max(one.gpus_per_host for one in job.machines)
    name = job.machines[0].name if len(job.machines) == 1 else "any machine it may run on"
    if vcpus and vcpus > most_vcpus:
        yield Hit(cpu or job, f"cpu {cpu.text}: {name} has {most_vcpus:.4g} for pods",
                  f"cpu: {int(most_vcpus * 0.95)}")
    if gib and gib / 2**30 > most_gib:
        yield Hit(memory or job, f"memory {memory.text}: {name} has {most_gib:,.0f} GiB for pods",
                  f"memory: {int(most_gib * 0.95)}Gi")
    if job.gpus > most_gpus:
        yield Hit(job, f"{job.gpus} GPUs: {name} has {most_gpus}", f"nvidia.com/gpu: {most_gpus}")


def script_not_in_image(trainer: Container, pod: PodTemplate) -> Hits:
    launch, image = trainer.launch, trainer.image
    if not launch or launch.is_module or not launch.script.endswith(".py") or not STOCK_IMAGES.match(image.text) \
            or pod.spec["initContainers"].items:
        return
    folder = launch.script.rpartition("/")[0] if launch.script.startswith("/") else trainer.node["workingDir"].text
    mounts = [mount["mountPath"].text.rstrip("/") for mount in trainer.node["volumeMounts"]]
    if not folder or not any(folder == path or folder.startswith(path + "/") for path in mounts):
        yield Hit(image or pod, f"{image.text} holds no {launch.script}")


def command_is_one_word(pod: PodTemplate) -> Hits:
    for container in pod.containers:
        first: Node = next(iter(container.node["command"]), container.node["command"])
        if len(first.text.split()) > 1 and first.text.split()[0] not in SHELLS:
            words = ", ".join(f'"{word}"' for word in first.text.split())
            yield Hit(first, f"the program would be {first.text!r}", f"command: [{words}]")


def one_process_on_many_gpus(trainer: Container, pod: PodTemplate) -> Hits:
    launch, gpus = trainer.launch, trainer.num_gpus
    if launch and launch.program == "python" and gpus > 1 and pod.kind != "PyTorchJob":
        yield Hit(trainer.node["command"] or pod, f"one process has {gpus} GPUs",
                  f"torchrun --nproc-per-node={gpus} {launch.script}")


def claim_not_given(trainer: Container, pod: PodTemplate, manifests: Manifests) -> Hits:
    for volume in pod.spec["volumes"]:
        node = volume.at("persistentVolumeClaim.claimName")
        if node and not manifests.named("PersistentVolumeClaim", node.text, pod.document.namespace):
            yield Hit(node, f"the PersistentVolumeClaim {node.text} is not among the files given",
                      f"a PersistentVolumeClaim {node.text} in namespace {pod.document.namespace}")


def unknown_accelerator_label(pod: PodTemplate, manifests: Manifests) -> Hits:
    known = {one.gke_accelerator for one in manifests.catalog.machines.values() if one.gke_accelerator}
    node = pod.spec["nodeSelector"][GKE_ACCELERATOR]
    gpu = re.search(r"a100|h100|h200|b200", node.text)
    if node.text.startswith("nvidia") and node.text not in known and gpu:
        near = sorted(label for label in known if gpu[0] in label)
        yield Hit(node, f"GKE labels no node {GKE_ACCELERATOR}: {node.text}", f"one of: {', '.join(near)}")


def runs_as_root(trainer: Container, pod: PodTemplate) -> Hits:
    for holder in (pod.spec["securityContext"], trainer.node["securityContext"]):
        user, privileged = holder["runAsUser"], holder["privileged"]
        if user.integer == 0:
            yield Hit(user, "the container runs as root", "runAsUser: 1000, runAsNonRoot: true",
                      set_scalar(user, "1000"))
        if privileged.value is True:
            yield Hit(privileged, "the training container is privileged",
                      "capabilities: {add: [IPC_LOCK]} instead")


def _is_rdma(job: TrainingJob) -> bool:
    asks = any(job.container.amount(name) for name in ("vpc.amazonaws.com/efa", "rdma/ib", "rdma/shared_ib"))
    fabric = job.machine.fabric.transport if job.machine is not None and job.machine.gpus_per_host >= 8 else ""
    means = any(name.startswith("FI_") for name in job.container.environment)
    return asks or means or (fabric in ("libfabric", "verbs") and job.cloud != "gcp")
