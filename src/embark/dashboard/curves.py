"""Curves as the browser draws them: few points, as JSON text that is made once for each version of a run."""

import json
import math
from functools import lru_cache
from typing import Literal

import numpy as np

from embark.events.metrics import find
from embark.events.plotting import Floats, means, thin
from embark.report.figures import MAX_LINES, RowsChart, charts_of, range_of
from embark.report.record import Record
from embark.report.rows import STEP, TIME, Rows
from embark.values import JsonDict, frozen
from .runs import WatchedRun

SHOWN = ("loss", "auc", "normalized_entropy", "samples_per_s", "step_s", "learning_rate")
EVAL_OF = {"loss": "log_loss", "auc": "auc", "normalized_entropy": "normalized_entropy"}
"""Which metric of an evaluation is drawn over which curve."""
MAX_POINTS = 4000
_MAX_CACHED = 4000


@frozen
class Window:
    """The part of a curve that is asked for."""

    by: Literal["step", "time"] = "step"
    low: float = -math.inf
    high: float = math.inf
    num_points: int = 1000


def curves_text(run: WatchedRun, window: Window) -> str:
    """Return JSON: `version`, and of each curve `x`, `y`, the means `mx`, `my` and the evaluations `ex`, `ey`."""
    with run.lock:
        return f'{{"version":{run.version},"curves":{_curves(run, run.version, window)}}}'


def charts_text(run: WatchedRun, window: Window) -> str:
    """Return JSON of the charts of one run."""
    with run.lock:
        return f'{{"version":{run.version},"charts":{_charts(run, run.version, window)}}}'


@lru_cache(maxsize=_MAX_CACHED)
def _curves(run: WatchedRun, _version: int, window: Window) -> str:
    return _json({name: _curve(run.record, name, window) for name in SHOWN})


@lru_cache(maxsize=_MAX_CACHED)
def _charts(run: WatchedRun, _version: int, window: Window) -> str:
    return _json([_chart(chart, run.record, window) for chart in charts_of(run.record)])


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _numbers(values: Floats, digits: int = 7) -> list[float | None]:
    """Return numbers rounded to the visible digits, and None for values that are not finite."""
    form = f"%.{digits}g"
    return [float(form % value) if math.isfinite(value) else None for value in values.tolist()]


def _chart(chart: RowsChart, record: Record, window: Window) -> JsonDict:
    read = [(label, *_part(chart.rows, column, record, window)) for label, column in chart.lines]
    read = [(label, xs, ys) for label, xs, ys in read if np.isfinite(ys).any()]
    lines = []
    for label, xs, ys in range_of(read) if len(read) > MAX_LINES and chart.key != "phases" else read:
        few_xs, few_ys = (means if chart.key == "phases" else thin)(xs, ys, window.num_points)
        lines.append({"label": label, "x": _numbers(few_xs, 9), "y": _numbers(few_ys)})
    return {"key": chart.key, "title": chart.title, "unit": chart.unit, "num_lines": len(read), "lines": lines}


def _curve(record: Record, name: str, window: Window) -> JsonDict:
    xs, ys = _part(record.steps, name, record, window)
    few, mean = thin(xs, ys, window.num_points), means(xs, ys, window.num_points // 2)
    known = find(name)
    curve = {"x": _numbers(few[0], 9), "y": _numbers(few[1]), "mx": _numbers(mean[0], 9), "my": _numbers(mean[1]),
             "better": known.better if known else None}
    if name in EVAL_OF:
        ex, ey = thin(*_part(record.evals, EVAL_OF[name], record, window), window.num_points)
        curve |= {"ex": _numbers(ex, 9), "ey": _numbers(ey)}
    return curve


def _part(rows: Rows, name: str, record: Record, window: Window) -> tuple[Floats, Floats]:
    """Return the points inside the window, and one on either side of it so that lines run on to its edges."""
    by = STEP if window.by == "step" else TIME
    xs, ys = rows.column(name, by)
    if by == TIME:
        xs = xs - (record.first_s if record.first_s is not None else xs[0] if len(xs) else 0.0)
    first = max(0, int(np.searchsorted(xs, window.low, side="left")) - 1)
    last = int(np.searchsorted(xs, window.high, side="right")) + 1
    return xs[first:last], ys[first:last]

