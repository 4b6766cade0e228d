"""What a step does, counted: the same network as the trainer's, the same bytes as by hand."""

from __future__ import annotations

import math

import pytest

from embark.model.placement import Placement, Shard, all_table_bytes
from embark.model.work import distinct, layers_of, lookups_of
from embark.plan.fit import one_rank_placement
from embark.spec import PRESETS, RunSpec, resolve

SMALL = {"model": {"num_dense": 2, "embedding_dim": 8, "bottom_mlp": [4], "top_mlp": [4],
                   "tables": [{"name": "a", "rows": 100, "multi_hot": 2}, {"name": "b", "rows": 10}]},
         "train": {"batch_size": 50}, "data": {"num_train_samples": 100}}


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]().model.kind in ("dlrm", "dcnv2")])
def test_the_layers_are_those_that_the_trainer_builds(preset):
    torch = pytest.importorskip("torch")
    from embark.trainers.torch.networks import dense_network

    model = PRESETS[preset]().model
    with torch.device("meta"):
        network = dense_network(model)
    linears = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    layers = layers_of(model)
    assert layers.num_values == sum(p.numel() for p in network.parameters())
    assert len(layers.all) == len(linears)
    assert sorted(layer.num_weights for layer in layers.all) == sorted(m.weight.numel() for m in linears)


@pytest.mark.parametrize("sets", [
    ["model.num_dense=0"], ["model.kind=dcnv2"], ["model.kind=dcnv2", "model.num_dense=0"],
])
def test_networks_without_dense_features_are_counted_too(sets):
    torch = pytest.importorskip("torch")
    from embark.trainers.torch.networks import dense_network

    model = resolve({}, sets).model
    with torch.device("meta"):
        assert layers_of(model).num_values == sum(p.numel() for p in dense_network(model).parameters())


def test_lookups_are_counted_by_ids_rows_and_widths():
    spec = resolve(SMALL, ["train.optimizer=rowwise_adagrad", "data.zipf_exponent=0"])
    found = lookups_of(spec, one_rank_placement(spec), 0, 4)
    assert found.num_ids == 50 * 3
    assert found.read_bytes == 150 * 8 * 4
    assert found.pooled_values == 50 * 16
    touched = 100 * (1 - math.exp(-1)) + 10 * (1 - math.exp(-5))
    assert found.update_bytes == pytest.approx(2 * touched * (8 * 4 + 4))
    assert found.host_bytes == 0


def test_a_shard_of_rows_is_asked_for_its_share_of_the_ids_of_all_ranks():
    spec = resolve(SMALL, [])
    halves = Placement(2, (Shard("a", 0, 50, 8), Shard("a", 1, 50, 8), Shard("b", 1, 10, 8)), {}, "by hand")
    assert lookups_of(spec, halves, 0, 4).num_ids == 50
    assert lookups_of(spec, halves, 1, 4).num_ids == 100


def test_features_that_share_a_table_count_its_rows_once():
    tables = [{"name": "a", "rows": 100, "multi_hot": 2}, {"name": "b", "shares": "a", "multi_hot": 3}]
    spec = resolve({**SMALL, "model": {**SMALL["model"], "tables": tables}})
    found = lookups_of(spec, one_rank_placement(spec), 0, 4)
    assert found.num_ids == 50 * 5
    assert found.pooled_values == 50 * 16
    assert all_table_bytes(spec) == 100 * (8 * 4 + 4)
    assert layers_of(spec.model).num_vectors == 3


def test_what_lives_on_the_host_crosses_to_the_device():
    spec = resolve(SMALL, ["train.optimizer=sgd", "data.zipf_exponent=0"])
    split = Placement(1, (Shard("a", 0, 100, 8, "host"), Shard("b", 0, 10, 8)), {}, "by hand")
    found = lookups_of(spec, split, 0, 4)
    assert found.host_bytes == pytest.approx(2 * 100 * (1 - math.exp(-1)) * 32)


def test_arithmetic_is_six_operations_a_weight_and_the_dots():
    layers = layers_of(RunSpec().model)
    by_hand = 6 * (sum(a * b for a, b in ((13, 512), (512, 256), (256, 64), (64 + 351, 512), (512, 256), (256, 1)))
                   + 27 * 27 * 64)
    assert layers.flops_per_sample == by_hand


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2, 2.0])
@pytest.mark.parametrize(("num_ids", "num_rows"), [(2_000, 500), (5_000, 100_000), (20_000, 20_000)])
def test_rows_touched_are_those_that_synthetic_ids_touch(exponent, num_ids, num_rows):
    from embark.data import open_source

    spec = resolve({"model": {"num_tables": 1, "rows_per_table": num_rows}, "data": {"num_train_samples": num_ids},
                    "train": {"batch_size": 1}}, [f"data.zipf_exponent={exponent}"])
    drawn = open_source(spec).train_rows(0, 0, num_ids).ids
    assert distinct(num_ids, num_rows, exponent) == pytest.approx(len(set(drawn.tolist())), rel=0.1)
