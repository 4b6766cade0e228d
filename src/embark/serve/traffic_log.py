"""The record of a server's traffic: windows of its processes, put together, for Prometheus and as events in a file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from embark.events.events import Event, RotatingEventLog
from embark.events.traffic import WINDOW_S, TrafficRecord
from embark.serve.served_model import VersionChange

Window = dict[int, dict[str, Any]]  # The contents of a `traffic` event of one process, by version.
_log = logging.getLogger("embark.serve")


class TrafficLog:
    """Records the traffic of all processes of a server; safe to call from several threads."""

    def __init__(self) -> None:
        self.record = TrafficRecord()
        self._log: RotatingEventLog | None = None
        self._opening = Event("serve")  # With the version that answers.
        self._written_s = time.time()
        self._metrics: dict[str, Any] = {}
        self._lock = threading.RLock()

    def open(self, folder: Path | None) -> None:
        """Write to `events.jsonl` in the folder too."""
        self._log = RotatingEventLog(folder / "events.jsonl") if folder else None

    def close(self) -> None:
        """End the record of the server."""
        self.add(Event("serve_end"))
        if self._log:
            self._log.close()

    @property
    def is_due(self) -> bool:
        """Tell whether a window has ended, at the same time on all replicas."""
        return time.time() // WINDOW_S != self._written_s // WINDOW_S

    def write(self, windows: Sequence[Window]) -> None:
        """Write the window of each process that ends now: an event for each version that answered in it."""
        with self._lock:
            now_s, answering = time.time(), self.record.version
            seconds, self._written_s = max(1e-3, now_s - self._written_s), now_s
            for version in sorted({one for window in windows for one in window},
                                  key=lambda one: (one == answering, one)):
                values = reduce(_sum, [window[version] for window in windows if version in window])
                self.add(Event("traffic", {
                    "version": version, "seconds": round(seconds, 3) if version == answering else 0, **values}),
                    with_metrics=version == answering)

    def add_refused(self, change: VersionChange) -> None:
        """Record a version that was rejected."""
        self.add(Event("version_refused", {"version": change.version or 0, "why": change.refused}))

    def add(self, event: Event, *, with_metrics: bool = False) -> None:
        """Write an event. A full disk or a deleted folder stops no answer."""
        with self._lock:
            self.record.add(event)
            if event.kind == "serve":
                self._opening = event
            if with_metrics:
                self._metrics = self.record.metrics()
                event = replace(event, values={**event.values, **self._metrics})
            try:
                if self._log:
                    self._log.emit(event, self._opening)
            except Exception as error:
                _log.warning("traffic is no longer recorded: %s", error)
                lost, self._log = self._log, None
                with suppress(Exception):
                    if lost:
                        lost.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        version, metrics = str(self.record.version), self._metrics
        psi = GaugeMetricFamily("embark_serve_column_psi", "Drift of a column from the model's reference: above 0.1 "
                                "moderate, above 0.25 large.", labels=("column", "version"))
        for column, value in metrics.get("psi", {}).items():
            psi.add_metric((column, version), value)
        yield psi
        for name, key, about in (("score_psi", "score_psi", "Drift of the scores from those of the evaluation."),
                                 ("calibration", "calibration", "Predicted over observed clicks, by /feedback.")):
            family = GaugeMetricFamily(f"embark_serve_{name}", about, labels=("version",))
            if key in metrics:
                family.add_metric((version,), metrics[key])
            yield family


def _sum(one: Any, other: Any) -> Any:
    """Add counts by index and by key; an empty list counts as zeros."""
    if isinstance(one, dict):
        return {key: _sum(one[key], other[key]) if key in one and key in other else (one if key in one else other)[key]
                for key in {**one, **other}}
    if isinstance(one, list):
        return [_sum(*both) for both in zip(one, other, strict=True)] if one and other else one or other
    return one + other
