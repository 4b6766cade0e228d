"""What only a GPU can show. Run by hand; what came of it is in bench/RESULTS.md."""

import pytest
import torch

from embark.errors import ExitCode, UserError

pytestmark = pytest.mark.gpu
GPU = ("place.device=cuda", "train.num_steps=24", "data.num_train_samples=16384")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_a_resumed_run_gives_the_same_losses_bit_for_bit(train_tiny, precision, optimizer):
    sets = (*GPU, f"train.precision={precision}", f"train.optimizer={optimizer}", "train.dense_optimizer=adam",
            "train.learning_rate=0.01", "store.checkpoint_every=8")
    reference = train_tiny(*sets, "name=whole")
    train_tiny(*sets, "name=parts", "train.num_steps=16", fresh=False)
    resumed = train_tiny(*sets, "name=parts", fresh=False)
    assert resumed.of("resume")[0]["step"] == 16
    assert resumed.losses() == reference.losses()


def test_training_on_while_a_save_is_written_does_not_touch_it(train_tiny):
    sets = (*GPU, "store.checkpoint_every=4", "store.keep_checkpoints=9")
    together = train_tiny(*sets, "name=background")
    apart = train_tiny(*sets, "name=foreground", "store.in_background=false")
    assert together.losses() == apart.losses()
    resumed = train_tiny(*sets, "name=background", "train.num_steps=25", fresh=False)
    assert resumed.of("resume")[0]["step"] == 24


def test_the_gpu_gives_the_losses_of_the_cpu(train_tiny):
    on_gpu = train_tiny(*GPU, "name=gpu", "data.seed=3")
    on_cpu = train_tiny(*GPU, "name=cpu", "data.seed=3", "place.device=cpu")
    # Tables start from each device's own random numbers, so the first losses differ a little; both learn.
    assert on_gpu.losses()[-1] == pytest.approx(on_cpu.losses()[-1], abs=0.05)
    assert on_gpu.losses()[-1] < on_gpu.losses()[0]


@pytest.mark.parametrize("sets", [("train.table_dtype=fp16",), ("model.kind=dcnv2",), ("train.precision=tf32",),
                                  ("data.ragged=true", "model.tables=[{name='a', rows=9, multi_hot=4}]")])
def test_any_shape_of_model_trains(train_tiny, sets):
    result = train_tiny(*GPU, *sets)
    assert result.values["step"] == 24
    assert result.losses()[-1] < result.losses()[0]


def test_a_rate_of_zero_moves_no_weight(train_tiny):
    still = train_tiny(*GPU, "train.learning_rate=0", "train.table_dtype=fp16", "data.num_train_samples=128",
                       "train.num_epochs=24")
    assert len(set(still.losses())) == 1


def test_tables_larger_than_the_gpu_are_refused_or_go_to_the_host(train_tiny, monkeypatch):
    from embark.trainers.torch import sharding
    from embark.trainers.torch.world import World

    monkeypatch.setattr(World, "device_bytes", 60_000)
    monkeypatch.setattr(sharding, "host_bytes", lambda: 10_000)
    with pytest.raises(UserError, match="do not fit") as caught:
        train_tiny(*GPU, "model.rows_per_table=50000")
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_the_planner_knows_the_card(alone):
    from embark.trainers.torch.sharding import true_topology
    from embark.trainers.torch.world import World

    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    assert true_topology(world).devices[0].storage.hbm == torch.cuda.get_device_properties(0).total_memory
