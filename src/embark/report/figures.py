"""Figures of a run as plain values, which the page shows as JSON and the report as bars, tables and charts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from embark.events.metrics import DYNAMIC_METRICS, metric
from embark.events.plotting import Floats
from embark.formatting import to_finite, to_one_line
from embark.values import JsonDict, frozen
from .record import PHASES, Record, gpus_of, slow_ranks
from .rows import Rows

MAX_TABLES = 400
MAX_RANKS = 1024
LEAST_SLOW = 0.05  # The share of a step below which a wait does not matter, even if it is twice the others'.
RECENT = 20
RANK_TIMES = ("own_s", "input_s", "step_s")
MAX_LINES = 8  # More lines in one chart become their mean, least and greatest.
MACHINE_CHARTS = (
    ("util_percent", "GPU utilization", "%", {"util_percent": "GPU"}),
    ("used_bytes", "GPU memory", "B", {"used_bytes": "GPU"}),
    ("power_w", "GPU power", "W", {"power_w": "GPU"}),
    ("temperature_c", "GPU temperature", "°C", {"temperature_c": "GPU"}),
    ("cpu", "CPU", "%", {"cpu_percent": ""}),
    ("memory", "Host memory", "B", {"host_used_bytes": "used", "resident_bytes": "this run"}),
    ("network", "Network", "B/s", {"net_in_bytes_per_s": "in", "net_out_bytes_per_s": "out"}),
    ("disk", "Disk", "B/s", {"disk_read_bytes_per_s": "read", "disk_write_bytes_per_s": "write"})
)
"""Key, title, unit, and the lines: what is measured, and a word for it."""


@frozen
class RowsChart:
    """A chart of a run's measurements: which columns of which rows it draws."""

    key: str
    title: str
    unit: str
    rows: Rows
    lines: Sequence[tuple[str, str]]  # Label and column.


def charts_of(record: Record) -> Iterator[RowsChart]:
    """Yield the charts of a run: its dynamic tables, where a step's time goes, its ranks, its GPUs, its hosts."""
    for name in DYNAMIC_METRICS:
        tables = [(column.removeprefix(f"{name}."), column) for column in record.tables.names
                  if column.startswith(f"{name}.")]
        if tables:
            yield RowsChart(f"tables.{name}", metric(name).label.capitalize(), "", record.tables, tables)
    machines, phases = record.machines, record.phases
    if len(phases):
        yield RowsChart("phases", "Step time by phase", "s", phases,
                        [(name.replace("_", "-"), name) for name in PHASES])
    ranks = [(f"rank {name.partition('.')[2]}", name) for name in record.ranks.names if name.startswith("step_s.")]
    if ranks:
        yield RowsChart("ranks", "Step time of each rank", "s", record.ranks, ranks)
    hosts = {name.partition(".")[0] for name in machines.names}
    for key, title, unit, ends in MACHINE_CHARTS:
        lines = [(_label(name, word, len(hosts)), name) for end, word in ends.items() for name in machines.names
                 if name.endswith(f".{end}") and (".gpu." in name) == (word == "GPU")]
        if lines:
            yield RowsChart(key, title, unit, machines, lines)


def _label(name: str, word: str, num_hosts: int) -> str:
    """Return the label of a column such as `0.cpu_percent` or `0.gpu.3.power_w`."""
    host, *rest = name.split(".", 3)
    if word == "GPU":
        return f"GPU {rest[1]}" if host == "0" else f"host {host} GPU {rest[1]}"
    return " ".join(filter(None, (f"host {host}" if num_hosts > 1 else "", word))) or "host"


def range_of(lines: Sequence[tuple[str, Floats, Floats]]) -> list[tuple[str, Floats, Floats]]:
    """Return many lines as their greatest, mean and least."""
    xs = lines[0][1]
    alike = np.vstack([ys for _, own_xs, ys in lines if len(own_xs) == len(xs)])
    known = np.isfinite(alike)
    num = np.maximum(known.sum(axis=0), 1)
    gap = np.where(known.any(axis=0), 0.0, np.nan)
    return [
        ("greatest", xs, np.where(known, alike, -np.inf).max(axis=0) + gap),
        ("mean", xs, np.where(known, alike, 0).sum(axis=0) / num + gap),
        ("least", xs, np.where(known, alike, np.inf).min(axis=0) + gap)
    ]


