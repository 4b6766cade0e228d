"""TorchRec's traps, each avoided. A test is named for its trap."""

import pytest
import torch
from torch.distributed.run import get_args_parser
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from embark.data import open_source
from embark.errors import SpecError, UserError
from embark.model.placement import Cluster
from embark.model.sharding import search_rounds
from embark.spec import PlaceSpec
from embark.trainers.torch import sharding
from embark.trainers.torch.model import local_shards
from embark.trainers.torch.sharding import sharded_tables
from embark.trainers.torch.world import World, backend_for, join

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def weights(built) -> dict[str, torch.Tensor]:
    tables = {name: shard.clone() for name, shard, _, _ in local_shards(sharded_tables(built.model))}
    dense = {n: p.detach().clone() for n, p in built.model.named_parameters() if "tables" not in n}
    return {**tables, **dense}


def test_data_parallel_tables_are_planned_only_where_the_spec_says_so(tiny):
    asked = "model.tables=[{name='a', rows=100, sharding='data_parallel'}, {name='b', rows=100}]"
    for sets, names in (((), []), ((asked,), ["a"])):
        spec = tiny(*sets)
        for cluster in (Cluster(1, 1, 0, 2**30, "cpu"), Cluster(16, 8, 2**30, 2**30)):
            for search in search_rounds(spec, cluster):
                found = sharding.constraints(spec, search)
                assert [name for name, one in found.items() if "data_parallel" in one.sharding_types] == names


def test_the_dense_optimizer_gets_no_table(built):
    made = built()
    assert not [name for name in made.optimizers.dense.params if "tables" in name]
    assert {name.split(".")[-2] for name in made.model.fused_optimizer.params} == {f"cat_{i}" for i in range(4)}


def test_row_wise_is_open_on_a_cpu(built):
    layout = built("train.sharding=row_wise").layout
    assert {t["sharding"] for t in layout["tables"]} == {"row_wise"}


def test_adam_on_a_cpu_is_refused_before_fbgemm_is_asked(train_tiny):
    with pytest.raises(SpecError, match="no fused Adam on the CPU"):
        train_tiny("place.device=auto", "train.optimizer=adam")


def test_the_process_group_has_a_cpu_backend_beside_nccl():
    assert backend_for(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    assert backend_for(torch.device("cpu")) == "gloo"


def test_no_flag_of_ours_is_an_abbreviation_of_torchrun_s():
    theirs = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    for ours in ("--set", "--fresh", "--json", "--quiet", "-s", "-q"):
        assert not [flag for flag in theirs if flag.startswith(ours)]


def test_the_storage_reservation_is_the_exact_one(tiny, alone, monkeypatch):
    seen = []

    class Planner(sharding.EmbeddingShardingPlanner):
        def __init__(self, **arguments):
            seen.append(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(sharding, "EmbeddingShardingPlanner", Planner)
    from embark.trainers.torch.trainer import TorchTrainer

    TorchTrainer(tiny(), alone, 10, open_source(tiny()))
    assert isinstance(seen[0]["storage_reservation"], FixedPercentageStorageReservation)
    assert seen[0]["batch_size"] == 128


def test_the_topology_is_this_machine_s_and_not_32_gb_a_rank(alone, monkeypatch):
    monkeypatch.setattr(sharding, "host_bytes", lambda: 2**40)
    topology = sharding.true_topology(alone)
    assert [d.storage.ddr for d in topology.devices] == [2**40]
    monkeypatch.setattr(World, "device_bytes", 141 * 10**9)
    wide = World(rank=0, world_size=16, local_rank=0, local_world_size=8, device=torch.device("cuda"))
    topology = sharding.true_topology(wide)
    assert topology.local_world_size == 8
    assert {d.storage.hbm for d in topology.devices} == {141 * 10**9}


def test_tables_too_large_for_the_machine_are_refused_in_one_sentence(built, monkeypatch):
    monkeypatch.setattr(sharding, "host_bytes", lambda: 10_000)
    with pytest.raises(UserError, match="the tables do not fit 1 ×"):
        built()


def test_the_learning_rate_reaches_the_embeddings(train_tiny):
    slow, fast = train_tiny("train.dense_learning_rate=0", "train.learning_rate=0.001"), train_tiny(
        "train.dense_learning_rate=0", "train.learning_rate=0.1")
    assert slow.losses()[0] == fast.losses()[0]
    assert slow.losses()[-1] > fast.losses()[-1] + 0.001


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_rate_of_zero_moves_no_weight_at_all(built, tiny, optimizer):
    sets = ("train.learning_rate=0", f"train.optimizer={optimizer}", f"train.dense_optimizer={optimizer}"
            if optimizer != "rowwise_adagrad" else "train.dense_optimizer=adam")
    made = built(*sets)
    before = weights(made)
    take_steps(made, tiny(*sets), 5)
    after = weights(made)
    assert len(before) == 4 + 8
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_the_schedule_reaches_the_embeddings(built, tiny):
    """With only the dense optimizer in the pipeline a warm-up would never reach them."""
    moved = {}
    for warmup_steps in (0, 10):
        made = built(f"train.warmup_steps={warmup_steps}")
        before = weights(made)
        made.optimizers.set_rates(0)
        take_steps(made, tiny(), 1)
        after = weights(made)
        moved[warmup_steps] = {n: after[n] - before[n] for n in before if "cat_" in n}
    for name, complete in moved[0].items():
        assert complete.abs().max() > 0
        assert torch.allclose(moved[10][name], complete / 10, atol=1e-7), name


def test_adam_s_state_is_restored(train_tiny):
    """Adam makes its state at the first step; loading before that would restore nothing and say nothing."""
    sets = ("name=adam", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01", "store.checkpoint_every=8")
    reference = train_tiny(*sets, "name=whole", "train.num_steps=16")
    train_tiny(*sets, "train.num_steps=8", fresh=False)
    resumed = train_tiny(*sets, "train.num_steps=16", fresh=False)
    assert resumed.of("resume")[0]["step"] == 8
    assert resumed.losses()[8:] == reference.losses()[8:]


def test_one_process_alone_trains(train_tiny):
    assert train_tiny("train.num_steps=3").values["outcome"] == "done"


def test_the_bottom_mlp_follows_the_embedding_width(built, tiny):
    made = built("model.embedding_dim=256")
    take_steps(made, tiny("model.embedding_dim=256"), 1)
    bottom = made.model.module.module.dense.bottom if hasattr(made.model.module, "module") else (
        made.model.module.dense.bottom)
    assert [m.out_features for m in bottom if hasattr(m, "out_features")] == [16, 256]


def test_the_pipeline_is_used_and_not_only_drawn(built):
    assert type(built().engine._pipeline).__name__ == "TrainPipelineSparseDist"


def test_labels_can_be_learnt(train_tiny):
    result = train_tiny("data.num_train_samples=65536", "watch.every=64")
    assert result.values["auc"] > 0.6


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="torch sees no GPU"), join(PlaceSpec(device="cuda")):
        pass


def take_steps(made, spec, num_steps: int) -> list[float]:
    from embark.trainers.torch.batch import ToDevice

    source = open_source(spec)
    size = spec.train.batch_size
    batches = map(ToDevice([t.name for t in spec.model.table_list()], torch.device("cpu")),
        [source.train_rows(0, i * size, (i + 1) * size) for i in range(num_steps + 2)])
    losses = []
    for step in range(num_steps):
        made.engine.step(batches, step)
        losses.append(made.window.take(ALONE)["log_loss"])
    return losses
