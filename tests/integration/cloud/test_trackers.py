"""What W&B's and MLflow's own clients have of a run that was stopped and resumed: one run, and no secret."""

import json
import struct
from pathlib import Path

import pytest
from tiny_runs import TINY

from embark.events.events import Event
from embark.events.sinks.trackers import TrackedRun, tracker_sink
from embark.spec import resolve

SECRET = "AKIA0123456789ABCDEF"


def tracked(folder, **train):
    spec = resolve({**TINY, "train": {**TINY["train"], **train},
                    "store": {"root": f"s3://bucket/runs?X-Amz-Credential={SECRET}"}})
    folder.mkdir(exist_ok=True)
    return TrackedRun("tiny", "ads", spec.model_dump(mode="json"), folder, folder / "tracking_id")


def attempt(name, run, steps, end):
    """One start of the run: its steps, an evaluation, and how it ended."""
    sink = tracker_sink(name, run, 3600.0)
    for step in steps:
        sink.emit(Event("step", {"step": step, "loss": 1 / step, "epoch": 0}))
    sink.emit(Event("eval", {"step": steps[-1], "auc": 0.75, "normalized_entropy": float("nan")}))
    sink.emit(end)
    sink.close()
    assert sink.take_problem() == ""


STOPPED = Event("interrupt", {"step": 2, "signal": "SIGTERM"})
DONE = Event("end", {"outcome": "done", "step": 6})


@pytest.mark.slow
def test_resumed_run_is_one_tracked_run_without_secrets(tmp_path, monkeypatch):
    import mlflow
    import wandb

    monkeypatch.setattr("embark.events.sinks.services.CLOSE_S", 60.0)  # a busy machine may be slow
    monkeypatch.setattr("embark.events.sinks.services.END_S", 60.0)
    for name, value in {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
                        "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_API_KEY": "0123456789abcdef" * 3}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "tiny"
    for name in ("wandb", "mlflow"):
        attempt(name, tracked(folder), [1, 2, 3], STOPPED)
        attempt(name, tracked(folder, num_steps=8), [3, 4], DONE)
    wandb.teardown()
    check_wandb(sorted(folder.glob("wandb/*/*.wandb")))
    check_mlflow(mlflow.MlflowClient())
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in written if SECRET.encode() in text]
    assert not [text for text in written if b"0123456789abcdef" * 3 in text]


def check_wandb(files):
    assert len(files) == 2
    first, second = (list(wandb_records(path)) for path in files)
    runs = [next(r.run for r in records if r.WhichOneof("record_type") == "run") for records in (first, second)]
    assert {(run.project, run.display_name) for run in runs} == {("ads", "tiny")}
    assert runs[0].run_id == runs[1].run_id != ""
    train = [json.loads(next(u.value_json for u in run.config.update if u.key == "train")) for run in runs]
    assert [one["num_steps"] for one in train] == [6, 8]
    rows = [row for records in (first, second) for row in history(records)]
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert [(row["step"], row["eval/auc"]) for row in rows if "eval/auc" in row] == [(3, 0.75), (4, 0.75)]
    assert [next(r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit")
            for records in (first, second)] == [1, 0]


def check_mlflow(client):
    experiment = client.get_experiment_by_name("ads")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.params["train.batch_size"] == "128"
    assert run.data.params["train.num_steps"] == "6"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({(one.step, one.value) for one in losses}) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert {one.step for one in client.get_metric_history(run.info.run_id, "eval/auc")} == {3, 4}


def history(records):
    for record in records:
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def wandb_records(path: Path):
    """W&B's messages in its file: LevelDB's log format, in blocks of 32 KiB behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
