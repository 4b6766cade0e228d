"""Pod templates wherever they are described (Jobs, JobSets, Kubeflow's and Ray's objects, Deployments, or bare), and
how a container starts its training."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from embark.kubernetes.pods import GPU_RESOURCES, is_accelerated, main_container, starts_torchrun, trains
from embark.kubernetes.yaml_nodes import NOTHING, NOWHERE, Node, SourceFile, Span
from embark.values import JsonDict, frozen
from .read import Document
from .shell import Command, Word, make_command, read_shell

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_SWITCHES = frozenset({"standalone", "no-python", "run-path", "use-env"})
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?$")
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "embark.torchrun"})
_FROM_ENVIRONMENT = ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend",
                     "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts")


@frozen
class Launch:
    """One start of a program that trains."""

    program: str  # `torchrun`, `python` or another program's name.
    argv: tuple[str, ...]
    is_in_shell: bool
    options: Mapping[str, str] = field(default_factory=dict)  # torchrun's, by their long names with hyphens.
    script: str = ""  # The path or the module that is run.
    is_module: bool = False

    @property
    def is_torchrun(self) -> bool:
        return self.program == "torchrun"

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """The least and the most nodes; None if they are not given, or by a variable."""
        low, _, high = self.options.get("nnodes", "").partition(":")
        try:
            return int(low), int(high or low)
        except ValueError:
            return None

    @property
    def nproc(self) -> int | None:
        number = self.options.get("nproc-per-node", "")
        return int(number) if number.isdigit() else None

    @property
    def endpoint(self) -> str:
        """`host:port` where the ranks meet; empty if it is not given."""
        if "rdzv-endpoint" in self.options:
            return self.options["rdzv-endpoint"]
        host = self.options.get("master-addr", "")
        return f"{host}:{self.options.get('master-port', '29500')}" if host else ""

    @property
    def endpoint_host(self) -> str:
        return self.endpoint.rpartition(":")[0] if re.search(r":\d+$|:\$", self.endpoint) else self.endpoint


def launch_of_argv(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return the program that an argument list starts. The text of a shell's `-c` is searched for the command that
    trains."""
    if argv and argv[0].rpartition("/")[2] in SHELLS:
        text = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if re.fullmatch(r"-\w*c", word)), "")
        return launch_of_text(text, environment)
    command = make_command([Word(word, NOWHERE) for word in argv])
    return _launch(command, False, environment or {}) if command else None


