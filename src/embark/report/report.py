"""The report of one run, put together from its events and from what the verb knows besides."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from embark.events.names import find, metric
from embark.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_duration,
    format_float,
    format_si,
    format_usd,
    pluralize,
    to_finite,
    to_one_line,
)
from embark.report.context import Finding, RunContext
from embark.report.curves import learning_curves, system_curves
from embark.report.document import (
    Block,
    Code,
    Document,
    Folded,
    Table,
    Tile,
    Tiles,
    Tone,
    Words,
    sections_with_something,
)
from embark.report.record import Record
from embark.report.spec_rows import set_fields, shown
from embark.report.status import Standing, State, sentence, standing
from embark.report.tables_on_ranks import tables_on_ranks
from embark.report.timing import faults, foretold, money, phases, ranks, timeline

TONES: dict[State, Tone] = {
    "empty": "", "running": "live", "done": "good", "stopped": "warn", "failed": "bad", "killed": "bad",
}
MAX_FINDINGS = 8
MAX_SEEN = 200
VERSIONS = ("embark", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
HELD_OUT = ("auc", "normalized_entropy", "log_loss", "calibration")
BEST = {"auc": "best_auc", "log_loss": "best_log_loss"}


def report(record: Record, around: RunContext) -> Document:
    """What there is to say of a run that is finished, running, stopped or dead."""
    now = standing(record, around.now_s, is_remote=around.is_remote)
    stops = record.interruptions()
    line = timeline(record, stops)
    return Document(
        kicker="Embark run report",
        title=around.name,
        sentence=sentence(record, now),
        badge=now.word,
        tone=TONES[now.state],
        facts=tuple(_facts(record, now)),
        lead=(_tiles(record, around, now, len(stops)),),
        sections=sections_with_something([
            ("How it went", [line, learning_curves(record, stops), *_held_out(record)]),
            ("Diagnosis", list(_diagnosis(around, now))),
            ("Faults survived" if now.state in ("done", "running") else "Interruptions", faults(record, around, stops)),
            ("Time and money", money(record, around, is_running=now.state == "running")),
            ("Foretold and fact", foretold(record)),
            ("Where the time goes", [phases(record), ranks(record)]),
            ("The machine", [_machine(record), system_curves(record)]),
            ("Tables on ranks", tables_on_ranks(record)),
            ("Checkpoints kept", list(_checkpoints(around))),
            ("What was run", list(_spec(around))),
            ("What it said", list(_notes(record))),
            ("Do it again", [Code("\n".join(around.commands)) if around.commands else None]),
        ]),
        footer=f"Written {when(around.now_s)} by Embark from {pluralize(record.num_events, 'event')} of {around.uri}",
    )


def when(time_s: float | None) -> str:
    """`2026-11-15 11:14 UTC`"""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if time_s else MISSING
    except (ValueError, OverflowError, OSError):
        return MISSING


def _facts(record: Record, now: Standing) -> Iterator[str]:
    start = record.start
    if not start:
        return
    yield to_one_line(start.get("device_name") or start.get("device") or "")
    yield pluralize(int(to_finite(start.get("world_size")) or 1), "rank")
    yield to_one_line(start.get("precision", ""))
    yield f"{format_si(start.get('num_parameters'))} parameters"
    began_s = record.attempts[0].start_s
    yield f"{when(began_s)} to {when(record.last_s)}" if now.state != "running" else f"since {when(began_s)}"


def _tiles(record: Record, around: RunContext, now: Standing, num_stops: int) -> Tiles:
    held, step = record.history.eval, record.history.step
    tiles = []
    if (auc := to_finite(held.get("auc"))) is not None:
        best = to_finite(held.get("best_auc"))
        tiles.append(Tile("Held-out AUC", format_float(auc), f"of at most {format_float(best)}" if best is not None else ""))
    elif step:
        tiles.append(Tile("Training AUC", format_float(step.get("auc")), "of the last points"))
    if held:
        tiles.append(Tile("Held-out loss", format_float(held.get("log_loss")),
                          f"NE {format_float(held.get('normalized_entropy'))}"))
    elif step:
        tiles.append(Tile("Training loss", format_float(step.get("loss")), "", "bad" if step.get("loss") is None else ""))
    rate = record.samples_per_s
    if rate is not None:
        tiles.append(Tile("Samples/s", format_si(rate), f"batches of {format_count(record.start.get('batch_size'))}"))
    if record.has_begun:
        of = f"of {format_count(record.num_steps)}" if record.num_steps else ""
        done = f" · {100 * record.steps_done / record.num_steps:.0f} %" if record.num_steps else ""
        tiles.append(Tile("Steps", format_count(record.steps_done), of + done))
        attempts = len(record.attempts)
        tiles.append(Tile("Time at work", format_duration(record.held_s), "in one go" if attempts == 1 else
                          f"in {attempts:,} goes"))
    spent = record.spending(around.price.usd_per_hour if around.price else None)
    if spent is not None and spent.usd is not None:
        tiles.append(Tile("Spent", format_usd(spent.usd), f"{format_usd(spent.usd_per_hour or 0.0)} an hour"))
    if record.has_begun and (num_stops or now.state in ("done", "running")):
        word = "survived" if now.state in ("done", "running") else ""
        tiles.append(Tile("Interruptions", format_count(num_stops), word if num_stops else "none"))
    return Tiles(tuple(tiles))


def _held_out(record: Record) -> Iterator[Block]:
    """The last evaluation beside the best of the run and the best there could be."""
    held = record.history.eval
    if not held:
        return
    rows: list[tuple[str, ...]] = []
    for name in HELD_OUT:
        line, known = record.evals.get(name), metric(name)
        best = line.best(known.better) if line is not None and known.better else None
        rows.append((known.label, format_float(held.get(name)),
                     f"{format_float(best[1])} at step {format_count(best[0])}" if best else MISSING,
                     format_float(held.get(BEST[name])) if name in BEST else MISSING, format_float(record.history.step.get(name)),
                     known.meaning))
    at = f"at step {format_count(held.get('step'))}"
    columns: tuple[str, ...] = ("held out", at, "best of the run", "best possible", "training", "")
    if all(row[3] == MISSING for row in rows):
        columns, rows = (*columns[:3], *columns[4:]), [(*row[:3], *row[4:]) for row in rows]
    yield Words(f"Evaluated on {format_count(held.get('num_samples'))} held-out samples.", is_small=True)
    yield Table(columns, tuple(rows), frozenset(range(1, len(columns) - 1)))


def _diagnosis(around: RunContext, now: Standing) -> Iterator[Block]:
    if around.findings is None:
        return
    if not around.findings:
        if now.state in ("failed", "killed", "stopped"):
            yield Words("Nothing in its events and logs shows a fault that Embark knows.")
        return
    for finding in around.findings[:MAX_FINDINGS]:
        yield Words(f"{_sentence(finding.cause)} Fix: {_sentence(finding.fix)}", _tone(finding))
        if finding.command:
            yield Code(finding.command)
        if finding.seen:
            seen = to_one_line(finding.seen)
            yield Words(f"Seen: {seen if len(seen) <= MAX_SEEN else f'{seen[:MAX_SEEN]}…'}", is_small=True)


def _tone(finding: Finding) -> Tone:
    return "warn" if finding.is_slow_only else "bad"


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
        ("model", f"{format_si(start.get('num_parameters'))} parameters, {format_bytes(start.get('table_bytes'))} of tables"),
        ("data", f"{format_count(start.get('num_train_samples'))} samples, {format_count(start.get('num_eval_samples'))} held out"),
        ("memory, at its peak", format_bytes(record.end.get("peak_bytes")) if record.end else MISSING),
        ("versions", ", ".join(f"{name} {to_one_line(versions[name])}" for name in VERSIONS if versions.get(name))
         if isinstance(versions, dict) else ""),
        ("machines", ", ".join(dict.fromkeys(to_one_line(one.get("host", "")) for one in record.machine.systems))),
    ]
    return Table(("", ""), tuple(row for row in rows if row[1] and row[1] != MISSING))


def _checkpoints(around: RunContext) -> Iterator[Block]:
    if not around.kept:
        return
    has_metric = any(kept.metric for kept in around.kept)
    rows: list[tuple[str, ...]] = []
    tones: list[Tone] = []
    for kept in around.kept:
        cells = (format_count(kept.step), when(kept.time_s), format_bytes(kept.size_bytes), kept.metric or MISSING, kept.why)
        rows.append(cells if has_metric else (*cells[:3], cells[4]))
        tones.append("" if kept.is_whole else "bad")
    known = find(around.best_by)
    columns = ("step", "when", "size", known.label if known else "held out", "kept because")
    yield Table(columns if has_metric else (*columns[:3], columns[4]), tuple(rows),
                frozenset({0, 2, 3} if has_metric else {0, 2}), tones=tuple(tones))


def _spec(around: RunContext) -> Iterator[Block]:
    if not around.spec:
        return
    rows = set_fields(around.spec)
    if rows:
        yield Words("What differs from the defaults:", is_small=True)
        yield Table(("field", "value", "default", "meaning"), tuple(rows), code=frozenset({0, 1, 2}))
    else:
        yield Words("Every field is at its default.")
    yield Folded("The whole spec", (Code(around.spec_toml or _as_text(around)),))


def _as_text(around: RunContext) -> str:
    from embark.report.spec_rows import flat

    return "\n".join(f"{field} = {shown(value)}" for field, value in flat(around.spec).items())


def _notes(record: Record) -> Iterator[Block]:
    if record.error:
        yield Words(record.error, "bad")
    if not record.notes:
        return
    rows = tuple((when(note.time_s), note.level, to_one_line(note.text)) for note in record.notes)
    table = Table(("when", "", "note"), rows, tones=tuple("warn" if n.level == "warning" else "" for n in record.notes))
    more = record.num_notes - len(record.notes)
    blocks: tuple[Block, ...] = (table, Words(f"and {more:,} more", is_small=True)) if more else (table,)
    if len(rows) > 6:
        yield Folded(pluralize(record.num_notes, "note"), blocks)
    else:
        yield from blocks


def _sentence(text: str) -> str:
    text = to_one_line(text)
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."
