"""What a server counts for Prometheus, and the sum of it over its processes."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from embark.export.artifact import short_identity
from .served_model import ServedModel, VersionChange

_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_SAME = {  # Metrics that are equal in all processes; the others are added up.
    "embark_serve_version": min, "embark_serve_version_info": max, "embark_serve_current_version": max,
    "embark_serve_version_changes": max}


class ServerMetrics:
    """The metrics of one process."""

    def __init__(self, model: ServedModel, num_queued_rows: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("embark_serve_requests", "Requests by route and status.", ("route", "status"),
                                registry=registry)
        self.rows = Counter("embark_serve_rows", "Rows by whether they have a score, and the version that answered.",
                            ("scored", "version"), registry=registry)
        self.seconds = Histogram("embark_serve_request_seconds", "Time from a request's last byte to its answer.",
                                 ("route",), registry=registry, buckets=_BUCKETS_S)
        self.in_flight = Gauge("embark_serve_requests_in_flight", "Requests that wait or are in work.",
                               registry=registry)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "queued_rows": ("Rows that wait or are in work.", num_queued_rows),
            "workers": ("Processes that answer.", lambda: 1),
            "version": ("The version that answers.", lambda: model.version),
            "current_version": ("The version that is current at its URI; NaN: it cannot be read.",
                                lambda: math.nan if model.current is None else model.current)}
        for name, (about, value) in gauges.items():
            Gauge(f"embark_serve_{name}", about, registry=registry).set_function(value)
        self._model = model
        registry.register(self)
        changes = Counter("embark_serve_version_changes", "Versions that became current, by what became of them.",
                          ("result",), registry=registry)
        for result in ("switched", "refused"):
            changes.labels(result)

        def count(change: VersionChange) -> None:
            changes.labels("refused" if change.refused else "switched").inc()

        model.listeners.append(count)
        if model.refused:  # by the time the server starts
            count(model.refused)

    def collect(self) -> Iterable[Metric]:
        """Return the metric that labels name."""
        found = GaugeMetricFamily("embark_serve_version_info", "The version that answers, and its identity.",
                                  labels=("version", "identity"))
        found.add_metric((str(self._model.version), short_identity(self._model.identity)), 1)
        return [found]

    def text(self) -> bytes:
        return generate_latest(self.registry)


def metrics_text(families: Iterable[Metric]) -> bytes:
    """Return metrics in the text format of Prometheus."""
    return generate_latest(SimpleNamespace(collect=lambda: families))


def add_up(processes: Iterable[Iterable[Metric]], *, is_ended: bool = False) -> list[Metric]:
    """Sum the metrics of all processes; those of processes that ended count only if they never fall."""
    found: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for family in (family for families in processes for family in families):
        if is_ended and (family.type == "gauge" or family.name in _SAME):
            continue
        metric, values = found.setdefault(family.name, (
            Metric(family.name, family.documentation, family.type), {}))
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            how = min if sample.name.endswith("_created") else _SAME.get(family.name)
            before = values.get(key)
            values[key] = sample.value if before is None else how(before, sample.value) if how else \
                before + sample.value
    for metric, values in found.values():
        for (name, labels), value in values.items():
            metric.add_sample(name, dict(labels), value)
    return [metric for metric, _ in found.values()]
