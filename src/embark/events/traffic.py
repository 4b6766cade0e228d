"""Served traffic, as a server's events have it: rates, latencies, scores and columns against the reference of their
version, and calibration where labels came back. The server's metrics, the page and `embark diagnose` read it here."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.formatting import format_si, format_step_time, to_finite, to_one_line
from embark.values import JsonDict, JsonMap, frozen
from .drift import NUM_SCORE_BINS, Drift, drift
from .events import Event

TRAFFIC_KINDS = frozenset({"serve", "traffic", "version_refused", "serve_end"})
WINDOW_S = 10.0  # Duration of one `traffic` event.
RECENT_S = 900.0  # Columns, scores and latencies are judged by these last seconds.
LATENCIES_S = 1e-4 * 10 ** (np.arange(101) / 20)  # Edges, an eighth apart, from 0.1 ms to 10 s.
MAX_WINDOWS = 8_640  # A day.
MAX_COLUMN_COUNTS = 720
MAX_VERSIONS = 16
QUANTILES = (0.5, 0.95, 0.99)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@frozen
class ColumnReference:
    """The bins of a column, and their counts when the model was evaluated."""

    name: str
    kind: str
    labels: tuple[str, ...]
    counts: Ints

    @property
    def title(self) -> str:
        return f"{self.name} (length)" if self.kind == "length" else self.name


@dataclass(slots=True)
class VersionTraffic:
    """The requests that one version answered."""

    version: int
    since_s: float
    rows: str = ""  # `held-out` or `training`: the rows of the reference.
    num_reference_rows: int = 0
    why_no_columns: str = ""
    columns: tuple[ColumnReference, ...] = ()
    reference_scores: Ints | None = None
    counts: deque[tuple[float, list[Ints], Ints]] = field(default_factory=lambda: deque(maxlen=MAX_COLUMN_COUNTS))
    """Time, rows by column and bin, and by column those without a value."""
    labels: Floats = field(default_factory=lambda: np.zeros((3, NUM_SCORE_BINS)))
    """Number of labels, predicted clicks and observed clicks, by score bin."""


@frozen
class Window:
    """One `traffic` event."""

    time_s: float
    seconds: float  # Duration; 0 for a further version in the same window.
    version: int
    statuses: Mapping[str, int]
    num_rows: int
    latency: Ints
    scores: Ints

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())


@frozen
class ColumnDrift:
    """A column of served requests against its reference."""

    column: ColumnReference
    drift: Drift
    missing_share: float  # Share of the rows now.

    def sentence(self) -> str:
        """Say how the column moved, such as `age: PSI 0.41; missing or 0: 23 % now, 1 % in the reference`."""
        moved = self.drift.moved[:2]
        parts = [f"{self.column.labels[i]}: {_percent(self.drift.shares[i])} now, "
                 f"{_percent(self.drift.reference[i])} in the reference" for i in moved]
        missing = f" ({_percent(self.missing_share)} are missing)" if self.missing_share >= 0.005 else ""
        return f"{self.column.title}: PSI {self.drift.psi:.2f}; {'; '.join(parts)}{missing}"


@frozen
class Calibration:
    """Predicted against observed clicks, if labels came back."""

    num: int
    predicted: float
    clicks: float

    @property
    def ratio(self) -> float | None:
        return self.predicted / self.clicks if self.clicks else None

    @property
    def is_off(self) -> bool:
        """True if calibration is off by more than 10 %, and by more than chance explains for this number of clicks."""
        return self.ratio is not None and abs(self.ratio - 1) > max(0.1, 3 / math.sqrt(self.clicks))


class TrafficRecord:
    """The events of one server, in bounded memory."""

    def __init__(self) -> None:
        self.model = ""
        self.url = ""
        self.uri = ""
        self.version: int | None = None  # The version that answers.
        self.versions: dict[int, VersionTraffic] = {}
        self.windows: deque[Window] = deque(maxlen=MAX_WINDOWS)
        self.changes: deque[tuple[float, str, bool]] = deque(maxlen=200)  # Time, description, whether it is bad.
        self.has_ended = False
        self.refused = ""  # Why the current version is not served; empty where it is.

    def __bool__(self) -> bool:
        return self.version is not None

    def add(self, event: Event) -> None:
        """Add the next event; those that are not of a server are skipped."""
        values = event.values
        if event.kind == "serve":
            self._add_version(event, int(values["version"]))
        elif event.kind == "traffic" and self.version is not None:
            self._add_window(event, int(values["version"]))
        elif event.kind == "version_refused":
            self.refused = f"version {values.get('version')} is refused: {to_one_line(values.get('why', ''))}"
            self.changes.append((event.time_s, self.refused, True))
        elif event.kind == "serve_end":
            self.has_ended = True
            self.changes.append((event.time_s, "the server ended", False))

    def _add_version(self, event: Event, number: int) -> None:
        values = event.values
        known = values.get("reference") or {}
        columns = tuple(_column(one) for one in known.get("columns", ()))
        found = VersionTraffic(
            number, event.time_s, rows=to_one_line(known.get("rows", "")),
            num_reference_rows=int(known.get("num_rows", 0)),
            why_no_columns=to_one_line(known.get("why_none", "")), columns=columns,
            reference_scores=_counts(known["scores"], NUM_SCORE_BINS) if known.get("scores") else None)
        before = self.versions.pop(number, None)
        if before is not None and [one.labels for one in before.columns] == [one.labels for one in columns]:
            found.counts, found.labels = before.counts, before.labels
        self.versions[number] = found
        while len(self.versions) > MAX_VERSIONS:
            self.versions.pop(next(iter(self.versions)))
        self.model, self.url, self.uri = (to_one_line(values.get(name, "")) for name in ("model", "url", "uri"))
        how = ": the server started" if values.get("is_start") else ""
        self.changes.append((event.time_s, f"version {number} answers{how}", False))
        self.version, self.has_ended, self.refused = number, False, ""

    def _add_window(self, event: Event, number: int) -> None:
        values, latency = event.values, np.zeros(len(LATENCIES_S) + 1, np.int64)
        for index, num in values.get("latency", {}).items():
            latency[min(int(index), len(LATENCIES_S))] += num
        self.windows.append(Window(
            event.time_s, to_finite(values.get("seconds")) or 0.0, number,
            {status: int(num) for status, num in values.get("statuses", {}).items()},
            int(values.get("rows", 0)), latency, _counts(values.get("scores") or [0] * NUM_SCORE_BINS, NUM_SCORE_BINS)))
        version = self.versions.get(number)
        if version is not None and (columns := values.get("columns")):
            counts = [_counts(one, len(of.counts)) for one, of in zip(columns["counts"], version.columns, strict=True)]
            version.counts.append((event.time_s, counts, _counts(columns["missing"], len(version.columns))))
        if version is not None and (labels := values.get("labels")):
            version.labels += np.array([labels[name] for name in ("num", "predicted", "clicks")], np.float64)

    def sentence(self) -> str:
        """Summarize the traffic, such as `version 2 · 123 requests/s · p99 8.10 ms`."""
        last = self.windows[-1] if self.windows else None
        p99 = quantiles_s(last.latency)[-1] if last else None
        rate = [f"{format_si(last.num_requests / last.seconds)} requests/s"] if last and last.seconds else []
        return " · ".join([f"version {self.version}", *rate, *([f"p99 {format_step_time(p99)}"] if p99 else [])])

    def metrics(self) -> JsonDict:
        """Return the metrics of the last window and of the recent ones, as a `traffic` event has them."""
        seen = TrafficView([self])
        last = self.windows[-1] if self.windows else None
        latency = last.latency if last is not None else np.zeros(0, np.int64)
        calibration = seen.calibration
        return {
            "requests_per_s": last.num_requests / last.seconds if last and last.seconds else 0.0,
            "rows_per_s": last.num_rows / last.seconds if last and last.seconds else 0.0,
            "latency_s": {f"{q:g}": value for q, value in zip(QUANTILES, quantiles_s(latency), strict=True)
                          if value is not None},
            "psi": {one.column.title: round(one.drift.psi, 4) for one in seen.columns},
            **({"score_psi": round(seen.scores.psi, 4)} if seen.scores else {}),
            **({"calibration": calibration.ratio} if calibration and calibration.ratio is not None else {})
        }


class TrafficView:
    """The recent traffic of one server, or of several replicas together, by the version that answers now."""

    def __init__(self, records: Sequence[TrafficRecord]) -> None:
        newest = max((one for one in records if one), key=lambda one: one.versions[one.version].since_s
                     if one.version in one.versions else 0.0)
        self.version = newest.version
        self.last_s = max((one.windows[-1].time_s for one in records if one.windows), default=None)
        self.since_s = -math.inf if self.last_s is None else self.last_s - RECENT_S
        self.of_version = [found for one in records if (found := one.versions.get(self.version or 0))]
        self.reference = self.of_version[0] if self.of_version else VersionTraffic(0, 0.0)
        self.recent = [window for one in records for window in one.windows if window.time_s > self.since_s]
        self.columns = self._columns()
        self.scores = self._scores()
        self.calibration = calibration_of(self.of_version)

    def _columns(self) -> list[ColumnDrift]:
        """Compare the columns with their references, the worst first."""
        reference, found = self.reference, []
        recent = [(counts, missing) for one in self.of_version for time_s, counts, missing in one.counts
                  if time_s > self.since_s and len(counts) == len(reference.columns)]
        for i, column in enumerate(reference.columns):
            counts = sum((counts[i] for counts, _ in recent if len(counts[i]) == len(column.counts)),
                         np.zeros(len(column.counts), np.int64))
            missing = sum(int(missing[i]) for _, missing in recent)
            found.append(ColumnDrift(column, drift(column.counts, counts), missing / max(1, int(counts.sum()))))
        return sorted(found, key=lambda one: (not one.drift.level, -one.drift.psi))

    def score_counts(self) -> Ints:
        """Count the recent scores of the version by bin."""
        return sum((window.scores for window in self.recent if window.version == self.version),
                   np.zeros(NUM_SCORE_BINS, np.int64))

    def _scores(self) -> Drift | None:
        """Compare the scores with their reference. One request's scores are not independent of each other: its rows
        count as so many requests."""
        before, now = self.reference.reference_scores, self.score_counts()
        if before is None or not now.sum():
            return None
        num_requests = sum(window.statuses.get("200", 0) for window in self.recent if window.version == self.version)
        return drift(before, now * (min(1.0, max(1, num_requests) / now.sum())))

    def latency_s(self) -> tuple[float | None, ...]:
        """Return quantiles of the latency of recent requests."""
        return quantiles_s(sum((window.latency for window in self.recent), np.zeros(len(LATENCIES_S) + 1, np.int64)))


def calibration_of(versions: Sequence[VersionTraffic]) -> Calibration | None:
    """Return the calibration of one version on all replicas; None without labels."""
    num, predicted, clicks = np.sum([one.labels.sum(axis=1) for one in versions], axis=0) if versions else (0, 0, 0)
    return Calibration(int(num), float(predicted), float(clicks)) if num else None


def quantiles_s(latency: Ints) -> tuple[float | None, ...]:
    """Return quantiles, interpolated within their bins."""
    total = int(latency.sum())
    if not total:
        return (None,) * len(QUANTILES)
    edges = np.concatenate([[0.0], LATENCIES_S, [2 * LATENCIES_S[-1]]])
    return tuple(float(one) for one in np.interp(np.asarray(QUANTILES) * total,
                                                 np.concatenate([[0], np.cumsum(latency)]), edges))


def findings(record: TrafficRecord) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the findings about traffic, each by the name of its row in `quality.toml`."""
    if not record:
        return
    seen = TrafficView([record])
    if drifted := [one for one in seen.columns if one.drift.level]:
        more = f"; and {len(drifted) - 3} more columns" if len(drifted) > 3 else ""
        yield "served-columns-drifted", {"what": ". ".join(one.sentence() for one in drifted[:3]) + more}
    if seen.scores and seen.scores.level:
        yield "served-scores-drifted", {"psi": f"{seen.scores.psi:.2f}"}
    calibration = seen.calibration
    if calibration and calibration.is_off:
        yield "served-miscalibrated", {"ratio": f"{calibration.ratio:.2f}", "num": f"{calibration.num:,}",
                                       "clicks": f"{calibration.clicks:,.0f}"}
    total = sum(window.num_requests for window in seen.recent)
    for name, first in (("served-requests-refused", "429"), ("served-requests-failed", "5")):
        num = sum(num for window in seen.recent for status, num in window.statuses.items() if status.startswith(first))
        if num > 0.01 * total:
            yield name, {"num": f"{num:,}", "total": f"{total:,}"}
    if record.refused:
        yield "served-version-refused", {"why": record.refused.rstrip(".")}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.1f} %"


def _column(held: JsonMap) -> ColumnReference:
    labels = tuple(map(to_one_line, held["labels"]))
    return ColumnReference(to_one_line(held["name"]), str(held["kind"]), labels,
                           _counts(held["counts"], len(labels)))


def _counts(value: Any, num: int) -> Ints:
    found = np.array(value, np.int64)
    if found.shape != (num,) or (found < 0).any():
        raise ValueError(f"{value!r} is not {num} counts")
    return found
