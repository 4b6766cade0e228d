"""The end of a run on a terminal: the curves, the held-out metrics, and one sentence that says how it went."""

import math
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from embark.formatting import (
    format_auc,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_rate,
    format_si,
    format_step_time,
    format_usd,
    to_finite,
    to_float,
    to_one_line,
)
from embark.values import JsonMap
from .events import Event, NewestEvents, resume_command
from .metrics import find, metric, task_rows
from .plotting import MARK, Chart, Point, Series, draw
from .quality import Quality

PACE_S = 30.0  # Seconds whose steps are used to estimate the time left.
MAX_WIDTH = 100
HELD_OUT = ("auc", "normalized_entropy", "log_loss", "calibration")
RANKING = ("recall_at_k", "ndcg_at_k", "hit_at_k")  # The metrics of two towers instead.
CEILING = {"auc": "best_auc", "log_loss": "best_log_loss"}  # Scores of the true probabilities of synthetic data.
_SIDE_BY_SIDE = 56
_WITH_MEANING = 92
_LABEL = 7
_GAP = 3

Panel = tuple[Text, Sequence[Point], Sequence[Point]]  # A title, the points of training, and those of evaluations.


class History(NewestEvents):
    """The newest events of a run, with the points of the curves, and the pace."""

    def __init__(self) -> None:
        super().__init__()
        self._steps_done = 0
        self._seconds_left: float | None = None
        self._curves = {(kind, name): Series() for kind, name in
                        (("step", "loss"), ("eval", "log_loss"), ("step", "auc"), ("eval", "auc"))}
        self.quality = Quality()
        self._ticks: deque[tuple[float, int]] = deque()

    @property
    def steps_done(self) -> int:
        return self._steps_done

    @property
    def seconds_left(self) -> float | None:
        return self._seconds_left

    def add(self, event: Event) -> None:
        values, kind = event.values, event.kind
        self.quality.add(event)
        step = to_finite(values.get("step"))
        if kind in ("start", "save", "predict", "interrupt", "end", "step"):
            setattr(self, kind, values)
        if kind == "start":
            self._steps_done = int(to_finite(values.get("first_step")) or 0)
        elif kind == "progress":
            self._tick(event)
            self.step = {**self.step, **values}
        elif kind == "step":
            self._tick(event)
        elif kind in ("resume", "end"):
            self._steps_done = int(step or (self.steps_done if kind == "end" else 0))
        if kind == "eval":
            self.add_eval(values)
        if kind in ("eval", "save"):
            self._ticks.clear()  # their time says nothing about the steps to come
        for (of_kind, name), series in self._curves.items():
            if kind == of_kind and step is not None and (value := to_finite(values.get(name))) is not None:
                series.add(step, value)

    def panels(self) -> list[Panel]:
        """Return what `curves` draws: loss and AUC."""
        loss, held_loss, auc, held_auc = (series.points for series in self._curves.values())
        return [(Text("  loss", "bold"), loss, held_loss), (Text("  AUC", "bold"), auc, held_auc)]

    def _tick(self, event: Event) -> None:
        self._steps_done = int(to_finite(event.values.get("step")) or self.steps_done)
        self._ticks.append((event.time_s, self.steps_done))
        while event.time_s - self._ticks[0][0] > PACE_S and len(self._ticks) > 2:
            self._ticks.popleft()
        (t0, first), (t1, last) = self._ticks[0], self._ticks[-1]
        if last > first and t1 > t0:
            self._seconds_left = self.steps_to_do * (t1 - t0) / (last - first)


def outcome_sentence(run: NewestEvents) -> str:
    """Say how a run that ended went."""
    outcome = run.end.get("outcome") or run.interrupt.get("signal")
    if outcome == "done":
        return _result(run)
    signal = to_one_line(run.interrupt.get("signal") or "")
    verb = "Failed" if outcome == "failed" else "Budget spent: stopped" if outcome == "budget" else \
        f"Interrupted{f' by {signal}' if signal else ''}"
    of = f" of {format_count(run.num_steps)}" if run.num_steps else ""
    hint = resume_hint(run, "Raise place.budget_usd to resume" if outcome == "budget" else "")
    return f"{verb} at step {format_count(run.steps_done)}{of}. {hint}"


