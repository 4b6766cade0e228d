"""Whatever the model and the data, the same road trains it."""

import csv
import random
import sys
from pathlib import Path

import pytest
import torch

from embark.errors import DataError, EmbarkError, ExitCode, Fault, UserError
from embark.run.host import host_bytes
from embark.spec import resolve
from embark.trainers import train
from embark.trainers.torch.model import local_shards
from embark.trainers.torch.sharding import sharded_tables
from embark.trainers.torch.trainer import precision_on
from embark.trainers.torch.world import explain

STEPS = "train.num_steps=4"


@pytest.mark.parametrize(
    "sets",
    [
        ("model.num_dense=0",),
        ("model.num_tables=1",),
        ("model.num_tables=1", "model.num_dense=0"),
        ("model.num_tables=60", "model.rows_per_table=5"),
        ("model.kind=dcnv2",),
        ("model.kind=dcnv2", "model.num_dense=0", "model.cross_rank=4"),
        ("model.kind=dcnv2", "model.num_tables=2", "model.embedding_dim=256"),
        ("model.bottom_mlp=[]", "model.top_mlp=[]"),
        ("train.table_dtype=fp16",),
        ("train.precision=bf16",),
        ("train.precision=tf32",),
        ("train.optimizer=sgd", "train.dense_optimizer=sgd"),
        ("train.optimizer=adagrad", "train.dense_optimizer=adam"),
        ("data.ragged=true",
         "model.tables=[{name='a', rows=9, multi_hot=4}, {name='b', rows=7, pooling='mean', multi_hot=3}]"),
        ("model.kind=dcnv2", "model.tables=[{name='a', rows=9, dim=4}, {name='b', rows=7, dim=32}]"),
        ("data.num_eval_samples=0",),
        ("train.warmup_steps=2", "train.decay=cosine"),
    ],
    ids=lambda sets: " ".join(sets)[:60],
)
def test_any_shape_of_model_trains(train_tiny, sets):
    result = train_tiny(STEPS, "train.learning_rate=0.005", *sets)
    losses = result.losses()
    assert len(losses) == 4
    assert all(0 < loss < 2 for loss in losses)
    assert len(result.of("eval")) == ("data.num_eval_samples=0" not in sets)


def test_a_multi_hot_model_learns(train_tiny):
    tables = "[{name='a', rows=50, multi_hot=4}, {name='b', rows=50, pooling='mean', multi_hot=3}, {name='c', rows=50}]"
    results = train_tiny(f"model.tables={tables}", "data.num_train_samples=32768", "train.batch_size=512",
                      "data.num_eval_samples=4000", "watch.every=16", "data.ragged=true", "train.learning_rate=0.2",
                      "train.dense_learning_rate=0.02")
    result = results.of("eval")[-1]
    assert result["auc"] > 0.65
    assert result["auc"] > 0.5 + 0.7 * (result["best_auc"] - 0.5)
    assert results.of("step")[-1]["log_loss"] < results.of("step")[0]["log_loss"] or len(results.of("step")) == 1


def user_item_file(path: Path, num_rows: int = 4000, *, bad_id: bool = False) -> Path:
    """Users like items of their own kind: nothing but the two ids says so."""
    draw = random.Random(3)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["when", "user", "item", "click"])
        for row in range(num_rows):
            user, item = draw.randrange(40), draw.randrange(30)
            rows.writerow([row, user, item, int(draw.random() < (0.85 if user % 3 == item % 3 else 0.15))])
        if bad_id:
            rows.writerows([[0, 40, 1, 1], [0, -1, 2, 0]])
    return path


def user_item_spec(tmp_path: Path, **data: object):
    return resolve({
        "name": "mine",
        "model": {"num_dense": 0, "embedding_dim": 8, "top_mlp": [16],
                  "tables": [{"name": "user", "rows": 40}, {"name": "item", "rows": 30}]},
        "data": {"kind": "columns", "label": "click", **data},
        "train": {"batch_size": 64, "num_epochs": 3, "learning_rate": 0.2, "dense_learning_rate": 0.05,
                  "precision": "fp32"},
        "store": {"root": str(tmp_path / "runs")},
    })


def test_your_own_columns_with_no_dense_feature_at_all(tmp_path):
    """The pattern is in the pair alone, so a model that learns it has looked at both."""
    values = train(user_item_spec(tmp_path, path=str(user_item_file(tmp_path / "clicks.csv"))))
    assert values["auc"] > 0.75
    assert "best_auc" not in values


def test_ids_out_of_range_are_counted_and_refused(tmp_path):
    path = user_item_file(tmp_path / "clicks.csv", bad_id=True)
    with pytest.raises(DataError) as caught:
        train(user_item_spec(tmp_path, path=str(path)))
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert "2" in caught.value.what
    assert "user" in caught.value.what
    assert not (tmp_path / "runs").exists()


