"""The report of one run, and the files it is written to."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from embark.errors import UserError
from embark.events.events import shown_value
from embark.events.metrics import find, metric, ranking_rows, task_rows
from embark.events.summary import CEILING, HELD_OUT, best_checkpoint
from embark.formatting import (
    MISSING,
    format_auc,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_usd,
    pluralize,
    redact,
    to_finite,
    to_one_line,
)
from embark.store import open_store, write_atomic
from embark.values import JsonMap, frozen
from .charts import (
    capitalize,
    faults,
    format_time,
    learning_curves,
    money,
    phases,
    predicted_and_actual,
    ranks,
    tables_on_ranks,
)
from .context import RunContext, State
from .document import (
    GENERATOR,
    Block,
    Code,
    Document,
    Folded,
    Table,
    Tile,
    Tone,
    Words,
    html_page,
    sections_with_something,
)
from .record import Record
from .spec_rows import set_fields

TONES: dict[State, Tone] = {
    "waiting": "", "running": "live", "finished": "good", "stopped": "warn", "failed": "bad", "killed": "bad",
    "deleted": "bad"
}
MAX_DIAGNOSES = 8
MAX_EVIDENCE = 200
MAX_NOTES = 200
VERSIONS = ("embark", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
NAME = "report.html"
_HEAD_BYTES = 4096


def report(context: RunContext) -> Document:
    """Return what there is to say about a run, whatever its state."""
    record, status = context.record, context.status
    return Document(
        kicker="Embark run report",
        title=context.name,
        sentence=status.sentence,
        badge=status.label,
        tone=TONES[status.state],
        facts=tuple(_facts(context)),
        tiles=_tiles(context),
        sections=sections_with_something([
            ("Training", [learning_curves(context), *_held_out(record)]),
            ("Changes on resume", list(_changes(record))),
            ("Diagnosis", list(_diagnosis(context))),
            ("Interruptions", faults(context)),
            ("Time and money", money(context)),
            ("Predicted vs. actual", predicted_and_actual(record)),
            ("Step time", [phases(record), ranks(record)]),
            ("Machine", [_machine(record)]),
            ("Tables on ranks", tables_on_ranks(record)),
            ("Checkpoints", list(_checkpoints(context))),
            ("Spec", list(_spec(context))),
            ("Notes", list(_notes(record))),
            ("Repeat it", [Code("\n".join(context.commands)) if context.spec else None])
        ]),
        footer=f"Written {format_time(context.now_s)} by Embark from {pluralize(record.num_events, 'event')} of "
               f"{context.uri}"
    )


def _facts(context: RunContext) -> Iterator[str]:
    start, record = context.record.start, context.record
    if not start:
        return
    yield to_one_line(start.get("device_name") or start.get("device") or "")
    yield pluralize(int(to_finite(start.get("world_size")) or 1), "rank")
    yield to_one_line(start.get("precision", ""))
    yield f"{format_si(start.get('num_parameters'))} parameters"
    began = format_time(record.first_s)
    yield f"since {began}" if context.status.state == "running" else f"{began} to {format_time(record.last_s)}"


def _tiles(context: RunContext) -> tuple[Tile, ...]:
    record, spent, num_stops = context.record, context.spent, len(context.interruptions)
    held, step = record.held_out, record.step
    tiles = []
    if (auc := to_finite(held.get("auc"))) is not None:
        best = to_finite(held.get("best_auc"))
        note = f"ceiling {format_float(best)}" if best is not None else ""
        tiles.append(Tile("Held-out AUC", format_float(auc), note))
    elif step:
        tiles.append(Tile("Training AUC", format_auc(step), "of the last steps"))
    if held:
        tiles.append(Tile("Held-out loss", format_float(held.get("log_loss")),
                          f"NE {format_float(held.get('normalized_entropy'))}"))
    elif step:
        is_nan = step.get("loss") is None
        tiles.append(Tile("Training loss", format_float(step.get("loss")), "", "bad" if is_nan else ""))
    if (rate := record.samples_per_s) is not None:
        tiles.append(Tile("Samples/s", format_si(rate), f"batches of {format_count(record.start.get('batch_size'))}"))
    if record.start:
        of = f"of {format_count(record.num_steps)}" if record.num_steps else ""
        done = f" · {100 * record.steps_done / record.num_steps:.0f} %" if record.num_steps else ""
        num_attempts = len(record.attempts())
        tiles.append(Tile("Steps", format_count(record.steps_done), of + done))
        tiles.append(Tile("Machine time", format_duration(record.held_s), f"in {pluralize(num_attempts, 'attempt')}"))
    if spent is not None and spent.usd is not None:
        tiles.append(Tile("Spent", format_usd(spent.usd), f"{format_usd(spent.usd_per_hour or 0.0)} an hour"))
    is_alive = context.status.state in ("finished", "running")
    if record.start and (num_stops or is_alive):
        note = "survived" if is_alive and num_stops else "" if num_stops else "none"
        tiles.append(Tile("Interruptions", format_count(num_stops), note))
    return tuple(tiles)


def _held_out(record: Record) -> Iterator[Block]:
    """Yield the evaluation of the run's model beside the best of the run and the ceiling."""
    held = record.held_out
    if not held:
        return
    rows: list[tuple[str, ...]] = []
    for name in HELD_OUT:
        known = metric(name)
        steps, values = record.evals.column(name)
        best = MISSING
        if known.better and np.isfinite(values).any():
            at = np.nanargmax(values) if known.better == "up" else np.nanargmin(values)
            best = f"{format_float(values[at])} at step {format_count(steps[at])}"
        ceiling = format_float(held.get(CEILING[name])) if name in CEILING else MISSING
        rows.append((known.label, format_float(held.get(name)), best, ceiling, format_float(record.step.get(name)),
                     known.meaning))
    at_step = f"at step {format_count(held.get('step'))}"
    columns: tuple[str, ...] = ("held out", at_step, "best of the run", "ceiling", "training", "")
    if all(row[3] == MISSING for row in rows):
        columns, rows = (*columns[:3], *columns[4:]), [(*row[:3], *row[4:]) for row in rows]
    yield Words(f"Evaluated on {format_count(held.get('num_samples'))} held-out samples.", is_small=True)
    yield Table(columns, tuple(rows), frozenset(range(1, len(columns) - 1)))
    if of_tasks := task_rows(held, record.step):
        yield Table(("task", "metric", "held out", "ceiling", "training"),
                    tuple((row.task, row.metric, row.held_out, row.ceiling, row.train) for row in of_tasks),
                    frozenset({2, 3, 4}))
    if ranked := ranking_rows(held.get("rankings") or {}):
        yield Table(tuple(ranked[0]), tuple(tuple(format_float(cell) if isinstance(cell, float) else str(cell)
                                                  for cell in row.values()) for row in ranked),
                    frozenset(range(2, len(ranked[0]))))
    if best := best_checkpoint(record.end):
        yield Words(f"Best checkpoint by early stopping: {best}.")


