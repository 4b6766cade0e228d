"""Cost against time in letters, for a terminal: the front joined up and lettered, everything else a dot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from embark.events.plotting import draw
from embark.formatting import format_duration
from embark.plan.axes import LOG_FROM, dollar_words
from embark.plan.survey import Survey, near_front, pareto_front

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DOT = "·"
ASCII_DOT = "."


def front_letters(found: Survey) -> dict[int, str]:
    """A letter for each estimate of the front, by its `id`, from the fastest on."""
    return {id(e): letter for e, letter in zip(pareto_front(found.fitting, found.purchase), LETTERS, strict=False)}


def plot(found: Survey, *, width: int, height: int, ascii_only: bool) -> list[str]:
    """Lines of text, at most `width` wide; none where there are not two points to set against each other."""
    points = [(e, total_s, usd) for e in near_front(found)
              if (total_s := e.total_s(found.purchase)) is not None
              and (usd := e.total_usd(found.purchase)) is not None]
    if len(points) < 2:
        return []
    along, up = _scale([p[1] for p in points]), _scale([p[2] for p in points])
    places = {id(e): (along(total_s), up(usd)) for e, total_s, usd in points}
    lettered = front_letters(found)
    ends = dollar_words(max(p[2] for p in points)), dollar_words(min(p[2] for p in points))
    margin = max(map(len, ends)) + 1
    inner = width - margin - 1
    chart = draw([places[name] for name in lettered], list(places.values()), width=inner, height=height,
                 ascii_only=ascii_only)
    if chart is None or inner < 20:
        return []
    rows = [list(row) for row in chart.rows]
    _put_letters(rows, places, lettered, (chart.first, chart.last), (chart.low, chart.high), ascii_only=ascii_only)
    corner, wall, floor = ("+", "|", "-") if ascii_only else ("└", "│", "─")
    sides = [ends[0], *[""] * (height - 2), ends[1]]
    lines = [f"{side:>{margin - 1}} {wall}{''.join(row)}".rstrip() for side, row in zip(sides, rows, strict=True)]
    lines.append(" " * margin + corner + floor * inner)
    first, last = format_duration(min(p[1] for p in points)), format_duration(max(p[1] for p in points))
    lines.append(" " * (margin + 1) + first + last.rjust(inner - len(first)))
    return lines


def _put_letters(
    rows: list[list[str]], places: dict[int, tuple[float, float]], lettered: dict[int, str],
    x_range: tuple[float, float], y_range: tuple[float, float], *, ascii_only: bool,
) -> None:
    """Over the marks that `draw` set, in the same places: dots first, the front's letters on top."""
    width, height = len(rows[0]), len(rows)
    across, down = (1, 2) if ascii_only else (2, 4)
    for name, (x, y) in sorted(places.items(), key=lambda item: item[0] in lettered):
        column = round(_share(x, x_range) * (width * across - 1)) // across
        row = height - 1 - round(_share(y, y_range) * (height * down - 1)) // down
        rows[row][column] = lettered.get(name, ASCII_DOT if ascii_only else DOT)


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return 0.5 if high <= low else min(max((value - low) / (high - low), 0.0), 1.0)


def _scale(values: Sequence[float]) -> _Scale:
    return _Scale(max(values) / min(values) >= LOG_FROM)


class _Scale:
    def __init__(self, is_log: bool) -> None:
        self._is_log = is_log

    def __call__(self, value: float) -> float:
        return math.log10(value) if self._is_log else value
