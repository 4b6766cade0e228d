"""What a server is asked and answers, counted in windows of ten seconds: for Prometheus, and as events for `embark
watch` and `embark diagnose`. Requests leave only references behind; a thread counts them, in a share of the CPU."""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import random

import numpy as np
from numpy.typing import NDArray

from embark.events.drift import NUM_SCORE_BINS, score_bins
from embark.events.events import Event
from embark.events.traffic import LATENCIES_S
from embark.export.artifact import Artifact
from embark.features.rows import RawRows
from embark.serve.feedback import Feedback
from embark.serve.request_rows import Scores
from embark.serve.served_model import ServedModel, VersionChange
from embark.serve.traffic_log import TrafficLog, Window

COUNT_EVERY_S = 1.0
MAX_CPU_SHARE = 0.005  # Share of a core; rows beyond it are left out. It delays one of 200 requests, so that p99 stays.
FIRST_CPU_S = 0.2  # That may be spent before.
MAX_HELD_ROWS = 32_768  # Rows of requests that wait to be counted.
MAX_HELD_SCORES = 1 << 20
COLUMNS_EVERY_S, COLUMNS_EVERY_ROWS = 60.0, 2_000  # The larger part of an event is written less often.
_ROUTES = ("/score", "/infer", "/invocations", "grpc ModelInfer", os.environ.get("AIP_PREDICT_ROUTE") or "/score")
_EDGES_S = LATENCIES_S.tolist()
_log = logging.getLogger("embark.serve")


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
class _Held:
    """A row of each request of a batch."""

    artifact: Artifact
    raw: RawRows
    chosen: list[int]
    dense: NDArray[np.float32]  # A copy: scoring changes the batch in place.


class Traffic:
    """Counts requests and answers; safe to call from the event loop and from the scoring thread."""

    def __init__(self, model: ServedModel, log: TrafficLog | None = None) -> None:
        """If there is no log, whoever calls `take` writes what it returns."""
        self._model, self.feedback, self.log = model, Feedback(), log
        self._held_lock, self._count_lock, self._stopping = threading.Lock(), threading.Lock(), threading.Event()
        self._statuses: Counter[str] = Counter()
        self._answers: list[tuple[Scores, float]] = []
        self._num_held_scores = self._num_held_rows = 0
        self._held: list[_Held] = []
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
        held = _Held(artifact, raw, chosen, raw.dense[chosen])
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

    def _count_rows(self, artifact: Artifact, held: Sequence[_Held]) -> None:
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
        """Return what was counted since the last call, by version."""
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
                "latency": {str(place): num for place, num in sorted(of.latency.items())},
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
            "place": artifact.place, "run": artifact.info.run, "step": artifact.info.step,
            "reference": {**reference.model_dump(exclude={"columns"}), "columns": columns}})


def _taken(held: _Held) -> RawRows:
    if len(held.chosen) == len(held.raw):
        return replace(held.raw, dense=held.dense)
    mask = np.zeros(len(held.raw), np.bool_)
    mask[held.chosen] = True
    return replace(held.raw.select(mask), dense=held.dense)
