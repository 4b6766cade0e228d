"""Pods wherever they are described (Jobs, JobSets, Kubeflow's and Ray's objects, Deployments, or bare), and how a
container of one starts its training."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from embark.lint.read import Document
from embark.lint.shell import Command, Word, make_command, read_shell
from embark.lint.source import NOTHING, Node, SourceFile, Span

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_SWITCHES = frozenset({"standalone", "no-python", "m", "module", "run-path", "use-env"})
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?$")
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "embark.torchrun"})
_FROM_ENVIRONMENT = ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend",
                     "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts")


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a program that trains."""

    program: str  # `torchrun`, `python`, or what else it is.
    options: Mapping[str, str]  # Of torchrun: by long name, with hyphens.
    script: str  # What is run: a path, or a module.
    is_module: bool
    argv: tuple[str, ...]
    is_in_shell: bool

    @property
    def is_torchrun(self) -> bool:
        return self.program == "torchrun"

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """At least and at most; None where it is not said, or is a variable."""
        low, _, high = self.options.get("nnodes", "").partition(":")
        try:
            return int(low), int(high or low)
        except ValueError:
            return None

    @property
    def nproc(self) -> int | None:
        try:
            return int(self.options.get("nproc-per-node", ""))
        except ValueError:
            return None

    @property
    def endpoint(self) -> str:
        """`host:port` where the ranks meet; empty where it is not said."""
        if "rdzv-endpoint" in self.options:
            return self.options["rdzv-endpoint"]
        host = self.options.get("master-addr", "")
        return f"{host}:{self.options.get('master-port', '29500')}" if host else ""

    @property
    def endpoint_host(self) -> str:
        return self.endpoint.rpartition(":")[0] if re.search(r":\d+$|:\$", self.endpoint) else self.endpoint

    @property
    def is_c10d(self) -> bool:
        return self.options.get("rdzv-backend") == "c10d"


def launch_of_words(words: Sequence[Word], is_in_shell: bool = False,
                    environment: Mapping[str, str] | None = None) -> Launch | None:
    """What an argument list starts. A shell's `-c` text is read for the command in it that trains."""
    argv = [word.text for word in words]
    if not argv:
        return None
    name = argv[0].rpartition("/")[2]
    if name in SHELLS:
        text = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if re.fullmatch(r"-\w*c", word)), "")
        return launch_of_text(text, environment)
    command = make_command(list(words))
    return launch_of_command(command, is_in_shell, environment) if command else None


def launch_of_text(text: str, environment: Mapping[str, str] | None = None) -> Launch | None:
    """The last start of a launcher in a shell text, else the last of Python, else the last command."""
    source = SourceFile.of(Path("command"), text)
    commands = read_shell(source)
    set_here = {name: value for command in commands for name, value, _ in command.assignments}
    known = {**(environment or {}), **set_here}
    launches = [made for command in commands if (made := launch_of_command(command, True, known))]
    for wanted in ("torchrun", "python"):
        for launch in reversed(launches):
            if launch.program == wanted:
                return launch
    return launches[-1] if launches else None


def launch_of_command(command: Command, is_in_shell: bool = True,
                      environment: Mapping[str, str] | None = None) -> Launch | None:
    argv = command.argv
    if not argv:
        return None
    name, rest = command.name, argv[1:]
    if _PYTHON.match(name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[1:]
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
            return _torchrun(rest[2:], argv, is_in_shell, environment)
        if rest[:1] == ["-m"]:
            return Launch("python", {}, rest[1] if rest[1:] else "", True, tuple(argv), is_in_shell)
        return Launch("python", {}, rest[0] if rest else "", False, tuple(argv), is_in_shell)
    if name == "torchrun":
        return _torchrun(rest, argv, is_in_shell, environment)
    return Launch(name, {}, "", False, tuple(argv), is_in_shell)


def words_of(node: Node) -> list[Word]:
    """A YAML list as words."""
    return [Word(item.text, item.place or Span(SourceFile.of(Path(""), ""), 0, 0))
            for item in node if item.items is None]


def _torchrun(rest: Sequence[str], argv: Sequence[str], is_in_shell: bool,
              environment: Mapping[str, str] | None) -> Launch:
    options: dict[str, str] = {}
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
    for name in _FROM_ENVIRONMENT:
        inherited = (environment or {}).get("PET_" + name.replace("-", "_").upper())
        if inherited:
            options.setdefault(name, inherited)
    return Launch("torchrun", options, rest[at] if at < len(rest) else "", is_module, tuple(argv), is_in_shell)


GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
TPU_RESOURCE = "google.com/tpu"
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
          "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")


