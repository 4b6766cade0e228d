"""Metrics sent to services from a separate thread, so that no run waits for them; CloudWatch and OTLP collectors."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Protocol

from embark.errors import MissingPackage
from embark.events.events import Event
from embark.events.metrics import UNITS, Latest, Reading
from embark.formatting import to_one_line
from embark.values import JsonDict

CLOSE_S = 3.0  # Limit for the last request before the run ends: a preempted machine has little time.
END_S = 15.0  # This long at the end of a run that was not stopped, if the service has not failed.
MAX_CHARS = 200
MAX_AT_ONCE = 500  # CloudWatch takes 1,000 in a request, of at most 1 MB.
MAX_LABEL = 1024
OTLP_PREFIX = "embark."
OTLP_SERVICE = "embark"
OTLP_SEND_S = 10.0


def cloudwatch_sink(run: str, namespace: str, every_s: float) -> SendingSink:
    """Open CloudWatch; region, credentials and endpoint are found as the AWS tools find them."""
    require_packages("CloudWatch needs the boto3 package, which is not installed", "cloud", "boto3")
    return SendingSink("CloudWatch", lambda: CloudWatch(run, namespace), every_s)


def otlp_sink(run: str, every_s: float) -> SendingSink:
    """Open a collector; endpoint and headers are those of OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS and
    their like."""
    require_packages("OTLP needs OpenTelemetry's packages, which are not installed", "otlp", "opentelemetry.sdk",
                     "opentelemetry.exporter.otlp.proto.http")
    return SendingSink("the OTLP endpoint", lambda: Otlp(run), every_s)


def require_packages(problem: str, extra: str, *modules: str) -> None:
    """Raise `MissingPackage` unless they are installed; none is imported here."""
    try:
        is_here = all(find_spec(name) for name in modules)
    except ModuleNotFoundError:
        is_here = False
    if not is_here:
        raise MissingPackage(problem, f'pip install "embark-rec[{extra}]"')


def batched(rows: Sequence[Any], num: int) -> Iterator[Sequence[Any]]:
    """Yield the rows, at most so many at once."""
    return (rows[start : start + num] for start in range(0, len(rows), num))


class Sender(Protocol):
    """A client of one service."""

    def send(self, fresh: Sequence[Any]) -> None:
        """Send; raises if it fails."""
        ...

    def close(self) -> None: ...


class NewestReadings:
    """The newest value of every series that has a new one; their number is bounded by that of the series."""

    def __init__(self) -> None:
        self._latest = Latest()
        self._sent_s: dict[tuple[str, object], float] = {}

    def add(self, event: Event) -> None:
        self._latest.add(event)

    def fresh(self) -> list[Any]:
        """Return the readings that were not sent yet."""
        newest = self._latest.readings()
        return [one for one in newest if one.time_s > self._sent_s.get((one.metric.name, one.labels), 0.0)]

    def sent(self, fresh: Sequence[Any]) -> None:
        """Learn that these were sent."""
        self._sent_s |= {(one.metric.name, one.labels): one.time_s for one in fresh}


class SendingSink:
    """Sends what is new every so many seconds and at the end. A failure is reported once, and the next sending tries
    again."""

    def __init__(
        self, name: str, make: Callable[[], Sender], every_s: float, pending: NewestReadings | None = None
    ) -> None:
        self._name, self._make, self._every_s = name, make, every_s
        self._pending = pending or NewestReadings()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_interrupted = False
        self._problem = ""
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name=f"embark-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        self._is_interrupted |= event.kind == "interrupt"
        with self._lock:
            self._pending.add(event)

    def take_problem(self) -> str:
        """Return once why sending fails."""
        if self._is_reported or not self._problem:
            return ""
        self._is_reported = True
        return f"{self._name} does not receive the metrics; training continues: {self._problem}"

    def hurry(self) -> None:
        """Begin the last sending without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S if self._is_interrupted or self._problem else END_S)
        if self._thread.is_alive():
            self._problem = self._problem or "it did not take the last of them in time"

    def _run(self) -> None:
        sender: Sender | None = None
        is_first, is_last = True, False
        while not is_last:
            is_last = self._stop.wait(0 if is_first else self._every_s)
            try:
                sender = sender or self._make()  # at once: loading a client takes seconds, and a run may be short
                with self._lock:
                    fresh = self._pending.fresh() if is_last or not is_first else ()
                if fresh:
                    sender.send(fresh)
                    with self._lock:
                        self._pending.sent(fresh)
            except Exception as error:  # whatever a service or its client raises must not stop a run
                self._problem = self._problem or to_one_line(f"{type(error).__name__}: {error}")[:MAX_CHARS]
            is_first = False
        if sender is not None:
            try:
                sender.close()
            except Exception as error:
                self._problem = self._problem or to_one_line(error)[:MAX_CHARS]


