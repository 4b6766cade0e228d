"""Axes of time and of money: linear, or logarithmic where the range is wide."""

from collections.abc import Sequence

from embark.events.plotting import Axis

LOG_FROM = 6.0
"""The largest over the smallest from which an axis is logarithmic."""
MARGIN = 0.06
MOST_TICKS = 9


def axis_of(values: Sequence[float], start: float, stop: float) -> Axis:
    """Of seconds or dollars, which are all above 0."""
    low, high = min(values), max(values)
    if low <= 0:
        raise ValueError(f"{low} is no time and no cost")
    if low == high:
        return Axis(low / 1.5, high * 1.5, start, stop, is_log=True)
    if high / low >= LOG_FROM:
        margin = (high / low) ** MARGIN
        return Axis(low / margin, high * margin, start, stop, is_log=True)
    margin = MARGIN * (high - low)
    return Axis(max(low - margin, low / 2), high + margin, start, stop)


def dollar_words(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 10 else f"${usd:.3g}"