@dataclass(frozen=True)  # no slots: it has cached properties
class Container:
    """A container, or the `trainer` of a TrainJob."""

    node: Node
    name: Node
    image: Node
    command: Node
    args: Node
    env: Node
    limits: Node
    requests: Node

    @cached_property
    def environment(self) -> dict[str, tuple[Node, Node]]:
        """Each variable's entry and value, in order."""
        return {entry["name"].text: (entry, entry["value"]) for entry in self.env if entry["name"]}

    @property
    def env_values(self) -> dict[str, str]:
        return {name: value.text for name, (_, value) in self.environment.items() if value}

    @property
    def has_env_from(self) -> bool:
        return bool(self.node["envFrom"])

    @cached_property
    def launch(self) -> Launch | None:
        return launch_of_words([*words_of(self.command), *words_of(self.args)], environment=self.env_values)

    @property
    def starts_torchrun(self) -> bool:
        return self.launch is not None and self.launch.is_torchrun

    @property
    def argv_nodes(self) -> list[Node]:
        return [*self.command, *self.args]

    def amount(self, resource: str) -> Node:
        """Of a resource: its limit, else its request."""
        return self.limits[resource] or self.requests[resource]

    @cached_property
    def num_gpus(self) -> int:
        return sum(self.amount(name).integer or 0 for name in GPU_RESOURCES)

    @property
    def is_accelerated(self) -> bool:
        return self.num_gpus > 0 or bool(self.amount(TPU_RESOURCE))

    @property
    def place(self) -> Span:
        found = self.name.place or self.node.place
        assert found is not None
        return found


@dataclass(frozen=True)
class Pod:
    """A pod's template."""

    document: Document
    role: str  # Which of the object's templates: `Worker`, `head`; empty where there is one.
    holder: Node  # What holds the template: a Job's spec, a ReplicaSpec.
    metadata: Node
    spec: Node
    containers: tuple[Container, ...]
    sidecars: tuple[Container, ...]  # Init containers that stay: `restartPolicy: Always`.
    is_complete: bool = True  # Not so where a runtime that is not among the files fills in the rest.

    @cached_property
    def main(self) -> Container | None:
        """The one with accelerators, else the one that starts torchrun, else the first."""
        choices = [*(one for one in self.containers if one.is_accelerated),
                   *(one for one in self.containers if one.starts_torchrun), *self.containers]
        return choices[0] if choices else None

    @property
    def num_gpus(self) -> int:
        return sum(container.num_gpus for container in self.containers)

    @cached_property
    def is_training(self) -> bool:
        """It has accelerators, or starts torchrun, and is no service."""
        if self.document.kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "RayService"):
            return any(container.starts_torchrun for container in self.containers)
        if self.document.kind in ("PyTorchJob", "TrainJob"):
            return True
        return self.main is not None and (self.main.is_accelerated or self.main.starts_torchrun)

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def labels(self) -> dict[str, str]:
        return {name: self.metadata["labels"][name].text for name in self.metadata["labels"].names}

    @property
    def annotations(self) -> dict[str, str]:
        return {name: self.metadata["annotations"][name].text for name in self.metadata["annotations"].names}

    @cached_property
    def selector(self) -> dict[str, str]:
        """Node labels it asks for, by nodeSelector or by a required affinity for one value."""
        found = {name: self.spec["nodeSelector"][name].text for name in self.spec["nodeSelector"].names}
        terms = self.spec.at("affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")
        for term in terms:
            for expression in term["matchExpressions"]:
                values = expression["values"].words
                if expression["operator"].text == "In" and len(values) == 1:
                    found.setdefault(expression["key"].text, values[0])
        return found

    def tolerates(self, key: str, value: str = "") -> bool:
        for toleration in self.spec["tolerations"]:
            operator = toleration["operator"].text or "Equal"
            if not toleration["key"] and operator == "Exists":
                return True
            if toleration["key"].text == key and (operator == "Exists" or toleration["value"].text == value
                                                  or not value):
                return True
        return False

    def volume(self, name: str) -> Node:
        return next((volume for volume in self.spec["volumes"] if volume["name"].text == name), NOTHING)

    def mounted(self, container: Container, path: str) -> Node:
        """The volume at a path of a container."""
        for mount in container.node["volumeMounts"]:
            if mount["mountPath"].text.rstrip("/") == path:
                return self.volume(mount["name"].text) or mount
        return NOTHING

    @property
    def place(self) -> Span:
        main = self.main
        return main.place if main is not None else self.document.place


