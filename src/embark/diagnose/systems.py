"""What the machines measured of themselves, as a run's events have it: GPUs that are too hot, memory nearly full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from embark.diagnose.finding import Evidence, Seen
from embark.diagnose.rule import rule_named
from embark.events.alerts import FULL, HOT_C
from embark.formatting import to_finite, to_one_line

MIN_READINGS = 3
MAX_MACHINES = 4096
GIB = 1024.0**3


class Systems:
    """Hears the `systems` of a run's events."""

    def __init__(self) -> None:
        self._hot: dict[tuple[str, str], list[tuple[float, Evidence]]] = {}
        """By machine and GPU: readings that are too high, the first of them."""
        self._memory: dict[str, tuple[float, float, Evidence]] = {}
        """By machine, the last reading: bytes in use, bytes in all."""

    def take(self, told: object, evidence: Evidence) -> None:
        for system in told if isinstance(told, list) else ():
            if isinstance(system, dict) and isinstance(system.get("host"), str):
                self._take_one(system, evidence)

    def findings(self) -> Iterator[Seen]:
        hot = {place: readings for place, readings in self._hot.items() if len(readings) >= MIN_READINGS}
        if hot:
            (host, gpu), readings = max(hot.items(), key=lambda one: max(reading for reading, _ in one[1]))
            cause = (f"GPU {gpu} of {host} is at {max(reading for reading, _ in readings):.0f} °C, and slows itself "
                     "down so as not to break: every rank waits for it")
            yield Seen(rule_named("gpu-throttled"), readings[0][1], len(readings), cause=cause)
        full = {host: last for host, last in self._memory.items() if last[0] >= FULL * last[1]}
        if full:
            host, (used, total, evidence) = max(full.items(), key=lambda one: one[1][0] / one[1][1])
            cause = (f"{host} has {used / GIB:,.1f} of its {total / GIB:,.1f} GiB in use at the last reading: when it "
                     "is full the kernel kills a rank, and the run ends without a word")
            yield Seen(rule_named("host-memory-nearly-full"), evidence, len(full), cause=cause)

    def _take_one(self, system: Mapping[str, Any], evidence: Evidence) -> None:
        host = to_one_line(system["host"])
        used, total = to_finite(system.get("host_used_bytes")), to_finite(system.get("host_bytes"))
        if used is not None and total and (host in self._memory or len(self._memory) < MAX_MACHINES):
            self._memory[host] = used, total, evidence
        for gpu in system["gpus"] if isinstance(system.get("gpus"), list) else ():
            degrees = to_finite(gpu.get("temperature_c")) if isinstance(gpu, dict) else None
            if degrees is None or degrees < HOT_C or len(self._hot) >= MAX_MACHINES:
                continue
            readings = self._hot.setdefault((host, str(gpu.get("index", "?"))), [])
            if len(readings) < MAX_MACHINES:
                readings.append((degrees, evidence))
