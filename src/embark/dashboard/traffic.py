"""What the page shows of served traffic: one server, or all watched replicas of a model together."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from embark.events.drift import LARGE, LOGITS, MODERATE, NUM_SCORE_BINS
from embark.events.traffic import (
    LATENCIES_S,
    WINDOW_S,
    Calibration,
    TrafficRecord,
    TrafficView,
    calibration_of,
    quantiles_s,
)
from embark.formatting import pluralize
from embark.values import JsonDict
from .runs import WatchedRun

MAX_POINTS = 360
MAX_COLUMNS = 100
_CENTRES = [float(LOGITS[0]) - 0.25, *((LOGITS[:-1] + LOGITS[1:]) / 2).tolist(), float(LOGITS[-1]) + 0.25]
_LEVELS = {"": f"no drift: below {MODERATE}", "moderate": f"moderate drift: {MODERATE} to {LARGE}",
           "large": f"large drift: {LARGE} or more"}


def replicas_of(runs: Sequence[WatchedRun], run: WatchedRun) -> list[WatchedRun]:
    """Return the servers of the same model, `run` among them."""
    mine = run.record.traffic
    return [one for one in runs if one is run or (
        (other := one.record.traffic) and (other.model, other.uri) == (mine.model, mine.uri))]


def traffic_of(runs: Sequence[WatchedRun]) -> JsonDict | None:
    """Return the traffic of replicas, ready to be JSON."""
    with ExitStack() as locks:
        for run in sorted(runs, key=lambda one: one.id):
            locks.enter_context(run.lock)
        records = [run.record.traffic for run in runs if run.record.traffic]
        return _shown(records) if records else None


def _shown(records: Sequence[TrafficRecord]) -> JsonDict:
    view = TrafficView(records)
    times = [window.time_s for one in records for window in one.windows]
    start_s = min(times, default=0.0) - WINDOW_S
    num_rows = max((one.drift.num for one in view.columns), default=0)
    drifted = [one for one in view.columns if one.drift.level]
    return {
        "model": records[0].model, "version": view.version, "num_replicas": len(records),
        "series": _series(records, start_s, max(times, default=0.0)),
        "marks": [{"at_s": round(time_s - start_s, 3), "time_s": time_s, "text": text[:500], "is_bad": is_bad}
                  for one in records for time_s, text, is_bad in one.changes if time_s >= start_s - WINDOW_S],
        "scores": _scores(view), "calibration": _calibration(view),
        "columns": [{"name": one.column.title, "psi": round(one.drift.psi, 4), "level": one.drift.level,
                     "words": _LEVELS[one.drift.level], "num": one.drift.num, "missing": one.missing_share,
                     "moved": [{"label": one.column.labels[i], "now": one.drift.shares[i],
                                "reference": one.drift.reference[i]} for i in one.drift.moved[:3]]}
                    for one in view.columns[:MAX_COLUMNS]],
        "num_columns": len(view.columns), "num_rows": num_rows, "why_no_columns": view.reference.why_no_columns,
        "reference": {"rows": view.reference.rows, "num_rows": view.reference.num_reference_rows},
        "sentence": _sentence(view, len(drifted), num_rows),
        "versions": _versions(records)
    }


def _sentence(view: TrafficView, num_drifted: int, num_rows: int) -> str:
    """Say whether columns have drifted."""
    if not view.columns:
        return f"No column is compared: {view.reference.why_no_columns or 'the version has no reference'}."
    if not num_rows:
        return "No rows are counted yet: the first are written after 2,000 requests or a minute."
    sample = f"{pluralize(num_rows, 'row')} of the last 15 minutes, one of each request"
    if not num_drifted:
        return f"No column has drifted, by {sample}."
    worst = next(one for one in view.columns if one.drift.level)
    return f"{pluralize(num_drifted, 'column')} drifted, by {sample}. {worst.sentence()}."


def _series(records: Sequence[TrafficRecord], start_s: float, end_s: float) -> dict[str, list[Any]]:
    """Add up rates over replicas; windows end at the same times on all of them."""
    bucket_s = WINDOW_S * max(1, math.ceil((end_s - start_s) / WINDOW_S / MAX_POINTS))
    buckets: dict[int, dict[int, list[Any]]] = {}
    for index, record in enumerate(records):
        for window in record.windows:
            of = buckets.setdefault(round(window.time_s / bucket_s), {}).setdefault(
                index, [0.0, 0, 0, 0, np.zeros(len(LATENCIES_S) + 1, np.int64)])
            bad = sum(num for status, num in window.statuses.items() if not status.startswith("2"))
            for i, more in enumerate((window.seconds, window.num_requests, window.num_rows, bad)):
                of[i] += more
            of[4] += window.latency
    found: dict[str, list[Any]] = {name: [] for name in ("x", "requests_per_s", "rows_per_s", "failed_per_s", "p50",
                                                         "p95", "p99")}
    for number, by_replica in sorted(buckets.items()):
        found["x"].append(round(number * bucket_s - start_s, 1))
        for i, name in enumerate(("requests_per_s", "rows_per_s", "failed_per_s"), 1):
            found[name].append(round(sum(of[i] / max(of[0], 1.0) for of in by_replica.values()), 3))
        latency = quantiles_s(sum(of[4] for of in by_replica.values()))
        for name, value in zip(("p50", "p95", "p99"), latency, strict=True):
            found[name].append(value)
    return found


def _scores(view: TrafficView) -> JsonDict:
    counts, before = view.score_counts(), view.reference.reference_scores
    return {"x": _CENTRES, "now": (counts / max(1, int(counts.sum()))).tolist(), "num": int(counts.sum()),
            "reference": None if before is None else (before / max(1, int(before.sum()))).tolist(),
            "psi": view.scores.psi if view.scores else None, "level": view.scores.level if view.scores else "",
            "words": _LEVELS[view.scores.level] if view.scores else ""}


def _calibration(view: TrafficView) -> JsonDict | None:
    found = view.calibration
    if found is None:
        return None
    num, predicted, clicks = np.sum([one.labels for one in view.of_version], axis=0)
    used = [i for i in range(NUM_SCORE_BINS) if num[i]]
    return {**_ratio(found), "x": [_CENTRES[i] for i in used], "num_labels": [int(num[i]) for i in used],
            "predicted": [float(predicted[i] / num[i]) for i in used],
            "observed": [float(clicks[i] / num[i]) for i in used]}


def _ratio(found: Calibration) -> JsonDict:
    return {"num": found.num, "clicks": found.clicks, "ratio": found.ratio, "is_off": found.is_off}


def _versions(records: Sequence[TrafficRecord]) -> list[JsonDict]:
    """Return the versions, the newest first."""
    found = []
    for version in sorted({number for one in records for number in one.versions}, reverse=True):
        of = [one.versions[version] for one in records if version in one.versions]
        calibration = calibration_of(of)
        found.append({
            "version": version, "since_s": min(one.since_s for one in of),
            "num_answering": sum(one.version == version and not one.has_ended for one in records),
            "rows": sum(window.num_rows for one in records for window in one.windows if window.version == version),
            "calibration": _ratio(calibration) if calibration else None})
    return found
