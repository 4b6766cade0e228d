"""Which shardings a table may get and how long a search through them may be: one rule for TorchRec's planner in the
trainer and for the closed form in the plan."""

from collections.abc import Iterator

from embark.model.placement import Cluster, table_value_bytes
from embark.spec import RunSpec, Table

SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")
"""In the order in which a planner gets them: of equals the first is taken. Never data_parallel: it would take the
dense optimizer and other keys in a checkpoint, so that the same spec on another number of ranks could not resume."""
MAX_STEPS = 600
"""Proposals of a complete search: some hundred tables."""
MAX_SHARDS = 5_000_000
"""Shards examined over all its proposals: some 20 s in TorchRec."""
NUM_STRIDES = {"part": 4, "sum": 12}
"""Of a shortened search, by what an option is judged by: its slowest part, or the sum of all."""
MAX_GRID = 1_000
"""Combinations that are all tried, where so few are possible."""
SMALL_PART = 1 / 16
"""Of a rank's memory for tables: parts that pack well enough without being cut further."""
STATE_FACTORS = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0}
"""Bytes of optimizer state for a byte of the table. TorchRec's planner counts the state as wide as the values."""


def allowed_shardings(spec: RunSpec, num_ranks: int, device: str) -> list[str]:
    """What `train.sharding` names, or all that keep a run's losses the same on any number of ranks."""
    if spec.train.sharding != "auto":
        return [spec.train.sharding]
    if num_ranks == 1:
        return ["table_wise"]
    # Row-wise Adagrad keeps one number a row and column shard: cut into columns, a table learns something else, and
    # the losses would depend on the number of ranks.
    by_column = [] if spec.train.optimizer == "rowwise_adagrad" else ["column_wise", "table_column_wise"]
    if device == "cpu":  # the fastest over gloo; the others when requested
        return ["table_wise", *(by_column or ["row_wise"])]
    return [name for name in SHARDINGS if by_column or "column" not in name]


def is_long_search(num_tables: int, num_memories: int, shardings: list[str], cluster: Cluster) -> bool:
    """Going through all options of all tables would take TorchRec's planner minutes or hours."""
    num_steps = 2 * num_tables * num_memories * len(shardings)  # two greedy proposers, each over all options
    num_shards = num_tables * num_memories * sum(_typical_num_parts(kind, cluster) for kind in shardings)
    return num_steps > MAX_STEPS or num_shards * num_steps > MAX_SHARDS


def narrowed(shardings: list[str], table: Table, spec: RunSpec, cluster: Cluster, *, may_spill: bool) -> list[str]:
    """For a long search: without what cannot fit, and without cutting a table over all ranks where cutting it over one
    host's ranks will do."""
    capacity = table_capacity(spec, cluster)[cluster.device == "cpu"]
    num_bytes = float(table.rows * (table.dim or 0) * table_value_bytes(spec))
    num_bytes *= 1 + STATE_FACTORS.get(spec.train.optimizer, 0.0)
    part_bytes = {kind: num_bytes / _typical_num_parts(kind, cluster) for kind in shardings}
    fitting = [kind for kind in shardings if part_bytes[kind] <= capacity or may_spill] or shardings
    others = [kind for kind in fitting if kind != "row_wise"]
    return others if others and min(part_bytes[kind] for kind in others) <= capacity * SMALL_PART else fitting


def table_capacity(spec: RunSpec, cluster: Cluster) -> tuple[float, float]:
    """Bytes that tables may take of a rank's device, and of its share of the host."""
    return cluster.device_bytes * (1 - spec.train.memory_reserve), cluster.host_bytes / ranks_per_group(cluster)


def ranks_per_group(cluster: Cluster) -> int:
    """Of a host."""
    return min(cluster.ranks_per_host, cluster.num_ranks)


def stride_ends(num_steps: int, num_strides: int) -> Iterator[int]:
    """After which steps of a greedy search to look: 1, 2, 4, …, `num_steps`. The first steps move the large tables and
    count the most."""
    end = 0
    while end < num_steps:
        end = min(num_steps, max(end + 1, int(end * num_steps ** (1 / num_strides))))
        yield end


def _typical_num_parts(kind: str, cluster: Cluster) -> int:
    return {"table_wise": 1, "row_wise": cluster.num_ranks, "table_row_wise": ranks_per_group(cluster)}.get(kind, 4)