def test_ids_out_of_range_are_clipped_aloud_when_the_spec_says_so(tmp_path):
    path = user_item_file(tmp_path / "clicks.csv", 640, bad_id=True)
    seen = []

    class View:
        def emit(self, event):
            seen.append(event)

        def close(self):
            pass

    spec = user_item_spec(tmp_path, path=str(path), on_bad_id="clip")
    values = train(spec.model_copy(update={"train": spec.train.model_copy(update={"num_steps": 2})}), [View()])
    notes = [e.values["text"] for e in seen if e.kind == "note" and e.values["level"] == "warning"]
    assert values["step"] == 2
    assert any("2" in note and "user" in note for note in notes)


def test_data_with_fewer_rows_than_a_batch_is_refused(tmp_path):
    path = user_item_file(tmp_path / "clicks.csv", 50)
    with pytest.raises(DataError, match="batch"):
        train(user_item_spec(tmp_path, path=str(path)))


def test_the_same_spec_twice_gives_the_same_losses_bit_for_bit(train_tiny):
    assert train_tiny("train.num_steps=8").losses() == train_tiny("train.num_steps=8").losses()


def test_a_program_s_tracebacks_are_its_own_again_after_training(train_tiny):
    before = sys.excepthook
    train_tiny("train.num_steps=1")
    assert sys.excepthook is before


def test_another_seed_gives_another_start(train_tiny):
    assert train_tiny(STEPS).losses()[0] != train_tiny(STEPS, "train.seed=2").losses()[0]


def test_every_epoch_goes_through_all_of_the_data(train_tiny):
    result = train_tiny("train.num_epochs=2", "data.num_train_samples=1000", "watch.every=1")
    assert result.values["step"] == 2 * (1000 // 128)
    assert [e["epoch"] for e in result.of("step")] == [0] * 7 + [1] * 7
    assert result.losses()[7] < result.losses()[0]


def test_tables_start_within_their_bounds_whatever_their_shards(built):
    for name, shard, row, column in local_shards(sharded_tables(built("train.sharding=row_wise").model)):
        assert (row, column) == (0, 0)
        assert 0 < shard.abs().max() <= (1 / 50) ** 0.5, name
        assert shard.unique().numel() > 0.9 * shard.numel()


def test_checkpoints_are_stored_as_many_as_asked_for(train_tiny):
    result = train_tiny("store.checkpoint_every=2", "store.keep_checkpoints=3", "train.num_steps=9",
                      "store.checkpoint_at_end=true")
    names = sorted(p.name for p in Path(result.values["run_dir"], "checkpoints").iterdir())
    assert names == ["step-000000006", "step-000000008", "step-000000009"]
    assert [e["step"] for e in result.of("save")] == [2, 4, 6, 8, 9]
    assert all(e["bytes"] > 0 for e in result.of("save"))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(train_tiny):
    sets = ("name=damaged", "store.checkpoint_every=4", "store.keep_checkpoints=5")
    result = train_tiny(*sets, "train.num_steps=8", fresh=False)
    shard = next(Path(result.values["run_dir"], "checkpoints", "step-000000008").glob("rank-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1])
    again = train_tiny(*sets, "train.num_steps=9", fresh=False)
    assert again.of("resume")[0]["step"] == 4


def test_a_loss_that_is_no_number_ends_the_run_with_its_step(train_tiny):
    with pytest.raises(EmbarkError, match=r"the loss became NaN at step \d+; all inputs were finite"):
        train_tiny("train.optimizer=sgd", "train.dense_optimizer=sgd", "train.learning_rate=1e30")


def test_a_failed_run_keeps_what_went_wrong(tiny, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr("embark.run.loop.TrainingLoop.train", broken)
    spec = tiny()
    with pytest.raises(Fault, match="a rank was lost"):
        train(spec)
    assert "a rank was lost" in Path(spec.store.root, "tiny", "events.jsonl").read_text()


def test_what_torch_raises_is_reported_in_our_words():
    assert isinstance(explain(torch.OutOfMemoryError("CUDA out of memory. Tried …")), UserError)
    assert isinstance(explain(torch.distributed.DistBackendError("NCCL …")), Fault)
    assert explain(RuntimeError("shape '[2]' is invalid")) is None


def test_precision_follows_the_processor(tiny, monkeypatch):
    auto = tiny("train.precision=auto").train
    for capability, expected in (((9, 0), "bf16"), ((7, 5), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, c=capability: c)
        assert precision_on(auto, torch.device("cuda")) == expected
    for has_units, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("embark.trainers.torch.trainer.cpu_has_matrix_bf16", lambda has=has_units: has)
        assert precision_on(auto, torch.device("cpu")) == expected


def test_the_container_s_limit_counts_as_the_machine_s_memory(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr("embark.run.host.CGROUP_LIMITS", (str(tmp_path / "none"), str(limit)))
    assert host_bytes() == 1048576
    limit.write_text("max\n")
    assert host_bytes() > 2**30
