"""What a server is asked and answers, counted in windows of ten seconds: for Prometheus, and as events for `embark
watch` and `embark diagnose`. Requests leave only references behind; a thread counts them, and a sample of the rows."""

import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from random import random
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field

from embark.events.drift import NUM_SCORE_BINS, score_bins
from embark.events.events import Event, RotatingEventLog
from embark.events.traffic import LATENCIES_S, WINDOW_S, TrafficRecord
from embark.export.artifact import Artifact
from embark.features.rows import RawRows
from embark.values import JsonDict, JsonMap
from .request_rows import Scores
from .served_model import ServedModel, VersionChange

COUNT_EVERY_S = 1.0
MAX_HELD_SCORES = 1 << 20  # Scores, also those that came with labels, that wait to be counted.
_ROUTES = ("/score", "/infer", "/invocations", "grpc ModelInfer", os.environ.get("AIP_PREDICT_ROUTE") or "/score")
_EDGES_S = LATENCIES_S.tolist()
MAX_VERSIONS = 16  # Versions that are counted in one window: clients name those of labels, and each becomes an event.
Window = dict[int, JsonDict]  # The contents of a `traffic` event of one process, by version.
Floats = NDArray[np.float64]
_log = logging.getLogger("embark.serve")


class TrafficLog:
    """Records the traffic of all processes of a server; safe to call from several threads."""

    def __init__(self) -> None:
        self.record = TrafficRecord()
        self._path: Path | None = None
        self._log: RotatingEventLog | None = None
        self._is_lost = False  # Whether the last event could not be written.
        self._opening = Event("serve")  # The event that begins a log, with the active version.
        self._url = ""
        self._written_s = time.time()
        self._metrics: JsonDict = {}
        self._lock = threading.RLock()

    @contextmanager
    def recording(self, folder: Path | None, url: str, version: JsonMap,
                  take: Callable[[], Sequence[Window]]) -> Iterator[None]:
        """Record what `take` returns, the windows of all processes, while the block runs; with a folder, write it to
        `events.jsonl` there too. `version` describes the active version."""
        self._path, self._url = folder and folder / "events.jsonl", url
        self._log = RotatingEventLog(self._path) if self._path else None
        self.add_version(version, is_start=True)

        def write_window() -> None:
            if time.time() // WINDOW_S != self._written_s // WINDOW_S:  # at the same time on all replicas
                self.write(take())

        try:
            with _repeated(write_window, "embark-record"):
                yield
        finally:
            self.write(take())
            self.add(Event("serve_end"))
            self._path = None
            if self._log:
                self._log.close()

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

    def add_version(self, version: JsonMap, *, is_start: bool = False) -> None:
        """Record the version that answers from now on."""
        self._opening = Event("serve", {**version, "is_start": is_start, "url": self._url})
        self.add(self._opening)

    def add_refused(self, change: VersionChange) -> None:
        """Record a version that was rejected."""
        self.add(Event("version_refused", {"version": change.version or 0, "why": change.refused}))

    def add(self, event: Event, *, with_metrics: bool = False) -> None:
        """Write an event. A full disk or a deleted folder stops no answer, and the file is opened again for the next
        event."""
        with self._lock:
            self.record.add(event)
            if with_metrics:
                self._metrics = self.record.metrics()
                event = replace(event, values={**event.values, **self._metrics})
            if self._path is None:
                return
            was_lost = self._is_lost
            try:
                self._log = self._log or RotatingEventLog(self._path)
                self._log.emit(event, self._opening)
                self._is_lost = False
                if was_lost:
                    _log.warning("traffic is recorded again in %s", self._path)
            except Exception as error:
                self._is_lost = True
                if not was_lost:
                    _log.warning("traffic is not recorded until %s can be written again: %s", self._path, error)
                lost, self._log = self._log, None
                with suppress(Exception):
                    if lost:
                        lost.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        version, metrics = str(self.record.version), self._metrics
        if self._path:
            yield GaugeMetricFamily("embark_serve_recorded", "Whether the last events of the traffic were written.",
                                    value=float(not self._is_lost))
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


