"""Runs side by side: what differs in their specs, how each ended, and which was better by what."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Literal

from embark.errors import UserError
from embark.events.events import Change, shown_value
from embark.events.results import Tabular
from embark.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_step_time,
    format_usd,
    pluralize,
    to_finite,
)
from embark.values import JsonDict, frozen
from .charts import format_time, overlaid
from .context import RunContext, State, read_run
from .document import Code, Document, Table, Tile, Tone, Words, sections_with_something
from .report import TONES
from .spec_rows import differences, field_of

SAME_QUALITY = 0.0005  # Less than that is chance: two runs that differ in their seed differ by more.
SAME_SHARE = 0.03
SAME_SAMPLES = frozenset(
    f"data.{name}" for name in ("num_train_samples", "shuffle", "cache_gb", "cache_dir", "on_bad_id")
)
"""Fields of `[data]` that leave the held-out samples what they are."""
HELD_OUT = "number of held-out samples"
EVAL_ONLY = frozenset({"data.num_eval_samples", "data.eval_split", HELD_OUT})  # They change the held-out samples alone.
_DRAWN_BY = re.compile(r"model\.(num_dense|num_tables|rows_per_table|tables\..+\.(rows|multi_hot))")
"""Fields of `[model]` that synthetic samples are drawn by."""

Values = Mapping[str, float | None]


@frozen
class ComparedRun:
    """A run of a comparison, with its figures."""

    name: str  # Unique among the compared runs.
    uri: str
    state: State
    sentence: str
    values: Values  # Figures by the names of `ROWS`.
    context: RunContext = field(repr=False)


@frozen
class Row:
    """A quantity that runs are compared by."""

    name: str
    label: str
    say: Callable[[float], str]
    better: Literal["up", "down"] | None


ROWS = (
    Row("eval_auc", "held-out AUC", format_float, "up"),
    Row("eval_log_loss", "held-out log loss", format_float, "down"),
    Row("eval_normalized_entropy", "held-out NE", format_float, "down"),
    Row("loss", "training loss", format_float, "down"),
    Row("steps", "steps", format_count, None),
    Row("num_samples", "samples", format_si, None),
    Row("samples_per_s", "samples/s", format_si, "up"),
    Row("step_s", "step time", format_step_time, "down"),
    Row("held_s", "machine time", format_duration, "down"),
    Row("peak_bytes", "peak memory", format_bytes, "down"),
    Row("usd", "spent", format_usd, "down"),
    Row("num_interruptions", "interruptions", format_count, None)
)
_BY_NAME = {row.name: row for row in ROWS}


@frozen
class SpecDifference:
    """A field that is not the same in all specs, and its value in each."""

    field: str
    values: tuple[str, ...]


@frozen
class Comparison(Tabular):
    """The comparison of several runs: the better one, and why."""

    sentence: str
    best: str  # The better run's name; empty where none is.
    runs: tuple[ComparedRun, ...]
    spec: tuple[SpecDifference, ...]
    report: str | None = None  # The page, where one was written.

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each run: where it is, how it stands, and its figures."""
        return [{"run": run.name, "state": run.state, **{row.name: run.values.get(row.name) for row in self.rows()}}
                for run in self.runs]

    def best_of(self, row: Row) -> int | None:
        """Return the index of the best run in a row; None if it is not known or all are equal. A low training loss does
        not count if there are held-out samples."""
        if row.name == "loss" and any(run.values.get("eval_log_loss") is not None for run in self.runs):
            return None
        values = [run.values.get(row.name) for run in self.runs]
        known = sorted(((value, index) for index, value in enumerate(values) if value is not None),
                       reverse=row.better == "up")
        if row.better is None or len(known) < 2 or _is_same(row, known[0][0], known[-1][0]):
            return None
        return known[0][1]

    def rows(self) -> list[Row]:
        """Return the rows that some run has a value for."""
        return [row for row in ROWS if any(run.values.get(row.name) is not None for run in self.runs)]