def _changes(record: Record) -> Iterator[Block]:
    """Yield the steps from which on the run learned from other settings or data."""
    if changes := record.changes():
        yield Words("Accepted with --accept-change: the steps before and after learned from other settings or data.",
                    "warn")
        yield Table(("after step", "field", "before", "after"),
                    tuple((format_count(one.step), one.field, shown_value(one.old), shown_value(one.new))
                          for one in changes), frozenset({0}), code=frozenset({1, 2, 3}))


def _diagnosis(context: RunContext) -> Iterator[Block]:
    if context.diagnoses == () and context.status.state in ("failed", "killed", "stopped"):
        yield Words("No known fault in its events and logs.")
    if context.diagnoses is None:  # as at the end of a run, where logs are not read
        for finding in context.record.quality.findings():
            yield Words(f"{capitalize(_sentence(finding.cause))} Fix: {_sentence(finding.fix)}", "warn")
            yield Code(finding.command)
    for one in (context.diagnoses or ())[:MAX_DIAGNOSES]:
        tone: Tone = "warn" if one.kind in ("slow", "quality") else "bad"
        yield Words(f"{capitalize(_sentence(one.cause))} Fix: {_sentence(one.fix)}", tone)
        if one.command:
            yield Code(one.command)
        evidence = to_one_line(f"{one.evidence.location}: {one.evidence.text}")
        yield Words(f"Evidence: {evidence if len(evidence) <= MAX_EVIDENCE else f'{evidence[:MAX_EVIDENCE]}…'}",
                    is_small=True)


