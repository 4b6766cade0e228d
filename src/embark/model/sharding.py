"""Which shardings a table may get and how long a search through them may be: one rule for TorchRec's planner in the
trainer and for the closed form in the plan."""

import math
from collections.abc import Iterator
from dataclasses import field

from embark.spec import ModelSpec, RunSpec, StoredTable
from embark.spec.section import remembered
from embark.spec.sequence import EMBEDDING_SHARDINGS
from embark.values import frozen
from .placement import Cluster, Memory, optimizer_of, table_value_bytes, wire_bytes

SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")
"""Shardings in the order of preference: of equals the first is taken. grid_shard: rows over the ranks of a host,
columns over hosts. data_parallel only where a table
names it: a checkpoint keeps its optimizer's state under other names, so that a choice by the number of ranks could not
resume on another."""
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
MAX_STEPS = 600  # Proposals of a complete search: some hundred tables.
MAX_SHARDS = 5_000_000  # Shards examined over all its proposals: some 20 s in TorchRec.
NUM_STRIDES = {"part": 4, "sum": 12}
"""Limits of a shortened search, by what an option is judged by: its slowest part, or the sum of all."""
MAX_GRID = 1_000  # Combinations that are all tried, where so few are possible.
SMALL_PART = 1 / 16  # The share of a rank's memory for tables below which a part needs no further cut.
STATE_FACTORS = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0, "rowwise_adam": 1.0}
"""Bytes of optimizer state for a byte of the table. TorchRec's planner counts the state as wide as the values."""
GIB = 2**30
DEVICE_BYTES_PER_S = {"cuda": 897 * GIB, "tpu": 897 * GIB, "cpu": 51 * GIB}
INTRA_BYTES_PER_S = 600 * GIB
INTER_BYTES_PER_S = 12.5 * GIB
BACKWARD_AND_FORWARD = 3
COPY_FACTOR = 2.455  # Reads and writes of gradients that row-wise parts gather, beside reading them once.
ID_BYTES = 8
CACHED_SHARE = 0.2  # The share of a table in host memory that is cached on the device.
CACHE_ROW_BYTES = 4 + 16 * CACHED_SHARE
"""What the device keeps to know which rows are cached, for each row of the table."""
MIN_COLUMNS = 32  # The least columns of a part of a table that is cut into columns.
MANY_IDS = 16  # A sample, from which on a table may be spread over several hosts as a grid.


def allowed_shardings(
    spec: RunSpec, table: StoredTable, num_ranks: int, device: str, num_hosts: int = 1
) -> list[str]:
    """Return what the table or `train.sharding` names, or all that keep a run's losses the same on any number of
    ranks."""
    asked = table.sharding or spec.train.sharding
    # TorchRec's grid does not divide, nor do others beside it: where rows are averaged, hosts get all columns.
    has_means = _has_means(spec.model)
    if asked != "auto":
        return ["table_row_wise" if asked == "grid_shard" and has_means else asked]
    if num_ranks == 1:
        return ["table_wise"]
    # Row-wise Adagrad keeps one number a row and column shard: cut into columns, a table learns something else, and
    # the losses would depend on the number of ranks.
    by_column = [] if optimizer_of(spec, table) == "rowwise_adagrad" else ["column_wise", "table_column_wise"]
    if device == "cpu":  # the fastest over gloo; the others when requested
        return ["table_wise", *(by_column or ["row_wise"])]
    is_spread = (by_column and num_hosts > 1 and not has_means and table.mean_ids >= MANY_IDS
                 and column_width(table.dim) < table.dim)
    return [name for name in SHARDINGS
            if (is_spread if name == "grid_shard" else by_column or "column" not in name)]


@remembered
def _has_means(model: ModelSpec) -> bool:
    return any(table.pooling == "mean" for table in model.stored_tables())


