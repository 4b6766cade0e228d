"""Which engine and which precision a run trains with."""

from pathlib import Path

from embark.errors import UserError
from embark.spec import RunSpec, TrainSpec
from embark.spec.model import FIELD_KINDS
from embark.spec.sequence import SEQUENCE_KINDS
from .work import TRACED

MAX_PADDED_LENGTH = 512  # `auto` pads no longer histories of SASRec: most are far from the longest.


def select_engine(spec: RunSpec, device: str, obstacle: str) -> tuple[str, str]:
    """Return `pipeline` or `cuda_graph` by `train.engine`, and why.

    `obstacle`: why a CUDA graph cannot be used; empty where it can. Raises `UserError` where the spec demands what
    cannot be.
    """
    requested = spec.train.engine
    if spec.has_bf16_tables and (obstacle or requested == "pipeline"):
        raise UserError(f"tables in bf16 are trained by a captured step only: {obstacle or 'pipeline requested'}",
                        'train.table_dtype = "fp16" or "fp32"')
    if requested == "pipeline":
        return "pipeline", "requested"
    if requested == "cuda_graph":
        if obstacle and (spec.model.is_custom or spec.model.kind in FIELD_KINDS):
            return "pipeline", obstacle
        if obstacle:
            raise UserError(f'train.engine = "cuda_graph" cannot be used: {obstacle}',
                            'train.engine = "pipeline", or "auto", which chooses')
    elif obstacle or (device != "cuda" and not spec.has_bf16_tables):
        return "pipeline", obstacle or "there is no GPU to capture the step on"
    if device != "cuda":
        return "cuda_graph", "the captured step, run one operation at a time: no GPU"
    return "cuda_graph", "the complete step as one CUDA graph"


def cuda_graph_obstacle(spec: RunSpec, device: str, *, has_tables_on_host: bool, num_ranks: int = 1) -> str:
    """Say why the step cannot be captured, by what is known before the run; empty where nothing is in the way."""
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
    if spec.has_bf16_tables:
        return "the captured step rounds no rows of sequences to bf16"
    longest = spec.model.feature(spec.model.sequence.history).multi_hot
    if spec.train.engine == "auto" and spec.model.kind == "sasrec" and longest > MAX_PADDED_LENGTH:
        return f"a captured step pads histories of sasrec to {longest} items: train.engine = \"cuda_graph\" chooses it"
    return ""


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
