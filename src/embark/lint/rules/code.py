"""EMB8xx: training code, TPU machines, and settings that cure nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from embark.lint.edit import replace_within
from embark.lint.read import PythonFile
from embark.lint.rule import Hit, Rules, World
from embark.lint.settings import settings

RULES = Rules()
CHECKPOINT = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
TPU = "https://cloud.google.com/tpu/docs/runtimes"
_REMOTE = re.compile(r"^(?:s3a?|gs|az|abfss?|wasbs?|hdfs)://")
_RUNTIMES = (("v5litepod", "v2-alpha-tpuv5-lite"), ("v5p", "v2-alpha-tpuv5"), ("v6e", "v2-alpha-tpuv6e"),
             ("v2", "tpu-ubuntu2204-base"), ("v3", "tpu-ubuntu2204-base"), ("v4", "tpu-ubuntu2204-base"))


@RULES.add("EMB801", "save-to-a-uri", "error",
           "torch.save takes a URI for a path: it fails, or writes a local folder `s3:` that is gone with the machine.",
           CHECKPOINT)
def save_to_a_uri(world: World) -> Iterator[Hit]:
    for file in world.files.pythons:
        saves = file.calls("torch.save")
        wrappers = _wrappers(file)
        for call in saves:
            if len(call.args) > 1 and _is_remote(call.args[1]):
                yield Hit(file.place(call), f"torch.save to {ast.unparse(call.args[1])}", _SAVE_FIX)
        for name, call in file.all_calls:
            position = wrappers.get(name)
            if position is not None and len(call.args) > position and _is_remote(call.args[position]):
                yield Hit(file.place(call), f"{name} hands {ast.unparse(call.args[position])} to "
                          "torch.save", _SAVE_FIX)


@RULES.add("EMB802", "saves-one-shard", "error",
           "Each rank holds its shards alone: torch.save of a sharded model keeps one rank's part of the tables.",
           CHECKPOINT)
def saves_one_shard(world: World) -> Iterator[Hit]:
    for file in world.files.pythons:
        if not re.search(r"\bDistributedModelParallel\b", file.source.text):
            continue
        for call in file.calls("torch.save"):
            if "state_dict" in ast.unparse(call):
                yield Hit(file.place(call), "torch.save of a model that is sharded over ranks",
                          "torch.distributed.checkpoint.save(state, checkpoint_id=…), on every rank")


@RULES.add("EMB803", "torchrec-on-tpu", "error",
           "fbgemm has no kernels for XLA: TorchRec's embeddings do not run on a TPU.",
           "https://github.com/AI-Hypercomputer/RecML")
def torchrec_on_tpu(world: World) -> Iterator[Hit]:
    for file in world.files.pythons:
        imported = {name.partition(".")[0] for name in _imports(file)}
        if {"torch_xla", "torchrec"} <= imported:
            yield Hit(file.place(file.tree.body[0]), "torchrec and torch_xla in one program",
                      "on TPU, JAX: RecML, or embark's tpu target; TorchRec on GPUs")


@RULES.add("EMB804", "stale-tpu-runtime", "error",
           "The runtime belongs to another TPU generation or is no longer offered: the TPU is not created, or is not "
           "seen.", TPU, can_fix=True)
def stale_tpu_runtime(world: World) -> Iterator[Hit]:
    for command in world.commands:
        version, kind = command.flag("--version"), command.flag("--accelerator-type", "--type") or ""
        if not command.begins("gcloud", "compute", "tpus") or "create" not in command.argv or not version:
            continue
        wanted = next((runtime for prefix, runtime in _RUNTIMES if kind.startswith(prefix)), "tpu-ubuntu2204-base")
        is_framework = re.match(r"tpu-vm-(?:pt|tf)-", version) is not None
        known = {runtime for _, runtime in _RUNTIMES}
        if is_framework or (version in known and version != wanted):
            place = command.value_place("--version")
            yield Hit(place, f"{version} is stale" if is_framework else f"{version} is not for {kind}",
                      f"--version={wanted}, and pip install the framework",
                      replace_within(place, version, wanted))


@RULES.add("EMB805", "no-such-tpu", "error", "Cloud TPU calls a v5e slice v5litepod-N: the type is refused.",
           "https://cloud.google.com/tpu/docs/v5e", can_fix=True)
def no_such_tpu(world: World) -> Iterator[Hit]:
    for command in world.commands:
        kind = command.flag("--accelerator-type") or ""
        if command.begins("gcloud", "compute", "tpus") and re.fullmatch(r"v5e-\d+", kind):
            place, right = command.value_place("--accelerator-type"), kind.replace("v5e", "v5litepod")
            yield Hit(place, f"there is no type {kind}", f"--accelerator-type={right}",
                      replace_within(place, kind, right))


@RULES.add("EMB806", "timeout-that-cures-nothing", "warning",
           "NCCL_IB_TIMEOUT is of InfiniBand's retries; a collective that hangs on EFA or TCP waits as long as before.",
           "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html", can_fix=True)
def timeout_that_cures_nothing(world: World) -> Iterator[Hit]:
    for one in settings(world):
        machines = one.job.machines if one.job is not None else ()
        if one.name == "NCCL_IB_TIMEOUT" and not any(m.fabric.transport == "verbs" for m in machines):
            yield Hit(one.place, f"{one.name}={one.value} does not lengthen any wait but InfiniBand's",
                      "init_process_group(timeout=…), and TORCH_NCCL_TRACE_BUFFER_SIZE=2000 to see which rank hangs",
                      one.removal)


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