def resume_hint(run: NewestEvents, how: str = "") -> str:
    """Say what starting the run again would do."""
    if (saved_step := run.save.get("step")) is None:
        return "No checkpoint yet: the same command starts over."
    return f"{how or f'Run {resume_command(run.start)} to resume'} from step {format_count(saved_step)}."


def work(history: History) -> str:
    """Summarize the work of this process, such as `20,000 steps · 164 M samples in 5 min 12 s · 52.5 k samples/s`;
    empty if it did no step."""
    end = history.end
    steps = history.steps_done - int(to_finite(history.start.get("first_step")) or 0)
    if steps <= 0 or not history.start:
        return ""
    samples = f"{format_si(end.get('num_samples'))} samples in {format_duration(end.get('train_s'))}"
    return " · ".join([f"{format_count(steps)} steps", samples, format_rate(end.get("samples_per_s"))])


def predicted_and_actual(history: History) -> str:
    """Compare the prediction, such as `predicted 0.171 ms a step and 2.12 GB, actual 0.165 ms a step and 2.11 GB`;
    empty if nothing was predicted or measured."""
    figures = [f"{format_step_time(values['step_s'])} a step and {format_bytes(values['peak_bytes'])}"
               for values in (history.predict, history.end) if values.get("step_s") and values.get("peak_bytes")]
    how = "predicted" if history.predict.get("is_calibrated") else "estimated"
    return f"{how} {figures[0]}, actual {figures[1]}" if len(figures) == 2 else ""


def costs(history: History) -> str:
    """Summarize the cost of interruptions and of the complete run; empty if neither is known."""
    spent = to_finite(history.end.get("spent_usd"))
    lost = to_one_line(history.end.get("lost") or "")
    return " · ".join(part for part in (lost, f"{format_usd(spent)} in all" if spent is not None else "") if part)


