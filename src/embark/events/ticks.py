"""Axes of drawings: from values to positions, with ticks at round numbers and at times that people say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TIMES_S = tuple(n * unit for unit, ns in (
    (0.01, (1, 2, 5, 10, 20, 50)), (1, (1, 2, 5, 10, 15, 30)), (60, (1, 2, 5, 10, 15, 30)), (3600, (1, 2, 3, 6, 12)),
    (86_400, (1, 2, 5, 7, 14, 30, 90, 180, 365, 730, 1825, 3650)),
) for n in ns)
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = 0.5 if high <= low else (value - low) / (high - low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """Round numbers, about `most` of them at most."""
        if self.high <= self.low:
            return [self.low]
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1,) if self.high / self.low > 10**4 else (1, 2, 5)
            inside = self._apart([n * 10.0**p for p in powers for n in digits], most)
            if len(inside) > 1:
                return inside
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        return self._multiples(next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999), most)

    def time_ticks(self, most: int) -> list[float]:
        """Of seconds: quarters of an hour, not tenths of one."""
        if self.is_log:
            inside = self._apart(_TIMES_S, most)
            return inside if len(inside) > 2 else self.ticks(most)
        span = self.high - self.low
        step = next((step for step in _TIMES_S if step * most >= span), 86_400.0 * math.ceil(span / 86_400 / most))
        return self._multiples(step, most)

    def _multiples(self, step: float, most: int) -> list[float]:
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [n * step for n in range(first, last + 1)]
        return self._apart(values, most) if self.is_log else values

    def _apart(self, values: Sequence[float], most: int) -> list[float]:
        """The values inside, so far apart that their labels do not overlap."""
        least = abs(self.stop - self.start) / (most + 1)
        kept: list[float] = []
        for value in values:
            if self.low <= value <= self.high and (not kept or abs(self.place(value) - self.place(kept[-1])) >= least):
                kept.append(value)
        return kept


def format_time_tick(seconds: float) -> str:
    """`30 s`, `5 min`, `2 h`, `10 d`."""
    for unit_s, unit in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
