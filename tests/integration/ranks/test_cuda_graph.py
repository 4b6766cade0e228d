"""The captured step on many ranks, one operation at a time over gloo: the numbers are those of TorchRec's pipeline."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "table_row_wise"])
def test_two_captured_ranks_give_the_losses_of_the_pipeline(ranks, torchrun, one, sharding):
    start = torchrun if sharding == "table_wise" else ranks
    two = start(2, "train.engine=cuda_graph", f"train.sharding={sharding}")
    assert two.code == 0, two.output
    assert two.events("start")[0]["engine"] == "cuda_graph"
    assert {t["sharding"] for t in two.events("plan")[0]["tables"]} == {sharding}
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
    assert two.last_eval()["auc"] == pytest.approx(one.last_eval()["auc"], rel=1e-3)


@pytest.mark.parametrize("sets", [
    ("model.tasks=[{name='click'}, {name='stars', loss='regression', weight=0.2}]", "model.task_head=mmoe"),
    ("model.tables=[{name='a', rows=90, multi_hot=3, pooling='mean', weights_column='w'}, {name='b', rows=60}]",
     "train.sharding=row_wise"),
], ids=["tasks", "weighted_ids"])
def test_two_captured_ranks_train_as_one_does(ranks, sets):
    one, two = (ranks(num, *sets, f"train.engine={engine}", name=engine)
                for num, engine in ((1, "pipeline"), (2, "cuda_graph")))
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.events("start")[0]["engine"] == "cuda_graph"
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)


def test_four_captured_ranks_give_the_losses_of_the_pipeline(ranks, one):
    four = ranks(4, "train.engine=cuda_graph")
    assert four.code == 0, four.output
    assert four.losses() == pytest.approx(one.losses(), rel=2e-5)


def test_rows_cut_over_four_captured_ranks_and_few_rows_for_some(ranks, one):
    four = ranks(4, "train.engine=cuda_graph", "train.sharding=row_wise")  # shop's 7 rows: 2, 2, 2 and 1
    assert four.code == 0, four.output
    assert four.losses() == pytest.approx(one.losses(), rel=2e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_comms_train_the_same_within_their_precision(ranks, one, dtype):
    narrow = ranks(2, "train.engine=cuda_graph", f"train.comms_dtype={dtype}")
    assert narrow.code == 0, narrow.output
    assert narrow.losses() != pytest.approx(one.losses(), rel=2e-6)
    assert narrow.losses() == pytest.approx(one.losses(), rel=5e-3)


def test_a_checkpoint_goes_from_engine_to_engine_and_from_two_ranks_to_one(ranks, one):
    sets = ("store.checkpoint_every=6", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01")
    reference = ranks(1, *sets, name="whole")
    first = ranks(2, *sets, "train.num_steps=6", "train.engine=cuda_graph", name="run")
    second = ranks(1, *sets, "train.engine=pipeline", name="run")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert second.events("resume")[0]["step"] == 6
    assert second.losses() == pytest.approx(reference.losses(), rel=1e-4)
