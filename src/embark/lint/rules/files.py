"""EMB0xx, EMB3xx and EMB8xx: unreadable files, images and the packages in them, training code and TPU machines."""

import ast
import re
from collections.abc import Iterator

from embark.kubernetes.yaml_nodes import SourceFile, Span, is_unsafe
from embark.lint.edits import replace_within
from embark.lint.manifests import Manifests, TrainingJob
from embark.lint.read import Dockerfile, Document, PythonFile
from embark.lint.rule import Hit, Hits
from embark.lint.shell import Command
from embark.stack.versions import Triple, default_triple, load_triples
from embark.values import frozen


def unreadable(manifests: Manifests, *, is_ours: bool) -> Hits:
    for one in manifests.files.unread:
        if one.is_ours == is_ours:
            yield Hit(Span(one.source, one.index, one.index), f"the file {one.what}", one.fix)


def repeated_key(document: Document) -> Hits:
    for node in document.root.walk():
        for key in node.repeated:
            if key:
                yield Hit(key, f"{key.text} occurs twice in one mapping")


def tag_that_runs_code(document: Document) -> Hits:
    for node in document.root.walk():
        if is_unsafe(node.tag):
            yield Hit(node, f"the tag {node.tag} would run code in an unsafe loader")


_STACK = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
_TORCH_TAG = re.compile(r"pytorch/pytorch:(\d+\.\d+)")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*(?:(===?|~=|>=|<=|!=|<|>)\s*([\w.*+!]+))?")
_SECRET_NAME = re.compile(r"(?:^|_)(?:SECRET(?:_ACCESS)?_KEY|SECRET|PASSWORD|PASSWD|TOKEN|API_?KEY|PRIVATE_KEY|"
                          r"ACCOUNT_KEY|ACCESS_KEY_ID|CONNECTION_STRING|SAS_TOKEN)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|hf_[A-Za-z0-9]{30,}|"
                           r"gh[pousr]_[A-Za-z0-9]{36,}|AccountKey=[A-Za-z0-9+/=]{40,}|sk-[A-Za-z0-9]{32,}")
_PLACEHOLDER = re.compile(r"^$|^[<\[{$%]|x{3,}|\*{3,}|\.\.\.|\$\(|\$\{|change-?me|your[-_]|example|placeholder|"
                          r"^(?:true|false|none|null|\d)$", re.IGNORECASE)
_SECRET_FILE = re.compile(r"(?:^|/)(?:\.aws|\.env|\.netrc|id_rsa|id_ed25519|credentials(?:\.json)?|"
                          r"service-?account[\w-]*\.json|[\w-]+\.pem|kubeconfig)/?$")


@frozen
class Pin:
    """A package that is installed, and its exact version if it has one."""

    name: str
    version: str  # Empty where any will do.
    location: Span


def image_not_pinned(manifests: Manifests) -> Hits:
    fix = "a tag of its own for each build, or better its digest: IMAGE@sha256:…"
    for pod in manifests.pods:
        if pod.is_training:
            for container in pod.containers:
                if _is_floating(container.image.text):
                    yield Hit(container.image, f"{container.image.text} is not one image", fix)
    for dockerfile in training_images(manifests):
        for image, location in dockerfile.base_images():
            if _is_floating(image) and "$" not in image and image != "scratch":
                yield Hit(location, f"{image} is not one image", "FROM a version, or better its digest")


def stack_mismatch(pins: list[Pin]) -> Hits:
    exact = {pin.name: pin for pin in pins if pin.name in _STACK and pin.version}
    minor = _minor(exact["torch"].version) if "torch" in exact else ()
    known = next((triple for triple in load_triples() if _minor(triple.torch) == minor), None)
    wrong = [pin for name, pin in exact.items() if name != "torch" and not _goes_with(pin, exact, known)]
    if wrong:
        names = " and ".join(f"{pin.name} {pin.version}" for pin in wrong)
        beside = "torch" if "torch" in exact else "torchrec"
        yield Hit(wrong[0], f"{names} is not built for {beside} {exact[beside].version}",
                  _together(known or default_triple()))


