"""Where tables go without torch: the verdict, what each rank holds, and how long the answer takes."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.catalog import load_catalog
from embark.model.placement import Cluster, TooLarge, shard_bytes
from embark.model.sharding import allowed_shardings, options_of, table_capacity
from embark.plan import closed_form as closed_form_module
from embark.plan.closed_form import closed_form
from embark.spec import PRESETS, DataSpec, ModelSpec, RunSpec, Table, TrainSpec, load_spec, resolve

GIB = 2**30
CRITEO = PRESETS["criteo-1tb"]()


def changed(spec, **train):
    return spec.model_copy(update={"train": spec.train.model_copy(update=train)})


def of_machine(name, num_nodes=1):
    machine = load_catalog().machines[name]
    device_mib = machine.gpu.seen_mib or machine.gpu.memory_mib
    return Cluster(num_nodes * machine.num_gpus, machine.num_gpus, device_mib * 2**20, machine.allocatable_gib * GIB)


def verdict(spec, cluster):
    try:
        return "host" if closed_form(spec, cluster).is_on_host else "device"
    except TooLarge:
        return "no"


@pytest.mark.parametrize(("machine", "num_nodes", "expected"), [
    ("a2-highgpu-1g", 1, "no"), ("a2-highgpu-2g", 1, "host"), ("a2-highgpu-4g", 1, "device"),
    ("a2-highgpu-8g", 1, "device"), ("p4d.24xlarge", 2, "device"), ("p4d.24xlarge", 16, "device"),
    ("a2-ultragpu-1g", 1, "host"), ("a2-ultragpu-2g", 1, "device"), ("p4de.24xlarge", 16, "device"),
    ("a3-highgpu-1g", 1, "host"), ("p5.48xlarge", 1, "device"), ("p5en.48xlarge", 1, "device"),
])
def test_criteo_1tb_fits_where_it_does(machine, num_nodes, expected):
    assert verdict(CRITEO, of_machine(machine, num_nodes)) == expected


def test_criteo_1tb_fits_one_h200():
    node = of_machine("p5en.48xlarge")
    assert verdict(CRITEO, Cluster(1, 1, node.device_bytes, node.host_bytes / 8)) == "device"


def test_one_80_gb_card_leaves_to_the_host_only_what_it_must():
    placement = closed_form(CRITEO, of_machine("a2-ultragpu-1g"))
    assert [s.num_rows for s in placement.shards if s.memory == "host"] == [40_000_000] * 3


def test_the_refusal_says_what_is_needed_and_what_is_there():
    with pytest.raises(TooLarge) as caught:
        closed_form(CRITEO, of_machine("a2-highgpu-1g"))
    text = str(caught.value)
    assert "tables of 98.1 GiB" in text
    assert "have 34.0 GiB for them (15% is reserved)" in text
    assert "98.1 of 78.2 GiB" in text
    assert "\n" not in text


def test_a_refusal_on_a_cpu_or_a_tpu_does_not_speak_of_another_memory():
    with pytest.raises(TooLarge, match=r"98\.9 GiB with the buffers of a batch, of the 2 ranks' 32\.0 GiB"):
        closed_form(CRITEO, Cluster(2, 2, 0, 32 * GIB, "cpu"))
    with pytest.raises(TooLarge) as caught:
        closed_form(CRITEO, Cluster(1, 1, 16 * GIB, 512 * GIB, "tpu"))
    assert "host" not in str(caught.value)


def test_tables_that_fit_in_sum_but_not_in_parts_are_refused():
    spec = RunSpec(model=ModelSpec(kind="dcnv2", embedding_dim=128, num_tables=3, rows_per_table=20_000_000),
                   data=DataSpec(), train=TrainSpec(sharding="table_wise", memory_reserve=0.0))
    with pytest.raises(TooLarge, match="split into parts too small for the tables"):
        closed_form(spec, Cluster(2, 2, 16 * GIB, 1 * GIB))


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise",
                                      "grid_shard"])
def test_a_sharding_that_is_asked_for_is_stored_to(sharding):
    placement = closed_form(changed(CRITEO, sharding=sharding), Cluster(16, 8, 80 * GIB, 1000 * GIB))
    assert set(placement.shardings.values()) == {sharding}
    hosts = {table: {s.rank // 8 for s in placement.shards if s.table == table} for table in placement.shardings}
    if sharding in ("table_row_wise", "table_column_wise"):
        assert all(len(ranks) == 1 for ranks in hosts.values())
    num_parts = Counter(s.table for s in placement.shards)["cat_0"]
    assert num_parts == {"row_wise": 16, "table_row_wise": 8, "table_wise": 1, "grid_shard": 32}.get(sharding, 4)


def test_where_rows_are_averaged_a_grid_is_cut_by_rows_alone():
    spec = resolve({"model": {"tables": [{"name": "a", "rows": 900}, {"name": "b", "rows": 50, "multi_hot": 3,
                                                                      "pooling": "mean"}]},
                    "train": {"sharding": "grid_shard"}})
    assert set(closed_form(spec, Cluster(4, 2, 80e9, 500e9)).shardings.values()) == {"table_row_wise"}


def test_row_wise_adagrad_is_never_cut_into_columns_by_itself():
    cluster = Cluster(16, 8, 40 * GIB, 1000 * GIB)
    assert not [s for s in closed_form(CRITEO, cluster).shards if s.num_columns != 128]
    assert [s for s in closed_form(changed(CRITEO, optimizer="adagrad"), cluster).shards if s.num_columns == 32]


def test_a_table_s_own_optimizer_type_and_sharding_count_in_its_bytes():
    one, two = ({"name": name, "rows": 1_000, "dim": 64} for name in "ab")

    def held(**settings):
        spec = resolve({"model": {"kind": "dcnv2", "tables": [one, {**two, **settings}]}})
        placement = closed_form(spec, Cluster(4, 4, 80e9, 500e9))
        return placement.shardings["b"], {rank: sum(shard_bytes(s, spec) for s in placement.of_rank(rank)
                                                    if s.table == "b") for rank in range(4)}

    values, rows = 64_000, 1_000
    assert sum(held()[1].values()) == 4 * values + 4 * rows
    assert sum(held(optimizer="sgd")[1].values()) == 4 * values
    assert sum(held(optimizer="adagrad")[1].values()) == 8 * values
    assert sum(held(dtype="fp16")[1].values()) == sum(held(dtype="bf16")[1].values()) == 2 * values + 4 * rows
    assert held(sharding="row_wise") == ("row_wise", dict.fromkeys(range(4), values + rows))
    assert held(sharding="data_parallel") == ("data_parallel", dict.fromkeys(range(4), 4 * values + 4 * rows))


def test_a_larger_reserve_leaves_less_to_the_tables():
    cluster = Cluster(2, 2, 80 * GIB, 1000 * GIB)
    assert verdict(CRITEO, cluster) == "device"
    assert verdict(changed(CRITEO, memory_reserve=0.5), cluster) == "host"


def test_a_table_of_a_hundred_ids_is_a_grid_over_hosts():
    spec = changed(PRESETS["mlperf-dcnv2"](), optimizer="adagrad")
    placement = closed_form(spec, Cluster(64, 8, 141 * GIB, 2000 * GIB))
    assert placement.shardings["cat_20"] == "grid_shard"
    parts = [s for s in placement.shards if s.table == "cat_20"]
    assert {s.num_columns for s in parts} == {32}
    assert len({s.rank for s in parts}) == 4 * 8
    assert len({s.rank // 8 for s in parts}) == 4
    assert sum(s.num_rows for s in parts) == 4 * spec.model.table_list()[20].rows
    for other, cluster in ((spec, Cluster(8, 8, 141 * GIB, 2000 * GIB)),
                           (changed(spec, optimizer="rowwise_adagrad"), Cluster(64, 8, 141 * GIB, 2000 * GIB))):
        assert "grid_shard" not in closed_form(other, cluster).shardings.values()


def test_hot_tables_are_spread_and_cold_ones_are_not():
    """A table with a hundred ids a sample would keep one rank busy alone."""
    placement = closed_form(PRESETS["mlperf-dcnv2"](), Cluster(8, 8, 80 * GIB, 2000 * GIB))
    assert placement.shardings["cat_20"] == "row_wise"
    assert placement.shardings["cat_0"] == "table_wise"


def test_a_cpu_holds_tables_in_its_host_s_memory():
    spec = PRESETS["quickstart"]()
    assert verdict(spec, Cluster(2, 2, 0, 8 * GIB, "cpu")) == "device"
    assert verdict(spec, Cluster(2, 2, 0, 0.5 * GIB, "cpu")) == "no"


def test_the_cluster_s_own_rates_do_not_count():
    """The trainer's planner does not know them."""
    slow, fast = (Cluster(128, 8, 80 * GIB, 2000 * GIB, "cuda", 450.0, rate) for rate in (5.0, 500.0))
    assert closed_form(CRITEO, slow) == closed_form(CRITEO, fast)


