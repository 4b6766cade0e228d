"""EMB7xx: Vertex AI custom training, by Python, by gcloud and by YAML."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from embark.errors import nearest
from embark.lint.edit import replace_within
from embark.lint.launch import launch_of_words
from embark.lint.read import PythonFile
from embark.lint.rule import Hit, World
from embark.lint.shell import Command, Word
from embark.lint.source import Edit, Place

ACCELERATORS = ("NVIDIA_TESLA_T4", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_P4", "NVIDIA_TESLA_A100",
                "NVIDIA_A100_80GB", "NVIDIA_L4", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB",
                "NVIDIA_B200", "NVIDIA_GB200", "NVIDIA_RTX_PRO_6000", "TPU_V2", "TPU_V3", "TPU_V4_POD",
                "TPU_V5_LITEPOD", "ACCELERATOR_TYPE_UNSPECIFIED")
_PREBUILT = re.compile(r"(?:docker\.pkg\.dev/vertex-ai|gcr\.io/cloud-aiplatform)/training/"
                       r"((pytorch|tf)-(?:gpu|cpu|xla|tpu)\.(\d+)-(\d+))(\.py\d+)?(?::|$)")
_SUFFIX_SINCE = {"pytorch": (1, 12), "tf": (2, 12)}
"""Older images have no Python version in their names."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines of a custom job."""

    place: Place
    machine_type: str
    accelerator: str
    num_accelerators: int
    replicas: int
    command: tuple[str, ...]
    is_script: bool = False
    """A local script that Vertex runs with `python`."""


def no_staging_bucket(file: PythonFile) -> Iterator[Hit]:
    starts = [call for call in file.calls("aiplatform.init") if "staging_bucket" in _keywords(call)]
    for call in file.calls("CustomJob.from_local_script", "CustomTrainingJob"):
        if not starts and "staging_bucket" not in _keywords(call):
            yield Hit(file.place(call.func))


def no_such_training_image(world: World) -> Iterator[Hit]:
    for text, place in _texts(world):
        match = _PREBUILT.search(text)
        if match is not None and match[5] is None and (int(match[3]), int(match[4])) >= _SUFFIX_SINCE[match[2]]:
            yield Hit(place, f"there is no image {match[1]}", f"{match[1]}.py310, or an image of your own by digest")


def one_process_a_replica(world: World) -> Iterator[Hit]:
    for pool in _pools(world):
        launch = launch_of_words([Word(word, pool.place) for word in pool.command])
        is_python = pool.is_script or (launch is not None and launch.program == "python")
        if pool.num_accelerators > 1 and pool.accelerator.startswith("NVIDIA") and is_python:
            yield Hit(pool.place, f"one process for {pool.num_accelerators} GPUs",
                      f"a container that runs torchrun --nproc-per-node={pool.num_accelerators} --nnodes=$WORLD_SIZE "
                      "--node-rank=$RANK --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT")


def command_of_one_word(world: World) -> Iterator[Hit]:
    for command in world.commands:
        value = command.flag("--command") or ""
        if command.begins("gcloud", "ai", "custom-jobs", "create") and " " in value.strip():
            place, listed = command.value_place("--command"), ",".join(value.split())
            edits: tuple[Edit, ...] = () if "," in value else replace_within(place, value, listed)
            yield Hit(place, f"the program would be {value!r}", f"--command={listed}", edits)
    for document in world.documents:
        for node in document.root.walk():
            for first in list(node.at("containerSpec.command"))[:1]:
                if len(first.text.split()) > 1 and first.place is not None:
                    yield Hit(first.place, f"the program would be {first.text!r}", f"{first.text.split()}")


def old_role(command: Command) -> Iterator[Hit]:
    role = command.flag("--role") or ""
    if command.name == "gcloud" and re.fullmatch(r"roles/ml\.(developer|admin|viewer|jobOwner)", role):
        place = command.value_place("--role")
        yield Hit(place, f"{role} gives nothing in Vertex AI",
                  edits=replace_within(place, role, "roles/aiplatform.user"))


def unknown_accelerator(world: World) -> Iterator[Hit]:
    for pool in _pools(world):
        if pool.accelerator and pool.accelerator not in ACCELERATORS and "$" not in pool.accelerator:
            gpu = pool.accelerator.rpartition("_")[2]
            near = [name for name in ACCELERATORS if gpu in name.split("_")]
            yield Hit(pool.place, f"{pool.accelerator} is no accelerator of Vertex",
                      f"one of: {', '.join(near)}" if near else nearest(pool.accelerator, ACCELERATORS))


