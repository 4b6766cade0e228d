"""What ranks exchange, and how links, fabric and the engine's way of doing it set the time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embark.model.placement import Cluster, Placement, Shard
from embark.model.work import dense_work_of
from embark.plan.calibration import SHIPPED, read_calibrations
from embark.plan.exchange import ENGINES, Exchange, all_reduce_s, all_to_all_s, link_s
from embark.plan.step_time import step_time
from embark.spec import load_spec

BATCH, DIM, ROWS = 1_024, 64, 100_000
FLAT, SUMMED, RELAYED = Exchange(), Exchange(sums_in_host=True), Exchange(is_hierarchical=True)
# Bytes count alone: no table of the catalog has a fabric of this name, and at this rate what is constant is little.
TWO_HOSTS = Cluster(4, 2, 80e9, 1e12, intra_gbyte_per_s=1e-3, inter_gbyte_per_s=1e-4)


def spec_of(*tables, **sets):
    rows = [f'{{ name = "{name}", rows = {ROWS}, multi_hot = {ids}{more} }}' for name, ids, more in tables]
    return load_spec("quickstart", [f"model.tables=[{', '.join(rows)}]", f"model.embedding_dim={DIM}",
                                    f"train.batch_size={BATCH}", "train.comms_dtype=fp16",
                                    *(f"{name}={value}" for name, value in sets.items())])


def placed(cluster, cut, spec):
    """Cut each table into rows over the ranks named."""
    shards = [Shard(name, rank, ROWS // len(ranks), DIM) for name, ranks in cut.items() for rank in ranks]
    kinds = {name: "table_row_wise" if len(ranks) > 1 else "table_wise" for name, ranks in cut.items()}
    return Placement(cluster.num_ranks, tuple(shards), kinds, "a test")


def pooled_s(exchange, spec, cut, rank=0, cluster=TWO_HOSTS):
    return all_to_all_s(exchange, spec, placed(cluster, cut, spec), cluster, rank, 2)[0]


def seconds(within, between):
    """Seconds there and back."""
    return 2 * (within / (1e6 * 0.75) + between / (1e5 * 0.8))


def test_every_part_of_a_sum_crosses_the_fabric_in_the_captured_step():
    spec, cut = spec_of(("a", 1, ""), ("b", 1, "")), {"a": [0, 1], "b": [2, 3]}
    vectors = BATCH * DIM * 2
    assert pooled_s(ENGINES["cuda_graph"], spec, cut) == pytest.approx(seconds(vectors / 2, vectors / 2), rel=1e-3)
    assert pooled_s(ENGINES["pipeline"], spec, cut) == pytest.approx(seconds(vectors, vectors / 4), rel=1e-3)


def test_a_hierarchical_exchange_adds_up_and_collects_in_each_host():
    spec, vectors = spec_of(("a", 1, ""), ("b", 1, "")), BATCH * DIM * 2
    # a is cut over host 0; b is on rank 1 alone. Two vectors a sample leave the host, half of them to the other, by
    # both ranks; rank 1 passes half of two parts on to rank 0.
    assert pooled_s(RELAYED, spec, {"a": [0, 1], "b": [1]}) == pytest.approx(seconds(vectors, vectors / 2), rel=1e-3)
    # Cut over all four ranks, each host sends the other one sum a sample.
    assert pooled_s(RELAYED, spec, {"a": [0, 1, 2, 3]}) == pytest.approx(seconds(vectors / 2, vectors / 4), rel=1e-3)


def test_within_one_host_all_ways_of_exchanging_take_the_same_time():
    one_host = replace(TWO_HOSTS, ranks_per_host=4)
    spec, cut = spec_of(("a", 1, ""), ("b", 1, "")), {"a": [0, 1, 2, 3], "b": [1]}
    flat, summed = (pooled_s(way, spec, cut, rank=1, cluster=one_host) for way in (FLAT, SUMMED))
    assert flat == summed
    # The hierarchical exchange alone leaves out what a rank sends itself.
    assert pooled_s(RELAYED, spec, cut, rank=1, cluster=one_host) == pytest.approx(flat * 3 / 4, rel=1e-3)


def test_an_id_goes_to_every_part_of_its_table_in_the_captured_step():
    spec, cut = spec_of(("a", 5, "")), {"a": [0, 1, 2, 3]}
    flat, summed = (all_to_all_s(way, spec, placed(TWO_HOSTS, cut, spec), TWO_HOSTS, 0, 2)[1] for way in (FLAT, SUMMED))
    ids = 4 * 5 * BATCH / 4
    assert summed == pytest.approx(seconds(ids / 2, ids / 2) / 2, rel=1e-2)
    assert flat == pytest.approx(seconds(ids / 2, 4 * ids / 2) / 2, rel=1e-2)


def test_replicated_tables_exchange_gradients_only():
    spec = spec_of(("a", 5, ', sharding = "data_parallel"'))
    everywhere = Placement(4, tuple(Shard("a", rank, ROWS, DIM) for rank in range(4)), {"a": "data_parallel"}, "a test")
    for way in (FLAT, RELAYED):
        assert all_to_all_s(way, spec, everywhere, TWO_HOSTS, 0, 2) == (0.0, 0.0)
    layers, without = dense_work_of(spec.model, BATCH), spec_of(("a", 5, ""))
    more_s = all_reduce_s(FLAT, spec, layers, TWO_HOSTS) - all_reduce_s(FLAT, without, layers, TWO_HOSTS)
    rows = 4 * ROWS * DIM
    assert more_s == pytest.approx(seconds(rows / 2, rows / 4), rel=1e-3)


def test_rows_of_a_sequence_travel_once_however_many_ranks_hold_them():
    spec = load_spec("mlperf-hstu", ["train.batch_size=1024"])
    item = next(t for t in spec.model.stored_tables() if t.is_sequence)
    cluster = replace(TWO_HOSTS, num_ranks=8)
    sent = []
    for ranks in (4, 8):
        shards = tuple(Shard(item.name, rank, -(-item.rows // ranks), item.dim) for rank in range(ranks))
        placement = Placement(8, shards, {item.name: "row_wise"}, "a test")
        sent.append(all_to_all_s(FLAT, spec, placement, cluster, 0, 2)[0])
    assert sent[0] == pytest.approx(2 * sent[1], rel=0.01)


def test_switches_that_add_halve_what_a_sum_takes_between_hosts():
    spec = spec_of(("a", 1, ""))
    layers, many = dense_work_of(spec.model, BATCH), replace(TWO_HOSTS, num_ranks=2_048, intra_gbyte_per_s=1e9)
    by_ranks, by_switches = (all_reduce_s(Exchange(adds_in_fabric=way), spec, layers, many) for way in (False, True))
    assert by_ranks == pytest.approx(2 * by_switches, rel=0.01)
    half = all_reduce_s(Exchange(gradient_bytes=2), spec, layers, many)
    assert by_ranks == pytest.approx(2 * half, rel=0.01)


def test_a_measured_fabric_replaces_the_estimate():
    plain = Cluster(16, 8, 80e9, 1e12, intra_gbyte_per_s=450, inter_gbyte_per_s=50)
    found = [link_s(0.0, 47e9, replace(plain, fabric=name), num_messages=1) for name in ("infiniband", "efa", "")]
    assert found[0] == pytest.approx(1.0, rel=1e-3)
    assert found[1] == found[2] == pytest.approx(47 / 40, rel=1e-3)


def test_a_step_waits_only_for_what_nothing_hides():
    calibration = read_calibrations(SHIPPED)["H200"]
    spec = spec_of(("a", 5, ""), ("b", 5, ""))
    cluster = Cluster(16, 8, 80e9, 1e12, intra_gbyte_per_s=450, inter_gbyte_per_s=50)
    placement = placed(cluster, {"a": range(8), "b": range(8, 16)}, spec)

    def step(way=None):
        return step_time(spec, placement, cluster, "cuda_graph", "bf16", calibration, from_memory=True, exchange=way)

    plain, ahead, beside = step(), step(Exchange(ids_go_ahead=True)), step(Exchange(beside_update=1.0))
    assert plain == step(ENGINES["cuda_graph"])
    assert plain.total_s == pytest.approx(sum(plain.parts_s[name] for name in (
        "lookup and update", "dense layers", "launches", "all-to-all", "all-reduce")))
    ids_s = ahead.parts_s["ids of the next batch"]
    assert plain.total_s - ahead.total_s == pytest.approx(ids_s)
    assert plain.parts_s["all-to-all"] - ahead.parts_s["all-to-all"] == pytest.approx(ids_s)
    assert 0 < plain.total_s - beside.total_s <= min(plain.parts_s["all-reduce"], plain.parts_s["lookup and update"])
    assert beside.parts_s == plain.parts_s
