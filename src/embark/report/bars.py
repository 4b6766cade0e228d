"""What a run cost and where: time, money and memory beside what was predicted, and the tables on each rank, as bars."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from embark.events.monitoring import SLOW_RANK
from embark.events.sharding import plan_rows, ranks_text
from embark.events.spending import losses_sentence
from embark.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_duration,
    format_step_time,
    format_usd,
    pluralize,
    to_finite,
    to_one_line,
)
from embark.report.context import RunContext
from embark.report.curves import REASONS, capitalize
from embark.report.document import Bar, Bars, BarSegment, Block, Folded, Key, Table, Words
from embark.report.record import PHASES, Record, gpus_of, slow_ranks

MAX_ROWS = 40
MAX_TICKS = 500
TICK = 0.003  # How wide a moment is drawn, as a share of the wall time.
MAX_RANKS = 32
MAX_TABLES = 400
MAX_KEYS = 8
LEAST_SHARE = 0.05


def timeline(context: RunContext) -> Bars | None:
    """The run from its first start to its last event: training, interrupted, saving, evaluating."""
    record, stops, attempts = context.record, context.interruptions, context.record.attempts()
    if not attempts or record.last_s is None:
        return None
    begin_s = attempts[0].began_s
    wall_s = max(record.last_s - begin_s, 1e-9)

    def at(time_s: float) -> float:
        return min(max((time_s - begin_s) / wall_s, 0.0), 1.0)

    def tick(time_s: float, sign: str, tooltip: str) -> BarSegment:
        start = min(at(time_s), 1.0 - TICK)
        return BarSegment(start, start + TICK, sign, tooltip)

    work = tuple(
        BarSegment(at(a.began_s), max(at(a.last_s), at(a.began_s) + TICK), "used",
              f"steps {format_count(a.first_step)} to {format_count(a.last_step)}, "
              f"{format_duration(a.held_s)}") for a in attempts)
    ends = tuple(tick(s.stopped_s, "bad", f"{REASONS[s.reason]} at step {format_count(s.stopped_step)}") for s in stops)
    bars = [Bar("running", (*work, *ends), format_duration(sum(a.held_s for a in attempts)))]
    saves, evals = record.saves, record.of_kind("eval")
    if saves:
        pieces = tuple(tick(s.time_s, "save", f"step {format_count(s.step)}, {format_bytes(s.size_bytes)}")
                       for s in saves[-MAX_TICKS:])
        bars.append(Bar("checkpoints", pieces, format_count(len(saves))))
    if evals:
        pieces = tuple(tick(e.time_s, "held", f"step {format_count(e.values.get('step'))}") for e in evals[-MAX_TICKS:])
        bars.append(Bar("evaluations", pieces, format_count(len(evals))))
    keys = (Key("used", "running"), Key("away", "not running"), *((Key("bad", "interrupted"),) if stops else ()))
    return Bars("", tuple(bars), keys if len(work) > 1 or stops else ())


def predicted_and_actual(record: Record) -> list[Block]:
    """What `embark plan` predicts for this machine, and what was measured."""
    rows = []
    for what, name, actual, say in (("step time", "step_s", record.step_s, format_step_time),
                                    ("peak memory", "peak_bytes", to_finite(record.end.get("peak_bytes")),
                                     format_bytes)):
        predicted = to_finite(record.predict.get(name))
        if predicted is not None:
            error = MISSING if actual is None or predicted <= 0 else percent_off(predicted, actual)
            rows.append((what, say(predicted), say(actual) if actual is not None else "not measured yet", error))
    if not rows:
        return []
    basis, bound = record.predict.get("basis"), record.predict.get("bound_by")
    how = "Predicted from measurements on this kind of machine" if record.predict.get("is_calibrated") else \
        "Estimated from data sheets: this kind of machine was not measured"
    note = f"{how}{f' ({basis})' if basis else ''}.{f' Predicted bottleneck: {bound}.' if bound else ''}"
    return [Table(("", "predicted", "actual", "off by"), tuple(rows), frozenset({1, 2, 3})), Words(note, is_small=True)]


def money(context: RunContext) -> list[Block]:
    """Hours, and dollars where a price is known."""
    record, spent, attempts = context.record, context.spent, context.record.attempts()
    if spent is None or record.last_s is None:
        return []
    rows = [("wall time", format_duration(record.last_s - attempts[0].began_s))]
    samples = record.num_samples
    if samples and spent.held_s:
        rows.append(("samples trained on", format_count(samples)))
        rows.append(("machine time per million samples", format_duration(1e6 * spent.held_s / samples)))
    note = context.price.text or "No price is known for where it ran: hours only."
    if spent.usd is not None:
        left, lost = spent.usd_for(spent.left_s), spent.lost.usd if spent.lost.num else None
        amounts = (("spent", spent.usd), ("spent per million samples", 1e6 * spent.usd / samples if samples else None),
                   ("of it on interruptions", min(spent.usd, lost) if lost is not None else None),
                   ("still to spend, at this pace", left or None), ("budget", spent.budget_usd))
        rows += [(label, format_usd(amount)) for label, amount in amounts if amount is not None]
        if context.price.usd_per_hour is None:
            note = f"Price: {format_usd(spent.usd_per_hour or 0.0)} an hour, as given at the start."
    parts = {"training": spent.useful_s, "repeated steps": spent.redone_s, "starting and waiting": spent.waiting_s}
    bars = _share_bars(f"{format_duration(spent.held_s)} of machine time", parts, ["used", "bad", "wait"],
                       format_duration)
    return [*([bars] if bars else []), Table(("", ""), tuple(rows), frozenset({1})), Words(note, is_small=True)]


def faults(context: RunContext) -> list[Block]:
    """What interrupted the run, what that cost, and where it resumed."""
    stops, spent = context.interruptions, context.spent
    if not stops:
        return []
    rows = [
        (format_time(stop.stopped_s), REASONS[stop.reason], format_count(stop.stopped_step),
         format_count(stop.resumed_step) if stop.resumed_step is not None else "not yet", format_count(stop.lost_steps),
         format_duration(stop.redone_s), format_duration(stop.down_s) if stop.resumed_s is not None else MISSING)
        for stop in stops[-MAX_ROWS:]
    ]
    columns = ("when", "how", "at step", "resumed from", "steps repeated", "repeated in", "down for")
    note = [Words(f"The last {MAX_ROWS} of {pluralize(len(stops), 'interruption')}.", is_small=True)] \
        if len(stops) > MAX_ROWS else []
    summary = [Words(f"{capitalize(losses_sentence(spent.lost))}.")] if spent is not None else []
    return [*summary, Table(columns, tuple(rows), frozenset({2, 3, 4, 5, 6})), *note]


def ranks(record: Record) -> Bars | None:
    """Each rank's step, and its wait for input; those that the others wait for in red."""
    columns = record.ranks.last(len(record.ranks))
    times = {int(name.rpartition(".")[2]): known for name, values in columns.items()
             if name.startswith("step_s.") and len(known := values[np.isfinite(values)])}
    if not times:
        return None
    means = {rank: float(values.mean()) for rank, values in times.items()}
    slow = slow_ranks(means)
    longest = max(means.values()) or 1.0
    bars = []
    # Of many, the slowest matter most.
    for rank in sorted(sorted(means, key=lambda rank: -means[rank])[:MAX_ROWS]):
        waits = columns.get(f"input_s.{rank}", np.empty(0))
        wait_s = float(np.nanmean(waits)) if np.isfinite(waits).any() else 0.0
        end, wait_end = means[rank] / longest, min(wait_s, means[rank]) / longest
        pieces = (BarSegment(0.0, wait_end, "wait", f"waiting for input {format_step_time(wait_s)}"),
                  BarSegment(wait_end, end, "slow" if rank in slow else "used",
                        f"step {format_step_time(means[rank])}, at worst {format_step_time(float(times[rank].max()))}"))
        bars.append(Bar(f"rank {rank}", pieces, format_step_time(means[rank]), "bad" if rank in slow else ""))
    keys = (Key("used", "step time, mean"), Key("wait", "of it waiting for input"),
            *((Key("slow", f"over {SLOW_RANK:g} times the others' time"),) if slow else ()))
    note = f"The slowest {MAX_ROWS} of {pluralize(len(times), 'rank')}." if len(times) > MAX_ROWS else ""
    return Bars("Step time by rank", tuple(bars), keys, note)