class CloudWatch:
    """Sends metrics named as in the list; run and labels are dimensions."""

    def __init__(self, run: str, namespace: str) -> None:
        import boto3
        from botocore.config import Config

        self._run, self._namespace = run, namespace
        config = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 2, "mode": "standard"})
        self._client: Any = boto3.client("cloudwatch", config=config)

    def send(self, readings: Sequence[Reading]) -> None:
        """Send the readings. CloudWatch has no NaN: such a loss is missing there."""
        data = [self._datum(one) for one in readings if math.isfinite(one.value)]
        for some in batched(data, MAX_AT_ONCE):
            self._client.put_metric_data(Namespace=self._namespace, MetricData=some)

    def close(self) -> None:
        self._client.close()

    def _datum(self, reading: Reading) -> JsonDict:
        labels = (("run", self._run), *reading.labels)
        return {
            "MetricName": reading.metric.name,
            "Dimensions": [{"Name": name, "Value": value[:MAX_LABEL] or "-"} for name, value in labels],
            "Timestamp": datetime.fromtimestamp(reading.time_s, UTC),
            "Value": reading.value,
            "Unit": UNITS["cloudwatch"].get(reading.metric.unit, "None")
        }


class Otlp:
    """Sends metrics named as in the list, behind `embark.`; run and labels are attributes."""

    def __init__(self, run: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        self._warnings = LastWarning("opentelemetry")
        self._run = run
        self._reader = InMemoryMetricReader()
        resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": OTLP_SERVICE}))
        self._provider = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter(OTLP_SERVICE)
        self._exporter = OTLPMetricExporter()
        self._instruments: JsonDict = {}
        self._counts: defaultdict[str, float] = defaultdict(float)

    def send(self, readings: Sequence[Reading]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        for reading in readings:
            if math.isfinite(reading.value):
                self._set(reading)
        data = self._reader.get_metrics_data()
        if data is None:
            return
        if self._exporter.export(data, timeout_millis=OTLP_SEND_S * 1000) is not MetricExportResult.SUCCESS:
            raise ConnectionError(self._warnings.text or "the endpoint rejected them")

    def close(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()

    def _set(self, reading: Reading) -> None:
        metric, attributes = reading.metric, {"run": self._run, **dict(reading.labels)}
        is_counter = metric.kind == "counter"
        if metric.name not in self._instruments:
            make = self._meter.create_counter if is_counter else self._meter.create_gauge
            self._instruments[metric.name] = make(
                OTLP_PREFIX + metric.name, UNITS["otlp"].get(metric.unit, "1"), metric.meaning)
        if is_counter:
            self._instruments[metric.name].add(reading.value - self._counts[metric.name], attributes)
            self._counts[metric.name] = reading.value
        else:
            self._instruments[metric.name].set(reading.value, attributes)


class LastWarning(logging.Handler):
    """Keeps the last reason why sending failed, which a client would log to the run's terminal each time."""

    def __init__(self, logger: str) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logging.getLogger(logger).propagate = False
        logging.getLogger(logger).handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
