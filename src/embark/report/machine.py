"""What a run did to its machines: times of ranks, parts of a step, processors, memory, power, wires."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embark.formatting import to_finite
from embark.report.line import Line

SLOW_RANK = 1.3
"""Times the median of all ranks: from there on it is called slow."""
PHASES = ("input", "copy", "lookup", "all_to_all", "dense", "optimizer", "other")
MAX_RANKS = 4096


@dataclass(slots=True)
class RankTime:
    """One rank's steps, added up."""

    num: int = 0
    step_s: float = 0.0
    input_s: float = 0.0
    worst_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.step_s / max(1, self.num)

    @property
    def mean_input_s(self) -> float:
        return self.input_s / max(1, self.num)


@dataclass(slots=True)
class Machine:
    """Told by `ranks` and `phases` events, which not every run has."""

    lines: dict[str, Line] = field(default_factory=dict)
    """`rank_median`, `rank_slowest`, `cpu_percent`, `memory_share`, `gpu_percent`, …"""
    ranks: dict[int, RankTime] = field(default_factory=dict)
    last_ranks: tuple[float, ...] = ()
    """A step's time by rank, as last told."""
    systems: tuple[Mapping[str, Any], ...] = ()
    """One for each machine, as last told."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by part, added up over the events."""
    num_phases: int = 0

    def take(self, kind: str, values: Mapping[str, Any], step: float, time_s: float) -> None:
        if kind == "phases":
            self._take_phases(values)
            return
        times = _numbers(values.get("step_s"))
        if times:
            self.last_ranks = tuple(times)
            self._add("rank_median", step, time_s, statistics.median(times))
            self._add("rank_slowest", step, time_s, max(times))
            waits = _numbers(values.get("input_s"))
            for rank, step_s in enumerate(times[:MAX_RANKS]):
                held = self.ranks.setdefault(rank, RankTime())
                held.num += 1
                held.step_s += step_s
                held.input_s += waits[rank] if rank < len(waits) else 0.0
                held.worst_s = max(held.worst_s, step_s)
        systems = [one for one in _list(values.get("systems")) if isinstance(one, Mapping)]
        if systems:
            self.systems = tuple(systems)
            self._take_systems(systems, step, time_s)

    def mean_phases(self) -> dict[str, float]:
        """Seconds of a step, in the order a step has them."""
        known = [name for name in PHASES if name in self.phases] + sorted(set(self.phases) - set(PHASES))
        return {name: self.phases[name] / max(1, self.num_phases) for name in known}

    def slow_ranks(self) -> list[int]:
        return slow_ranks({rank: time.mean_s for rank, time in self.ranks.items()})

    def _take_phases(self, values: Mapping[str, Any]) -> None:
        parts = values.get("seconds")
        if not isinstance(parts, Mapping):
            return
        read = {str(name): seconds for name, value in parts.items() if (seconds := to_finite(value)) is not None}
        if read:
            self.num_phases += 1
            for name, seconds in read.items():
                self.phases[name] = self.phases.get(name, 0.0) + max(0.0, seconds)

    def _take_systems(self, systems: Sequence[Mapping[str, Any]], step: float, time_s: float) -> None:
        gpus = [gpu for one in systems for gpu in _list(one.get("gpus")) if isinstance(gpu, Mapping)]
        told = {
            "cpu_percent": _mean(_each(systems, "cpu_percent")),
            "memory_share": _most(share_of(one, "host_used_bytes", "host_bytes") for one in systems),
            "net_in_bytes_per_s": _sum(_each(systems, "net_in_bytes_per_s")),
            "net_out_bytes_per_s": _sum(_each(systems, "net_out_bytes_per_s")),
            "disk_read_bytes_per_s": _sum(_each(systems, "disk_read_bytes_per_s")),
            "disk_write_bytes_per_s": _sum(_each(systems, "disk_write_bytes_per_s")),
            "gpu_percent": _mean(_each(gpus, "util_percent")),
            "gpu_memory_share": _most(share_of(gpu, "used_bytes", "total_bytes") for gpu in gpus),
            "power_w": _sum(_each(gpus, "power_w")),
            "temperature_c": _most(_each(gpus, "temperature_c")),
        }
        for name, value in told.items():
            if value is not None:
                self._add(name, step, time_s, value)

    def _add(self, name: str, step: float, time_s: float, value: float) -> None:
        self.lines.setdefault(name, Line()).add(step, time_s, value)


def slow_ranks(times_s: Mapping[int, float]) -> list[int]:
    """Those that the others wait for; none where there are too few to tell."""
    if len(times_s) < 3:
        return []
    usual_s = statistics.median(times_s.values())
    return [rank for rank, time_s in times_s.items() if time_s > SLOW_RANK * usual_s]


def share_of(values: Mapping[str, Any], used: str, total: str) -> float | None:
    """How full, from 0 to 1."""
    part, whole = to_finite(values.get(used)), to_finite(values.get(total))
    return part / whole if part is not None and whole else None


def _numbers(value: Any) -> list[float]:
    """A list of times as numbers; empty where one of them is none, since then no place is a rank."""
    read = [to_finite(one) for one in _list(value)]
    known = [one for one in read if one is not None]
    return known if len(known) == len(read) else []


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _each(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [read for row in rows if (read := to_finite(row.get(name))) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