def compare_runs(given: Sequence[str | RunContext]) -> Comparison:
    """Find which of the runs was better, and what differs between them. They are given as `read_run` reads them, or by
    name."""
    if len(given) < 2:
        raise UserError("a comparison needs two runs or more", "embark compare RUN RUN")
    contexts = [read_run(one, is_brief=True) if isinstance(one, str) else one for one in given]
    runs = tuple(ComparedRun(name, one.uri, one.status.state, one.status.sentence, _values(one), one)
                 for name, one in zip(_unique_names(contexts), contexts, strict=True))
    best, sentence = _verdict(runs)
    spec = _spec_differences(contexts)
    changes = [f"{run.name} changed {change.field} at step {format_count(change.step)}"
               for run in runs for change in run.context.record.changes()]
    if other := _other_samples(contexts, [one.field for one in spec]):
        how = "evaluated on the same held-out" if EVAL_ONLY.issuperset(other) else "trained on the same"
        sentence += f" They were not {how} samples ({', '.join(other[:3])}): compare with care."
    if changes:
        sentence += f" {'; '.join(changes[:3])}{' …' if len(changes) > 3 else ''}: compare with care."
    return Comparison(sentence, best, runs, spec)


def _other_samples(contexts: Sequence[RunContext], fields: Sequence[str]) -> list[str]:
    """Return what gave the runs different samples: fields of their specs, or other data at the same path."""
    found = [field for field in fields if field.startswith("data.") and field not in SAME_SAMPLES]
    if any((context.spec.get("data") or {}).get("kind", "synthetic") == "synthetic" for context in contexts):
        return found + [field for field in fields if _DRAWN_BY.fullmatch(field)]
    for name, words in (("num_train_samples", "number of training samples"), ("num_eval_samples", HELD_OUT)):
        counts = {context.record.start[name] for context in contexts if name in context.record.start}
        found += [words] if len(counts) > 1 else []
    return found


def _spec_differences(contexts: Sequence[RunContext]) -> tuple[SpecDifference, ...]:
    """Return what differs between the specs, and what a run changed on resume: its cell has all values, with their
    steps."""
    found = {name: list(cells) for name, cells in differences([context.spec for context in contexts])}
    for index, context in enumerate(contexts):
        history: dict[str, list[Change]] = {}
        for change in context.record.changes():
            history.setdefault(change.field, []).append(change)
        for name, changes in history.items():
            later = [f"then {shown_value(one.new)} after step {format_count(one.step)}" for one in changes]
            cells = found.setdefault(name, [field_of(one.spec, name) for one in contexts])
            cells[index] = ", ".join([shown_value(changes[0].old), *later])
    return tuple(SpecDifference(name, tuple(cells)) for name, cells in found.items())


def compare_document(found: Comparison) -> Document:
    """Return the page of a comparison, in the look of a report."""
    runs = found.runs
    names = tuple(run.name for run in runs)
    tone: Tone = TONES[runs[0].state] if len({run.state for run in runs}) == 1 else ""
    return Document(
        kicker="Embark comparison of runs",
        title=" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more",
        sentence=found.sentence,
        badge=pluralize(len(runs), "run"),
        tone=tone,
        facts=tuple(f"{run.name}: {run.context.status.label}" for run in runs),
        tiles=tuple(_tile(found, run) for run in runs),
        sections=sections_with_something([
            ("Curves", [overlaid([run.context.record for run in runs], names)]),
            ("Results", [results_table(found)]),
            ("Differences of their specs", [spec_table(found) if found.spec else Words("None but their names.")]),
            ("The runs", [Table(("run", "status", "where"), tuple((run.name, run.sentence, run.uri) for run in runs),
                                code=frozenset({2}))]),
            ("Repeat it", [Code("embark compare " + " ".join(run.uri for run in runs))])
        ]),
        footer=f"Written {format_time(max(run.context.now_s for run in runs))} by Embark"
    )