def about_version(model: ServedModel) -> JsonDict:
    """Describe the active version, with the statistics that its requests are compared with."""
    artifact = model.artifact
    reference = artifact.reference
    columns = [{"name": one.name, "kind": one.kind, "labels": one.labels, "counts": one.counts}
               for one in reference.columns]
    return {"model": model.name, "version": artifact.version, "identity": artifact.identity, "uri": artifact.uri,
            "run": artifact.info.run, "step": artifact.info.step,
            "reference": {**reference.model_dump(exclude={"columns"}), "columns": columns}}


class _Labels(BaseModel):
    """The body of `/feedback`."""

    model_config = ConfigDict(strict=True)

    version: int = Field(gt=0, lt=1 << 53)
    scores: list[Annotated[float, Field(ge=0, le=1)] | None] = Field(min_length=1)
    labels: list[Literal[0, 1] | None]


def read_labels(body: JsonMap) -> tuple[int, Floats, Floats]:
    """Return the version of a request to `/feedback`, and the scores and labels of its rows; NaN where one has none."""
    asked = _Labels.model_validate(body)
    if len(asked.scores) != len(asked.labels):
        raise ValueError(f"{len(asked.labels)} labels, and {len(asked.scores)} scores")
    return asked.version, np.array(asked.scores, np.float64), np.array(asked.labels, np.float64)


@dataclass(slots=True)
class _Counts:
    """Counts of one version since they were last taken."""

    latency: Counter[int] = field(default_factory=Counter)
    num_rows: int = 0
    num_unscored: int = 0
    scores: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_SCORE_BINS, np.int64))
    labels: Floats = field(default_factory=lambda: np.zeros((3, NUM_SCORE_BINS)))  # Labels, their scores, and clicks.
    columns: list[list[NDArray[np.int64]]] = field(default_factory=list)  # Rows by column and bin; last, missing ones.
    num_sampled: int = 0  # Rows in `columns`.

    def to_json(self, statuses: Mapping[str, int]) -> JsonDict:
        found: JsonDict = {
            "statuses": statuses, "rows": self.num_rows, "unscored": self.num_unscored,
            "latency": {str(index): num for index, num in sorted(self.latency.items())},
            "scores": self.scores.tolist() if self.num_rows else []}
        if self.columns:
            *counts, missing = [sum(several).tolist() for several in zip(*self.columns, strict=True)]
            found["columns"] = {"rows": self.num_sampled, "counts": counts, "missing": missing}
        if self.labels.any():
            num, predicted, clicks = self.labels
            found["labels"] = {"num": num.astype(np.int64).tolist(), "predicted": predicted.round(6).tolist(),
                               "clicks": clicks.tolist()}
        return found