def curves(panels: Sequence[Panel], width: int, height: int = 5) -> RenderableType | None:
    """Draw curves over steps, side by side if they fit; None where there is nothing to draw."""
    width = min(width, MAX_WIDTH)
    is_beside = width >= _SIDE_BY_SIDE
    across = ((width - _GAP) // 2 if is_beside else width) - _LABEL - 2
    drawn = []
    for title, line, marks in panels if across >= 8 else ():
        if chart := draw(line, marks, width=across, height=height):
            steps = f"step {format_count(chart.first)}", format_count(chart.last)
            axis = steps[0] + steps[1].rjust(across - len(steps[0]))
            drawn.append(Group(title, *_chart_rows(chart), Text(" " * (_LABEL + 2) + axis[-across:], "dim")))
    if not drawn:
        return None
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for row in [drawn] if is_beside else [[one] for one in drawn]:
        grid.add_row(*row)
    has_marks = any(marks for _, _, marks in panels)
    return Group(grid, Text.assemble(("  ⠒ train", "cyan"), (f"  {MARK} held out" if has_marks else "", "magenta")))


def _chart_rows(chart: Chart) -> list[Text]:
    """Return a drawn curve, with its highest and lowest value beside it."""
    labels = [format_float(chart.high), *[""] * (len(chart.rows) - 2), format_float(chart.low)]
    rows = [Text.assemble((f"{label:>{_LABEL + 1}} ", "dim"), (row, "cyan"), no_wrap=True)
            for label, row in zip(labels, chart.rows, strict=True)]
    for row in rows:
        row.highlight_words([MARK], "magenta")
    return rows


def metrics(history: History, width: int) -> RenderableType | None:
    """Show the held-out metrics beside their ceiling and the last training window."""
    held, step = history.held_out, history.step
    if not held:
        return None
    names = RANKING if RANKING[0] in held else HELD_OUT
    columns = {"": [metric_label(name, held) for name in names],
               "held out": [format_float(held.get(name)) for name in names],
               "ceiling": [format_float(held.get(CEILING[name])) if name in CEILING else "" for name in names],
               "train": [format_auc(step) if name == "auc" else format_float(step.get(name)) for name in names],
               " ": [metric(name).meaning for name in names]}
    if all(to_finite(held.get(name)) is None for name in CEILING.values()):
        del columns["ceiling"]
    if width < _WITH_MEANING:
        del columns[" "]
    return _table(list(columns), zip(*columns.values(), strict=True))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        style = {"held out": "bold", " ": "dim"}.get(heading, "")
        table.add_column(heading, style, justify="left" if heading.strip() in ("", "task", "metric") else "right",
                         no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return Padding(table, (0, 0, 0, 2))


def metric_label(name: str, evaluated: JsonMap) -> str:
    """Return the label with the K of the evaluation, such as `Recall@20`."""
    k = to_finite(evaluated.get("k"))
    return metric(name).label.replace("@K", f"@{k:.0f}" if k else "@K")


def ranking_text(evaluated: JsonMap) -> str:
    """Return the ranking metrics, such as `Recall@20 0.2513 · NDCG@20 0.1034 · Hit@20 0.2513`; empty if there are
    none."""
    if RANKING[0] not in evaluated:
        return ""
    return " · ".join(f"{metric_label(name, evaluated)} {format_float(evaluated.get(name))}" for name in RANKING)


def tasks(history: History) -> RenderableType | None:
    """Show the metrics of each task, if there are several."""
    rows = task_rows(history.held_out, history.step)
    return _table(["task", "metric", "held out", "ceiling", "train"], map(astuple, rows)) if rows else None


def paths(history: History) -> Iterator[tuple[str, str]]:
    """Yield labels and paths of the run's files."""
    run_dir = history.end.get("run_dir") or history.start.get("run_dir")
    if not run_dir:
        return
    yield "run", to_one_line(run_dir)
    if best := best_checkpoint(history.end):
        yield "best", best
    tensorboard, report = Path(str(run_dir)) / "tensorboard", Path(str(run_dir)) / "report.html"
    if tensorboard.is_dir():
        yield "curves", f"tensorboard --logdir {shlex.quote(to_one_line(tensorboard))}"
    if report.is_file():
        yield "report", to_one_line(report)


def best_checkpoint(end: JsonMap) -> str:
    """Name the best checkpoint, such as `AUC 0.7812 at step 1,500: runs/a/checkpoints/step-000001500, as runs/a@best`;
    empty without early stopping."""
    state = end.get("early_stopping")
    if not isinstance(state, Mapping) or to_finite(state.get("best")) is None:
        return ""
    known = find(str(state.get("metric")))
    path, where = state.get("path"), f"{to_one_line(end.get('run_dir', ''))}@best"
    if path is not None:  # as of a run that is done
        where = f"{to_one_line(path)}, as {where}" if path else "its checkpoint could not be saved"
    return (f"{known.label if known else 'metric'} {format_float(state.get('best'))} at step "
            f"{format_count(state.get('best_step'))}: {where}")


def _result(run: NewestEvents) -> str:
    loss = to_float(run.step.get("loss"))
    if loss is not None and not math.isfinite(loss):
        return f"The loss became {format_float(loss)}: nothing was learned after that."
    held = run.held_out
    if not held:
        return (f"Trained to step {format_count(run.steps_done)}: training loss {format_float(loss)}; "
                "no samples were held out.")
    if ranking := ranking_text(held):
        return f"Held-out {ranking}, of {format_count(held.get('num_users'))} users."
    auc, best = to_finite(held.get("auc")), to_finite(held.get("best_auc"))
    at = held.get("step")
    if run.kept.get("metric") == "auc":  # also where an attempt before this one evaluated it
        auc, at = to_finite(run.kept.get("best")), run.kept.get("best_step")
    when = f" at step {format_count(at)}" if to_finite(at) not in (None, run.steps_done) else ""
    if auc is None:
        return (f"Held-out log loss {format_float(held.get('log_loss'))}{when}; AUC is undefined on these samples: "
                "it needs both labels.")
    sentence = f"Held-out AUC {format_float(auc)}{when}"
    if auc <= 0.5:
        return f"{sentence}: no better than chance (0.5)."
    if best is None or best <= 0.5:
        return f"{sentence}, on {format_count(held.get('num_samples'))} samples."
    if auc >= best:
        return f"{sentence}: the best any model could reach on these samples ({format_float(best)})."
    share = min(99, round(100 * (auc - 0.5) / (best - 0.5)))
    way = f"{share} % of the way from chance (0.5) to the best any model could reach on these samples"
    return f"{sentence}: {way} ({format_float(best)})."