def phases(record: Record) -> Bars | None:
    """The parts of a step."""
    means = {name.replace("_", "-"): float(values.mean()) for name in PHASES
             if len(values := record.phases.values(name))}
    return _share_bars("Step time by phase", means, [f"k{place}" for place in range(len(means))], format_step_time)


def _share_bars(
    title: str, parts: Mapping[str, float], signs: Sequence[str], say: Callable[[float], str]
) -> Bars | None:
    """Parts of a total, each starting where the one above ends."""
    total = sum(parts.values())
    if total <= 0:
        return None
    bars, start = [], 0.0
    for (label, value), sign in zip(parts.items(), signs, strict=True):
        share = value / total
        bars.append(Bar(label, (BarSegment(start, start + share, sign),), f"{say(value)} · {100 * share:.0f} %"))
        start += share
    return Bars(title, tuple(bars))


def percent_off(predicted: float, actual: float) -> str:
    """`+3 %`: how much more it was than predicted."""
    percent = 100 * (actual / predicted - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 9.5 else f"{percent:+.1f} %"


def format_time(time_s: float | None) -> str:
    """`2026-11-15 11:14 UTC`"""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if time_s else MISSING
    except (ValueError, OverflowError, OSError):
        return MISSING


def tables_on_ranks(record: Record) -> list[Block]:
    """A bar a rank; the tables that are alike in one row each; all of them folded."""
    tables = [t for t in _rows(record.plan.get("tables")) if to_finite(t.get("bytes"))]
    if not tables:
        return []
    held = _held(tables)
    fullest = max(sum(num_bytes for _, num_bytes in pieces) for pieces in held.values())
    capacity = _capacity(record)
    if fullest < LEAST_SHARE * capacity:  # a bar of the device's size would show nothing
        capacity = 0.0
    most = max(capacity, fullest) or 1.0
    shown = sorted(sorted(held, key=lambda rank: -sum(b for _, b in held[rank]))[:MAX_RANKS])
    order = {id(table): place for place, table in enumerate(tables)}
    bars = [_bar(rank, held[rank], most, capacity, order) for rank in shown]
    note = f"The fullest {MAX_RANKS} of {len(held):,} ranks." if len(held) > MAX_RANKS else ""
    if capacity:
        note = f"{note} A full bar is a device's memory, {format_bytes(capacity)}.".strip()
    keys = tuple(Key(f"k{place % 8}", to_one_line(table.get("table", ""))) for place, table in enumerate(tables)) \
        if len(tables) <= MAX_KEYS else ()
    short = Table(("tables", "size", "sharding", "bytes"), tuple(plan_rows(tables)), frozenset({3}))
    every = Table(
        ("table", "rows", "width", "sharding", "kernel", "where", "bytes"),
        tuple((to_one_line(t.get("table", "")), format_count(t.get("rows")), format_count(t.get("dim")),
               to_one_line(t.get("sharding", "")), to_one_line(t.get("kernel", "")), ranks_text(_ranks(t)),
               format_bytes(t.get("bytes"))) for t in tables[:MAX_TABLES]),
        frozenset({1, 2, 6}),
    )
    folded = [Folded(f"All {len(tables):,} tables", (every,))] if len(tables) > 1 else []
    return [Bars("", tuple(bars), keys, note), short, *folded]


def _held(tables: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[Mapping[str, Any], float]]]:
    """By rank, its part of each table. A table that is cut lies in equal parts."""
    held: dict[int, list[tuple[Mapping[str, Any], float]]] = {}
    for table in tables:
        on = sorted(set(_ranks(table)))
        for rank in on:
            held.setdefault(rank, []).append((table, (to_finite(table.get("bytes")) or 0.0) / len(on)))
    return held or {0: [(table, to_finite(table.get("bytes")) or 0.0) for table in tables]}