@remembered
def tables_alike(model: ModelSpec) -> tuple[tuple[StoredTable, ...], tuple[int, ...]]:
    """Return one of each kind of table, and the kind of each table: thousands of tables are of a few kinds."""
    kinds: dict[tuple[object, ...], int] = {}
    tables: list[StoredTable] = []
    numbers = []
    for table in model.stored_tables():
        key = (table.rows, table.dim, table.mean_ids, table.vectors_per_sample, table.optimizer, table.dtype,
               table.sharding, table.is_sequence)
        if key not in kinds:
            kinds[key] = len(tables)
            tables.append(table)
        numbers.append(kinds[key])
    return tuple(tables), tuple(numbers)


@frozen
class SearchRound:
    """The choices of one search through the shardings of the tables."""

    may_spill: bool  # Tables may be placed in host memory.
    is_long: bool
    shardings: dict[str, list[str]]  # Allowed shardings of each table.


def search_rounds(spec: RunSpec, cluster: Cluster) -> Iterator[SearchRound]:
    """Return a round with all tables in the devices' memory, and on CUDA a second with some in the host's.

    The second counts only if the first does not fit: a search over both would weigh the two, and rows that come from
    the host cost more than TorchRec's planner thinks.
    """
    tables, (kinds, numbers) = spec.model.stored_tables(), tables_alike(spec.model)
    allowed = [allowed_shardings(spec, kind, cluster.num_ranks, cluster.device, num_groups(cluster)) for kind in kinds]
    most = max(allowed, key=len, default=[])
    of_kind = [_allowed_for(kind, names) for kind, names in zip(kinds, allowed, strict=True)]
    for may_spill in (False, True) if cluster.device == "cuda" else (False,):
        is_long = is_long_search(len(tables), 1 + may_spill, most, cluster)
        chosen = [narrowed(names, kind, spec, cluster, may_spill=may_spill) if is_long else names
                  for kind, names in zip(kinds, of_kind, strict=True)]
        yield SearchRound(may_spill, is_long, {
            table.name: chosen[number] for table, number in zip(tables, numbers, strict=True)})


def _allowed_for(table: StoredTable, allowed: list[str]) -> list[str]:
    """Return the shardings of a table; TorchRec shards tables of sequences in fewer ways."""
    return [kind for kind in allowed if kind in EMBEDDING_SHARDINGS] if table.is_sequence else allowed


def column_width(dim: int) -> int:
    """Return the columns of each part of a table that is cut into columns."""
    return MIN_COLUMNS if dim % MIN_COLUMNS == 0 else dim


def is_long_search(num_tables: int, num_memories: int, shardings: list[str], cluster: Cluster) -> bool:
    """Return whether all options of all tables would take TorchRec's planner minutes or hours."""
    num_steps = 2 * num_tables * num_memories * len(shardings)  # two greedy proposers, each over all options
    num_shards = num_tables * num_memories * sum(_typical_num_parts(kind, cluster) for kind in shardings)
    return num_steps > MAX_STEPS or num_shards * num_steps > MAX_SHARDS


def narrowed(
    shardings: list[str], table: StoredTable, spec: RunSpec, cluster: Cluster, *, may_spill: bool
) -> list[str]:
    """Return the options of a long search.

    It has none that cannot fit, and cuts no table over all ranks where cutting it over one host's ranks will do.
    """
    capacity = table_capacity(spec, cluster)[cluster.device == "cpu"]
    num_bytes = float(table.rows * table.dim * table_value_bytes(spec, table))
    num_bytes *= 1 + STATE_FACTORS.get(optimizer_of(spec, table), 0.0)
    part_bytes = {kind: num_bytes / _typical_num_parts(kind, cluster) for kind in shardings}
    fitting = [kind for kind in shardings if part_bytes[kind] <= capacity or may_spill] or shardings
    others = [kind for kind in fitting if kind != "row_wise"]
    return others if others and min(part_bytes[kind] for kind in others) <= capacity * SMALL_PART else fitting


