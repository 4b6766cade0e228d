"""Events of a server, as `embark serve --record` writes them."""

from __future__ import annotations

from embark.events.drift import NUM_SCORE_BINS
from embark.events.events import Event

COLUMNS = [{"name": "age", "kind": "dense", "labels": ["missing or 0", "up to 30", "above 30"],
            "counts": [100, 5_000, 4_900]},
           {"name": "word", "kind": "ids", "labels": ["missing or unseen", "id 1", "other ids"],
            "counts": [1_000, 5_000, 4_000]}]


def scores(*at):
    return [1_000 if i in at else 0 for i in range(NUM_SCORE_BINS)]


def serve_event(version=1, time_s=0.0, **more):
    return Event("serve", {"model": "clicks", "uri": "/models", "version": version, "is_start": version == 1,
                           "reference": {"rows": "held-out", "num_rows": 10_000, "label_rate": 0.5, "columns": COLUMNS,
                                         "scores": scores(10, 11), "why_none": ""}} | more, time_s)


def window(time_s, version=1, age=(5, 250, 245), num=500, **more):
    return Event("traffic", {
        "version": version, "seconds": 10, "statuses": {"200": num}, "rows": 10 * num, "latency": {"20": num},
        "scores": [5 * num if i in (10, 11) else 0 for i in range(NUM_SCORE_BINS)],
        "columns": {"rows": sum(age), "counts": [list(age), [50, 250, 200]], "missing": [age[0], 0]}} | more, time_s)


LABELS = {"num": scores(10), "predicted": [0.3 * one for one in scores(10)],
          "clicks": [0.2 * one for one in scores(10)]}
TROUBLES = {
    "served-columns-drifted": [serve_event(), window(10), window(20, age=(115, 200, 185))],
    "served-scores-drifted": [serve_event(), window(10, scores=[
        2_500 if i in (20, 21) else 0 for i in range(NUM_SCORE_BINS)])],
    "served-miscalibrated": [serve_event(), window(10, labels=LABELS)],
    "served-requests-refused": [serve_event(), window(10, statuses={"200": 500, "429": 100})],
    "served-requests-failed": [serve_event(), window(10, statuses={"200": 500, "500": 50})],
    "served-version-refused": [serve_event(), window(10), Event("version_refused", {
        "version": 2, "why": "it is damaged"}, 12.0)],
}