def launch_of_text(text: str, environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return the last start of torchrun in a shell text, else the last of Python, else the last command."""
    commands = read_shell(SourceFile.of(Path("command"), text))
    assigned = {name: value for command in commands for name, value, _ in command.assignments}
    known = {**(environment or {}), **assigned}
    launches = [launch for command in commands if (launch := _launch(command, True, known))]
    ranks = {"torchrun": 2, "python": 1}
    return max(reversed(launches), key=lambda launch: ranks.get(launch.program, 0), default=None)


def _launch(command: Command, is_in_shell: bool, environment: Mapping[str, str]) -> Launch | None:
    if not command.argv:
        return None
    name, argv, rest = command.name, tuple(command.argv), command.argv[1:]
    is_python = _PYTHON.match(name) is not None
    while is_python and rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[1:]
    if name == "torchrun":
        return _torchrun(rest, argv, is_in_shell, environment)
    if not is_python:
        return Launch(name, argv, is_in_shell)
    is_module = rest[:1] == ["-m"]
    script = next(iter(rest[is_module:]), "")
    if is_module and script in _MODULES:
        return _torchrun(rest[2:], argv, is_in_shell, environment)
    return Launch("python", argv, is_in_shell, script=script, is_module=is_module)


def _torchrun(rest: Sequence[str], argv: tuple[str, ...], is_in_shell: bool, environment: Mapping[str, str]) -> Launch:
    inherited = {name: environment.get("PET_" + name.replace("-", "_").upper()) for name in _FROM_ENVIRONMENT}
    options = {name: value for name, value in inherited.items() if value}
    is_module, at = False, 0
    while at < len(rest) and rest[at].startswith("-"):
        name, equals, value = rest[at].lstrip("-").partition("=")
        name = name.replace("_", "-")
        at += 1
        if name in ("m", "module"):
            is_module = True
        elif name in _SWITCHES:
            options[name] = "true"
        elif equals:
            options[name] = value
        elif at < len(rest):
            options[name] = rest[at]
            at += 1
    return Launch("torchrun", argv, is_in_shell, options, next(iter(rest[at:]), ""), is_module)


@dataclass(frozen=True)  # no slots: it has cached properties
class Container:
    """A container's YAML, or that of the `trainer` of a TrainJob."""

    node: Node

    @property
    def name(self) -> str:
        return self.node["name"].text

    @property
    def image(self) -> Node:
        return self.node["image"]

    @property
    def limits(self) -> Node:
        return self.node.at("resources.limits")

    @cached_property
    def environment(self) -> dict[str, tuple[Node, Node]]:
        """The entry and the value of each variable, in order."""
        return {entry["name"].text: (entry, entry["value"]) for entry in self.node["env"] if entry["name"]}

    @property
    def env_values(self) -> dict[str, str]:
        return {name: value.text for name, (_, value) in self.environment.items() if value}

    @property
    def has_env_from(self) -> bool:
        return bool(self.node["envFrom"])

    @property
    def argv_nodes(self) -> list[Node]:
        return [*self.node["command"], *self.node["args"]]

    @property
    def argv(self) -> list[str]:
        return [*self.node["command"].words, *self.node["args"].words]

    @cached_property
    def launch(self) -> Launch | None:
        return launch_of_argv(self.argv, self.env_values)

    @cached_property
    def is_accelerated(self) -> bool:
        return is_accelerated(self.node.plain())

    @cached_property
    def starts_torchrun(self) -> bool:
        return starts_torchrun(self.node.plain())

    def amount(self, resource: str) -> Node:
        """Return the limit of a resource, else its request."""
        return self.limits[resource] or self.node.at("resources.requests")[resource]

    @cached_property
    def num_gpus(self) -> int:
        return sum(self.amount(name).integer or 0 for name in GPU_RESOURCES)

    @property
    def location(self) -> Span:
        return self.node["name"].location or self.node.location


@dataclass(frozen=True)
class PodTemplate:
    """A pod's template as YAML, in the object that holds it."""

    document: Document
    role: str  # Name of the template in its object: `Worker`, `head`; empty if there is only one.
    holder: Node  # The parent of the template, such as a Job's spec or a ReplicaSpec.
    metadata: Node
    spec: Node
    is_complete: bool = True  # False if a runtime that is not among the files fills in the rest.

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        return tuple(map(Container, self.spec["containers"]))

    @property
    def sidecars(self) -> list[Container]:
        """Init containers that keep running beside the others."""
        return [Container(one) for one in self.spec["initContainers"] if one["restartPolicy"].text == "Always"]

    @cached_property
    def main(self) -> Container | None:
        """The container that trains."""
        chosen = main_container(self._values)
        return next((one for one, values in zip(self.containers, self._values["containers"], strict=True)
                     if values is chosen), None)

    @property
    def num_gpus(self) -> int:
        return sum(container.num_gpus for container in self.containers)

    @cached_property
    def is_training(self) -> bool:
        """Whether it has accelerators or starts torchrun, and is not a service."""
        if self.kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "RayService"):
            return any(container.starts_torchrun for container in self.containers)
        return self.kind in ("PyTorchJob", "TrainJob") or trains(self._values)

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def labels(self) -> dict[str, str]:
        return self.metadata["labels"].texts

    @property
    def annotations(self) -> dict[str, str]:
        return self.metadata["annotations"].texts

    @cached_property
    def selector(self) -> dict[str, str]:
        """Node labels it asks for, by nodeSelector or by a required affinity for one value."""
        required: dict[str, str] = {}
        terms = self.spec.at("affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")
        for term in terms:
            for expression in term["matchExpressions"]:
                values = expression["values"].words
                if expression["operator"].text == "In" and len(values) == 1:
                    required.setdefault(expression["key"].text, values[0])
        return required | self.spec["nodeSelector"].texts

    def tolerates(self, key: str, value: str = "") -> bool:
        for toleration in self.spec["tolerations"]:
            operator = toleration["operator"].text or "Equal"
            if not toleration["key"] and operator == "Exists":
                return True
            if toleration["key"].text == key and (operator == "Exists" or toleration["value"].text == value
                                                  or not value):
                return True
        return False

    def mounted(self, container: Container, path: str) -> Node:
        """Return the volume at a path of a container."""
        for mount in container.node["volumeMounts"]:
            if mount["mountPath"].text.rstrip("/") == path:
                named = (one for one in self.spec["volumes"] if one["name"].text == mount["name"].text)
                return next(named, mount)
        return NOTHING

    @property
    def location(self) -> Span:
        return self.main.location if self.main is not None else self.document.location

    @cached_property
    def _values(self) -> JsonDict:
        return {"containers": [one.node.plain() for one in self.containers]}


