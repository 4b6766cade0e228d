"""What the ranks of a run exchange in a step, and the seconds that links and fabric take for it."""

from embark.catalog import load_catalog
from embark.model.placement import Cluster, Placement, data_parallel_values, tables_by_name, wire_bytes
from embark.model.work import DenseWork, Layers, values_per_sample
from embark.spec import RunSpec
from embark.values import frozen
from .prediction import ASSUMPTIONS

STEP = ASSUMPTIONS["step"]


@frozen
class Exchange:
    """How ranks exchange values. The defaults are what Embark's captured step does: every vector, also one that is a
    part of a sum, goes straight to its sample's rank, and what is exchanged is waited for."""

    sums_in_host: bool = False
    """Parts of a vector from tables cut by rows within a host are added up there before they leave it."""
    is_hierarchical: bool = False
    """All vectors for another host are added up within their own host and collected on the rank that has the
    receiver's number, so that a rank sends one message to each other host."""
    ids_go_ahead: bool = False  # The next batch's ids are exchanged while this batch is computed.
    gradient_bytes: int = 4  # Bytes of each dense gradient that is summed over the ranks.
    adds_in_fabric: bool = False  # Switches add up the gradients: each is sent once and its sum received once.
    beside_dense: float = 0.0  # Share of the dense layers' time during which gradients are summed.
    beside_update: float = 0.0  # Share of the update's time during which gradients are summed.


ENGINES = {
    "cuda_graph": Exchange(),
    # DDP reduces gradients while the layers before still compute theirs.
    "pipeline": Exchange(sums_in_host=True, beside_dense=0.5)
}


def all_to_all_s(
    exchange: Exchange, spec: RunSpec, placement: Placement, cluster: Cluster, rank: int, size: int
) -> tuple[float, float]:
    """Return the seconds to send pooled vectors and their gradients, and those to send ids.

    `size`: bytes of a value that the dense layers compute with.
    """
    wire, share = wire_bytes(spec, size), share_between_hosts(cluster)
    if exchange.is_hierarchical:
        pooled, num_messages = _relayed_traffic(spec, placement, cluster, wire), _num_hosts(cluster) - 1
    else:
        pooled, num_messages = _pooled_traffic(exchange, spec, placement, cluster, rank, wire), cluster.num_ranks
    samples = spec.train.batch_size / placement.num_ranks
    ids = 4.0 * samples * sum(t.mean_ids for t in spec.model.table_list() if t.sharding != "data_parallel")
    copies = 1.0 if exchange.sums_in_host or exchange.is_hierarchical else _copies_of_ids(spec, placement)
    return (2 * link_s(*pooled, cluster, num_messages=num_messages),
            link_s(ids * (1 - share), ids * copies * share, cluster, num_messages=num_messages)
            + _dynamic_ids_s(spec, cluster))


def all_reduce_s(exchange: Exchange, spec: RunSpec, layers: Layers | DenseWork, cluster: Cluster) -> float:
    """Return the seconds of a sum within the host, then between hosts by all ranks of a host at once."""
    num_bytes = float(exchange.gradient_bytes) * (layers.num_values + data_parallel_values(spec))
    per_host, hosts = cluster.ranks_per_host, _num_hosts(cluster)
    within = 2 * num_bytes * (per_host - 1) / per_host
    between = num_bytes / per_host * (1 if exchange.adds_in_fabric else 2 * (hosts - 1) / hosts)
    return link_s(within, between, cluster)


def link_s(within_host: float, between_hosts: float, cluster: Cluster, *, num_messages: int = 0) -> float:
    """Return the seconds for bytes that leave one rank in one direction."""
    total_s = 0.0
    if within_host and cluster.ranks_per_host > 1:
        rate = (cluster.intra_gbyte_per_s or cluster.inter_gbyte_per_s or 1.0) * 1e9 * STEP["link_share"]
        total_s += STEP["link_latency_s"] + within_host / rate
    if between_hosts and cluster.num_ranks > cluster.ranks_per_host:
        share, latency_s, message_s = _fabric_facts(cluster.fabric)
        rate = (cluster.inter_gbyte_per_s or 1.0) * 1e9 * share
        total_s += latency_s + message_s * num_messages + between_hosts / rate
    return total_s


def _fabric_facts(name: str) -> tuple[float, float, float]:
    """Return what was measured of a fabric, else what is assumed of all: the share of its bandwidth that collectives
    reach, and the seconds of one and of each of its messages."""
    fabric = load_catalog().fabrics.get(name)
    if fabric is None or not (fabric.share and fabric.latency_s and fabric.message_s):
        return STEP["fabric_share"], STEP["fabric_latency_s"], STEP["message_s"]
    return fabric.share, fabric.latency_s, fabric.message_s