def _machine(record: Record) -> Block | None:
    start = record.start
    if not start:
        return None
    versions = start.get("versions")
    rows = [
        ("device", to_one_line(start.get("device_name") or start.get("device") or "")),
        ("ranks", format_count(start.get("world_size"))),
        ("engine", ": ".join(filter(None, (to_one_line(start.get("engine", "")),
                                           to_one_line(start.get("engine_reason", "")))))),
        ("precision", to_one_line(start.get("precision", ""))),
        ("model", f"{format_si(start.get('num_parameters'))} parameters, "
                  f"{format_bytes(start.get('table_bytes'))} of tables"),
        ("data", f"{format_count(start.get('num_train_samples'))} samples, "
                 f"{format_count(start.get('num_eval_samples'))} held out"),
        ("peak memory", format_bytes(record.end.get("peak_bytes")) if record.end else MISSING),
        ("versions", ", ".join(f"{name} {to_one_line(versions[name])}" for name in VERSIONS if versions.get(name))
         if isinstance(versions, dict) else ""),
        ("machines", ", ".join(dict.fromkeys(to_one_line(one.get("host", "")) for one in record.systems)))
    ]
    return Table(("", ""), tuple(row for row in rows if row[1] and row[1] != MISSING))


def _checkpoints(context: RunContext) -> Iterator[Block]:
    if not context.checkpoints:
        return
    rows: list[tuple[str, ...]] = []
    for one in context.checkpoints:
        why = ", ".join(one.kept) or "no rule"
        if one.state != "committed":
            why = f"{one.state}{f': {one.damage[0]}' if one.damage else ''}"
        rows.append((format_count(one.step), format_time(one.time_s), format_bytes(one.size_bytes),
                     format_float(one.metric), why))
    known = find(context.best_by)
    yield Table(("step", "when", "size", known.label if known else "held out", "kept because"), tuple(rows),
                frozenset({0, 2, 3}),
                tones=tuple("" if one.state == "committed" else "bad" for one in context.checkpoints))


def _spec(context: RunContext) -> Iterator[Block]:
    if not context.spec:
        return
    rows = set_fields(context.spec)
    if rows:
        yield Words("Different from the defaults:", is_small=True)
        yield Table(("field", "value", "default", "meaning"), tuple(rows), code=frozenset({0, 1, 2}))
    else:
        yield Words("Every field has its default.")
    yield Folded("The complete spec", (Code(redact(context.spec_toml)),))


def _notes(record: Record) -> Iterator[Block]:
    if record.error:
        yield Words(record.error_text, "bad")
    notes = [(event.time_s, str(event.values.get("level", "info")), event.values.get("text", ""))
             for event in record.of_kind("note")][:MAX_NOTES]
    if not notes:
        return
    rows = tuple((format_time(time_s), level, to_one_line(text)) for time_s, level, text in notes)
    table = Table(("when", "", "note"), rows, tones=tuple("warn" if row[1] == "warning" else "" for row in rows))
    more = record.num_notes - len(rows)
    blocks: tuple[Block, ...] = (table, Words(f"and {more:,} more", is_small=True)) if more else (table,)
    if len(rows) > 6:
        yield Folded(pluralize(record.num_notes, "note"), blocks)
    else:
        yield from blocks


def _sentence(text: str) -> str:
    text = to_one_line(text)
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


@frozen
class WrittenReport:
    """The address of a run's report, and its summary."""

    run: str
    report: str
    state: State
    sentence: str
    steps: int
    eval: JsonMap
    held_s: float


def write_report(context: RunContext, document: Document, *, out: str) -> WrittenReport:
    """Write the report of a run to a file or URI, by default into the run's directory."""
    target = out or f"{context.uri.rstrip('/')}/{NAME}"
    record = context.record
    return WrittenReport(
        run=context.uri, report=write_page(target, html_page(document)), state=context.status.state,
        sentence=document.sentence, steps=record.steps_done, eval=record.held_out, held_s=record.held_s)


def write_page(target: str, text: str) -> str:
    """Write to a URI, or to a file; a file that is not a report is never overwritten."""
    if "://" in target and not target.startswith("file://"):
        folder, _, name = target.rpartition("/")
        open_store(folder).write(name, text.encode())
        return target
    path = Path(target.removeprefix("file://")).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a directory", f"--out {path / NAME}")
    try:
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if GENERATOR.encode() not in file.read(_HEAD_BYTES):
                    raise UserError(f"{path} exists and is not a report of Embark",
                                    "name another file, or remove it first")
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "--out FILE writes elsewhere") from error
    return str(path)
