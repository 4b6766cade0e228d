"""TensorBoard reads back what was measured."""

import math
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embark.errors import MissingPackage
from embark.events.events import Event
from embark.events.sinks.tensorboard import TensorBoardSink


def read(directory):
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_every_point_is_read_back_at_its_step_and_time(tmp_path, make_events):
    sink = TensorBoardSink(tmp_path / "tensorboard")
    events = make_events()
    for event in events:
        sink.emit(event)
    sink.close()
    curves = read(tmp_path / "tensorboard")
    steps = [event for event in events if event.kind == "step"]
    assert [(s.step, s.wall_time) for s in curves.Scalars("train/loss")] == [
        (event.values["step"], event.time_s) for event in steps
    ]
    assert [s.value for s in curves.Scalars("train/loss")] == pytest.approx([e.values["loss"] for e in steps])
    assert [s.step for s in curves.Scalars("eval/best_auc")] == [500, 1000]
    train = {"loss", "learning_rate", "samples_per_s", "step_s", "auc", "normalized_entropy", "log_loss", "calibration"}
    held_out = {"auc", "normalized_entropy", "log_loss", "calibration", "eval_s", "best_auc", "best_log_loss"}
    assert set(curves.Tags()["scalars"]) == {f"train/{n}" for n in train} | {f"eval/{n}" for n in held_out}


def test_points_are_on_disk_before_the_run_ends(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.emit(Event("step", {"step": 1, "loss": 0.5}))
    assert [s.value for s in read(tmp_path).Scalars("train/loss")] == [0.5]
    sink.close()
    sink.close()


def test_a_resumed_run_replaces_what_was_written_after_its_checkpoint(tmp_path):
    killed = TensorBoardSink(tmp_path)
    for step in (10, 20, 30, 40):
        killed.emit(Event("step", {"step": step, "loss": 1.0}))
    resumed = TensorBoardSink(tmp_path)
    resumed.emit(Event("resume", {"step": 20, "path": "x"}))
    for step in (30, 40, 50):
        resumed.emit(Event("step", {"step": step, "loss": 2.0}))
    killed.close()
    resumed.close()
    points = [(s.step, s.value) for s in read(tmp_path).Scalars("train/loss")]
    assert points == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def test_a_value_that_is_none_has_no_point_and_nan_has_one(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.emit(Event("step", {"step": 1, "loss": math.nan, "auc": None, "epoch": 3}))
    sink.emit(Event("step", {"step": 2, "auc": None}))
    sink.close()
    curves = read(tmp_path)
    assert curves.Tags()["scalars"] == ["train/loss"]
    assert [math.isnan(s.value) for s in curves.Scalars("train/loss")] == [True]


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackage) as caught:
        TensorBoardSink(tmp_path / "tensorboard")
    assert 'pip install "embark-rec[tensorboard]"' in caught.value.fix
    assert not (tmp_path / "tensorboard").exists()


def test_neither_torch_nor_tensorflow_is_looked_for(tmp_path):
    code = f"""
import sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "torch"):
            sys.exit("looked for " + name)

sys.meta_path.insert(0, Refuse())
import embark.events.sinks.tensorboard as t
assert "tensorboard" not in sys.modules
sink = t.TensorBoardSink(Path({str(tmp_path)!r}))
sink.emit(t.Event("step", {{"step": 1, "loss": 0.5}}))
sink.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list(tmp_path.glob("*tfevents*"))) == 1
