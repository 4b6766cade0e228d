"""The metrics over OTLP/HTTP, for the collectors of Azure, Google and others."""

import logging
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from embark.errors import MissingPackage
from embark.events.metrics import Metric, Reading
from embark.events.sinks.background import SendingSink

PREFIX = "embark."
SERVICE = "embark"
UNITS = {"s": "s", "B": "By", "B/s": "By/s", "%": "%", "samples/s": "{sample}/s", "W": "W", "°C": "Cel",
         "nats": "nat", "USD": "{USD}", "USD/h": "{USD}/h"}
"""Ours as UCUM writes them."""
SEND_S = 10.0


def otlp_sink(run: str, every_s: float) -> SendingSink:
    """Endpoint and headers are those of OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS and their like."""
    try:
        is_here = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        is_here = None
    if not is_here:
        raise MissingPackage("OTLP needs OpenTelemetry's packages, which are not installed",
                             fix='pip install "embark-rec[otlp]"')
    return SendingSink("the OTLP endpoint", lambda: Otlp(run), every_s)


class Otlp:
    """A metric is named as in the list, behind `embark.`; its run and its labels are attributes."""

    def __init__(self, run: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        self._warnings = _LastWarning()
        self._run = run
        self._reader = InMemoryMetricReader()
        resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter(SERVICE)
        self._exporter = OTLPMetricExporter()
        self._gauges: dict[str, Any] = {}
        self._counts: dict[str, float] = {}

    def send(self, readings: Sequence[Reading]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        for reading in readings:
            if math.isfinite(reading.value):
                self._set(reading)
        data = self._reader.get_metrics_data()
        if data is None:
            return
        if self._exporter.export(data, timeout_millis=SEND_S * 1000) is not MetricExportResult.SUCCESS:
            raise ConnectionError(self._warnings.text or "the endpoint rejected them")

    def close(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()
        self._warnings.close()

    def _set(self, reading: Reading) -> None:
        metric = reading.metric
        if metric.kind == "counter":
            if metric.name not in self._counts:
                self._count(metric)
            self._counts[metric.name] = reading.value
            return
        if metric.name not in self._gauges:
            self._gauges[metric.name] = self._meter.create_gauge(
                PREFIX + metric.name, UNITS.get(metric.unit, "1"), metric.meaning)
        self._gauges[metric.name].set(reading.value, {"run": self._run, **dict(reading.labels)})

    def _count(self, metric: Metric) -> None:
        from opentelemetry.metrics import CallbackOptions, Observation

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(self._counts[metric.name], {"run": self._run})]

        self._meter.create_observable_counter(PREFIX + metric.name, [observe], "1", metric.meaning)


class _LastWarning(logging.Handler):
    """Keeps the last reason why sending failed, which OpenTelemetry would log to the run's terminal each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._logger = logging.getLogger("opentelemetry")
        self._propagated = self._logger.propagate
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        super().close()