def _bar(
    rank: int, pieces: Sequence[tuple[Mapping[str, Any], float]], most: float, capacity: float, order: Mapping[int, int]
) -> Bar:
    drawn, start = [], 0.0
    for table, num_bytes in sorted(pieces, key=lambda piece: -piece[1]):
        stop = start + num_bytes / most
        # A hairline between two tables of one colour.
        drawn.append(BarSegment(start, max(start, stop - 0.0015), f"k{order[id(table)] % 8}",
                           f"{to_one_line(table.get('table', ''))}: {format_bytes(num_bytes)}, "
                           f"{to_one_line(table.get('sharding', ''))}"))
        start = stop
    total = sum(num_bytes for _, num_bytes in pieces)
    share = f" · {100 * total / capacity:.0f} %" if capacity else ""
    return Bar(f"rank {rank}", tuple(drawn), f"{format_bytes(total)}{share}")


def _capacity(record: Record) -> float:
    """Of the smallest device that was seen; 0 where none was."""
    if record.start.get("device") != "cuda":
        return 0.0
    totals = [to_finite(gpu.get("total_bytes")) for one in record.systems for gpu in gpus_of(one)]
    return min((total for total in totals if total), default=0.0)


def _ranks(table: Mapping[str, Any]) -> list[int]:
    ranks = table.get("ranks")
    return [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list | tuple) else []


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []
