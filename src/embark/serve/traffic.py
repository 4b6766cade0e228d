"""What a server is asked and answers, counted in windows of ten seconds: for Prometheus, and as events for `embark
watch` and `embark diagnose`. Requests leave only references behind; a thread counts them, in a share of the CPU."""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from random import random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily, Metric

from embark.events.drift import NUM_SCORE_BINS, score_bins
from embark.events.events import Event, RotatingEventLog
from embark.events.traffic import LATENCIES_S, WINDOW_S, TrafficRecord
from embark.export.artifact import Artifact
from embark.features.rows import RawRows
from embark.serve.request_rows import Scores
from embark.serve.served_model import ServedModel, VersionChange

COUNT_EVERY_S = 1.0
MAX_CPU_SHARE = 0.005  # Share of a core; rows beyond it are left out. It delays one of 200 requests, so that p99 stays.
FIRST_CPU_S = 0.2  # Seconds that may be spent before the share applies.
MAX_HELD_ROWS = 32_768  # Rows of requests that wait to be counted.
MAX_HELD_SCORES = 1 << 20
COLUMNS_EVERY_S, COLUMNS_EVERY_ROWS = 60.0, 2_000  # The larger part of an event is written less often.
_ROUTES = ("/score", "/infer", "/invocations", "grpc ModelInfer", os.environ.get("AIP_PREDICT_ROUTE") or "/score")
_EDGES_S = LATENCIES_S.tolist()
MAX_REQUESTS, MAX_ROWS = 65_536, 1 << 20  # Requests and rows whose scores are kept until their labels arrive.
MAX_ID_CHARS = 256
MAX_VERSIONS = 16  # Versions whose labels are counted in one window: clients name them, and each becomes an event.
KnownScores = Sequence[float | None] | NDArray[np.float64]  # NaN, and in JSON None, of a row without a score.
_FEEDBACK_USAGE = """send {"id": "…", "labels": [0, 1, null, …]}, or {"version": 1, "scores": […], "labels": […]}"""
Window = dict[int, dict[str, Any]]  # The contents of a `traffic` event of one process, by version.
_log = logging.getLogger("embark.serve")


class TrafficLog:
    """Records the traffic of all processes of a server; safe to call from several threads."""

    def __init__(self) -> None:
        self.record = TrafficRecord()
        self._log: RotatingEventLog | None = None
        self._opening = Event("serve")  # The event that begins a log, with the active version.
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
        for name, about in (("score_psi", "Drift of the scores from those of the evaluation."),
                            ("calibration", "Predicted over observed clicks, by /feedback.")):
            family = GaugeMetricFamily(f"embark_serve_{name}", about, labels=("version",))
            if name in metrics:
                family.add_metric((version,), metrics[name])
            yield family


def _sum(one: Any, other: Any) -> Any:
    """Add counts by index and by key; an empty list counts as zeros."""
    if isinstance(one, dict):
        return {key: _sum(one[key], other[key]) if key in one and key in other else (one if key in one else other)[key]
                for key in {**one, **other}}
    if isinstance(one, list):
        return [_sum(*both) for both in zip(one, other, strict=True)] if one and other else one or other
    return one + other


class LabelSums:
    """Sums of one version since they were last written."""

    def __init__(self) -> None:
        self.num = np.zeros(NUM_SCORE_BINS, np.int64)
        self.predicted, self.clicks = np.zeros(NUM_SCORE_BINS), np.zeros(NUM_SCORE_BINS)

    def add(self, scores: NDArray[np.float64], labels: NDArray[np.float64]) -> None:
        """Add rows that have a score and a label."""
        bins = score_bins(scores)
        for total, weights in ((self.num, None), (self.predicted, scores), (self.clicks, labels)):
            total += np.bincount(bins, weights, NUM_SCORE_BINS).astype(total.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"num": self.num.tolist(), "predicted": [round(one, 6) for one in self.predicted.tolist()],
                "clicks": self.clicks.tolist()}


class Feedback:
    """Scores of the last requests with an id, which `/feedback` joins with the labels that arrive later."""

    def __init__(self) -> None:
        self._scores: OrderedDict[str, tuple[int, KnownScores]] = OrderedDict()
        self._num_rows = 0
        self._sums: dict[int, LabelSums] = {}
        self._lock = threading.Lock()

    def keep(self, request_id: str, found: Scores) -> None:
        """Keep the scores of a request for labels that may come."""
        scores = found.values.astype(np.float64)
        if len(request_id) > MAX_ID_CHARS or scores.ndim > 1 or np.isnan(scores).all():  # only of one task
            return
        with self._lock:
            self._drop(request_id)
            self._scores[request_id] = found.version, scores
            self._num_rows += len(found)
            while len(self._scores) > MAX_REQUESTS or self._num_rows > MAX_ROWS:
                self._drop(next(iter(self._scores)))

    def _drop(self, request_id: str) -> None:
        if found := self._scores.pop(request_id, None):
            self._num_rows -= len(found[1])

    def add(self, body: Mapping[str, Any]) -> int:
        """Return how many rows had a score and a label; 0 if no scores of the request are known. Raises ValueError."""
        labels, request_id = body.get("labels"), body.get("id")
        if not isinstance(labels, list) or not labels or not all(one is None or one in (0, 1) for one in labels):
            raise ValueError(f"'labels' is no array of 0, 1 and null; {_FEEDBACK_USAGE}")
        if "scores" in body:
            version, scores = body.get("version"), body["scores"]
            if type(version) is not int or not 0 < version < 1 << 53 or not isinstance(scores, list) or not all(
                    one is None or (isinstance(one, int | float) and 0 <= one <= 1) for one in scores):
                raise ValueError(f"'version' is no number, or 'scores' no array of probabilities; {_FEEDBACK_USAGE}")
            if version not in self._sums and len(self._sums) >= MAX_VERSIONS:
                raise ValueError(f"labels of {MAX_VERSIONS} other versions came in the last seconds; send them later")
            found: tuple[int, KnownScores] = version, scores
        elif isinstance(request_id, str):
            with self._lock:
                known = self._scores.get(request_id)
                if known is None:
                    return 0
                if len(known[1]) == len(labels):
                    self._drop(request_id)
            found = known
        else:
            raise ValueError(_FEEDBACK_USAGE)
        if len(found[1]) != len(labels):
            raise ValueError(f"{len(labels)} labels, and the request has {len(found[1])} scores")
        scores_of, labels_of = (np.array(one, np.float64) for one in (found[1], labels))
        is_both = np.isfinite(scores_of) & np.isfinite(labels_of)
        with self._lock:
            self._sums.setdefault(found[0], LabelSums()).add(scores_of[is_both], labels_of[is_both])
        return len(labels)

    def take(self) -> dict[int, LabelSums]:
        """Return what came since the last call, by version."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return taken


@dataclass(slots=True)
class _Counts:
    """Counts of one version since they were last written."""

    latency: Counter[int] = field(default_factory=Counter)
    num_rows: int = 0
    num_unscored: int = 0
    scores: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_SCORE_BINS, np.int64))


@dataclass(slots=True)
class _ColumnCounts:
    counts: list[NDArray[np.int64]]
    missing: NDArray[np.int64]
    since_s: float
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class _HeldBatch:
    """A row of each request of a batch."""

    artifact: Artifact
    raw: RawRows
    chosen: list[int]
    dense: NDArray[np.float32]  # A copy: scoring changes the batch in place.


class Traffic:
    """Counts requests and answers; safe to call from the event loop and from the scoring thread."""

    def __init__(self, model: ServedModel, log: TrafficLog | None = None) -> None:
        """Create the counters. If there is no log, the caller of `take` writes what it returns."""
        self._model, self.feedback, self.log = model, Feedback(), log
        self._held_lock, self._count_lock, self._stopping = threading.Lock(), threading.Lock(), threading.Event()
        self._statuses: Counter[str] = Counter()
        self._answers: list[tuple[Scores, float]] = []
        self._num_held_scores = self._num_held_rows = 0
        self._held: list[_HeldBatch] = []
        self._counts: dict[int, _Counts] = {}
        self._columns: dict[int, _ColumnCounts] = {}
        self._rng = np.random.default_rng()
        self._since_s, self._cpu_s, self._is_late = time.monotonic(), 0.0, False

    def add_status(self, route: str, status: str) -> None:
        """Count an answered request; only those for scores count."""
        if route.endswith(_ROUTES):
            with self._held_lock:
                self._statuses[status] += 1

    def add_answer(self, found: Scores, seconds: float, request_id: str = "") -> None:
        """Add the scores of a request, and how long they took."""
        if request_id:
            self.feedback.keep(request_id, found)
        with self._held_lock:
            if self._num_held_scores <= MAX_HELD_SCORES:
                self._answers.append((found, seconds))
                self._num_held_scores += len(found)

    def add_rows(self, artifact: Artifact, raw: RawRows, num_rows: Sequence[int]) -> None:
        """Add a batch before it is scored. One row of each request is kept, since a user's candidates share the
        user."""
        if self._is_late or self._num_held_rows + len(raw) > MAX_HELD_ROWS or not artifact.reference.columns:
            return
        chosen, start = [], 0  # plain Python: of few requests faster than numpy
        for num in num_rows:
            chosen.append(start + int(random() * num))
            start += num
        held = _HeldBatch(artifact, raw, chosen, raw.dense[chosen])
        with self._held_lock:
            self._held.append(held)
            self._num_held_rows += len(raw)

    @contextmanager
    def running(self, folder: Path | None, url: str) -> Iterator[None]:
        """Count while the block runs; with a folder, write events to its `events.jsonl`."""
        if self.log:
            self.log.open(folder)
            self.log.add(self.version_event(url, is_start=True))
        self._model.observe(self.add_rows)
        self._model.listeners.append(lambda change: self._changed(change, url))
        thread = threading.Thread(target=self._run, name="embark-traffic", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(10)
            self.count()
            self.write()
            if self.log:
                self.log.close()

    def _run(self) -> None:
        while not self._stopping.wait(COUNT_EVERY_S):
            try:
                self.count()
                if self.log and self.log.is_due:
                    self.write()
            except Exception:
                _log.exception("traffic cannot be counted")

    def count(self) -> None:
        """Count what requests have left. Further rows are left out until there is CPU time for them again."""
        started = time.thread_time()
        with self._held_lock:
            answers, held = self._answers, self._held
            self._answers, self._held, self._num_held_scores, self._num_held_rows = [], [], 0, 0
        with self._count_lock:
            self._count_answers(answers)
            for artifact in {id(one.artifact): one.artifact for one in held}.values():
                self._count_rows(artifact, [one for one in held if one.artifact is artifact])
        self._cpu_s += time.thread_time() - started
        self._is_late = self._cpu_s > FIRST_CPU_S + MAX_CPU_SHARE * (time.monotonic() - self._since_s)

    def _count_answers(self, answers: Sequence[tuple[Scores, float]]) -> None:
        by_version: dict[int, list[NDArray[np.float32]]] = {}
        for found, seconds in answers:
            counts = self._counts.setdefault(found.version, _Counts())
            counts.latency[bisect_right(_EDGES_S, seconds)] += 1
            counts.num_rows += len(found)
            counts.num_unscored += len(found.errors)
            if found.values.ndim == 1:  # of one task
                by_version.setdefault(found.version, []).append(found.values)
        for version, several in by_version.items():
            scores = np.concatenate(several).astype(np.float64)
            bins = score_bins(scores[np.isfinite(scores)])
            self._counts[version].scores += np.bincount(bins, minlength=NUM_SCORE_BINS)

    def _count_rows(self, artifact: Artifact, held: Sequence[_HeldBatch]) -> None:
        reference, encoder = artifact.reference, artifact.encoder
        raw = RawRows.join([_taken(one) for one in held])
        features = {feature.name: i for i, feature in enumerate(encoder.layout.features)}
        dense = {name: i for i, name in enumerate(encoder.layout.dense)}
        is_nan, is_missing = np.isnan(raw.dense).sum(axis=0), [0 if one is None else int(one.sum())
                                                               for one in raw.is_missing]
        missing = [int(is_nan[dense[one.name]]) if one.kind == "dense" else is_missing[features[one.name]]
                   for one in reference.columns]
        counts = reference.count(encoder.encode(raw), encoder, self._rng)
        total = self._columns.setdefault(artifact.version, _ColumnCounts(
            [np.zeros_like(one) for one in counts], np.zeros(len(missing), np.int64), time.time()))
        for into, more in zip(total.counts, counts, strict=True):
            into += more
        total.missing += np.array(missing, np.int64)
        total.num_rows += len(raw)

    def write(self) -> None:
        """Write the window that ends now."""
        if self.log:
            self.log.write([self.take()])

    def take(self) -> Window:
        """Return the counts since the last call, by version."""
        with self._held_lock:
            statuses = dict(self._statuses)
            self._statuses.clear()
        with self._count_lock:
            counts, self._counts = self._counts, {}
            now_s = time.time()
            due = {version: self._columns.pop(version) for version, of in list(self._columns.items())
                   if of.num_rows >= COLUMNS_EVERY_ROWS or now_s - of.since_s >= COLUMNS_EVERY_S
                   or self._stopping.is_set()}
        labels, answering = self.feedback.take(), self._model.version
        found: Window = {}
        for version in {answering, *counts, *due, *labels}:
            of = counts.get(version, _Counts())
            # what a request without scores was refused by is not known: it counts to the version that answers now
            found[version] = values = {
                "statuses": statuses if version == answering else {}, "rows": of.num_rows, "unscored": of.num_unscored,
                "latency": {str(index): num for index, num in sorted(of.latency.items())},
                "scores": of.scores.tolist() if of.num_rows else []}
            if version in due:
                values["columns"] = {"rows": due[version].num_rows, "counts": [one.tolist() for one in
                                                                               due[version].counts],
                                     "missing": due[version].missing.tolist()}
            if version in labels:
                values["labels"] = labels[version].to_json()
        return found

    def _changed(self, change: VersionChange, url: str) -> None:
        if self.log and change.refused:
            self.log.add_refused(change)
        elif self.log:
            self.log.add(self.version_event(url, is_start=False))

    def version_event(self, url: str, *, is_start: bool) -> Event:
        """Return an event with the active version and the statistics that its requests are compared with."""
        artifact = self._model.artifact
        reference = artifact.reference
        columns = [{"name": one.name, "kind": one.kind, "labels": one.labels, "counts": one.counts}
                   for one in reference.columns]
        return Event("serve", {
            "model": self._model.name, "version": artifact.version, "is_start": is_start, "url": url,
            "uri": artifact.uri, "run": artifact.info.run, "step": artifact.info.step,
            "reference": {**reference.model_dump(exclude={"columns"}), "columns": columns}})


def _taken(held: _HeldBatch) -> RawRows:
    if len(held.chosen) == len(held.raw):
        return replace(held.raw, dense=held.dense)
    mask = np.zeros(len(held.raw), np.bool_)
    mask[held.chosen] = True
    return replace(held.raw.select(mask), dense=held.dense)
