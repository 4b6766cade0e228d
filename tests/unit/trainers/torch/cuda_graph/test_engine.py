"""The captured step, one operation at a time on a CPU, trains what TorchRec's pipeline trains."""

from __future__ import annotations

import numpy as np
import pytest

from embark.data import Batch
from embark.errors import DataError, EmbarkError, UserError
from embark.run.evaluation import refuse_trouble
from embark.trainers.torch.engines.cuda_graph.batch_layout import PackedLayout

RAGGED = ("data.ragged=true", "model.tables=[{name='a', rows=9, multi_hot=4, pooling='mean'}, "
          "{name='b', rows=60, multi_hot=3}, {name='c', rows=5}]")
SHARED = ("data.ragged=true", "model.tables=[{name='item', rows=40}, {name='shop', rows=9, pooling='mean', "
          "multi_hot=2}, {name='seen', multi_hot=3, shares='item'}, {name='last', shares='shop'}]")
RATES = ("model.tables=[{name='a', rows=9, learning_rate=0.2}, {name='b', rows=60}, {name='c', rows=5, "
         "learning_rate=0.0}, {name='d', rows=50, init_range=0.5}]", "train.warmup_steps=5")


@pytest.mark.parametrize("sets", [
    (), ("model.kind=dcnv2",), ("model.num_dense=0",), ("model.num_dense=0", "model.kind=dcnv2"), RAGGED,
    ("model.top_mlp=[]", "model.bottom_mlp=[]"), ("model.embedding_dim=12",), ("model.num_tables=1",),
    ("train.optimizer=adagrad", "train.dense_optimizer=adam"), ("train.optimizer=sgd", "train.dense_optimizer=sgd"),
    ("train.warmup_steps=5", "train.decay=cosine"), SHARED, RATES, ("train.max_gradient_norm=0.02",),
    ("train.weight_decay=0.5", "train.embedding_l2=0.5", "model.dropout=0.3", "model.top_mlp=[16, 8]"),
    ("train.weight_decay=0.5", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01"),
], ids=str)
def test_the_losses_are_those_of_the_pipeline(train_tiny, sets):
    sets = (*sets, "train.num_steps=8")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets, "train.engine=cuda_graph")
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=1e-5)
    assert captured.of("eval")[-1]["auc"] == pytest.approx(pipeline.of("eval")[-1]["auc"], abs=1e-4)


def test_in_bf16_the_losses_are_close(train_tiny):
    sets = ("train.precision=bf16", "train.num_steps=12")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets, "train.engine=cuda_graph")
    assert captured.losses() != pipeline.losses()
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=0.02)


@pytest.mark.parametrize(("first", "then", "optimizer"), [
    ("cuda_graph", "pipeline", "adagrad"), ("cuda_graph", "pipeline", "adam"), ("pipeline", "cuda_graph", "adam")])
def test_a_checkpoint_of_one_engine_continues_in_the_other(train_tiny, first, then, optimizer):
    sets = ("store.checkpoint_every=4", f"train.dense_optimizer={optimizer}", "train.dense_learning_rate=0.01")
    reference = train_tiny(*sets, "name=whole", "train.num_steps=8", "train.engine=pipeline")
    train_tiny(*sets, "name=parts", "train.num_steps=4", f"train.engine={first}", fresh=False)
    resumed = train_tiny(*sets, "name=parts", "train.num_steps=8", f"train.engine={then}", fresh=False)
    assert resumed.of("resume")[0]["step"] == 4
    assert resumed.losses() == pytest.approx(reference.losses(), rel=1e-5)


def test_a_resumed_captured_run_gives_the_same_losses_bit_for_bit(train_tiny):
    sets = ("store.checkpoint_every=4", "train.engine=cuda_graph", "train.dense_optimizer=adam")
    reference = train_tiny(*sets, "name=whole", "train.num_steps=8")
    train_tiny(*sets, "name=parts", "train.num_steps=4", fresh=False)
    assert train_tiny(*sets, "name=parts", "train.num_steps=8", fresh=False).losses() == reference.losses()


def test_a_rate_of_zero_moves_no_weight(train_tiny):
    still = train_tiny("train.engine=cuda_graph", "train.learning_rate=0", "data.num_train_samples=128",
                       "train.num_epochs=4")
    assert len(set(still.losses())) == 1


def test_auto_takes_the_pipeline_on_a_cpu_and_says_why(train_tiny):
    start = train_tiny("train.num_steps=1").of("start")[0]
    assert start["engine"] == "pipeline"
    assert "no GPU" in start["engine_reason"]


def test_what_cannot_be_captured_is_refused_with_the_reason(train_tiny):
    tables = "model.tables=[{name='a', rows=9, sharding='data_parallel'}, {name='b', rows=9}]"
    with pytest.raises(UserError, match=r"cannot be used: table a is data-parallel"):
        train_tiny("train.engine=cuda_graph", tables)
    start = train_tiny("train.num_steps=1", tables).of("start")[0]
    assert start["engine"] == "pipeline"
    assert "table a is data-parallel" in start["engine_reason"]


def test_a_loss_that_is_no_number_names_its_step(train_tiny):
    with pytest.raises(EmbarkError, match=r"became NaN in step \d+ \(samples \d+ to \d+ of epoch 0\).*diverged"):
        train_tiny("train.engine=cuda_graph", "train.optimizer=sgd", "train.dense_optimizer=sgd",
                   "train.learning_rate=1e30", "watch.every=10")


class OneBatch:
    """A source that gives one batch."""

    num_train_samples, num_eval_samples, notes = 4, 0, ()

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        assert (epoch, start, stop) == (2, 4, 8)
        return self._batch


@pytest.fixture
def batch():
    return Batch(np.zeros((4, 3), np.float32), np.array([1, 2, 3, 4] * 4, np.int32), np.ones((4, 4), np.int32),
                 np.zeros(4, np.float32))


def test_a_bad_id_is_reported_with_its_batch_table_and_sample(tiny, batch):
    spec = tiny("train.batch_size=4")
    batch.ids[4 + 2] = 50
    with pytest.raises(DataError, match=r"table cat_1: id 50 of sample 2 of the batch is not in 0 to 49, in step 12"):
        refuse_trouble(0.5, ("id", 11, "cat_1"), OneBatch(batch), spec, 20, per_epoch=5)


def test_a_value_that_is_no_number_is_reported_with_its_column(tiny, batch):
    spec = tiny("train.batch_size=4", 'data.dense_columns=["age", "price", "height"]', "data.kind=columns",
                "data.path=x.csv")
    batch.dense[3, 1] = np.nan
    with pytest.raises(DataError, match="dense column price: nan in sample 7"):
        refuse_trouble(float("nan"), ("loss", 9, ""), OneBatch(batch), spec, 20, per_epoch=4)


def test_rows_with_fewer_ids_are_padded(batch):
    ragged = Batch(batch.dense[:3], np.array([5, 6, 7, 8, 9, 10], np.int32),
                   np.array([[2, 0, 1], [1, 1, 1]], np.int32), batch.label[:3], is_fixed=False)
    form = PackedLayout(3, 3, (2, 1))
    buffer = np.zeros(form.size_bytes, np.uint8)
    form.pack(ragged, buffer)
    import torch

    dense, ids, label = form.decode(torch.from_numpy(buffer))
    assert ids.tolist() == [5, 6, -1, -1, 7, -1, 8, 9, 10]
    assert dense.shape == (3, 3)
    assert label.tolist() == [0, 0, 0]