@settings(max_examples=60)
@given(data=st.data())
def test_every_row_is_held_once_and_no_rank_is_overfull(data):
    spec, cluster = data.draw(specs()), data.draw(clusters())
    try:
        placement = closed_form(spec, cluster)
    except TooLarge:
        return
    tables = {t.name: t for t in spec.model.table_list()}
    values = Counter()
    device, host = Counter(), Counter()
    for shard in placement.shards:
        assert 0 <= shard.rank < cluster.num_ranks
        values[shard.table] += shard.num_rows * shard.num_columns
        (host if shard.memory == "host" else device)[shard.rank] += shard_bytes(shard, spec)
    assert values == {name: t.rows * t.dim for name, t in tables.items()}
    device_room, host_room = table_capacity(spec, cluster)
    if cluster.device == "cpu":
        device_room = host_room
    assert max(device.values(), default=0) <= device_room
    assert max(host.values(), default=0) <= host_room


@settings(max_examples=40)
@given(data=st.data())
def test_what_fits_on_every_device_is_never_put_on_the_host(data):
    spec, cluster = data.draw(specs()), data.draw(clusters(devices=("cuda",)))
    cheapest = [min(options_of(t, allowed_shardings(spec, t, cluster.num_ranks, "cuda"), spec, cluster,
                               may_spill=False), key=lambda o: o.all_device_bytes)
                for t in spec.model.stored_tables()]
    needed = sum(o.all_device_bytes for o in cheapest)
    roomy = Cluster(cluster.num_ranks, cluster.ranks_per_host, 2 * needed / (1 - spec.train.memory_reserve), 0)
    assert verdict(spec, roomy) == "device"