def share_between_hosts(cluster: Cluster) -> float:
    return 1 - min(cluster.ranks_per_host, cluster.num_ranks) / cluster.num_ranks


def num_dynamic_ids(spec: RunSpec) -> float:
    return spec.train.batch_size * sum(t.mean_ids for t in spec.model.stored_tables() if t.is_dynamic)


def _num_hosts(cluster: Cluster) -> int:
    return max(1, cluster.num_ranks // cluster.ranks_per_host)


def _dynamic_ids_s(spec: RunSpec, cluster: Cluster) -> float:
    """Return the seconds that dynamic tables exchange: ids to all ranks, first missing ids, new rows, rows back."""
    num_ids, share = num_dynamic_ids(spec), share_between_hosts(cluster)
    if not num_ids:
        return 0.0
    num_new = sum(min(table.features[0].max_new, spec.train.batch_size * table.multi_hot)
                  for table in spec.model.stored_tables() if table.is_dynamic)
    others = cluster.num_ranks - 1
    of_ids = num_ids / cluster.num_ranks * others
    return sum(link_s(size * (1 - share), size * share, cluster, num_messages=others)
               for size in (8 * of_ids, 8.0 * num_new * others, 16.0 * num_new * others, 4 * of_ids))


def _copies_of_ids(spec: RunSpec, placement: Placement) -> float:
    """Return to how many ranks an id goes on average: to all that hold a part of its table."""
    num_ids = {t.name: t.mean_ids for t in spec.model.stored_tables() if not t.is_data_parallel}
    ids = sum(num_ids.get(shard.table, 0.0) for shard in placement.shards)
    return ids / (sum(num_ids.values()) or 1.0)


def _pooled_traffic(
    exchange: Exchange, spec: RunSpec, placement: Placement, cluster: Cluster, rank: int, wire: int
) -> tuple[float, float]:
    """Return the bytes that leave a rank within its host and between hosts.

    A vector goes to its sample's rank. A table cut by rows gives a part of each vector on each of its ranks, and all
    parts travel; between hosts, only their sum where the exchange adds up those of one host before.
    """
    batch = spec.train.batch_size
    share = share_between_hosts(cluster)
    tables = tables_by_name(spec.model)
    within = between = 0.0
    for shard in placement.of_rank(rank):
        sharding = placement.shardings.get(shard.table)
        if sharding == "data_parallel":
            continue
        size = batch * wire * values_per_sample(shard, tables[shard.table])
        if sharding in ("table_row_wise", "grid_shard") and exchange.sums_in_host:
            within += size
            between += size / cluster.ranks_per_host * share
        else:
            within += size * (1 - share)
            between += size * share
    received = batch / placement.num_ranks * wire * sum(
        t.mean_width for t in spec.model.table_list() if t.sharding != "data_parallel")
    return (max(within, received * (1 - share)), max(between, received * share))


def _relayed_traffic(spec: RunSpec, placement: Placement, cluster: Cluster, wire: int) -> tuple[float, float]:
    """Return the most bytes that leave or reach a rank within its host, and between hosts, if hosts add up and collect
    vectors before they send them.

    Samples are spread evenly, so that all ranks of a host pass on equal shares of what leaves it.
    """
    per_host, share = cluster.ranks_per_host, share_between_hosts(cluster)
    tables = tables_by_name(spec.model)
    of_rank, in_host = [0.0] * placement.num_ranks, [0.0] * _num_hosts(cluster)
    widths: dict[tuple[int, str], float] = {}  # Columns of each table's sums that leave each host.
    for shard in placement.shards:
        if placement.shardings.get(shard.table) != "data_parallel":
            table, key = tables[shard.table], (shard.rank // per_host, shard.table)
            width, other_parts = values_per_sample(shard, table), widths.get(key, 0.0)
            of_rank[shard.rank] += width
            in_host[key[0]] += width / per_host
            is_summed = shard.num_rows < table.rows and not table.is_sequence
            widths[key] = max(other_parts, width) if is_summed else other_parts + width
    of_host = [sum(width for (host, _), width in widths.items() if host == at) for at in range(len(in_host))]
    column_bytes = float(spec.train.batch_size * wire)
    within = max(*of_rank, *in_host) * column_bytes * (per_host - 1) / per_host
    return within, max(*of_host, sum(of_host) / len(of_host)) * column_bytes / per_host * share
