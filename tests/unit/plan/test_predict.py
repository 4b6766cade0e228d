"""What fits where, and how the parts of a prediction move with the spec and the machines."""

from __future__ import annotations

import pytest

from embark.catalog import find_machine, load_catalog
from embark.model.placement import all_table_bytes
from embark.plan.calibration import SHIPPED, read_calibrations
from embark.plan.predict import choose_engine, cluster_of, predict
from embark.plan.prediction import Setup
from embark.spec import load_spec


def predicted(preset, machine, nodes=1, *sets):
    return predict(Setup(load_spec(preset, list(sets)), find_machine(load_catalog(), machine), nodes))


@pytest.mark.parametrize(("machine", "nodes", "says"), [
    ("a2-highgpu-1g", 1, "no"), ("p5.4xlarge", 1, "host"), ("a2-ultragpu-1g", 1, "host"),
    ("p5en.48xlarge", 1, "device"),
    ("p4d.24xlarge", 2, "device"), ("p4d.24xlarge", 1, "device"), ("p5.48xlarge", 1, "device"),
])
def test_the_criteo_1tb_tables_fit_where_they_should(machine, nodes, says):
    found = predicted("criteo-1tb", machine, nodes)
    assert found.fits == (says != "no")
    if found.fits:
        assert found.placement.is_on_host == (says == "host")
    assert "GiB" in found.why


def test_bytes_of_all_ranks_are_at_least_the_tables():
    found = predicted("criteo-1tb", "p5.48xlarge")
    by_rank = [sum(s.num_rows * s.num_columns * 4 for s in found.placement.of_rank(r)) for r in range(8)]
    assert sum(by_rank) == 204_184_588 * 128 * 4
    assert found.memory.device["tables"] == max(by_rank)
    assert found.memory.device_total < found.memory.device_limit


def test_a_larger_batch_takes_longer_but_less_for_each_sample():
    small, large = (predicted("quickstart", "p5en.48xlarge", 1, f"train.batch_size={b}") for b in (2_048, 65_536))
    assert large.step.total_s > small.step.total_s
    assert large.memory.device["activations"] > small.memory.device["activations"]
    assert large.samples_per_s > small.samples_per_s


def test_another_node_adds_what_crosses_the_fabric():
    one, two = (predicted("criteo-1tb", "p5.48xlarge", n) for n in (1, 2))
    assert two.step.parts_s["lookup and update"] < one.step.parts_s["lookup and update"]
    assert two.step.parts_s["all-to-all"] > one.step.parts_s["all-to-all"]


def test_only_a_card_that_was_measured_is_called_calibrated():
    assert predicted("quickstart", "p5en.48xlarge").step.is_calibrated
    on_a100 = predicted("quickstart", "p4d.24xlarge")
    assert not on_a100.step.is_calibrated
    assert any("estimate" in note for note in on_a100.notes)


def test_cards_without_bf16_compute_in_fp32():
    slow, fast = (predicted("quickstart", "g4dn.xlarge", 1, *sets) for sets in ((), ("train.precision=bf16",)))
    assert slow.step.parts_s["dense layers"] > fast.step.parts_s["dense layers"]


@pytest.mark.parametrize(("sets", "why"), [
    (["train.engine=pipeline"], "requested"),
    (["model.tables=[{name='a', rows=1000, sharding='data_parallel'}]"], "table a is data-parallel"),
])
def test_the_engine_is_the_one_that_the_trainer_will_choose(sets, why):
    found = predicted("quickstart", "p5en.48xlarge", 1, *sets)
    assert found.engine == "pipeline"
    assert why in found.engine_why


def test_memory_and_step_follow_the_tables_dtype_and_their_optimizer():
    def of(*sets):
        found = predicted("quickstart", "p5.4xlarge", 1, "train.engine=cuda_graph", *sets)
        return found.memory.device, found.step.parts_s["lookup and update"]

    values, rows = 26 * 100_000 * 64, 26 * 100_000
    (plain, plain_s), (adam, adam_s), (rowwise, rowwise_s) = (
        of(), of("train.table_dtype=fp16", "train.optimizer=adam"), of("train.optimizer=rowwise_adam"))
    assert (plain["tables"], plain["optimizer state"]) == (4 * values, 4 * rows)
    assert (adam["tables"], adam["optimizer state"]) == (2 * values, 8 * values)
    assert (rowwise["tables"], rowwise["optimizer state"]) == (4 * values, 4 * values + 4 * rows)
    assert plain_s < min(adam_s, rowwise_s)


def test_tables_on_the_host_take_the_pipeline():
    found = predicted("criteo-1tb", "p5.4xlarge")
    assert (found.engine, "host" in found.engine_why) == ("pipeline", True)
    assert found.step.parts_s["host memory"] > 0
    assert choose_engine(found.setup.spec, cluster_of(found.setup), found.placement)[0] == "pipeline"


def test_a_batch_that_does_not_divide_is_noted_with_one_that_does():
    notes = predicted("quickstart", "p5.48xlarge", 3).notes
    assert any("does not divide over 24 ranks: use 2040 or 2064" in note for note in notes)


def test_more_ranks_than_samples_is_refused():
    found = predicted("quickstart", "p5.48xlarge", 1, "train.batch_size=4")
    assert not found.fits
    assert "without one" in found.why


def test_tables_larger_than_the_complete_cluster_are_reported_in_numbers():
    found = predicted("criteo-1tb", "g4dn.xlarge")
    assert not found.fits
    assert found.step is None
    assert f"{all_table_bytes(found.setup.spec) / 2**30:,.1f}" in found.why


def test_dynamic_tables_were_measured_in_every_engine():
    for device, calibration in read_calibrations(SHIPPED).items():
        assert set(calibration.id_maps) == set(calibration.engines), device


def test_each_rank_has_its_share_of_dynamic_tables():
    dynamic = "model.tables=[{name='a', ids='dynamic', rows=9, capacity=32000000, evict='lfu', admit='count'}]"
    static = "model.tables=[{name='a', rows=32000001}]"
    sets = ("train.batch_size=65536", "train.engine=cuda_graph")
    (one, two), (plain, plain_two) = ([predicted("quickstart", "p5en.48xlarge", nodes, *sets, tables)
                                       for nodes in (1, 2)] for tables in (dynamic, static))
    of_ids = 52 * 65_536
    assert one.memory.device["id maps"] == 32_000_000 / 8 * (18 + 16) + of_ids
    assert two.memory.device["id maps"] == 32_000_000 / 16 * (18 + 16) + of_ids
    assert 0 < two.step.parts_s["id maps"] < one.step.parts_s["id maps"]
    assert one.step.parts_s["all-to-all"] > plain.step.parts_s["all-to-all"]
    assert "id maps" not in plain.step.parts_s
    assert two.step.parts_s["all-to-all"] > plain_two.step.parts_s["all-to-all"]
