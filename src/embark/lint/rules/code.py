"""EMB8xx: training code, TPU machines, and settings that cure nothing."""

import ast
import re
from collections.abc import Iterator

from embark.lint.edit import replace_within
from embark.lint.read import PythonFile
from embark.lint.rule import Hit
from embark.lint.settings import Setting
from embark.lint.shell import Command

TPU = "https://cloud.google.com/tpu/docs/runtimes"
_REMOTE = re.compile(r"^(?:s3a?|gs|az|abfss?|wasbs?|hdfs)://")
_RUNTIMES = (("v5litepod", "v2-alpha-tpuv5-lite"), ("v5p", "v2-alpha-tpuv5"), ("v6e", "v2-alpha-tpuv6e"),
             ("v2", "tpu-ubuntu2204-base"), ("v3", "tpu-ubuntu2204-base"), ("v4", "tpu-ubuntu2204-base"))


def save_to_a_uri(file: PythonFile) -> Iterator[Hit]:
    saves = file.calls("torch.save")
    wrappers = _wrappers(file)
    for call in saves:
        if len(call.args) > 1 and _is_remote(call.args[1]):
            yield Hit(file.place(call), f"torch.save to {ast.unparse(call.args[1])}", _SAVE_FIX)
    for name, call in file.all_calls:
        position = wrappers.get(name)
        if position is not None and len(call.args) > position and _is_remote(call.args[position]):
            yield Hit(file.place(call), f"{name} hands {ast.unparse(call.args[position])} to torch.save", _SAVE_FIX)


def saves_one_shard(file: PythonFile) -> Iterator[Hit]:
    if not re.search(r"\bDistributedModelParallel\b", file.source.text):
        return
    for call in file.calls("torch.save"):
        if "state_dict" in ast.unparse(call):
            yield Hit(file.place(call))


def torchrec_on_tpu(file: PythonFile) -> Iterator[Hit]:
    imported = {name.partition(".")[0] for name in _imports(file)}
    if {"torch_xla", "torchrec"} <= imported:
        yield Hit(file.place(file.tree.body[0]))


def stale_tpu_runtime(command: Command) -> Iterator[Hit]:
    version, kind = command.flag("--version"), command.flag("--accelerator-type", "--type") or ""
    if not command.begins("gcloud", "compute", "tpus") or "create" not in command.argv or not version:
        return
    wanted = next((runtime for prefix, runtime in _RUNTIMES if kind.startswith(prefix)), "tpu-ubuntu2204-base")
    is_framework = re.match(r"tpu-vm-(?:pt|tf)-", version) is not None
    known = {runtime for _, runtime in _RUNTIMES}
    if is_framework or (version in known and version != wanted):
        place = command.value_place("--version")
        yield Hit(place, f"{version} is stale" if is_framework else f"{version} is not for {kind}",
                  f"--version={wanted}, and pip install the framework",
                  replace_within(place, version, wanted))


def no_such_tpu(command: Command) -> Iterator[Hit]:
    kind = command.flag("--accelerator-type") or ""
    if command.begins("gcloud", "compute", "tpus") and re.fullmatch(r"v5e-\d+", kind):
        place, right = command.value_place("--accelerator-type"), kind.replace("v5e", "v5litepod")
        yield Hit(place, f"there is no type {kind}", f"--accelerator-type={right}", replace_within(place, kind, right))


def timeout_that_cures_nothing(setting: Setting) -> Iterator[Hit]:
    machines = setting.job.machines if setting.job is not None else ()
    if setting.name == "NCCL_IB_TIMEOUT" and not any(m.fabric.transport == "verbs" for m in machines):
        yield Hit(setting.place, f"{setting.name}={setting.value} does not lengthen any wait but InfiniBand's",
                  edits=setting.removal)


_SAVE_FIX = "torch.distributed.checkpoint with an fsspec writer: every rank writes its shards to the store"


def _wrappers(file: PythonFile) -> dict[str, int]:
    """Functions that hand one of their parameters to torch.save as the path, and which."""
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