def table_capacity(spec: RunSpec, cluster: Cluster) -> tuple[float, float]:
    """Return the bytes that tables may take of a rank's device, and of its share of the host."""
    return cluster.device_bytes * (1 - spec.train.memory_reserve), cluster.host_bytes / ranks_per_group(cluster)


def ranks_per_group(cluster: Cluster) -> int:
    """Return the ranks of a host."""
    return min(cluster.ranks_per_host, cluster.num_ranks)


def num_groups(cluster: Cluster) -> int:
    """Return the number of hosts."""
    return cluster.num_ranks // ranks_per_group(cluster)


def stride_ends(num_steps: int, num_strides: int) -> Iterator[int]:
    """Return after which steps of a greedy search to look: 1, 2, 4, …, `num_steps`.

    The first steps move the large tables and count the most.
    """
    end = 0
    while end < num_steps:
        end = min(num_steps, max(end + 1, int(end * num_steps ** (1 / num_strides))))
        yield end


def _typical_num_parts(kind: str, cluster: Cluster) -> int:
    group = ranks_per_group(cluster)
    return {"table_wise": 1, "row_wise": cluster.num_ranks, "table_row_wise": group, "grid_shard": 4 * group}.get(
        kind, 4)


@frozen
class Option:
    """A table cut in one way; all parts are alike, but for the last one of rows of each block of columns."""

    sharding: str
    memory: Memory
    num_parts: int  # Parts of each block of columns that hold rows.
    num_rows: int
    last_rows: int
    num_columns: int
    device_bytes: float  # Bytes of a part, with the buffers of a batch.
    last_device_bytes: float
    host_bytes: float
    last_host_bytes: float
    part_s: float  # Time of a step for a part.
    all_s: float  # Time of all parts, including parts without rows.
    num_blocks: int = 1  # Blocks of columns, each with its host, except in a table that is cut into columns alone.
    all_device_bytes: float = field(init=False)
    all_host_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        device = self.device_bytes * (self.num_parts - 1) + self.last_device_bytes
        host = self.host_bytes * (self.num_parts - 1) + self.last_host_bytes
        object.__setattr__(self, "all_device_bytes", self.num_blocks * device)
        object.__setattr__(self, "all_host_bytes", self.num_blocks * host)


Options = dict[tuple[str, str, Memory], Option]  # Options by table, sharding and memory.


def options_of(
    table: StoredTable, shardings: list[str], spec: RunSpec, cluster: Cluster, *, may_spill: bool,
    known: Options | None = None
) -> list[Option]:
    """Return a table cut in each of these ways, in device memory first.

    `known` caches options of the same spec on clusters that differ only in their memory; new options are added to it.
    """
    memories: tuple[Memory, ...] = ("device", "host") if may_spill and not table.is_data_parallel else ("device",)
    keys = [(table.name, kind, memory) for memory in memories for kind in shardings]
    known = {} if known is None else known
    known |= {key: _option(table, *key[1:], spec, cluster) for key in keys if key not in known}
    return [known[key] for key in keys]


def _option(table: StoredTable, kind: str, memory: Memory, spec: RunSpec, cluster: Cluster) -> Option:
    num_columns = table.dim
    num_slots = _row_parts(kind, cluster)
    num_blocks = 1
    num_rows = math.ceil(table.rows / num_slots)
    num_parts = math.ceil(table.rows / num_rows)
    last_rows = table.rows - num_rows * (num_parts - 1)
    if "column" in kind:
        width = column_width(num_columns)
        num_slots = num_parts = num_columns // width
        num_columns = width
    if kind == "grid_shard":
        num_columns = column_width(num_columns)
        num_blocks = table.dim // num_columns
    if kind == "data_parallel":
        num_slots = num_parts = cluster.num_ranks
        last_rows = num_rows
    device, host = _part_bytes(table, num_rows, num_columns, kind, memory, spec, cluster)
    last_device, last_host = _part_bytes(table, last_rows, num_columns, kind, memory, spec, cluster)
    part_s = _part_s(table, num_columns, kind, spec, cluster)
    return Option(kind, memory, num_parts, num_rows, last_rows, num_columns, device, last_device, host, last_host,
                  part_s, part_s * num_slots * num_blocks, num_blocks)


