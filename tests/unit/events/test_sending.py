"""What is sent elsewhere never holds a run up, arrives at the end, and is told of once where it does not."""

import threading
import time

import pytest
from limits import HANG_S

from embark.errors import MissingPackage
from embark.events.events import Event
from embark.events.sinks.services import SendingSink, cloudwatch_sink, otlp_sink
from embark.events.sinks.trackers import Points, TrackedRun, parameters, tracker_sink


class Service:
    """A sender that keeps what it gets, or fails."""

    def __init__(self, fails=0, waits=None):
        self.got, self.closed, self.is_asked = [], False, False
        self._fails, self._waits = fails, waits

    def send(self, readings):
        self.is_asked = True
        if self._waits is not None:
            self._waits.wait(600)
        if self._fails:
            self._fails -= 1
            raise ConnectionError("no route\n\x1b[31mto host")
        self.got.append({one.metric.name: one.value for one in readings})

    def close(self):
        self.closed = True


def step(number, loss=0.5):
    return Event("step", {"step": number, "loss": loss})


def until(condition):
    end = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_what_was_reported_last_is_sent_when_the_run_ends():
    service = Service()
    sink = SendingSink("x", lambda: service, 3600)
    for number in range(100):
        sink.emit(step(number))
    assert service.got == []
    sink.close()
    assert [sent["last_step"] for sent in service.got] == [99]
    assert service.closed


def test_only_what_is_new_is_sent():
    service = Service()
    sink = SendingSink("x", lambda: service, 0.005)
    sink.emit(step(1))
    until(lambda: service.got)
    sink.emit(Event("save", {"step": 1, "bytes": 10}, time.time() + 1))
    until(lambda: len(service.got) > 1)
    sink.close()
    assert "loss" in service.got[0]
    assert all("loss" not in sent for sent in service.got[1:])
    assert service.got[1]["save_bytes"] == 10


def test_a_failure_is_reported_once_and_sending_is_tried_again():
    service = Service(fails=3)
    sink = SendingSink("CloudX", lambda: service, 0.005)
    sink.emit(step(1))
    until(lambda: service.got)
    assert sink.take_problem() == ("CloudX does not receive the metrics; training continues: "
                                   "ConnectionError: no route [31mto host")
    assert sink.take_problem() == ""
    sink.close()
    assert sink.take_problem() == ""
    assert service.got[0]["loss"] == 0.5


def test_a_service_that_cannot_even_be_made_is_reported_of():
    def make():
        raise ValueError("You must specify a region.")

    sink = SendingSink("CloudWatch", make, 3600)
    sink.emit(step(1))
    sink.close()
    assert "You must specify a region." in sink.take_problem()


def test_neither_events_nor_the_end_wait_for_a_hanging_service(monkeypatch):
    monkeypatch.setattr("embark.events.sinks.services.END_S", 0.1)
    waits = threading.Event()
    service = Service(waits=waits)
    sink = SendingSink("x", lambda: service, 0.001)
    sink.emit(step(0))
    until(lambda: service.is_asked)
    for number in range(1000):
        sink.emit(step(number))
    sink.close()
    assert service.got == []
    waits.set()


@pytest.mark.parametrize(
    ("make", "fix"),
    [(lambda: cloudwatch_sink("x", "Embark", 1), "embark-rec[cloud]"), (lambda: otlp_sink("x", 1), "embark-rec[otlp]"),
     (lambda: tracker_sink("wandb", None, 1), "embark-rec[wandb]"),
     (lambda: tracker_sink("mlflow", None, 1), "embark-rec[mlflow]")],
)
def test_without_its_package_the_error_says_what_to_install(monkeypatch, make, fix):
    monkeypatch.setattr("embark.events.sinks.services.find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        make()
    assert fix in caught.value.fix


class Tracker(Service):
    """Keeps the losses of what it gets."""

    def send(self, points):
        if self._fails:
            self._fails -= 1
            raise ConnectionError("no route to host")
        self.got += [point.values["train/loss"] for point in points]


def test_a_tracker_gets_every_point_once_and_in_order():
    service = Tracker(fails=1)
    sink = SendingSink("W&B", lambda: service, 0.005, Points())
    for number in range(3):
        sink.emit(step(number, float(number)))
    until(lambda: len(service.got) == 3)
    sink.emit(step(3, 3.0))
    sink.close()
    assert service.got == [0.0, 1.0, 2.0, 3.0]
    assert "no route to host" in sink.take_problem()


def test_the_points_that_wait_are_the_newest_and_bounded(monkeypatch):
    monkeypatch.setattr("embark.events.sinks.trackers.MAX_WAITING", 2)
    points = Points()
    for number in range(4):
        points.add(step(number, float(number)))
    taken = points.fresh()
    assert [point.step for point in taken] == [2, 3]
    points.add(step(4, 4.0))
    points.sent(taken)
    assert [point.step for point in points.fresh()] == [4]


def test_a_run_keeps_its_id_and_another_run_has_another(tmp_path):
    def id_of(folder):
        return TrackedRun("tiny", "", {}, tmp_path, tmp_path / folder).find_or_make_id()

    assert id_of("a") == id_of("a") != id_of("b")


def test_the_spec_is_sent_without_secrets(tmp_path):
    spec = {"store": {"root": "s3://u:hunter2hunter2@host/x"}, "model": {"top_mlp": [8, 4]}, "name": "tiny"}
    config = TrackedRun("tiny", "", spec, tmp_path, tmp_path / "id").config
    assert "hunter2" not in str(config)
    assert parameters(config) == {"store.root": config["store"]["root"], "model.top_mlp": "[8, 4]",
                                         "name": "tiny"}
