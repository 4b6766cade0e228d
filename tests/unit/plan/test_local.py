"""A run says before it starts what it should take; where nothing is calibrated it says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from embark.plan.predict import predict_local
from embark.run.logger import RunLogger, log_prediction
from embark.spec import load_spec

HERE: dict[str, Any] = {"device": "cpu", "device_name": "8 CPU devices of JAX", "engine": "jax", "precision": "fp32",
                        "world_size": 8, "host_bytes": 1, "device_bytes": 0}


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("other", [
    {}, {"device": "gpu", "device_name": "NVIDIA H200"}, {"device": "tpu", "device_name": "8 x TPU v5 lite"},
    {"device": "cuda", "device_name": "NVIDIA of tomorrow", "engine": "pipeline"},
])
def test_where_nothing_is_known_nothing_is_reported(other):
    assert predict_local(load_spec("quickstart", []), HERE | other) is None


def test_it_is_reported_as_an_event_before_the_first_step():
    result = Heard()
    world = SimpleNamespace(is_first=True, device_type="cuda", device_name="NVIDIA H200", num_devices=1,
                            device_bytes=150e9)
    trainer = SimpleNamespace(engine=SimpleNamespace(name="cuda_graph"), precision="bf16")
    log_prediction(RunLogger([result], []), load_spec("quickstart", []), world, trainer)
    (event,) = result.events
    assert event.kind == "predict"
    assert event.values["peak_bytes"] > 0
