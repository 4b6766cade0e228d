"""Which engine and which precision a run trains with."""

from collections.abc import Callable
from pathlib import Path

from embark.errors import UserError
from embark.model.work import TRACED
from embark.spec import ModelSpec, RunSpec, TrainSpec
from embark.spec.model import FIELD_KINDS
from embark.spec.sequence import SEQUENCE_KINDS

MAX_IDS_PER_SAMPLE = 1024  # Past this the slots kept for ids that most samples lack cost more than the launches saved.
MAX_PADDED_LENGTH = 512  # Histories are padded to the longest, which most are far from.
UNTIMED: dict[str, Callable[[ModelSpec], bool]] = {
    "several tasks": lambda model: bool(model.tasks),
    "two towers": lambda model: model.kind == "two_tower",
    "weighted ids": lambda model: model.has_weighted_ids,
    "dynamic tables and gradients by autograd": lambda model: model.has_dynamic_tables and model.goes_back_by_autograd,
    f"more than {MAX_IDS_PER_SAMPLE} ids a sample": lambda model: not model.has_sequences
        and sum(table.multi_hot for table in model.table_list()) > MAX_IDS_PER_SAMPLE,
    f"sasrec over more than {MAX_PADDED_LENGTH} items": lambda model: model.kind == "sasrec"
        and any(table.multi_hot > MAX_PADDED_LENGTH for table in model.table_list() if table.lookup
                and table.name == model.sequence.history),
}
"""What `auto` leaves to the pipeline until its captured step was timed on a GPU."""


def select_engine(spec: RunSpec, device: str, obstacle: str) -> tuple[str, str]:
    """Return `pipeline` or `cuda_graph` by `train.engine`, and why.

    `obstacle`: why a CUDA graph cannot be used; empty where it can. Raises `UserError` where the spec demands what
    cannot be.
    """
    requested = spec.train.engine
    if spec.has_bf16_tables and (obstacle or requested == "pipeline"):
        raise UserError(f"tables in bf16 are trained by a captured step only: {obstacle or 'pipeline requested'}",
                        fix='train.table_dtype = "fp16" or "fp32"')
    if requested == "pipeline":
        return "pipeline", "requested"
    if requested == "cuda_graph":
        if obstacle and (spec.model.is_custom or spec.model.kind in FIELD_KINDS):
            return "pipeline", obstacle
        if obstacle:
            raise UserError(f'train.engine = "cuda_graph" cannot be used: {obstacle}',
                            fix='train.engine = "pipeline", or "auto", which chooses')
    elif obstacle or (device != "cuda" and not spec.has_bf16_tables):
        return "pipeline", obstacle or "there is no GPU to capture the step on"
    if device != "cuda":
        return "cuda_graph", "the captured step, run one operation at a time: no GPU"
    return "cuda_graph", "the complete step as one CUDA graph"


def cuda_graph_obstacle(spec: RunSpec, device: str, *, has_tables_on_host: bool, num_ranks: int = 1) -> str:
    """Say why the step cannot be captured, by what is known before the run; empty where nothing is in the way."""
    if spec.train.engine == "auto" and not spec.has_bf16_tables:
        untimed = next((what for what, has in UNTIMED.items() if has(spec.model)), "")
        if untimed:
            return f'the captured step of {untimed} was not timed yet: train.engine = "cuda_graph" chooses it'
    if note := TRACED[spec.model].note if spec.model in TRACED else "":
        return f"{spec.model.kind} does not run without values, as a captured step must: {note.partition(': ')[2]}"
    if spec.model.has_sequences and (obstacle := _obstacle_of_sequences(spec, num_ranks)):
        return obstacle
    if spec.model.has_weighted_ids and spec.train.embedding_l2:
        return "train.embedding_l2 has no gradient for weighted ids in the captured step"
    if copied := next((t for t in spec.model.tables if t.sharding == "data_parallel"), None):
        return f"table {copied.name} is data-parallel, and the captured step has no such update"
    if device == "cuda" and has_tables_on_host:
        return "some tables live in the host's memory"
    return ""


def _obstacle_of_sequences(spec: RunSpec, num_ranks: int) -> str:
    if spec.model.kind not in SEQUENCE_KINDS:
        return f"{spec.model.kind} reads sequences, which have rows in a captured step that are no sample's"
    if num_ranks > 1:
        return "the captured step exchanges no rows of sequences between ranks"
    return "the captured step rounds no rows of sequences to bf16" if spec.has_bf16_tables else ""


def regularization_of(spec: RunSpec) -> str:
    """Return the first field set that only the torch trainer implements; empty where none is."""
    values = {"model.dropout": spec.model.dropout, "train.weight_decay": spec.train.weight_decay,
              "train.embedding_l2": spec.train.embedding_l2, "train.max_gradient_norm": spec.train.max_gradient_norm}
    return next((field for field, value in values.items() if value), "")


def choose_precision(train: TrainSpec, *, has_matrix_bf16: bool) -> str:
    """Return `fp32`, `tf32` or `bf16`; `auto` takes bf16 where matrix units make it faster."""
    if train.precision != "auto":
        return train.precision
    return "bf16" if has_matrix_bf16 else "fp32"


def cpu_has_matrix_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether there is AMX; the vector instructions of avx512_bf16 are no matrix units."""
    try:
        return "amx_bf16" in cpuinfo.read_text()
    except OSError:
        return False


def gpu_has_matrix_bf16(capability: tuple[int, int]) -> bool:
    """Return whether an NVIDIA GPU is an Ampere or newer."""
    return capability >= (8, 0)
