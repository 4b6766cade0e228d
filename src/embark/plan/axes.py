"""Axes of time and of money: straight or logarithmic as the range asks, with ticks that people say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOG_FROM = 6.0
"""The largest over the smallest from which an axis is logarithmic."""
MARGIN = 0.06
MOST_TICKS = 9

_TIMES_S = tuple(n * unit for unit, ns in (
    (1, (1, 2, 5, 10, 15, 30)), (60, (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 45)), (3600, (1, 2, 3, 4, 5, 6, 8, 12)),
    (86_400, (1, 2, 3, 4, 5, 7, 10, 14, 30, 60, 90, 180, 365, 730, 1825, 3650)),
) for n in ns)
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places between `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...] = ()

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + share * (self.stop - self.start)


def time_axis(values: Sequence[float], start: float, stop: float) -> Axis:
    """Of seconds."""
    axis = _axis(values, start, stop)
    inside: list[float] = [t for t in _TIMES_S if axis.low <= t <= axis.high]
    if len(inside) < 3:
        inside = [t for t in _round_numbers(axis) if axis.low <= t <= axis.high]
    return _with_ticks(axis, inside, span_words)


def dollars_axis(values: Sequence[float], start: float, stop: float) -> Axis:
    axis = _axis(values, start, stop)
    return _with_ticks(axis, _round_numbers(axis), dollar_words)


def span_words(seconds: float) -> str:
    """`30 s`, `5 min`, `2 h`, `10 d`."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def dollar_words(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 10 else f"${usd:.3g}"


def _axis(values: Sequence[float], start: float, stop: float) -> Axis:
    low, high = min(values), max(values)
    if low <= 0:
        raise ValueError(f"{low} is no time and no cost")
    if low == high:
        return Axis(low / 1.5, high * 1.5, start, stop, is_log=True)
    if high / low >= LOG_FROM:
        margin = (high / low) ** MARGIN
        return Axis(low / margin, high * margin, start, stop, is_log=True)
    margin = MARGIN * (high - low)
    return Axis(max(low - margin, low / 2), high + margin, start, stop, is_log=False)


def _round_numbers(axis: Axis) -> list[float]:
    """1, 2 and 5 times powers of ten on a logarithmic axis; steps of one of them on a straight one."""
    if axis.is_log:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        wide = axis.high / axis.low > 10**4
        found = [n * 10.0**p for p in powers for n in ((1,) if wide else (1, 2, 5))]
        inside = [v for v in found if axis.low <= v <= axis.high]
        if len(inside) >= 2:
            return inside
    rough = (axis.high - axis.low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    first = math.ceil(axis.low / step)
    return [n * step for n in range(first, math.floor(axis.high / step) + 1)]


def _with_ticks(axis: Axis, values: Sequence[float], say: Callable[[float], str]) -> Axis:
    return Axis(axis.low, axis.high, axis.start, axis.stop, axis.is_log,
                tuple((v, say(v)) for v in _thinned(axis, values)))


def _thinned(axis: Axis, values: Sequence[float]) -> list[float]:
    """So few, and so far apart, that their words do not meet."""
    least = abs(axis.stop - axis.start) / (MOST_TICKS + 1)
    kept: list[float] = []
    for value in values:
        if not kept or abs(axis.place(value) - axis.place(kept[-1])) >= least:
            kept.append(value)
    return kept
