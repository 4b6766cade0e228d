"""Metrics that go out by OTLP arrive as OpenTelemetry's own messages; a collector that fails costs a run nothing."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from http_servers import HttpHandler, HttpServer
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from tiny_runs import TINY

from embark.events.events import Event
from embark.events.sinks.services import otlp_sink
from embark.spec import resolve


class Receiver:
    """Takes what is posted to /v1/metrics, as a collector does."""

    def __init__(self, code=200, wait_s=0.0):
        self.requests, self.headers = [], []
        self._gone = threading.Event()
        receiver = self

        class Handler(HttpHandler):
            def do_POST(self):  # noqa: N802
                body = self.body()
                if receiver._gone.wait(wait_s):
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                if self.path == "/v1/metrics" and code == 200:
                    receiver.requests.append(ExportMetricsServiceRequest.FromString(body))
                    receiver.headers.append(dict(self.headers))
                self.answer(code, ExportMetricsServiceResponse().SerializeToString(), "application/x-protobuf")

        self._server = HttpServer(Handler)
        self.url = self._server.url

    def points(self):
        """The last value of each series, by name and attributes, and each metric as it was described."""
        values, metrics = {}, {}
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        metrics[metric.name] = metric
                        rows = metric.gauge if metric.HasField("gauge") else metric.sum
                        for point in rows.data_points:
                            attributes = tuple(sorted((a.key, a.value.string_value) for a in point.attributes))
                            values[metric.name, attributes] = point.as_double or float(point.as_int)
        return values, metrics

    def close(self):
        self._gone.set()
        self._server.down()


@pytest.fixture
def receiver(monkeypatch, environment):
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    yield receiver
    receiver.close()


def test_a_run_s_metrics_arrive(receiver, tmp_path):
    from embark.trainers import train

    values = train(resolve(TINY, [f"store.root={tmp_path}", 'watch.sinks=["otlp"]', "watch.system_every_s=0.01"]))
    events = [json.loads(line) for line in Path(values["run_dir"], "events.jsonl").read_text().splitlines()]
    last = [e for e in events if e["event"] == "step"][-1]
    points, metrics = receiver.points()
    assert points["embark.loss", (("run", "tiny"),)] == last["loss"]
    assert points["embark.auc", (("run", "tiny"), ("split", "eval"))] == values["auc"]
    assert points["embark.rank_step_s", (("rank", "0"), ("run", "tiny"))] > 0
    assert points["embark.last_step", (("run", "tiny"),)] == 6
    assert (metrics["embark.step_s"].unit, metrics["embark.peak_bytes"].unit) == ("s", "By")
    assert metrics["embark.num_saves"].sum.is_monotonic
    assert receiver.headers[0]["x-token"] == "abc"
    attributes = {a.key: a.value.string_value for a in receiver.requests[0].resource_metrics[0].resource.attributes}
    assert attributes["service.name"] == "embark"
    assert attributes["deployment.environment"] == "test"
    assert not [e for e in events if e["event"] == "note" and "OTLP" in e["text"]]


def test_counts_go_out_as_they_stand(receiver):
    sink = otlp_sink("counted", 60)
    for _ in range(3):
        sink.emit(Event("save", {"step": 1, "bytes": 10}))
    sink.close()
    points, _ = receiver.points()
    assert points["embark.num_saves", (("run", "counted"),)] == 3


@pytest.mark.parametrize("code", [404, 503])
def test_a_collector_that_refuses_is_reported_once_and_stops_nothing(monkeypatch, tmp_path, capfd, code):
    from embark.trainers import train

    refusing = Receiver(code)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    try:
        values = train(resolve(TINY, [f"store.root={tmp_path}", 'watch.sinks=["otlp"]', "watch.send_every_s=0.01"]))
    finally:
        refusing.close()
    lines = Path(values["run_dir"], "events.jsonl").read_text().splitlines()
    notes = [e["text"] for e in map(json.loads, lines) if e["event"] == "note"]
    assert values["outcome"] == "done"
    assert len([note for note in notes if "does not receive the metrics" in note]) == 1
    assert "Failed to export" not in capfd.readouterr().err


def test_a_collector_that_is_slow_slows_nothing_but_the_end(monkeypatch, environment):
    slow = Receiver(wait_s=600)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", slow.url)
    monkeypatch.setattr("embark.events.sinks.services.END_S", 0.3)
    sink = otlp_sink("slow", 0.01)
    sink.emit(Event("step", {"step": 0, "loss": 0.5}))
    time.sleep(0.5)  # it is in the middle of sending now
    for step in range(2000):
        sink.emit(Event("step", {"step": step, "loss": 0.5, "auc": 0.5, "step_s": 0.1}))
    sink.close()
    assert slow.requests == []
    slow.close()