def placement_of(record: Record) -> JsonDict | None:
    """Return the tables, the largest first, the bytes of each rank, and the memory of the GPUs."""
    tables: list[JsonDict] = [
        {"table": to_one_line(table.get("table", ""))[:200], "rows": to_finite(table.get("rows")),
         "dim": to_finite(table.get("dim")), "sharding": to_one_line(table.get("sharding", ""))[:80],
         "kernel": to_one_line(table.get("kernel", ""))[:80], "bytes": to_finite(table.get("bytes")) or 0.0,
         "ranks": [int(rank) for rank in map(to_finite, list_of(table.get("ranks"))) if rank is not None][:MAX_RANKS]}
        for table in list_of(record.plan.get("tables")) if isinstance(table, Mapping)
    ]
    if not tables:
        return None
    tables.sort(key=lambda table: -table["bytes"])
    ranks = [{"rank": int(to_finite(rank.get("rank")) or 0), "bytes": to_finite(rank.get("bytes")) or 0.0}
             for rank in list_of(record.plan.get("per_rank")) if isinstance(rank, Mapping)]
    gpus = [{name: to_finite(gpu.get(name)) for name in ("used_bytes", "total_bytes")}
            for system in record.systems for gpu in gpus_of(system)]
    totals = [gpu["total_bytes"] for gpu in gpus if gpu["total_bytes"]]
    is_complete = all(gpu["used_bytes"] is not None and gpu["total_bytes"] for gpu in gpus)
    return {"tables": tables[:MAX_TABLES], "num_tables": len(tables), "per_rank": ranks[:MAX_RANKS],
            "gpu_bytes": min(totals) if totals else None, "gpus": gpus[:MAX_RANKS] if is_complete else []}


def prediction_of(record: Record) -> JsonDict | None:
    """Return what `embark plan` predicts for this machine, beside what was measured."""
    predict = record.predict
    if not predict:
        return None
    used = [to_finite(gpu.get("used_bytes")) for system in record.systems for gpu in gpus_of(system)]
    peak = to_finite(record.end.get("peak_bytes")) or max((b for b in used if b), default=None)
    return {
        "is_calibrated": bool(predict.get("is_calibrated")), "basis": to_one_line(predict.get("basis", ""))[:200],
        "bound_by": to_one_line(predict.get("bound_by", ""))[:200],
        "rows": [
            {"name": "step time", "unit": "s", "predicted": to_finite(predict.get("step_s")), "actual": record.step_s},
            {"name": "memory", "unit": "B", "predicted": to_finite(predict.get("peak_bytes")), "actual": peak}
        ]
    }


def phase_means(record: Record) -> dict[str, float] | None:
    """Return the mean seconds of each part of the recent steps."""
    recent = record.phases.last(RECENT)
    known = {name: recent[name][np.isfinite(recent[name])] for name in PHASES}
    return {name: float(values.mean()) for name, values in known.items() if len(values)} or None


def rank_times(record: Record) -> list[JsonDict]:
    """Return each rank's recent times and, where the others wait for it, theirs."""
    recent = {name: values[np.isfinite(values)]
              for name, values in (record.ranks.last(RECENT) | record.own.last(RECENT)).items()}
    names = (*record.ranks.names, *record.own.names)
    ranks = sorted({int(name.rpartition(".")[2]) for name in names})[:MAX_RANKS]
    usual = {name: {rank: float(np.median(values)) for rank in ranks
                    if len(values := recent.get(f"{name}.{rank}", np.empty(0)))} for name in RANK_TIMES}
    least_s = LEAST_SLOW * float(np.median(list(usual["step_s"].values()))) if usual["step_s"] else 0.0
    slow = {name: slow_ranks(times, least_s) for name, times in usual.items()}
    return [{"rank": rank, **{name: usual[name].get(rank) for name in RANK_TIMES},
             "slower_than": {name: slow[name][rank] for name in RANK_TIMES if rank in slow[name]}} for rank in ranks]


def list_of(value: Any) -> list[Any]:
    """Return a list as it is, and anything else from a damaged event as an empty one."""
    return value if isinstance(value, list) else []
