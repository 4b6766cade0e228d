"""A table cut into columns goes on under another cut, row-wise Adagrad's state with it."""

from pathlib import Path

import pytest
import torch

from embark.data import open_source
from embark.store import RunDir
from embark.trainers.torch.checkpoint import TorchCheckpointer
from embark.trainers.torch.model import local_shards
from embark.trainers.torch.sharding import sharded_tables
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import join

WIDE = ("model.embedding_dim=64", "model.num_tables=2", "store.checkpoint_every=6", "train.num_steps=6")


@pytest.fixture
def loaded(tiny):
    """A function that loads a run's newest checkpoint under another sharding, and gives state and weights."""

    def load(run_dir: str, sharding: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        spec = tiny(*WIDE, f"train.sharding={sharding}")
        with join(spec.place) as world:
            made = TorchTrainer(spec, world, 6, open_source(spec))
            notes: list[str] = []
            checkpointer = TorchCheckpointer(RunDir(run_dir), made)
            assert checkpointer.load_newest(notes.append).step == 6
            assert notes == []
            states = {
                name: torch.cat([s.tensor for s in value.local_shards()])
                for of in made.optimizers.both.state_dict()["state"].values()
                for name, value in of.items() if name.endswith("momentum1")
            }
            weights: dict[str, torch.Tensor] = {}
            for name, shard, _, column in local_shards(sharded_tables(made.model)):
                complete = weights.setdefault(name, torch.zeros(50, 64))
                complete[:, column : column + shard.shape[1]] = shard
        return states, weights

    return load


def test_shards_of_columns_become_complete_rows_by_their_mean(train_tiny, loaded):
    run_dir = train_tiny(*WIDE, "train.sharding=column_wise").values["run_dir"]
    cut, cut_weights = loaded(run_dir, "column_wise")
    complete, whole_weights = loaded(run_dir, "table_wise")
    for name, state in cut.items():
        assert state.shape == (100,)
        assert not torch.equal(state[:50], state[50:])
        assert torch.allclose(complete[name], (state[:50] + state[50:]) / 2)
    assert all(torch.equal(cut_weights[name], weight) for name, weight in whole_weights.items())


def test_complete_rows_become_shards_of_columns_that_begin_alike(train_tiny, loaded):
    run_dir = train_tiny(*WIDE, "train.sharding=row_wise").values["run_dir"]
    complete, weights = loaded(run_dir, "table_wise")
    cut, cut_weights = loaded(run_dir, "column_wise")
    for name, state in complete.items():
        assert state.abs().max() > 0
        assert torch.equal(cut[name], torch.cat([state, state]))
    assert all(torch.equal(cut_weights[name], weight) for name, weight in weights.items())


def test_a_run_continues_under_the_other_cut(train_tiny):
    sets = ("name=other", *WIDE)
    first = train_tiny(*sets, "train.sharding=column_wise", fresh=False)
    second = train_tiny(*sets, "train.sharding=table_wise", "train.num_steps=12", fresh=False)
    assert second.of("resume")[0]["step"] == 6
    assert len(second.losses()) == 12
    assert max(second.losses()[6:]) < max(first.losses()) + 0.05
    assert Path(second.values["run_dir"], "checkpoints", "step-000000012").is_dir()
