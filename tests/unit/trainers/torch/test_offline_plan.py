"""TorchRec's planner without its machines: what it answers, and that the closed form answers the same."""

import logging
from collections import Counter

import pytest
import torch
from torchrec.distributed.planner.types import PlannerError

from embark.catalog import load_catalog
from embark.model import sharding as sharding_rules
from embark.model.placement import Cluster, TooLarge, shard_bytes
from embark.plan.closed_form import closed_form
from embark.run.host import host_bytes
from embark.spec import PRESETS, DataSpec, ModelSpec, RunSpec, Table, TrainSpec
from embark.trainers.torch import sharding
from embark.trainers.torch.model import tables_without_values
from embark.trainers.torch.sharding import offline_plan
from embark.trainers.torch.world import World

GIB = 2**30
TOLERANCE = 0.002
"""Of the fullest rank's table bytes. Most plans are the same shard by shard; where two ranks are equally busy but for
the rounding of a sum, one of the two planners may choose the other rank."""
CRITEO = PRESETS["criteo-1tb"]()


def of_gpu(gpu, num_ranks):
    """So many of a card, in the smallest machines of the catalog that hold them."""
    machines = [m for m in load_catalog().machines.values() if m.gpu.name == gpu and m.allocatable_gib]
    per_host = min(8, num_ranks)
    machine = min((m for m in machines if m.num_gpus >= per_host), key=lambda m: (m.num_gpus, m.name))
    device_mib = machine.gpu.seen_mib or machine.gpu.memory_mib
    return Cluster(num_ranks, per_host, device_mib * 2**20, machine.allocatable_gib * GIB * per_host / machine.num_gpus)


def verdict_and_fullest(place, spec, cluster):
    try:
        placement = place(spec, cluster)
    except TooLarge:
        return "no", 0.0
    rows = Counter()
    for shard in placement.shards:
        rows[shard.rank] += shard_bytes(shard, spec)
    return "host" if placement.is_on_host else "device", max(rows.values())


def assert_the_two_agree(spec, cluster):
    verdict, fullest = verdict_and_fullest(offline_plan, spec, cluster)
    ours, our_fullest = verdict_and_fullest(closed_form, spec, cluster)
    assert ours == verdict
    assert our_fullest == pytest.approx(fullest, rel=TOLERANCE)
    return verdict


@pytest.mark.parametrize(("gpu", "by_ranks"), [
    ("A100", {1: "no", 2: "host", 4: "device", 16: "device", 128: "device"}),
    ("A100-80GB", {1: "host", 2: "device"}),
    ("H100", {1: "host", 2: "device", 16: "device"}),
    ("H200", {1: "device", 8: "device"}),
])
def test_the_closed_form_agrees_on_criteo_1tb(gpu, by_ranks):
    assert {n: assert_the_two_agree(CRITEO, of_gpu(gpu, n)) for n in by_ranks} == by_ranks


@pytest.mark.parametrize(("preset", "gpu", "num_ranks", "expected"), [
    ("mlperf-dcnv2", "A100", 4, "host"), ("mlperf-dcnv2", "A100", 8, "device"), ("mlperf-dcnv2", "A100-80GB", 1, "no"),
    ("mlperf-dcnv2", "H100", 8, "device"), ("mlperf-dcnv2", "H200", 1, "host"), ("mlperf-dcnv2", "H200", 16, "device"),
    ("quickstart", "A100", 1, "device"), ("quickstart", "A100", 16, "device"),
])
def test_the_closed_form_agrees_on_the_other_presets(preset, gpu, num_ranks, expected):
    assert assert_the_two_agree(PRESETS[preset](), of_gpu(gpu, num_ranks)) == expected


@pytest.mark.parametrize("train", [
    {"table_dtype": "fp16", "optimizer": "adam"}, {"comms_dtype": "fp16", "optimizer": "rowwise_adam"},
    {"sharding": "table_row_wise"}, {"sharding": "table_column_wise", "optimizer": "sgd"}, {"memory_reserve": 0.6},
    {"sharding": "grid_shard", "optimizer": "adagrad", "table_dtype": "fp16"},
], ids=str)
def test_the_closed_form_agrees_whatever_train_says(train):
    spec = CRITEO.model_copy(update={"train": CRITEO.train.model_copy(update=train)})
    assert_the_two_agree(spec, of_gpu("A100", 16))


def test_both_spread_a_table_of_a_hundred_ids_over_hosts_as_a_grid():
    spec = PRESETS["mlperf-dcnv2"]()
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": "adagrad"})})
    cluster = of_gpu("H200", 64)
    assert assert_the_two_agree(spec, cluster) == "device"
    theirs, ours = offline_plan(spec, cluster), closed_form(spec, cluster)
    assert theirs.shardings["cat_20"] == ours.shardings["cat_20"] == "grid_shard"


def test_the_closed_form_agrees_on_a_cpu():
    spec = PRESETS["quickstart"]()
    assert assert_the_two_agree(spec, Cluster(4, 4, 0, 8 * GIB, "cpu")) == "device"
    assert assert_the_two_agree(spec, Cluster(4, 4, 0, 0.5 * GIB, "cpu")) == "no"