def _values(context: RunContext) -> Values:
    record, spent = context.record, context.spent
    return {
        **{f"eval_{name}": to_finite(record.held_out.get(name)) for name in ("auc", "log_loss", "normalized_entropy")},
        "loss": to_finite(record.step.get("loss")), "steps": float(record.steps_done),
        "num_samples": record.num_samples, "samples_per_s": record.samples_per_s, "step_s": record.step_s,
        "held_s": record.held_s if record.start else None, "peak_bytes": to_finite(record.end.get("peak_bytes")),
        "usd": spent.usd if spent is not None else None, "num_interruptions": float(len(context.interruptions))
    }


def _verdict(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return which was better: by its held-out metrics, else by its training loss; of equals, the cheaper or faster
    one."""
    has_held_out = any(run.values.get("eval_log_loss") is not None for run in runs)
    for name in ("eval_auc", "eval_log_loss", *(() if has_held_out else ("loss",))):
        row = _BY_NAME[name]
        known = [(value, run) for run in runs if (value := run.values.get(name)) is not None]
        if len(known) < 2:
            continue
        known.sort(key=lambda pair: pair[0], reverse=row.better == "up")
        (first, best), (second, next_best) = known[0], known[1]
        of = "" if len(known) == len(runs) else f" of the {len(known)} that have it"
        if _is_same(row, first, second):
            return _equally_good(best, next_best, row, first, second)
        return best.name, (f"{best.name} was better{of}: {row.label} {row.say(first)} against {row.say(second)} of "
                           f"{next_best.name} ({first - second:+.4f}).")
    if has_held_out:
        return "", "Nothing to compare: fewer than two of the runs have held-out figures."
    return "", "Nothing to compare: fewer than two of the runs have trained a step."


def _is_same(row: Row, a: float, b: float) -> bool:
    if row.name.startswith("eval_") or row.name == "loss":
        return abs(a - b) < SAME_QUALITY
    return abs(a - b) <= SAME_SHARE * max(abs(a), abs(b))


def _equally_good(a: ComparedRun, b: ComparedRun, row: Row, first: float, second: float) -> tuple[str, str]:
    sentence = f"{a.name} and {b.name} learned equally well ({row.label} {row.say(first)} and {row.say(second)})"
    for name, word in (("usd", "cheaper"), ("held_s", "faster"), ("samples_per_s", "faster")):
        x, y = a.values.get(name), b.values.get(name)
        if x is None or y is None or min(x, y) <= 0 or abs(x / y - 1) < SAME_SHARE:
            continue
        say = _BY_NAME[name].say
        a_wins = (x > y) == (name == "samples_per_s")
        winner, mine, other = (a, x, y) if a_wins else (b, y, x)
        return winner.name, f"{sentence}; {winner.name} was {word}: {say(mine)} against {say(other)}."
    return "", f"{sentence}, and neither was faster."


def _tile(found: Comparison, run: ComparedRun) -> Tile:
    row = _BY_NAME["loss" if run.values.get("eval_auc") is None else "eval_auc"]
    note = f"{row.label} · {format_duration(run.values.get('held_s'))}"
    return Tile(run.name, format_float(run.values.get(row.name)), note, "good" if run.name == found.best else "")


def results_table(found: Comparison) -> Table:
    """Return the figures of the runs, the best marked."""
    rows = []
    for row in found.rows():
        best, values = found.best_of(row), [run.values.get(row.name) for run in found.runs]
        rows.append((row.label, *(MISSING if value is None else f"{row.say(value)}{' ✓' if index == best else ''}"
                                  for index, value in enumerate(values))))
    return Table(("", *(run.name for run in found.runs)), tuple(rows), frozenset(range(1, len(found.runs) + 1)))


def spec_table(found: Comparison) -> Table:
    """Return the fields in which the specs differ."""
    return Table(("field", *(run.name for run in found.runs)), tuple((one.field, *one.values) for one in found.spec),
                 code=frozenset(range(len(found.runs) + 1)))


def _unique_names(contexts: Sequence[RunContext]) -> list[str]:
    """Return the runs' names; where two are the same, their URIs; where those are too, with a number."""
    names = [context.name for context in contexts]
    if len(set(names)) < len(names):
        names = [context.uri for context in contexts]
    return [name if (num := names[: index + 1].count(name)) == 1 else f"{name} ({num})"
            for index, name in enumerate(names)]
