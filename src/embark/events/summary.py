"""The end of a run, told: the curves, the held-out metrics, and one sentence that says how it went."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embark.events.curve import MARK, Chart, Point, draw
from embark.events.history import History
from embark.events.names import metric
from embark.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_rate,
    format_si,
    to_finite,
    to_float,
    to_one_line,
)

MAX_WIDTH = 100
_SIDE_BY_SIDE = 56
_WITH_MEANING = 92
_LABEL = 7
_GAP = 3
_HEIGHT = 5
_TOLD = ("auc", "normalized_entropy", "log_loss", "calibration")
_BEST = {"auc": "best_auc", "log_loss": "best_log_loss"}

Fit = Callable[[str], str]
"""Puts text into letters that the stream can carry."""


def sentence(history: History) -> str:
    """How it went."""
    outcome = history.end.get("outcome")
    if outcome == "done":
        return _result(history)
    verb = "Failed" if outcome == "failed" else "Its budget is spent: stopped" if outcome == "budget" else "Interrupted"
    of = f" of {format_count(history.num_steps)}" if history.num_steps else ""
    saved = history.save.get("step")
    how = "a larger place.budget_usd goes" if outcome == "budget" else "start it again and it goes"
    again = f" Saved at step {format_count(saved)}: {how} on from there." if saved is not None else ""
    return f"{verb} at step {format_count(history.steps_done)}{of}.{again}"


def work(history: History) -> str:
    """`20,000 steps · 164 M samples in 5 min 12 s · 52.5 k samples/s`"""
    end = history.end
    steps = history.steps_done - int(to_finite(history.start.get("first_step")) or 0)
    took = f"{format_si(end.get('num_samples'))} samples in {format_duration(end.get('train_s'))}"
    return " · ".join([f"{format_count(steps)} steps", took, format_rate(end.get("samples_per_s"))])


def foresight(history: History) -> str:
    """`predicted 0.171 ms a step and 2.12 GB, took 0.165 ms and 2.11 GB`; empty where nothing was predicted."""
    said, took = (_taken(values) for values in (history.predict, history.end))
    how = "predicted" if history.predict.get("is_calibrated") else "estimated"
    return f"{how} {said}, took {took}" if said and took else ""


def losses(history: History) -> str:
    """`taken away twice; 41 steps (12.0 s) were redone and 1 min 35 s waited: $0.87`, and what it took in all; empty
    where nothing was lost and nothing is known to be paid."""
    spent = to_finite(history.end.get("spent_usd"))
    lost = to_one_line(history.end.get("lost") or "")
    return " · ".join(part for part in (lost, f"${spent:,.2f} in all" if spent is not None else "") if part)


def curves(history: History, width: int, fit: Fit, *, ascii_only: bool) -> RenderableType | None:
    """Loss and AUC over steps, side by side where there is room."""
    width = min(width, MAX_WIDTH)
    beside = width >= _SIDE_BY_SIDE
    across = ((width - _GAP) // 2 if beside else width) - _LABEL - 2
    if across < 8:
        return None
    drawn = [
        _panel(title, line.points(), marks, across, fit, ascii_only)
        for title, line, marks in (
            ("loss", history.loss, history.eval_loss),
            (metric("auc").label, history.auc, history.eval_auc),
        )
    ]
    panels = [panel for panel in drawn if panel is not None]
    if not panels:
        return None
    key = Text(fit("  ⠒ train") if not ascii_only else "  .' train", "cyan")
    if history.eval:
        key.append(fit(f"  {MARK} held out"), "magenta")
    if not beside:
        return Group(*panels, key)
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_row(*panels)
    return Group(grid, key)


def metrics(history: History, width: int, fit: Fit) -> RenderableType | None:
    """The held-out metrics beside the best there could be and the last training window."""
    if not history.eval:
        return None
    best = any(to_finite(history.eval.get(name)) is not None for name in _BEST.values())
    meaning = width >= _WITH_MEANING
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("held out", justify="right", no_wrap=True)
    if best:
        table.add_column("best", justify="right", no_wrap=True)
    table.add_column("train", justify="right", no_wrap=True)
    if meaning:
        table.add_column("")
    for name in _TOLD:
        cells = [metric(name).label, format_float(history.eval.get(name))]
        if best:
            cells.append(format_float(history.eval.get(_BEST[name])) if name in _BEST else "")
        cells.append(format_float(history.step.get(name)))
        texts = [Text(fit(cell), style) for cell, style in zip(cells, ["", "bold", "", ""], strict=False)]
        table.add_row(*texts, *([Text(metric(name).meaning, "dim")] if meaning else []))
    return Padding(table, (0, 0, 0, 2))


def places(history: History) -> Iterator[tuple[str, str]]:
    """Where things are."""
    run_dir = history.end.get("run_dir") or history.start.get("run_dir")
    if not run_dir:
        return
    yield "run", to_one_line(run_dir)
    curves_dir = Path(str(run_dir)) / "tensorboard"
    if curves_dir.is_dir():
        yield "curves", f"tensorboard --logdir {shlex.quote(to_one_line(curves_dir))}"
    if (Path(str(run_dir)) / "report.html").is_file():
        yield "report", to_one_line(Path(str(run_dir)) / "report.html")


def _result(history: History) -> str:
    loss = to_float(history.step.get("loss"))
    if loss is not None and not math.isfinite(loss):
        return f"The loss is {format_float(loss)}: nothing was learnt after it became so."
    if not history.eval:
        return f"Trained to step {format_count(history.steps_done)}: training loss {format_float(loss)}; no samples were held out."
    auc, best = to_finite(history.eval.get("auc")), to_finite(history.eval.get("best_auc"))
    at = history.eval.get("step")
    when = f" at step {format_count(at)}" if to_finite(at) not in (None, history.steps_done) else ""
    if auc is None:
        log_loss = format_float(history.eval.get("log_loss"))
        return f"Held-out log loss {log_loss}{when}; AUC is not defined on these samples."
    told = f"Held-out AUC {format_float(auc)}{when}"
    if auc <= 0.5:
        return f"{told}: no better than chance (0.5)."
    if best is None or best <= 0.5:
        return f"{told}, on {format_count(history.eval.get('num_samples'))} samples."
    if auc >= best:
        return f"{told}: the best any model could reach on these samples ({format_float(best)})."
    share = min(99, round(100 * (auc - 0.5) / (best - 0.5)))
    way = f"{share} % of the way from chance (0.5) to the best any model could reach on these samples"
    return f"{told}: {way} ({format_float(best)})."


def _taken(values: Mapping[str, Any]) -> str:
    step_s, peak = to_finite(values.get("step_s")), to_finite(values.get("peak_bytes"))
    return "" if step_s is None or peak is None else f"{step_s * 1e3:,.3g} ms a step and {format_bytes(peak)}"


def _panel(
    title: str, line: Sequence[Point], marks: Sequence[Point], width: int, fit: Fit, ascii_only: bool
) -> RenderableType | None:
    chart = draw(line, marks, width=width, height=_HEIGHT, ascii_only=ascii_only)
    if chart is None:
        return None
    text = Text(f"  {title}\n", "bold", no_wrap=True)
    for index, row in enumerate(chart.rows):
        label = format_float(chart.high) if index == 0 else format_float(chart.low) if index == len(chart.rows) - 1 else ""
        text.append(f"  {label:>{_LABEL - 1}} ", "not bold dim")
        for char in row:
            text.append(char, "not bold magenta" if char in (MARK, "o") else "not bold cyan")
        text.append("\n")
    text.append(" " * (_LABEL + 2) + _axis(chart, width), "not bold dim")
    return text


def _axis(chart: Chart, width: int) -> str:
    left, right = f"step {format_count(chart.first)}", format_count(chart.last)
    return left + right.rjust(width - len(left)) if len(left) + len(right) < width else right.rjust(width)