def pods_of(document: Document) -> Iterator[Pod]:
    """Every pod template of an object."""
    spec, kind = document.root["spec"], document.kind
    if document.api.startswith("batch.volcano.sh"):
        for task in spec["tasks"]:
            yield from _pod(document, task["name"].text, task)
    elif kind in ("Job", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
        yield from _pod(document, "", spec)
    elif kind == "CronJob":
        yield from _pod(document, "", spec.at("jobTemplate.spec"))
    elif kind == "InferenceService" and spec["predictor"]["containers"]:
        yield _made(document, "predictor", spec, spec["predictor"], spec["predictor"])
    elif kind == "Pod" and spec:
        yield _made(document, "", document.root, document.root["metadata"], spec)
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
    """The Job specs that a TrainJob's patches change."""
    return [job for patch in document.root.at("spec.runtimePatches")
            for job in patch.at("trainingRuntimeSpec.template.spec.replicatedJobs")]


def container_of(node: Node) -> Container:
    return Container(node, node["name"], node["image"], node["command"], node["args"], node["env"],
                     node.at("resources.limits"), node.at("resources.requests"))


def _pod(document: Document, role: str, holder: Node) -> Iterator[Pod]:
    template = holder["template"]
    if template["spec"]:
        yield _made(document, role, holder, template["metadata"], template["spec"])


def _made(document: Document, role: str, holder: Node, metadata: Node, spec: Node) -> Pod:
    sidecars = [one for one in spec["initContainers"] if one["restartPolicy"].text == "Always"]
    return Pod(document, role, holder, metadata, spec, tuple(container_of(one) for one in spec["containers"]),
               tuple(container_of(one) for one in sidecars))


def _train_job(document: Document) -> Pod:
    """The trainer, with what the patches add to its pod."""
    trainer = document.root.at("spec.trainer")
    specs = [job.at("template.spec.template.spec") for job in patches(document) if job["name"].text == "node"]
    spec = next((one for one in specs if one), NOTHING)
    metadata = next((job.at("template.spec.template.metadata") for job in patches(document)), NOTHING)
    added = next((one for one in spec["containers"] if one["name"].text == "node"), NOTHING)
    # A merged view: the patch's container has mounts and security, the trainer has the rest.
    pairs = {**(added.pairs or {}), **(trainer.pairs or {})}
    node = Node(trainer.place or document.root.place, pairs=pairs)
    container = Container(node, NOTHING, trainer["image"], trainer["command"], trainer["args"], trainer["env"],
                          trainer.at("resourcesPerNode.limits"), trainer.at("resourcesPerNode.requests"))
    is_complete = document.root.at("spec.runtimeRef.name").text == "torch-distributed"
    return Pod(document, "node", document.root["spec"], metadata, spec, (container,), (), is_complete)


def quantity(text: str) -> float | None:
    """`500m`, `64Gi` and their like as a number."""
    match = _QUANTITY.match(text)
    return float(match[1]) * _UNITS[match[2] or ""] if match else None
