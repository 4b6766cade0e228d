"""EMB2xx: what Kubeflow's operators and TorchX do with a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from embark.catalog.machine import Catalog, Machine
from embark.lint.edit import add_key, remove_item, remove_key, set_scalar
from embark.lint.pods import patches
from embark.lint.rule import Hit, Rules, World
from embark.lint.shell import Command, Word
from embark.lint.source import Edit, Place
from embark.lint.yaml_nodes import Node

RULES = Rules()
OPERATOR = "https://github.com/kubeflow/trainer/blob/release-1.9/"
WEBHOOK = OPERATOR + "pkg/webhooks/pytorch/pytorchjob_webhook.go"
DEFAULTS = OPERATOR + "pkg/apis/kubeflow.org/v1/pytorch_types.go"
TRAINER = "https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/apis/trainer/v1alpha1/trainjob_types.go"
TORCHX = "https://github.com/meta-pytorch/torchx/blob/main/torchx/schedulers/kubernetes_scheduler.py"
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@RULES.add("EMB201", "container-not-pytorch", "error",
           "The operator's webhook refuses a PyTorchJob without a container named pytorch.", WEBHOOK, can_fix=True)
def container_not_pytorch(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        if pod.document.kind != "PyTorchJob" or any(one.name.text == "pytorch" for one in pod.containers):
            continue
        for container in pod.containers[:1]:
            yield Hit(container.place, f"the first container of {pod.role} is named {container.name.text or 'nothing'}",
                      "name: pytorch", set_scalar(container.name, "pytorch"))


@RULES.add("EMB202", "python-for-torchrun", "error",
           "The operator hands on PET_* variables, which only torchrun reads: `python` runs one process in each pod.",
           DEFAULTS, can_fix=True)
def python_for_torchrun(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        if pod.document.kind not in ("PyTorchJob", "TrainJob") or pod.main is None:
            continue
        launch = pod.main.launch
        elastic = pod.document.root.at("spec.elasticPolicy")
        if launch is None or launch.program != "python" or not (elastic or pod.main.num_gpus > 1):
            continue
        first = next(iter(pod.main.command), pod.main.command)
        is_alone = re.fullmatch(r"python[\d.]*", first.text) is not None and launch.argv[1:2] == (launch.script,)
        yield Hit(first.place or pod.place, f"one process in each pod of {pod.main.num_gpus or 'its'} GPUs",
                  f"command: [torchrun, {launch.script or '-m, MODULE'}]",
                  set_scalar(first, "torchrun") if is_alone else ())


@RULES.add("EMB203", "no-nproc-per-node", "warning",
           "How many processes a pod starts is left to `auto`, which counts what the container sees.", DEFAULTS)
def no_nproc_per_node(world: World) -> Iterator[Hit]:
    for job in world.jobs:
        spec = job.document.root["spec"]
        if job.kind == "PyTorchJob" and job.gpus > 1 and not spec["nprocPerNode"] and \
                not spec.at("elasticPolicy.nProcPerNode") and not (job.launch and job.launch.nproc):
            yield Hit(job.document.place, f"nprocPerNode is not set for pods of {job.gpus} GPUs",
                      f'spec.nprocPerNode: "{job.gpus}"')


@RULES.add("EMB204", "nproc-in-elastic-policy", "error",
           "elasticPolicy.nProcPerNode is deprecated, and beside spec.nprocPerNode the webhook refuses the job.",
           WEBHOOK, can_fix=True)
def nproc_in_elastic_policy(world: World) -> Iterator[Hit]:
    for document in world.of_kind("PyTorchJob"):
        policy = document.root.at("spec.elasticPolicy")
        node = policy["nProcPerNode"]
        both = document.root.at("spec.nprocPerNode")
        if node.place is not None:
            why = "both spec.nprocPerNode and elasticPolicy.nProcPerNode are set" if both else "it is deprecated"
            yield Hit(node.place, why, f'spec.nprocPerNode: "{node.text}" alone',
                      remove_key(policy, "nProcPerNode") if both else ())


@RULES.add("EMB205", "elastic-size", "warning",
           "Training may start on fewer nodes than planned; a sharding plan is made for one world size.",
           "https://docs.pytorch.org/docs/stable/elastic/run.html", can_fix=True)
def elastic_size(world: World) -> Iterator[Hit]:
    for document in world.of_kind("PyTorchJob"):
        policy = document.root.at("spec.elasticPolicy")
        low, high = policy["minReplicas"], policy["maxReplicas"]
        replicas = [node["replicas"].whole or 1 for node in document.root.at("spec.pytorchReplicaSpecs").values()]
        if low.whole is None or high.whole is None or low.whole == high.whole or low.place is None:
            continue
        if not any(pod.num_gpus for pod in world.pods_in(document)):
            continue
        wanted = str(sum(replicas))
        yield Hit(low.place, f"it may run on {low.text} to {high.text} nodes", f"minReplicas and maxReplicas: {wanted}",
                  set_scalar(low, wanted) + set_scalar(high, wanted))


@RULES.add("EMB206", "restart-policy-in-template", "warning",
           "The operator reads the replica's restartPolicy and writes over the one in the pod's template.",
           OPERATOR + "pkg/core/pod.go", can_fix=True)
def restart_policy_in_template(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        node = pod.spec["restartPolicy"]
        if pod.document.kind != "PyTorchJob" or node.place is None:
            continue
        has_own = bool(pod.holder["restartPolicy"])
        yield Hit(node.place, f"restartPolicy: {node.text} in the template of {pod.role} is not read",
                  f"restartPolicy: {node.text} beside replicas",
                  () if has_own else _moved(pod.holder, pod.spec, node))


@RULES.add("EMB207", "no-run-policy", "warning",
           "Without a runPolicy a PyTorchJob is never cleaned up, has no deadline and restarts without end.", DEFAULTS)
def no_run_policy(world: World) -> Iterator[Hit]:
    for document in world.of_kind("PyTorchJob"):
        if not document.root.at("spec.runPolicy"):
            yield Hit(document.place, "there is no runPolicy",
                      "runPolicy: {cleanPodPolicy: None, ttlSecondsAfterFinished: 86400, backoffLimit: 3}")


@RULES.add("EMB208", "operator-path-gone", "error",
           "The operator's manifests are gone from the default branch: kustomize finds nothing at that path.",
           "https://github.com/kubeflow/trainer/tree/release-1.9/manifests/overlays/standalone")
def operator_path_gone(world: World) -> Iterator[Hit]:
    for _, word in _operator_urls(world):
        if not re.search(r"[?&]ref=(?:v1\.|release-1\.)", word.text):
            yield Hit(word.place, "there are no such manifests on the default branch",
                      '"github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"')


@RULES.add("EMB209", "not-server-side", "warning",
           "The operator's CRDs are larger than an annotation may be: a plain `kubectl apply` is refused.",
           "https://github.com/kubeflow/trainer/tree/release-1.9#installation")
def not_server_side(world: World) -> Iterator[Hit]:
    for command, word in _operator_urls(world):
        if not command.has("--server-side"):
            yield Hit(word.place, "the CRDs do not fit into the annotation that a plain apply writes",
                      "kubectl apply --server-side -k …")


@RULES.add("EMB210", "processes-not-a-number", "error",
           "numProcPerNode is a whole number since Trainer 2.2: `auto` and text are refused.", TRAINER, can_fix=True)
def processes_not_a_number(world: World) -> Iterator[Hit]:
    for document in world.of_kind("TrainJob"):
        node = document.root.at("spec.trainer.numProcPerNode")
        if node.place is None or (isinstance(node.value, int) and not isinstance(node.value, bool)):
            continue
        gpus = document.root.at("spec.trainer.resourcesPerNode.limits")["nvidia.com/gpu"].whole
        number = node.whole or gpus
        yield Hit(node.place, f"numProcPerNode: {node.place.text} is no whole number",
                  f"numProcPerNode: {number or 'as many as GPUs'}", set_scalar(node, str(number)) if number else ())


@RULES.add("EMB211", "reserved-variable", "error", "Trainer sets PET_* itself, and refuses a TrainJob that does.",
           "https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/runtime/framework/plugins/torch/torch.go",
           can_fix=True)
def reserved_variable(world: World) -> Iterator[Hit]:
    for document in world.of_kind("TrainJob"):
        env = document.root.at("spec.trainer.env")
        for entry in env:
            if entry["name"].text in RESERVED and entry.place is not None:
                yield Hit(entry.place, f"{entry['name'].text} is reserved", "leave it out: Trainer sets it",
                          remove_item(env, entry))


@RULES.add("EMB212", "pod-template-overrides", "error",
           "podTemplateOverrides was replaced by runtimePatches in Trainer 2.2: the field is unknown.", TRAINER)
def pod_template_overrides(world: World) -> Iterator[Hit]:
    for document in world.of_kind("TrainJob"):
        for name in ("podTemplateOverrides", "podSpecOverrides"):
            place = document.root["spec"].key(name).place
            if place is not None:
                yield Hit(place, f"{name} is no field of a TrainJob", "runtimePatches: [{manager: …, "
                          "trainingRuntimeSpec: {template: {spec: {replicatedJobs: [{name: node, …}]}}}}]")


@RULES.add("EMB213", "patches-no-node", "error",
           "The trainer's job and container are named `node`; a patch for another name changes nothing.", TRAINER)
def patches_no_node(world: World) -> Iterator[Hit]:
    known = ("node", "dataset-initializer", "model-initializer", "launcher")
    for document in world.of_kind("TrainJob"):
        for job in patches(document):
            held = [one["name"] for one in job.at("template.spec.template.spec.containers")]
            for name in (job["name"], *held):
                if name.place is not None and name.text not in known:
                    yield Hit(name.place, f"there is no {name.text} in the runtime torch-distributed", "name: node")


@RULES.add("EMB214", "old-trainer-api", "error", "The TrainJob's API group is trainer.kubeflow.org/v1alpha1.", TRAINER,
           can_fix=True)
def old_trainer_api(world: World) -> Iterator[Hit]:
    for document in world.of_kind("TrainJob", "ClusterTrainingRuntime", "TrainingRuntime"):
        node = document.root["apiVersion"]
        if node.place is not None and node.text != "trainer.kubeflow.org/v1alpha1":
            yield Hit(node.place, f"{node.text} is served by no Trainer of today",
                      "apiVersion: trainer.kubeflow.org/v1alpha1", set_scalar(node, "trainer.kubeflow.org/v1alpha1"))


@RULES.add("EMB215", "no-runtime", "error", "A TrainJob without a runtimeRef is refused.", TRAINER)
def no_runtime(world: World) -> Iterator[Hit]:
    for document in world.of_kind("TrainJob"):
        if not document.root.at("spec.runtimeRef.name"):
            yield Hit(document.place, "there is no runtimeRef", "runtimeRef: {apiGroup: trainer.kubeflow.org, "
                      "kind: ClusterTrainingRuntime, name: torch-distributed}")


@RULES.add("EMB220", "torchx-takes-the-whole-node", "error",
           "The node keeps some of its processors and memory for itself: pods that ask for all of it stay Pending.",
           "https://github.com/meta-pytorch/torchx/blob/main/torchx/specs/named_resources_aws.py")
def torchx_takes_the_whole_node(world: World) -> Iterator[Hit]:
    for command in _torchx(world):
        named = command.flag("-h", "--h") or ""
        asked = [_number(command.flag(name)) for name in ("--gpu", "--cpu", "--memMB")]
        yield from _beyond(world, command.value_place("--cpu", "-h"), asked[0], asked[1], asked[2], named)
    for file in world.files.pythons:
        for call in file.calls("Resource"):
            values = {key.arg: key.value.value for key in call.keywords
                      if isinstance(key.value, ast.Constant) and isinstance(key.value.value, int)}
            asked = [_number(str(values.get(name, ""))) for name in ("gpu", "cpu", "memMB")]
            yield from _beyond(world, file.place(call), asked[0], asked[1], asked[2], "")


@RULES.add("EMB221", "torchx-workspace", "error",
           "TorchX patches the image with this folder: it needs a Docker daemon and an `image_repo` to push to.",
           TORCHX)
def torchx_workspace(world: World) -> Iterator[Hit]:
    for command in _torchx(world):
        settings = " ".join(command.flag(name) or "" for name in ("-cfg", "--scheduler_args", "--cfg"))
        if "image_repo" not in settings and command.flag("--workspace") is None:
            yield Hit(command.place, "no image_repo to push the patched image to",
                      "-cfg …,image_repo=REGISTRY/IMAGE, or --workspace '' to run the image as it is")


@RULES.add("EMB222", "torchx-needs-volcano", "warning",
           "TorchX's kubernetes scheduler submits Volcano jobs; without Volcano the API knows no such kind.", TORCHX)
def torchx_needs_volcano(world: World) -> Iterator[Hit]:
    for command in _torchx(world):
        if not any("volcano" in word for word in world.all_words):
            yield Hit(command.place, "Volcano's installation is not among the files given",
                      "helm install volcano volcano-sh/volcano -n volcano-system --create-namespace")


def _torchx(world: World) -> Iterator[Command]:
    for command in world.commands:
        if command.begins("torchx", "run") and command.flag("-s", "--scheduler") == "kubernetes":
            yield command


def _beyond(world: World, place: Place, gpus: float | None, cpu: float | None, mem_mb: float | None,
            named: str) -> Iterator[Hit]:
    """A request that equals a machine's whole, or is beyond what any machine of that size has left."""
    machine = world.machine(named.removeprefix("aws_")) if named else None
    if machine is not None and not cpu:
        yield Hit(place, f"{named} asks for all {machine.vcpus:g} vCPUs of the node",
                  _leave(machine))
        return
    if not gpus or not cpu:
        return
    of_size = sorted((one for one in _with_gpus(world.catalog, gpus) if one.vcpus == cpu),
                     key=lambda one: abs((one.memory_gib or 0) - (mem_mb or 0) / 1024))
    fits = [one for one in _with_gpus(world.catalog, gpus) if (one.allocatable_vcpus or 0) >= cpu
            and (mem_mb or 0) / 1024 <= (one.allocatable_gib or 0)]
    if of_size and not any(one in fits for one in of_size):
        names = ", ".join(one.name for one in of_size[:3])
        yield Hit(place, f"{cpu:g} is every vCPU of {names}: such a pod fits on none of them", _leave(of_size[0]))
    elif not fits and _with_gpus(world.catalog, gpus):
        largest = max(_with_gpus(world.catalog, gpus), key=lambda one: one.allocatable_gib or 0)
        yield Hit(place, f"no machine of {gpus:g} GPUs has {cpu:g} vCPUs and {(mem_mb or 0):,.0f} MB for pods",
                  _leave(largest))


def _with_gpus(catalog: Catalog, gpus: float) -> list[Machine]:
    return [one for one in catalog.machines.values() if one.gpus_per_host == gpus and one.gpu.kind == "gpu"]


def _leave(machine: Machine) -> str:
    cpu, gib = int((machine.allocatable_vcpus or 0) * 0.95), int((machine.allocatable_gib or 0) * 0.95)
    return f"on {machine.name}: --cpu {cpu} --memMB {gib * 1024}"


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\d{1,12}", text) else None


def _operator_urls(world: World) -> Iterator[tuple[Command, Word]]:
    for command in world.commands:
        if command.begins("kubectl", "apply") or command.begins("kubectl", "create"):
            for word in command.words:
                if re.search(r"github\.com/kubeflow/(?:training-operator|trainer)\S*overlays/standalone", word.text):
                    yield command, word


def _moved(holder: Node, spec: Node, node: Node) -> tuple[Edit, ...]:
    """The line out of the template, and one beside `replicas`."""
    taken = remove_key(spec, "restartPolicy")
    added = add_key(holder, f"restartPolicy: {node.text}")
    return (*taken, *added) if taken and added else ()
