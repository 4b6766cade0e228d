"""Curves as the browser draws them: few points, as JSON text that is made once for each version of a run."""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embark.dashboard.runs import WatchedRun
from embark.events.metrics import DYNAMIC_METRICS, find, metric
from embark.events.plotting import Floats, means, thin
from embark.report.record import FUTURE_S, PHASES, Record
from embark.report.rows import STEP, TIME, Rows

SHOWN = ("loss", "auc", "normalized_entropy", "samples_per_s", "step_s", "learning_rate")
EVAL_OF = {"loss": "log_loss", "auc": "auc", "normalized_entropy": "normalized_entropy"}
"""Which metric of an evaluation is drawn over which curve."""
MACHINE_CHARTS = (
    ("util_percent", "GPU utilization", "%", {"util_percent": "GPU"}),
    ("used_bytes", "GPU memory", "B", {"used_bytes": "GPU"}),
    ("power_w", "GPU power", "W", {"power_w": "GPU"}),
    ("temperature_c", "GPU temperature", "°C", {"temperature_c": "GPU"}),
    ("cpu", "CPU", "%", {"cpu_percent": ""}),
    ("memory", "Host memory", "B", {"host_used_bytes": "used", "resident_bytes": "this run"}),
    ("network", "Network", "B/s", {"net_in_bytes_per_s": "in", "net_out_bytes_per_s": "out"}),
    ("disk", "Disk", "B/s", {"disk_read_bytes_per_s": "read", "disk_write_bytes_per_s": "write"}),
)
"""Key, title, unit, and the lines: what is measured, and a word for it."""
MAX_POINTS = 4000
MAX_LINES = 8  # More lines in one chart become their mean, least and greatest.
_MAX_CACHED = 4000


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a curve that is asked for."""

    by: Literal["step", "time"] = "step"
    low: float = -math.inf
    high: float = math.inf
    num_points: int = 1000


class CurveCache:
    """The JSON texts last asked for."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def text(self, key: tuple[object, ...], make: Callable[[], str]) -> str:
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
                return self._texts[key]
        made = make()
        with self._lock:
            self._texts[key] = made
            while len(self._texts) > _MAX_CACHED:
                self._texts.popitem(last=False)
        return made


def curves_text(run: WatchedRun, window: Window, cache: CurveCache, now_s: float) -> str:
    """JSON: `version`, and of each curve `x`, `y`, the means `mx`, `my` and the evaluations `ex`, `ey`."""
    with run.lock:
        version, record = run.version, run.record

        def make() -> str:
            return ",".join(f'"{name}":{_curve(record, name, window, now_s)}' for name in SHOWN)

        return f'{{"version":{version},"curves":{{{cache.text((run.id, version, window), make)}}}}}'


def charts_text(run: WatchedRun, window: Window, cache: CurveCache, now_s: float) -> str:
    """JSON of the charts of one run: its dynamic tables, where a step's time goes, its ranks, its GPUs, its hosts."""
    with run.lock:
        version, record = run.version, run.record

        def make() -> str:
            return ",".join(_chart(chart, record, window, now_s) for chart in _charts(record))

        return f'{{"version":{version},"charts":[{cache.text((run.id, version, window, "charts"), make)}]}}'


def as_json(values: Floats, digits: int = 7) -> str:
    """Numbers with as many digits as are seen; null for what is none."""
    form = f"%.{digits}g"
    return "[" + ",".join([form % v if math.isfinite(v) else "null" for v in values.tolist()]) + "]"


@dataclass(frozen=True, slots=True)
class _Chart:
    key: str
    title: str
    unit: str
    rows: Rows
    lines: Sequence[tuple[str, str]]  # Label and column.


def _charts(record: Record) -> Iterator[_Chart]:
    for name in DYNAMIC_METRICS:
        tables = [(one.removeprefix(f"{name}."), one) for one in record.tables.names if one.startswith(f"{name}.")]
        if tables:
            yield _Chart(f"tables.{name}", metric(name).label.capitalize(), "", record.tables, tables)
    machines, phases = record.machines, record.phases
    if len(phases):
        yield _Chart("phases", "Step time by phase", "s", phases, [(name.replace("_", "-"), name) for name in PHASES])
    ranks = [(f"rank {name.partition('.')[2]}", name) for name in record.ranks.names if name.startswith("step_s.")]
    if ranks:
        yield _Chart("ranks", "Step time of each rank", "s", record.ranks, ranks)
    hosts = {name.partition(".")[0] for name in machines.names}
    for key, title, unit, ends in MACHINE_CHARTS:
        lines = [(_label(name, word, len(hosts)), name) for end, word in ends.items() for name in machines.names
                 if name.endswith(f".{end}") and (".gpu." in name) == (word == "GPU")]
        if lines:
            yield _Chart(key, title, unit, machines, lines)


