"""The metrics as Prometheus scrapes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from embark.errors import MissingPackage
from embark.events.events import Event
from embark.events.metrics import METRICS, Latest, Metric, Reading
from embark.formatting import to_one_line

PREFIX = "embark_"
RUN = "run"  # The label of the run's name.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # The type of `exposition`.

# Prometheus wants full words, base units and, for counters, a total.
_ENDINGS = (("_per_s", "_per_second", 1.0), ("_event_s", "_event_timestamp_seconds", 1.0), ("_s", "_seconds", 1.0),
            ("_w", "_watts", 1.0), ("_c", "_celsius", 1.0), ("_percent", "_ratio", 0.01))


def prometheus_name(metric: Metric) -> str:
    """Name a metric for Prometheus: `embark_step_seconds` for `step_s`, `embark_saves_total` for `num_saves`."""
    if metric.kind == "counter":
        return f"{PREFIX}{metric.name.removeprefix('num_')}_total"
    for ending, whole, _ in _ENDINGS:
        if metric.name.endswith(ending):
            return PREFIX + metric.name.removesuffix(ending) + whole
    return PREFIX + metric.name


def prometheus_scale(metric: Metric) -> float:
    """Return the factor of a value: a percentage becomes a ratio."""
    return next((scale for ending, _, scale in _ENDINGS if metric.name.endswith(ending)), 1.0)


def exposition(runs: Mapping[str, Iterable[Event]]) -> str:
    """Write the newest metrics of runs, by their names, for Prometheus."""
    prometheus = _client()
    registry = prometheus.CollectorRegistry()
    registry.register(_Collector({name: Latest(events, null_is_nan=True) for name, events in runs.items()}))
    return str(prometheus.generate_latest(registry).decode())


class PrometheusSink:
    """Serves `/metrics` from a thread, as long as the run lasts."""

    def __init__(self, run: str, port: int, host: str = "0.0.0.0") -> None:
        prometheus = _client()
        self._latest = Latest()
        self._lock = threading.Lock()
        registry = prometheus.CollectorRegistry()
        registry.register(_Collector({run: self._latest}, self._lock))
        self._server, self._thread = prometheus.start_http_server(port, host, registry)

    def emit(self, event: Event) -> None:
        with self._lock:
            self._latest.add(event)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)


class _Collector:
    """Collects the metrics for prometheus-client at every scrape."""

    def __init__(self, runs: Mapping[str, Latest], lock: threading.Lock | None = None) -> None:
        self._runs = runs
        self._lock = lock or threading.Lock()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            newest = [(run, reading) for run, latest in self._runs.items() for reading in latest.readings()]
        by_name: dict[str, list[tuple[str, Reading]]] = {}
        for run, reading in newest:
            by_name.setdefault(reading.metric.name, []).append((run, reading))
        for metric in METRICS:
            if metric.name not in by_name:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(prometheus_name(metric), _sentence(metric), labels=[RUN, *metric.labels])
            for run, reading in by_name[metric.name]:
                labels = [run, *(to_one_line(value) for _, value in reading.labels)]
                family.add_metric(labels, reading.value * prometheus_scale(metric))
            yield family


def _sentence(metric: Metric) -> str:
    return f"{metric.meaning[0].upper()}{metric.meaning[1:]}."


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingPackage("a Prometheus endpoint needs the prometheus-client package, which is not installed",
                             'pip install "embark-rec[prometheus]"') from error
    return prometheus_client