def test_the_plan_is_the_one_the_trainer_makes(built, tiny):
    sets = ("train.sharding=row_wise",)
    layout = built(*sets).layout
    offline = offline_plan(tiny(*sets), Cluster(1, 1, 0, host_bytes(), "cpu"))
    assert offline.shardings == {t["table"]: t["sharding"] for t in layout["tables"]}
    assert [(s.table, s.num_rows, s.num_columns) for s in offline.shards] == [
        (t["table"], t["rows"], t["dim"]) for t in layout["tables"]]


def test_what_does_not_fit_is_reported_in_the_planner_s_first_line():
    with pytest.raises(TooLarge, match=r": Unable to find a plan[^\n]*insufficient storage\.$"):
        offline_plan(CRITEO, Cluster(1, 1, 40 * GIB, 85 * GIB))


def test_the_planner_does_not_speak(caplog):
    with caplog.at_level(logging.INFO):
        offline_plan(PRESETS["laptop"](), Cluster(1, 1, GIB, GIB))
    assert not [r for r in caplog.records if r.name.startswith("torchrec.distributed.planner")]
    assert logging.getLogger("torchrec.distributed.planner").level != logging.ERROR


def test_equal_options_are_tried_in_the_order_they_are_named():
    """TorchRec takes them from a set: under half of Python's hash seeds every table would go to the host."""
    world = World(0, 16, 0, 8, torch.device("cuda"))
    _, with_hosts = sharding_rules.search_rounds(CRITEO, Cluster(16, 8, 80 * GIB, 1000 * GIB))
    allowed = sharding.constraints(CRITEO, with_hosts)
    topology = sharding.topology_of(world, 80 * GIB, 1000 * GIB)
    tables = tables_without_values(CRITEO.model.stored_tables()[:3], CRITEO.train)
    options = sharding.OrderedEnumerator(topology, 4096, allowed).enumerate(tables, sharding.make_sharders(CRITEO))
    kinds = ["table_wise", "row_wise", "table_row_wise"]
    assert [(o.name, o.compute_kernel, o.sharding_type) for o in options] == [
        (f"cat_{i}", kernel, kind) for i in range(3) for kernel in ("fused", "fused_uvm_caching") for kind in kinds]


def test_only_the_tables_that_must_go_to_the_host():
    placement = offline_plan(CRITEO, of_gpu("A100-80GB", 1))
    assert [s.num_rows for s in placement.shards if s.memory == "host"] == [40_000_000] * 3


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_search_that_is_cut_short_finds_what_the_complete_one_finds(monkeypatch, num_ranks):
    cluster = of_gpu("A100", num_ranks)
    complete = verdict_and_fullest(offline_plan, CRITEO, cluster)
    monkeypatch.setattr(sharding_rules, "MAX_STEPS", 0)
    assert verdict_and_fullest(offline_plan, CRITEO, cluster) == complete


def test_many_tables_are_planned_the_same_by_both():
    tables = tuple(Table(name=f"t{i}", rows=800_000_000 // (i + 1), multi_hot=1 + 19 * (i % 9 == 0))
                   for i in range(110))
    spec = RunSpec(model=ModelSpec(kind="dcnv2", embedding_dim=64, tables=tables),
                   data=DataSpec(num_train_samples=10**6), train=TrainSpec(batch_size=65_536))
    cluster = Cluster(16, 8, 80 * GIB, 1000 * GIB)
    shardings = sharding_rules.allowed_shardings(spec, spec.model.stored_tables()[0], 16, "cuda")
    assert sharding_rules.is_long_search(len(tables), 1, shardings, cluster)
    assert assert_the_two_agree(spec, cluster) == "device"
    assert offline_plan(spec, cluster).shardings["t0"] != "table_wise"  # 191 GiB


def test_tables_with_settings_of_their_own_are_planned_the_same_by_both(caplog):
    own = ({"optimizer": "adagrad"}, {"dtype": "fp16"}, {"sharding": "column_wise"}, {"sharding": "table_wise"}, {})
    tables = tuple(Table(name=f"t{i}", rows=40_000_000 // (i + 1), **own[i % 5]) for i in range(10))
    small = Table(name="small", rows=500, sharding="data_parallel")
    spec = RunSpec(model=ModelSpec(embedding_dim=64, tables=(*tables, small)), train=TrainSpec(batch_size=65_536))
    cluster = Cluster(4, 4, 40 * GIB, 500 * GIB)
    assert assert_the_two_agree(spec, cluster) == "device"
    shardings = offline_plan(spec, cluster).shardings
    assert [shardings[name] for name in ("t2", "t7", "t3", "small")] == [
        "column_wise", "column_wise", "table_wise", "data_parallel"]


def test_a_long_search_that_finds_nothing_ends(monkeypatch):
    monkeypatch.setattr(sharding_rules, "MAX_STEPS", 0)
    world = World(0, 2, 0, 2, torch.device("cuda"))
    topology = sharding.topology_of(world, GIB, GIB)
    tables = tables_without_values(CRITEO.model.stored_tables(), CRITEO.train)
    with pytest.raises(PlannerError):
        sharding.first_plan(CRITEO, topology, lambda p: p.plan(tables, sharding.make_sharders(CRITEO)))
