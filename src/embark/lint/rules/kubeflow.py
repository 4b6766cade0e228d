"""EMB2xx: what Kubeflow's operators and TorchX do with a file."""

import re
from collections.abc import Iterator

from embark.lint.edits import set_scalar
from embark.lint.manifests import Manifests, TrainingJob
from embark.lint.pods import PodTemplate, patches
from embark.lint.read import Document
from embark.lint.rule import Hit, Hits
from embark.lint.shell import Command
from embark.spec import parse_spec

RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def container_not_pytorch(pod: PodTemplate) -> Hits:
    if any(one.name == "pytorch" for one in pod.containers):
        return
    for container in pod.containers[:1]:
        yield Hit(container, f"the first container of {pod.role} is named {container.name or 'nothing'}",
                  edits=set_scalar(container.node["name"], "pytorch"))


def python_for_torchrun(pod: PodTemplate) -> Hits:
    if not pod.main:
        return
    launch = pod.main.launch
    elastic = pod.document.at("spec.elasticPolicy")
    if not launch or launch.program != "python" or not (elastic or pod.main.num_gpus > 1):
        return
    first = next(iter(pod.main.node["command"]), pod.main.node["command"])
    is_alone = re.fullmatch(r"python[\d.]*", first.text) is not None and launch.argv[1:2] == (launch.script,)
    yield Hit(first or pod, f"one process in each pod of {pod.main.num_gpus or 'its'} GPUs",
              f"command: [torchrun, {launch.script or '-m, MODULE'}]",
              set_scalar(first, "torchrun") if is_alone else ())


def no_nproc_per_node(job: TrainingJob) -> Hits:
    spec = job.document["spec"]
    is_set = spec["nprocPerNode"] or spec.at("elasticPolicy.nProcPerNode") or (job.launch and job.launch.nproc)
    if job.gpus > 1 and not is_set:
        yield Hit(job.document, f"nprocPerNode is not set for pods of {job.gpus} GPUs",
                  f'spec.nprocPerNode: "{job.gpus}"')


def nproc_in_elastic_policy(document: Document) -> Hits:
    node = document.at("spec.elasticPolicy.nProcPerNode")
    both = document.at("spec.nprocPerNode")
    if node:
        why = "both spec.nprocPerNode and elasticPolicy.nProcPerNode are set" if both else "it is deprecated"
        yield Hit(node, why, f'spec.nprocPerNode: "{node.text}" alone')


def elastic_size(document: Document, manifests: Manifests) -> Hits:
    policy = document.at("spec.elasticPolicy")
    low, high = policy["minReplicas"], policy["maxReplicas"]
    replicas = [node["replicas"].integer or 1 for node in document.at("spec.pytorchReplicaSpecs").values()]
    if low.integer is None or high.integer is None or low.integer == high.integer:
        return
    if not any(pod.num_gpus for pod in manifests.pods if pod.document.root is document.root):
        return
    if (low.integer, high.integer) in _elastic_ranges(manifests):
        return
    wanted = str(sum(replicas))
    yield Hit(low, f"it may run on {low.text} to {high.text} nodes, and no spec here says so",
              f"minReplicas and maxReplicas: {wanted}; or place.nodes = {{min = {low.text}, max = {high.text}}} in the "
              "spec, rendered again", set_scalar(low, wanted) + set_scalar(high, wanted))


def _elastic_ranges(manifests: Manifests) -> set[tuple[int, int]]:
    """Node counts of the elastic specs in ConfigMaps, at each of which Embark has checked that the batch divides."""
    texts = [data[name].text for document in manifests.of_kind("ConfigMap")
             for data in [document["data"]] for name in data.names if name.endswith(".toml")]
    places = [spec.place for text in texts if (spec := parse_spec(text)) is not None]
    return {(place.min_nodes, place.max_nodes) for place in places}


def restart_policy_in_template(pod: PodTemplate) -> Hits:
    node = pod.spec["restartPolicy"]
    if node:
        yield Hit(node, f"restartPolicy: {node.text} in the template of {pod.role} is not read",
                  f"restartPolicy: {node.text} beside replicas")


def processes_not_a_number(document: Document) -> Hits:
    node = document.at("spec.trainer.numProcPerNode")
    if not node or (isinstance(node.value, int) and not isinstance(node.value, bool)):
        return
    gpus = document.at("spec.trainer.resourcesPerNode.limits")["nvidia.com/gpu"].integer
    number = node.integer or gpus
    yield Hit(node, f"numProcPerNode: {node.location.text} is no whole number",
              f"numProcPerNode: {number or 'as many as GPUs'}", set_scalar(node, str(number)) if number else ())


def reserved_variable(document: Document) -> Hits:
    for entry in document.at("spec.trainer.env"):
        if entry["name"].text in RESERVED:
            yield Hit(entry, f"{entry['name'].text} is reserved")


def pod_template_overrides(document: Document) -> Hits:
    for name in ("podTemplateOverrides", "podSpecOverrides"):
        location = document["spec"].key(name).location
        if location:
            yield Hit(location, f"{name} is no field of a TrainJob")


def patches_no_node(document: Document) -> Hits:
    known = ("node", "dataset-initializer", "model-initializer", "launcher")
    for job in patches(document):
        contents = [one["name"] for one in job.at("template.spec.template.spec.containers")]
        for name in (job["name"], *contents):
            if name and name.text not in known:
                yield Hit(name, f"there is no {name.text} in the runtime torch-distributed")


def old_trainer_api(document: Document) -> Hits:
    node = document["apiVersion"]
    if node and node.text != "trainer.kubeflow.org/v1alpha1":
        yield Hit(node, f"{node.text} is served by no Trainer of today",
                  edits=set_scalar(node, "trainer.kubeflow.org/v1alpha1"))


def torchx_workspace(torchx: Command) -> Hits:
    settings = " ".join(torchx.flag(name) or "" for name in ("-cfg", "--scheduler_args", "--cfg"))
    if "image_repo" not in settings and torchx.flag("--workspace") is None:
        yield Hit(torchx)


def torchx_needs_volcano(torchx: Command, manifests: Manifests) -> Hits:
    if not any("volcano" in word for word in manifests.all_words):
        yield Hit(torchx)


def torchx_runs(manifests: Manifests) -> Iterator[Command]:
    for command in manifests.commands:
        if command.begins("torchx run") and command.flag("-s", "--scheduler") == "kubernetes":
            yield command
