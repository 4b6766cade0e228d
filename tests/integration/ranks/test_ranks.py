"""Many ranks train what one does: the same samples, the same start, the same losses."""

import os
import signal
import time

import pytest
from limits import HANG_S

pytestmark = pytest.mark.slow


def test_four_ranks_give_the_losses_of_one(torchrun, one):
    four = torchrun(4, name="four")
    assert (one.code, four.code) == (0, 0), one.output + four.output
    assert len(one.losses()) == 12
    assert four.losses() == pytest.approx(one.losses(), rel=2e-5)
    assert one.losses()[-1] < one.losses()[0]
    for metric in ("auc", "log_loss", "normalized_entropy", "calibration", "best_auc"):
        assert four.last_eval()[metric] == pytest.approx(one.last_eval()[metric], rel=1e-3), metric
    assert four.last_eval()["num_samples"] == one.last_eval()["num_samples"] == 515


def test_two_ranks_give_the_losses_of_one_in_every_task(ranks):
    sets = ("model.tasks=[{name='click'}, {name='stars', loss='regression'}, {name='kind', loss='softmax', "
            "num_classes=3}]", "model.task_head=ple", "data.task_conflict=0.5")
    alone, two = ranks(1, *sets, name="alone"), ranks(2, *sets, name="two")
    assert (alone.code, two.code) == (0, 0), alone.output + two.output
    assert two.losses() == pytest.approx(alone.losses(), rel=2e-5)
    for task, metrics in alone.last_eval()["tasks"].items():
        assert two.last_eval()["tasks"][task] == pytest.approx(metrics, rel=1e-3), task


@pytest.mark.parametrize("engine", ["pipeline", "cuda_graph"])
def test_a_grid_over_two_hosts_of_two_ranks_gives_the_losses_of_one(ranks, engine):
    """Rows over the ranks of a host, columns over hosts; in both engines."""
    sets = ("model.embedding_dim=64", "train.optimizer=adagrad", f"train.engine={engine}",
            "model.tables=[{name='user', rows=301}, {name='shop', rows=7}, {name='tags', rows=64, multi_hot=20}]")
    alone = ranks(1, *sets, name="alone")
    four = ranks(4, *sets, "train.sharding=grid_shard", name="four", hook="integration.faults.hooks:in_hosts_of_two")
    assert (alone.code, four.code) == (0, 0), alone.output + four.output
    layout = four.events("plan")[0]
    assert {(t["sharding"], tuple(sorted(set(t["ranks"])))) for t in layout["tables"]} == {("grid_shard", (0, 1, 2, 3))}
    assert four.losses() == pytest.approx(alone.losses(), rel=2e-5)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "table_row_wise", "table_column_wise"])
def test_every_sharding_gives_the_same_losses(ranks, one, sharding):
    sharded = ranks(2, f"train.sharding={sharding}", name="sharded")
    assert sharded.code == 0, sharded.output
    layout = sharded.events("plan")[0]
    assert {t["sharding"] for t in layout["tables"]} == {sharding}
    assert sharding != "row_wise" or all(t["ranks"] == [0, 1] for t in layout["tables"])
    assert sharding in (sharded.run_dir / "plan.txt").read_text()
    assert sharded.losses() == pytest.approx(one.losses(), rel=2e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_quantized_comms_train_the_same_within_their_precision(ranks, one, dtype):
    quantized = ranks(2, f"train.comms_dtype={dtype}")
    assert quantized.code == 0, quantized.output
    assert quantized.losses() != pytest.approx(one.losses(), rel=2e-6)
    assert quantized.losses() == pytest.approx(one.losses(), rel=5e-3)


def test_a_batch_that_does_not_divide_is_refused(ranks):
    done = ranks(2, "train.batch_size=97")
    assert "does not divide over 2 ranks" in done.output
    assert "use 96 or 98" in done.output
    assert done.code == 64
    assert not done.run_dir.exists()


def test_a_checkpoint_of_two_ranks_continues_at_one(ranks, one):
    sets = ("store.checkpoint_every=6",)
    first = ranks(2, *sets, "train.num_steps=6", name="run")
    second = ranks(1, *sets, name="run")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert second.events("resume")[0]["step"] == 6
    assert second.losses()[6:] == pytest.approx(one.losses()[6:], rel=2e-5)


def test_ranks_that_resume_give_the_same_losses_bit_for_bit(ranks):
    sets = ("store.checkpoint_every=6", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01")
    reference = ranks(2, *sets, name="whole")
    first = ranks(2, *sets, "train.num_steps=6", name="run")
    second = ranks(2, *sets, name="run")
    assert (reference.code, first.code, second.code) == (0, 0, 0), second.output
    assert second.losses() == reference.losses()


def test_a_signal_to_one_rank_stops_all_at_one_step(zygote, tmp_path, spec_file):
    """Ctrl-C reaches whoever it reaches; the others must not wait for ever."""
    sets = (f"store.root={tmp_path}", "train.num_steps=100000", "train.num_epochs=2400")
    words = ["train", str(spec_file), *(word for one in sets for word in ("--set", one))]
    pids = zygote.fork(2, words, cwd=tmp_path, log=tmp_path / "log")
    events = tmp_path / "ranks" / "events.jsonl"
    deadline = time.time() + HANG_S
    while not (events.exists() and '"step"' in events.read_text()) and time.time() < deadline:
        time.sleep(0.1)
    os.kill(pids[1], signal.SIGTERM)
    assert [zygote.code(pid, 120.0) for pid in pids] == [75, 75]
    assert "stopped by SIGTERM" in (tmp_path / "log.0").read_text()
    assert len(list((tmp_path / "ranks" / "checkpoints").glob("step-*/commit.json"))) == 1