def stack_not_pinned(pins: list[Pin]) -> Hits:
    loose = [pin for pin in pins if pin.name in _STACK and not pin.version]
    if loose and any(pin.name in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu") for pin in pins):
        yield Hit(loose[0], f"{', '.join(pin.name for pin in loose)} in any version", _together(default_triple()))


def image_too_old(manifests: Manifests) -> Hits:
    oldest = min(_minor(triple.torch) for triple in load_triples())
    wanted = f"pytorch/pytorch:{default_triple().torch}-cuda13.0-cudnn9-runtime"
    places = [(c.image.text, c.image.location) for pod in manifests.pods if pod.is_training for c in pod.containers]
    places += [base for dockerfile in manifests.files.dockerfiles for base in dockerfile.base_images()]
    for image, location in places:
        tag = _TORCH_TAG.search(image)
        if tag and _minor(tag[1]) < oldest:
            needed = ".".join(map(str, oldest))
            yield Hit(location, f"{image} has torch {tag[1]}; torchrec of today needs {needed} or newer",
                      f"{wanted}, with torchrec {default_triple().torchrec} and fbgemm-gpu {default_triple().fbgemm}")


def image_runs_as_root(image: Dockerfile) -> Hits:
    users = [one for one in image.last_stage if one.name == "USER"]
    if not users or users[-1].text.partition(":")[0] in ("", "root", "0"):
        last = [Span(image.source, 0, 0), *(one.location for one in users or image.last_stage)]
        yield Hit(last[-1])


def no_efa_in_image(job: TrainingJob) -> Hits:
    asks = job.container.amount("vpc.amazonaws.com/efa") or any(n.startswith("FI_") for n in job.container.environment)
    image = job.container.image
    if asks and re.match(r"(?:docker\.io/)?(?:pytorch/pytorch|nvidia/cuda|python):", image.text):
        yield Hit(image, f"{image.text} has no libfabric and no aws-ofi-nccl")


def secret_in_file(manifests: Manifests) -> Hits:
    found = [(name, value.text, value.location) for pod in manifests.pods for container in pod.containers
             for name, (_, value) in container.environment.items() if value]
    found += [one for command in manifests.commands for one in command.assignments]
    found += [one for dockerfile in manifests.files.dockerfiles for one in dockerfile.environment]
    for name, value, location in found:
        is_secret = _SECRET_NAME.search(name) and len(value) >= 8 and not _PLACEHOLDER.search(value)
        if _SECRET_VALUE.search(value) or is_secret:
            yield Hit(location, f"{name} holds a secret in plain text",
                      "a Secret and valueFrom.secretKeyRef, or better the cloud's own identity for pods; and revoke it")
    for document in manifests.documents:
        if document.kind in ("ConfigMap", "Secret"):
            for contents in (document["data"], document["stringData"]):
                for node in contents.values():
                    if _SECRET_VALUE.search(node.text):
                        yield Hit(node, f"{document.kind} {document.name} holds a key in plain text",
                                  "keep it in the cloud's secret store, and revoke this one")


def secret_copied_into_image(manifests: Manifests) -> Hits:
    for dockerfile in manifests.files.dockerfiles:
        for one in dockerfile.instructions:
            if one.name in ("COPY", "ADD"):
                files = [word for word in one.words if not word.startswith("--")][:-1]
                for word in files:
                    if _SECRET_FILE.search(word):
                        yield Hit(one, f"{word} goes into the image")


def no_such_package(pins: list[Pin]) -> Hits:
    for pin in pins:
        if pin.name in ("google-cloud-sdk", "gcloud-sdk"):
            yield Hit(pin, f"PyPI has no {pin.name}")


def docker_small_shm(command: Command) -> Hits:
    if not command.begins("docker run") and not command.begins("podman run"):
        return
    several = re.search(r"--nproc[-_]per[-_]node[= ](\S+)", " ".join(command.argv))
    if command.has("--gpus") and several and several[1] != "1" and not command.has("--shm-size", "--ipc"):
        yield Hit(command, f"{several[1]} processes share 64 MB of /dev/shm")


def _together(triple: Triple) -> str:
    return f"torch=={triple.torch} torchrec=={triple.torchrec} fbgemm-gpu=={triple.fbgemm}"


def pins(manifests: Manifests) -> Iterator[list[Pin]]:
    """Yield packages that are installed together: by one pip, one requirements file, or one Vertex job."""
    for command in manifests.commands:
        words = command.argv
        if words[:3] in (["python", "-m", "pip"], ["python3", "-m", "pip"]):
            words = words[2:]
        if words[:2] in (["pip", "install"], ["pip3", "install"]) or words[:3] == ["uv", "pip", "install"]:
            contents = [_pin(word.text, word.location) for word in command.words if not word.text.startswith("-")]
            yield [pin for pin in contents if pin and pin.name not in ("pip", "pip3", "install", "uv")]
    for source in manifests.files.requirements:
        yield list(_requirements(source))
    for file in manifests.files.pythons:
        for _, call in file.all_calls:
            for key in call.keywords:
                if key.arg in ("requirements", "install_requires", "pip_packages") and isinstance(key.value, ast.List):
                    texts = [(item.value, file.location(item)) for item in key.value.elts
                             if isinstance(item, ast.Constant) and isinstance(item.value, str)]
                    yield [pin for text, location in texts if (pin := _pin(text, location))]


def _requirements(source: SourceFile) -> Iterator[Pin]:
    for number, line in enumerate(source.text.split("\n")):
        text = line.partition("#")[0].strip()
        if text and not text.startswith("-"):
            start = source.starts[number]
            pin = _pin(text, Span(source, start, start + len(line)))
            if pin is not None:
                yield pin


def _pin(text: str, location: Span) -> Pin | None:
    match = _REQUIREMENT.match(text)
    if not match:
        return None
    exact = match[3] if match[2] in ("==", "===", "~=") else ""
    return Pin(re.sub(r"[-_.]+", "-", match[1]).lower(), exact or "", location)


def _goes_with(pin: Pin, exact: dict[str, Pin], known: Triple | None) -> bool:
    """Return whether a torchrec or fbgemm belongs to the torch beside it, or to the torchrec if there is no torch."""
    if known is not None:
        wanted = known.torchrec if pin.name == "torchrec" else known.fbgemm
        plain = pin.version.partition("+")[0]
        return wanted.startswith(plain[:-1]) if plain.endswith(".*") else plain == wanted
    beside = exact.get("torch")
    if beside is not None:
        return _minor(pin.version) == _torchrec_minor(_minor(beside.version))
    return "torchrec" not in exact or _minor(pin.version) == _minor(exact["torchrec"].version)


def _torchrec_minor(torch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the release of torchrec and fbgemm that comes with a torch: 0.5 with 2.1, 1.0 with 2.5, 1.6 with 2.11."""
    if len(torch) < 2 or torch[0] != 2:
        return ()
    return (1, torch[1] - 5) if torch[1] >= 5 else (0, torch[1] + 4)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _is_floating(image: str) -> bool:
    if not image or "@sha256:" in image:
        return False
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag in ("", "latest", "nightly", "main", "master", "dev")


def training_images(manifests: Manifests) -> Iterator[Dockerfile]:
    """Yield Dockerfiles of images that train: their base or their packages say so."""
    for dockerfile in manifests.files.dockerfiles:
        bases = " ".join(image for image, _ in dockerfile.base_images())
        words = {_word_name(word) for command in dockerfile.commands for word in command.argv}
        if re.search(r"pytorch|nvidia|cuda|torchrec", bases) or words & {*_STACK, "embark-rec"}:
            yield dockerfile


def _word_name(word: str) -> str:
    match = _REQUIREMENT.match(word)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""


_REMOTE = re.compile(r"^(?:s3a?|gs|az|abfss?|wasbs?|hdfs)://")
_RUNTIMES = (("v5litepod", "v2-alpha-tpuv5-lite"), ("v5p", "v2-alpha-tpuv5"), ("v6e", "v2-alpha-tpuv6e"),
             ("v2", "tpu-ubuntu2204-base"), ("v3", "tpu-ubuntu2204-base"), ("v4", "tpu-ubuntu2204-base"))


def save_to_a_uri(file: PythonFile) -> Hits:
    saves = file.calls("torch.save")
    wrappers = _wrappers(file)
    for call in saves:
        if len(call.args) > 1 and _is_remote(call.args[1]):
            yield Hit(file.location(call), f"torch.save to {ast.unparse(call.args[1])}", _SAVE_FIX)
    for name, call in file.all_calls:
        position = wrappers.get(name)
        if position and len(call.args) > position and _is_remote(call.args[position]):
            yield Hit(file.location(call), f"{name} hands {ast.unparse(call.args[position])} to torch.save", _SAVE_FIX)


def saves_one_shard(file: PythonFile) -> Hits:
    if not re.search(r"\bDistributedModelParallel\b", file.source.text):
        return
    for call in file.calls("torch.save"):
        if "state_dict" in ast.unparse(call):
            yield Hit(file.location(call))


def torchrec_on_tpu(file: PythonFile) -> Hits:
    imported = {name.partition(".")[0] for name in _imports(file)}
    if {"torch_xla", "torchrec"} <= imported:
        yield Hit(file.location(file.tree.body[0]))


def stale_tpu_runtime(command: Command) -> Hits:
    version, kind = command.flag("--version"), command.flag("--accelerator-type", "--type") or ""
    if not command.begins("gcloud compute tpus") or "create" not in command.argv or not version:
        return
    wanted = next((runtime for prefix, runtime in _RUNTIMES if kind.startswith(prefix)), "tpu-ubuntu2204-base")
    is_framework = re.match(r"tpu-vm-(?:pt|tf)-", version) is not None
    known = {runtime for _, runtime in _RUNTIMES}
    if is_framework or (version in known and version != wanted):
        location = command.value_location("--version")
        yield Hit(location, f"{version} is stale" if is_framework else f"{version} is not for {kind}",
                  f"--version={wanted}, and pip install the framework",
                  replace_within(location, version, wanted))


_SAVE_FIX = "torch.distributed.checkpoint with an fsspec writer: every rank writes its shards to the store"


def _wrappers(file: PythonFile) -> dict[str, int]:
    """Return functions that hand one of their parameters to torch.save as the path, and the index of that parameter."""
    found: dict[str, int] = {}
    for node in file.nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        names = [argument.arg for argument in node.args.args]
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            if ast.unparse(call.func) == "torch.save" and len(call.args) > 1 and isinstance(call.args[1], ast.Name) \
                    and call.args[1].id in names:
                found[node.name] = names.index(call.args[1].id)
    return found


def _is_remote(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return _REMOTE.match(str(node.values[0].value)) is not None
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _REMOTE.match(node.value) is not None


def _imports(file: PythonFile) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
