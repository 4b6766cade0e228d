"""Which rank holds which part of which table, and in whose memory. The words that every planner's answer is put in."""

from dataclasses import field
from typing import Literal, Protocol

from embark.spec import ModelSpec, RunSpec, StoredTable
from embark.spec.model import TableOptimizer
from embark.spec.section import remembered
from embark.values import frozen

Memory = Literal["device", "host"]
STATE_BYTES = {"sgd": (0, 0), "rowwise_adagrad": (4, 0), "adagrad": (0, 4), "adam": (0, 8), "rowwise_adam": (4, 4)}
"""What an optimizer keeps beside a table: bytes for each row, and for each value."""
DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}  # Values that the dense optimizer stores for each weight.


@frozen
class Shard:
    """A part of a table on one rank."""

    table: str
    rank: int
    num_rows: int
    num_columns: int
    memory: Memory = "device"  # `host`: the rows live in the host's memory, and the device holds a cache of them.


@frozen
class Placement:
    """All shards; tables keep the spec's order."""

    num_ranks: int
    shards: tuple[Shard, ...]
    shardings: dict[str, str]  # Sharding of each table: `table_wise`, `row_wise`, …
    made_by: str  # `TorchRec's planner`, or `closed form`.

    _by_rank: dict[int, list[Shard]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_rank: dict[int, list[Shard]] = {}
        for shard in self.shards:
            by_rank.setdefault(shard.rank, []).append(shard)
        object.__setattr__(self, "_by_rank", by_rank)

    def of_rank(self, rank: int) -> list[Shard]:
        return self._by_rank.get(rank, [])

    @property
    def is_on_host(self) -> bool:
        """Whether some rows live in host memory."""
        return any(s.memory == "host" for s in self.shards)


@frozen
class Cluster:
    """The facts about machines that a planner needs: the ranks, and the memory that each may fill with tables."""

    num_ranks: int
    ranks_per_host: int
    device_bytes: float  # Memory of one accelerator, as its driver shows it; 0 on a CPU.
    host_bytes: float  # Memory of a whole host.
    device: Literal["cuda", "cpu", "tpu"] = "cuda"
    intra_gbyte_per_s: float = 0.0  # Rate from one rank to the others of its host, one direction; 0: not known.
    inter_gbyte_per_s: float = 0.0  # Rate from one rank to the ranks of other hosts, one direction; 0: not known.
    fabric: str = ""  # The catalog's name of what connects the hosts; empty: not known.


class TooLarge(Exception):
    """The tables do not fit the cluster, by any way that was tried; the text says why."""


class Planner(Protocol):
    """Puts a spec's tables on a cluster, or raises `TooLarge`."""

    def __call__(self, spec: RunSpec, cluster: Cluster) -> Placement: ...


def shard_bytes(shard: Shard, spec: RunSpec) -> float:
    """Return the bytes of a shard's rows and optimizer state."""
    table = tables_by_name(spec.model)[shard.table]
    a_row, a_value = state_bytes(spec, table)
    values = shard.num_rows * shard.num_columns
    return values * (table_value_bytes(spec, table) + a_value) + shard.num_rows * a_row


def table_value_bytes(spec: RunSpec, table: StoredTable | None = None) -> int:
    """Return the bytes of a value of a table's rows; without a table, of one that has no `dtype` of its own."""
    return 4 if ((table and table.dtype) or spec.train.table_dtype) == "fp32" else 2


def optimizer_of(spec: RunSpec, table: StoredTable) -> TableOptimizer:
    """Return the table's own optimizer, or that of all tables."""
    return table.optimizer or spec.train.optimizer


def state_bytes(spec: RunSpec, table: StoredTable) -> tuple[int, int]:
    """Return the bytes of a table's optimizer state for each row, and for each value."""
    return STATE_BYTES[optimizer_of(spec, table)]


@remembered
def tables_by_name(model: ModelSpec) -> dict[str, StoredTable]:
    return {table.name: table for table in model.stored_tables()}


@remembered
def all_table_bytes(spec: RunSpec) -> float:
    """Return the bytes of all rows of all tables with their optimizer state."""
    return sum(shard_bytes(Shard(t.name, 0, t.rows, t.dim), spec) for t in spec.model.stored_tables())


def data_parallel_values(spec: RunSpec) -> int:
    """Count the values of data-parallel tables: as many gradients are summed over the ranks in a step."""
    return sum(t.rows * t.dim for t in spec.model.stored_tables() if t.is_data_parallel)


def value_bytes(precision: str) -> int:
    """Return the bytes of a value that the dense layers compute with."""
    return 2 if precision == "bf16" else 4


def wire_bytes(spec: RunSpec, value_bytes: int) -> int:
    """Return the bytes of a value that ranks exchange."""
    return value_bytes if spec.train.comms_dtype == "fp32" else 2