class Traffic:
    """Counts requests and answers; safe to call from the event loop and from the scoring thread."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._held_lock, self._count_lock = threading.Lock(), threading.Lock()
        self._statuses: Counter[str] = Counter()
        self._answers: list[tuple[Scores, float]] = []
        self._labels: list[tuple[int, Floats, Floats]] = []
        self._num_held_scores = 0
        self._sample: tuple[Artifact, RawRows] | None = None  # Rows that wait to be counted.
        self._counts: defaultdict[int, _Counts] = defaultdict(_Counts)
        self._rng = np.random.default_rng()

    def add_status(self, route: str, status: str) -> None:
        """Count an answered request; only those for scores count."""
        if route.endswith(_ROUTES):
            with self._held_lock:
                self._statuses[status] += 1

    def add_answer(self, found: Scores, seconds: float) -> None:
        """Add the scores of a request, and how long they took."""
        with self._held_lock:
            if self._num_held_scores <= MAX_HELD_SCORES:
                self._answers.append((found, seconds))
                self._num_held_scores += len(found)

    def add_labels(self, version: int, scores: Floats, labels: Floats) -> None:
        """Add labels for scores that a version gave."""
        with self._held_lock:
            if self._num_held_scores <= MAX_HELD_SCORES:
                self._labels.append((version, scores, labels))
                self._num_held_scores += len(scores)

    def add_rows(self, artifact: Artifact, raw: RawRows, num_rows: Sequence[int]) -> None:
        """Sample a batch before it is scored, which changes it in place. One row of each request is kept, since a
        user's candidates share the user; and one batch of each second, which takes little time of a busy server."""
        if self._sample is not None or not artifact.reference.columns:
            return
        is_chosen, start = np.zeros(len(raw), np.bool_), 0
        for num in num_rows:
            is_chosen[start + int(random() * num)] = True
            start += num
        self._sample = artifact, raw.select(is_chosen)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the block runs."""
        self._model.observe(self.add_rows)
        try:
            with _repeated(self.count, "embark-traffic"):
                yield
        finally:
            self.count()

    def count(self) -> None:
        """Count what requests have left."""
        with self._held_lock:
            answers, labels = self._answers, self._labels
            self._answers, self._labels, self._num_held_scores = [], [], 0
        with self._count_lock:
            self._count_answers(answers)
            for version, scores, label in labels:
                if version in self._counts or len(self._counts) < MAX_VERSIONS:
                    is_both = np.isfinite(scores) & np.isfinite(label)
                    bins = score_bins(scores[is_both])
                    self._counts[version].labels += [np.bincount(bins, weights, NUM_SCORE_BINS) for weights in
                                                     (None, scores[is_both], label[is_both])]
            if self._sample is not None:
                self._count_rows(*self._sample)
                self._sample = None

    def _count_answers(self, answers: Sequence[tuple[Scores, float]]) -> None:
        by_version: dict[int, list[NDArray[np.float32]]] = {}
        for found, seconds in answers:
            counts = self._counts[found.version]
            counts.latency[bisect_right(_EDGES_S, seconds)] += 1
            counts.num_rows += len(found)
            counts.num_unscored += len(found.errors)
            if found.values.ndim == 1:  # of one task
                by_version.setdefault(found.version, []).append(found.values)
        for version, several in by_version.items():
            scores = np.concatenate(several).astype(np.float64)
            bins = score_bins(scores[np.isfinite(scores)])
            self._counts[version].scores += np.bincount(bins, minlength=NUM_SCORE_BINS)

    def _count_rows(self, artifact: Artifact, raw: RawRows) -> None:
        reference, encoder = artifact.reference, artifact.encoder
        missing = {name: num for code, num in zip(encoder.numbers.codes, np.isnan(raw.dense).sum(axis=0), strict=True)
                   for name in code.names}
        missing |= {feature.name: 0 if one is None else one.sum()
                    for feature, one in zip(encoder.layout.features, raw.is_missing, strict=True)}
        counts = self._counts[artifact.version]
        counts.columns.append([*reference.count(encoder.encode(raw), encoder, self._rng),
                               np.array([missing.get(one.name, 0) for one in reference.columns], np.int64)])
        counts.num_sampled += len(raw)

    def take(self) -> Window:
        """Return the counts since the last call, by version."""
        with self._held_lock:
            statuses, self._statuses = self._statuses, Counter()
        with self._count_lock:
            counts, self._counts = self._counts, defaultdict(_Counts)
        # What a request without scores was refused by is not known: it counts to the version that answers now.
        answering = self._model.version
        return {version: counts[version].to_json(dict(statuses) if version == answering else {})
                for version in {answering, *counts}}


@contextmanager
def _repeated(do: Callable[[], None], name: str) -> Iterator[None]:
    """Call a function every COUNT_EVERY_S seconds, in a thread of this name, while the block runs."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(COUNT_EVERY_S):
            try:
                do()
            except Exception:
                _log.exception("traffic cannot be counted")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(10)
