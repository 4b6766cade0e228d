"""A run in JAX says before it starts what its chips should take; where nothing is calibrated it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embark.catalog import load_catalog
from embark.plan.predict import match_tpu, predict, predict_local
from embark.plan.prediction import Setup
from embark.run.logger import RunLogger, log_prediction
from embark.spec import RunSpec, load_spec, resolve

HERE: dict[str, Any] = {"device": "tpu", "device_name": "8 x TPU v5 lite", "engine": "jax", "precision": "bf16",
                        "world_size": 8, "local_world_size": 8, "host_bytes": 1, "device_bytes": 0}


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_a_run_on_tpus_is_foreseen_as_the_plan_foresees_it():
    spec = load_spec("criteo-1tb", [])
    prediction = predict_local(spec, HERE)
    planned = predict(Setup(spec, load_catalog().machines["v5litepod-8"], 1))
    assert prediction["peak_bytes"] == pytest.approx(planned.memory.device_total)
    assert prediction["step_s"] == pytest.approx(planned.step.total_s)
    assert prediction["is_calibrated"] is False
    assert "unmeasured" in prediction["basis"]


@pytest.mark.parametrize("other", [
    {"device": "gpu", "device_name": "NVIDIA H200"}, {"device": "cpu", "device_name": "8 CPU devices of JAX"},
    {"device_name": "TPU v3"}, {"device_name": "TPU v99"}, {"world_size": 7},
])
def test_where_nothing_is_known_nothing_is_reported(other):
    assert predict_local(load_spec("quickstart", []), HERE | other) is None


@pytest.mark.parametrize(("title", "name"), [
    ("TPU v5 lite", "TPU-v5e"), ("4 x TPU v5e", "TPU-v5e"), ("TPU v5", "TPU-v5p"), ("TPU v5p", "TPU-v5p"),
    ("16 x TPU v6 lite", "TPU-v6e"), ("TPU v6e", "TPU-v6e"), ("TPU v4", "TPU-v4"),
])
def test_jax_s_names_of_chips_are_known(title, name):
    assert match_tpu(title, load_catalog()).name == name


def test_it_is_reported_as_an_event_before_the_first_step():
    result = Heard()
    world = SimpleNamespace(is_first=True, device_type="tpu", device_name="8 x TPU v5 lite", num_devices=8,
                            devices_per_host=8, device_bytes=0)
    trainer = SimpleNamespace(engine=SimpleNamespace(name="jax"), precision="bf16")
    log_prediction(RunLogger([result], []), load_spec("quickstart", []), world, trainer)
    (event,) = result.events
    assert event.kind == "predict"
    assert event.values["peak_bytes"] > 0


def test_a_run_in_jax_writes_it_beside_what_it_took(tmp_path, monkeypatch):
    pytest.importorskip("jax")
    from embark.trainers import train

    requests = []

    def on_a_tpu(spec: RunSpec, here: dict[str, Any]) -> dict[str, Any] | None:
        """What would be said, were these devices eight chips."""
        requests.append(here)
        return predict_local(spec, HERE)

    spec = resolve({"model": {"num_dense": 3, "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16], "num_tables": 2,
                              "rows_per_table": 50}, "place": {"device": "jax"},
                    "data": {"num_train_samples": 1024, "num_eval_samples": 0},
                    "train": {"batch_size": 128, "num_steps": 4},
                    "watch": {"every": 1, "tensorboard": False}, "store": {"root": str(tmp_path)}})
    monkeypatch.setattr("embark.run.logger.predict_local", on_a_tpu)
    values = train(spec, fresh=True)
    assert requests[0]["device"] == "cpu"
    assert requests[0]["engine"] == "jax"
    assert predict_local(spec, requests[0]) is None
    events = [json.loads(line) for line in (Path(values["run_dir"]) / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.index("start") < kinds.index("predict") < kinds.index("step") < kinds.index("end")
    run_events, duration = (next(e for e in events if e["event"] == kind) for kind in ("predict", "end"))
    assert {"step_s", "peak_bytes"} <= run_events.keys() & duration.keys()