def test_ten_terabytes_over_512_ranks_are_placed_by_few_proposals(monkeypatch):
    rows = tuple(math.ceil((2**31 - 1) / (i + 1) ** 0.985) for i in range(2_000))
    spec = RunSpec(model=ModelSpec(kind="dcnv2", embedding_dim=128, num_tables=2_000, rows_per_table=rows),
                   data=DataSpec(num_train_samples=10**6), train=TrainSpec(batch_size=524_288))
    proposed = []
    proposals = closed_form_module._proposals
    monkeypatch.setattr(closed_form_module, "_proposals",
                        lambda options, **more: (proposed.append(one) or one for one in proposals(options, **more)))
    placement = closed_form(spec, Cluster(512, 8, 80 * GIB, 1800 * GIB))
    assert len(proposed) < 50  # of 2,000 tables with up to three options each
    assert not placement.is_on_host
    assert placement.shardings["cat_0"] == "row_wise"
    assert Counter(placement.shardings.values())["table_wise"] > 1_900


def specs():
    tables = st.lists(
        st.builds(Table, name=st.just("t"), rows=st.integers(1, 10**8), multi_hot=st.sampled_from([1, 1, 20])),
        min_size=1, max_size=6,
    ).map(lambda listed: tuple(t.model_copy(update={"name": f"t{i}"}) for i, t in enumerate(listed)))
    train = st.builds(
        TrainSpec, batch_size=st.sampled_from([1_024, 65_536]),
        optimizer=st.sampled_from(["sgd", "rowwise_adagrad", "adagrad", "adam"]),
        sharding=st.sampled_from(["auto", "auto", "row_wise", "column_wise", "table_column_wise"]),
        memory_reserve=st.sampled_from([0.0, 0.15]),
    )
    model = st.builds(ModelSpec, kind=st.just("dcnv2"), embedding_dim=st.sampled_from([16, 64, 128]), tables=tables)
    return st.builds(RunSpec, model=model, train=train)


def clusters(devices=("cuda", "cuda", "cpu")):
    def build(num_hosts, per_host, device_gib, host_gib, device):
        return Cluster(num_hosts * per_host, per_host, device_gib * GIB if device == "cuda" else 0, host_gib * GIB,
                       device)

    return st.builds(build, st.integers(1, 4), st.sampled_from([1, 2, 8]), st.sampled_from([1, 8, 40]),
                     st.sampled_from([8, 100]), st.sampled_from(devices))


@pytest.mark.parametrize("sets", [(), ("model.num_tables=40", "model.rows_per_table=3000000")])
@pytest.mark.parametrize(("num_ranks", "device_gib"), [(2, 80), (8, 15), (16, 40)])
def test_a_try_that_is_not_packed_would_not_have_won(monkeypatch, sets, num_ranks, device_gib):
    spec = load_spec("quickstart", sets)
    cluster = Cluster(num_ranks, min(num_ranks, 8), device_gib * 2.0**30, 64 * 2.0**30)
    found = closed_form(spec, cluster)
    monkeypatch.setattr("embark.plan.closed_form._may_win", lambda *_: True)
    assert closed_form(spec, cluster) == found


def test_what_cannot_fit_is_refused_without_a_search(monkeypatch):
    monkeypatch.setattr(closed_form_module, "_greedy", None)
    spec = resolve({"model": {"num_tables": 10_000, "rows_per_table": 1_000_000}})
    with pytest.raises(TooLarge, match=r"tables of .* GiB with their optimizer's state need"):
        closed_form(spec, of_machine("p4d.24xlarge"))