def tpu_not_for_training(world: World) -> Iterator[Hit]:
    for pool in _pools(world):
        if pool.accelerator == "TPU_V4_POD":
            yield Hit(pool.place, f"{pool.machine_type or 'a machine'} with TPU_V4_POD")


def gpus_do_not_fit_vertex_machine(world: World) -> Iterator[Hit]:
    for pool in _pools(world):
        machine = world.machine(pool.machine_type)
        if machine is not None and pool.num_accelerators and pool.num_accelerators != machine.num_gpus:
            yield Hit(pool.place, f"{pool.num_accelerators} GPUs, and {machine.name} has {machine.num_gpus}",
                      f"accelerator count {machine.num_gpus}")


def training_image_not_pinned(world: World) -> Iterator[Hit]:
    for text, place in _texts(world):
        image = re.search(r"[\w.-]+(?:/[\w.-]+)*/(?:training/)[\w.-]+:latest\b", text)
        if image is not None:
            yield Hit(place, f"{image[0]} is not one image")


def _pools(world: World) -> Iterator[Pool]:
    for file in world.files.pythons:
        yield from _python_pools(file)
    for command in world.commands:
        if not command.begins("gcloud", "ai", "custom-jobs", "create"):
            continue
        said = (command.flag("--command") or "").replace(" ", ",").split(",")
        for word in command.words:
            name, _, value = word.text.partition("=")
            if name == "--worker-pool-spec":
                pairs = dict(part.partition("=")[::2] for part in value.split(","))
                yield _pool(word.place, {key.replace("-", "_"): text for key, text in pairs.items()}, tuple(said))
    for document in world.documents:
        for node in document.root.walk():
            for pool in node["workerPoolSpecs"]:
                machine, container = pool["machineSpec"], pool["containerSpec"]
                values = {"machine_type": machine["machineType"].text, "replica_count": pool["replicaCount"].text,
                          "accelerator_type": machine["acceleratorType"].text,
                          "accelerator_count": machine["acceleratorCount"].text}
                place = machine.place or document.place
                yield _pool(place, values, (*container["command"].words, *container["args"].words))


def _python_pools(file: PythonFile) -> Iterator[Pool]:
    is_script = bool(file.calls("CustomJob.from_local_script", "CustomTrainingJob"))
    for _, call in file.all_calls:
        values = {name: str(value.value) for name, value in _keywords(call).items() if isinstance(value, ast.Constant)}
        if "accelerator_type" in values and "machine_type" in values:
            place = next(file.place(key.value) for key in call.keywords if key.arg == "accelerator_type")
            yield _pool(place, values, (), is_script=is_script)
    for node in file.nodes:
        if isinstance(node, ast.Dict):
            contents = {key.value: value for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)}
            if "machine_spec" in contents and isinstance(contents["machine_spec"], ast.Dict):
                values = _constants(contents["machine_spec"])
                container = contents.get("container_spec")
                command = _command(container) if isinstance(container, ast.Dict) else ()
                yield _pool(file.place(node), values, command)


def _command(container: ast.Dict) -> tuple[str, ...]:
    words: list[str] = []
    for key, value in zip(container.keys, container.values, strict=True):
        if isinstance(key, ast.Constant) and key.value in ("command", "args") and isinstance(value, ast.List):
            words += [str(item.value) for item in value.elts if isinstance(item, ast.Constant)]
    return tuple(words)


def _constants(node: ast.Dict) -> dict[str, str]:
    return {str(key.value): str(value.value) for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)}


def _pool(place: Place, values: Mapping[str, str], command: tuple[str, ...], *, is_script: bool = False) -> Pool:
    numbers = [int(text) if text.isdigit() and len(text) < 9 else 0 for text in
               (values.get("accelerator_count", ""), values.get("replica_count", "1"))]
    return Pool(place, values.get("machine_type", ""), values.get("accelerator_type", ""), numbers[0], numbers[1],
                tuple(word for word in command if word), is_script)


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {key.arg: key.value for key in call.keywords if key.arg}


def _texts(world: World) -> Iterator[tuple[str, Place]]:
    """Texts that may name an image: of Python, of gcloud, of YAML."""
    for file in world.files.pythons:
        for node in file.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 500:
                yield node.value, file.place(node)
    for command in world.commands:
        for word in command.words if command.name == "gcloud" else ():
            yield word.text, word.place
    for document in world.documents:
        for contents in document.root.walk():
            if contents.text and contents.place is not None and len(contents.text) < 500:
                yield contents.text, contents.place