def pods_of(document: Document) -> Iterator[PodTemplate]:
    """Yield every pod template of an object."""
    spec, kind = document["spec"], document.kind
    if document.api.startswith("batch.volcano.sh"):
        for task in spec["tasks"]:
            yield from _pod(document, task["name"].text, task)
    elif kind in ("Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
        yield from _pod(document, "", spec)
    elif kind == "CronJob":
        yield from _pod(document, "", spec.at("jobTemplate.spec"))
    elif kind == "InferenceService" and spec["predictor"]["containers"]:
        yield PodTemplate(document, "predictor", spec, spec["predictor"], spec["predictor"])
    elif kind == "Pod" and spec:
        yield PodTemplate(document, "", document.root, document["metadata"], spec)
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        for job in (spec if kind == "JobSet" else spec.at("template.spec"))["replicatedJobs"]:
            yield from _pod(document, job["name"].text, job.at("template.spec"))
    elif kind == "TrainJob":
        yield _train_job(document)
    elif kind in ("RayCluster", "RayJob", "RayService"):
        cluster = spec if kind == "RayCluster" else spec["rayClusterSpec"] or spec["rayClusterConfig"]
        yield from _pod(document, "head", cluster["headGroupSpec"])
        for group in cluster["workerGroupSpecs"]:
            yield from _pod(document, group["groupName"].text, group)
    elif document.api.startswith("kubeflow.org/"):
        for replicas in (key for key in spec.names if key.endswith("ReplicaSpecs")):
            for role in spec[replicas].names:
                yield from _pod(document, role, spec[replicas][role])


def patches(document: Document) -> list[Node]:
    """Return the replicated jobs that a TrainJob's patches change."""
    return [job for patch in document.at("spec.runtimePatches")
            for job in patch.at("trainingRuntimeSpec.template.spec.replicatedJobs")]


def _pod(document: Document, role: str, holder: Node) -> Iterator[PodTemplate]:
    template = holder["template"]
    if template["spec"]:
        yield PodTemplate(document, role, holder, template["metadata"], template["spec"])


def _train_job(document: Document) -> PodTemplate:
    """Return the trainer, with what the patches add to its pod."""
    root, jobs = document.root, patches(document)
    specs = [job.at("template.spec.template.spec") for job in jobs if job["name"].text == "node"]
    spec = next(filter(None, specs), NOTHING)
    added = next((one for one in spec["containers"] if one["name"].text == "node"), NOTHING)
    trainer = root.at("spec.trainer")
    # A merged view: the patch's container has mounts and security, the trainer has the rest.
    pairs = {name: pair for name, pair in (added.pairs or {}).items() if name != "name"} | (trainer.pairs or {})
    if "resourcesPerNode" in pairs:
        pairs["resources"] = pairs["resourcesPerNode"]
    containers = Node(NOWHERE, items=[Node(trainer.location or root.location, pairs=pairs)])
    merged = Node(spec.location, pairs=(spec.pairs or {}) | {"containers": (NOTHING, containers)}, is_flow=spec.is_flow)
    metadata = next((job.at("template.spec.template.metadata") for job in jobs), NOTHING)
    return PodTemplate(document, "node", root["spec"], metadata, merged,
                       root.at("spec.runtimeRef.name").text == "torch-distributed")
