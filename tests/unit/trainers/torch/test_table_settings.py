"""Optimizer, type and sharding of a single table."""

from __future__ import annotations

import pytest
import torch

from embark.trainers.torch.checkpoint import local_shards
from embark.trainers.torch.model import local_shards as table_shards
from embark.trainers.torch.sharding import sharded_tables

MIXED = "model.tables=[{name='a', rows=9, optimizer='sgd', learning_rate=0.5}, {name='b', rows=60, optimizer=" \
    "'adagrad', dtype='fp16'}, {name='c', rows=50}, {name='d', rows=5, multi_hot=3, optimizer='adagrad'}]"
COPIED = "model.tables=[{name='a', rows=9, sharding='data_parallel'}, {name='b', rows=60}, {name='c', rows=50, " \
    "multi_hot=3, pooling='mean', sharding='data_parallel', optimizer='adagrad', learning_rate=0.1}, {name='e', " \
    "rows=9, sharding='data_parallel', optimizer='sgd'}]"


def test_each_table_has_its_own_optimizer_and_type(built):
    trainer = built(MIXED)
    rows = {name.split(".")[-2]: shard.dtype for name, shard, _, _ in table_shards(sharded_tables(trainer.model))}
    assert rows == {"a": torch.float32, "b": torch.float16, "c": torch.float32, "d": torch.float32}
    state = {shard.name.rpartition("embedding_bags.")[2]: shard.size
             for shard in local_shards(trainer.optimizers.both.state_dict()["state"]) if "embedding_bags" in shard.name}
    assert state == {"b.weight.b.momentum1": (60, 8), "c.weight.c.momentum1": (50,), "d.weight.d.momentum1": (5, 8)}


def test_the_captured_step_trains_the_same(train_tiny):
    sets = (MIXED.replace(", dtype='fp16'", ""), "train.num_steps=8", "data.ragged=true")
    pipeline, captured = (train_tiny(*sets, f"train.engine={engine}") for engine in ("pipeline", "cuda_graph"))
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=1e-5)
    assert pipeline.losses() != train_tiny(*sets, MIXED.replace("'sgd'", "'adagrad'")).losses()


def test_a_data_parallel_table_trains_as_a_sharded_one_and_resumes(train_tiny):
    sets = ("train.num_steps=8", "store.checkpoint_every=4", "train.warmup_steps=3", "data.ragged=true")
    sharded = train_tiny(*sets, COPIED.replace(" sharding='data_parallel',", "").replace(", sharding='data_parallel'",
                                                                                         ""))
    copied = train_tiny(*sets, COPIED, "name=copied")
    assert [t["sharding"] for t in copied.of("plan")[0]["tables"]] == ["data_parallel", "table_wise"] + [
        "data_parallel"] * 2
    assert copied.losses() == pytest.approx(sharded.losses(), rel=1e-5)
    assert copied.of("eval")[-1]["auc"] == pytest.approx(sharded.of("eval")[-1]["auc"], abs=1e-4)
    train_tiny(*sets, COPIED, "name=parts", "train.num_steps=4", fresh=False)
    assert train_tiny(*sets, COPIED, "name=parts", fresh=False).losses() == copied.losses()


def test_the_captured_step_has_no_data_parallel_tables_and_says_so(train_tiny):
    with pytest.raises(Exception, match="table a is data-parallel"):
        train_tiny(COPIED, "train.engine=cuda_graph")