def _part_bytes(
    table: StoredTable, num_rows: int, num_columns: int, kind: str, memory: Memory, spec: RunSpec, cluster: Cluster
) -> tuple[float, float]:
    """Return the bytes of a part on the device and on the host."""
    weights = num_rows * num_columns * table_value_bytes(spec, table)
    with_state = 1 + STATE_FACTORS.get(optimizer_of(spec, table), 1 / table.dim)
    if kind == "data_parallel":
        with_state += 1  # a gradient of every value
    rows = weights * with_state
    ids, pooled = _batch_sizes(table, num_columns, kind, spec, cluster)
    buffers = math.ceil(ids * ID_BYTES) + pooled * table_value_bytes(spec, table)
    if cluster.device == "cpu":
        return 0.0, rows + buffers
    if memory == "host":
        return weights * CACHED_SHARE * with_state + num_rows * CACHE_ROW_BYTES + buffers, rows
    return rows + buffers, 0.0


def _part_s(table: StoredTable, num_columns: int, kind: str, spec: RunSpec, cluster: Cluster) -> float:
    value_bytes = table_value_bytes(spec, table)
    wire = wire_bytes(spec, value_bytes)
    rate = DEVICE_BYTES_PER_S[cluster.device]
    intra = cluster.intra_gbyte_per_s * 1e9 or INTRA_BYTES_PER_S
    inter = cluster.inter_gbyte_per_s * 1e9 or INTER_BYTES_PER_S
    over_all = intra if cluster.num_ranks <= ranks_per_group(cluster) else inter
    ids, pooled = _batch_sizes(table, num_columns, kind, spec, cluster)
    by_rows = kind in BY_ROWS
    read_columns = num_columns if by_rows else max(num_columns, MIN_COLUMNS)
    sent = pooled * wire
    lookup_s = (math.ceil(ids * ID_BYTES) + ids * read_columns * value_bytes + sent) / rate
    lookup_s *= BACKWARD_AND_FORWARD * (1.0 if by_rows else _narrow_penalty(num_columns))
    if kind in ("table_row_wise", "grid_shard"):
        num_hosts = num_groups(cluster)
        across = sent / cluster.num_ranks * num_hosts if num_hosts > 1 else 0.0
        wire_s = 2 * (sent / intra + across / inter)
    elif kind == "data_parallel":
        wire_s = 2.0 * table.rows * num_columns * value_bytes / over_all if cluster.num_ranks > 1 else 0.0
    else:
        wire_s = 2 * sent / over_all
    return lookup_s + wire_s + (sent * COPY_FACTOR / rate if by_rows else 0.0)


def _batch_sizes(
    table: StoredTable, num_columns: int, kind: str, spec: RunSpec, cluster: Cluster
) -> tuple[float, float]:
    """Return the ids that a part looks up in a step, and the values that it gives: a part of rows sums for every
    sample."""
    num_samples = max(1, spec.train.batch_size // cluster.num_ranks) * cluster.num_ranks
    share = _row_parts(kind, cluster)
    if kind == "data_parallel":
        num_samples //= cluster.num_ranks
    return num_samples * table.mean_ids / share, num_samples * num_columns * table.vectors_per_sample


def _row_parts(kind: str, cluster: Cluster) -> int:
    """Return how many ranks the rows of a block of columns are spread over."""
    return {"row_wise": cluster.num_ranks}.get(kind, ranks_per_group(cluster) if kind in BY_ROWS else 1)


def _narrow_penalty(num_columns: int) -> float:
    return 1.0 if num_columns >= 128 else 1.15 if num_columns >= 64 else 1.75