def _label(name: str, word: str, num_hosts: int) -> str:
    """Of `0.cpu_percent` or `0.gpu.3.power_w`."""
    host, *rest = name.split(".", 3)
    if word == "GPU":
        return f"GPU {rest[1]}" if host == "0" else f"host {host} GPU {rest[1]}"
    return " ".join(filter(None, (f"host {host}" if num_hosts > 1 else "", word))) or "host"


def _chart(chart: _Chart, record: Record, window: Window, now_s: float) -> str:
    read = [(label, *_part(chart.rows, column, record, window, now_s)) for label, column in chart.lines]
    read = [(label, xs, ys) for label, xs, ys in read if np.isfinite(ys).any()]
    lines = _range_of(read) if len(read) > MAX_LINES and chart.key != "phases" else read
    texts = []
    for label, xs, ys in lines:
        few_xs, few_ys = (means if chart.key == "phases" else thin)(xs, ys, window.num_points)
        texts.append(f'{{"label":{json.dumps(label)},"x":{as_json(few_xs, 9)},"y":{as_json(few_ys)}}}')
    return (f'{{"key":"{chart.key}","title":"{chart.title}","unit":"{chart.unit}","num_lines":{len(read)},'
            f'"lines":[{",".join(texts)}]}}')


def _range_of(read: Sequence[tuple[str, Floats, Floats]]) -> list[tuple[str, Floats, Floats]]:
    xs = read[0][1]
    alike = np.vstack([ys for _, own, ys in read if len(own) == len(xs)])
    known = np.isfinite(alike)
    num = np.maximum(known.sum(axis=0), 1)
    gap = np.where(known.any(axis=0), 0.0, np.nan)
    return [
        ("greatest", xs, np.where(known, alike, -np.inf).max(axis=0) + gap),
        ("mean", xs, np.where(known, alike, 0).sum(axis=0) / num + gap),
        ("least", xs, np.where(known, alike, np.inf).min(axis=0) + gap),
    ]


def _curve(record: Record, name: str, window: Window, now_s: float) -> str:
    xs, ys = _part(record.steps, name, record, window, now_s)
    few, mean = thin(xs, ys, window.num_points), means(xs, ys, window.num_points // 2)
    parts = {"x": as_json(few[0], 9), "y": as_json(few[1]), "mx": as_json(mean[0], 9), "my": as_json(mean[1])}
    if name in EVAL_OF:
        ex, ey = thin(*_part(record.evals, EVAL_OF[name], record, window, now_s), window.num_points)
        parts |= {"ex": as_json(ex, 9), "ey": as_json(ey)}
    known = find(name)
    better = f'"{known.better}"' if known and known.better else "null"
    return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + f',"better":{better}}}'


def _part(rows: Rows, name: str, record: Record, window: Window, now_s: float) -> tuple[Floats, Floats]:
    """The points inside the window, and one on either side of it so that lines run on to its edges."""
    by = STEP if window.by == "step" else TIME
    xs, ys = rows.column(name, by, until_s=_until_s(rows, now_s))
    if by == TIME:
        xs = xs - (record.first_s if record.first_s is not None else xs[0] if len(xs) else 0.0)
    first = max(0, int(np.searchsorted(xs, window.low, side="left")) - 1)
    last = int(np.searchsorted(xs, window.high, side="right")) + 1
    return xs[first:last], ys[first:last]


def _until_s(rows: Rows, now_s: float) -> float:
    """A few times in the future are mistakes; where most are, another machine's clock is ahead, and all count."""
    times = rows.last(64)[TIME]
    return now_s + FUTURE_S if len(times) and float(np.nanmedian(times)) <= now_s + FUTURE_S else math.inf
