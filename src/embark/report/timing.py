"""What a run took: time, money, memory; beside what was foretold, and what interruptions added."""

from __future__ import annotations

from collections.abc import Sequence

from embark.events.interruptions import Interruption, losses_sentence
from embark.events.spending import Spending
from embark.formatting import MISSING, format_bytes, format_count, format_duration, format_usd, pluralize, to_finite
from embark.report.context import RunContext
from embark.report.curves import REASONS, milliseconds
from embark.report.document import Bar, Bars, Block, Key, Piece, Table, Words
from embark.report.record import Record

MAX_ROWS = 40
MAX_TICKS = 500
TICK = 0.003
"""How wide a moment is drawn, as a share of the whole time."""


def timeline(record: Record, stops: Sequence[Interruption]) -> Bars | None:
    """The run from its first start to its last word: at work, away, saving, evaluating."""
    if not record.attempts or record.last_s is None:
        return None
    begin_s = record.attempts[0].start_s
    whole_s = max(record.last_s - begin_s, 1e-9)

    def at(time_s: float) -> float:
        return min(max((time_s - begin_s) / whole_s, 0.0), 1.0)

    def tick(time_s: float, sign: str, tooltip: str) -> Piece:
        start = min(at(time_s), 1.0 - TICK)
        return Piece(start, start + TICK, sign, tooltip)

    work = tuple(
        Piece(at(a.start_s), max(at(a.last_s), at(a.start_s) + TICK), "used",
              f"steps {format_count(a.first_step)} to {format_count(a.last_step)}, {format_duration(a.last_s - a.start_s)}")
        for a in record.attempts
    )
    ends = tuple(tick(s.stopped_s, "bad", f"{REASONS[s.reason]} at step {format_count(s.stopped_step)}") for s in stops)
    bars = [Bar("at work", (*work, *ends), format_duration(record.held_s))]
    if record.saves:
        saves = tuple(tick(s.time_s, "save", f"step {format_count(s.step)}, {format_bytes(s.size_bytes)}")
                      for s in record.saves[-MAX_TICKS:])
        bars.append(Bar("checkpoints", saves, format_count(len(record.saves))))
    evals = next((line.kept for line in record.evals.values()), None)
    if evals is not None and len(evals):
        pieces = tuple(tick(t, "held", f"step {format_count(s)}")
                       for s, t in list(zip(evals.steps, evals.times_s, strict=True))[-MAX_TICKS:])
        bars.append(Bar("evaluations", pieces, format_count(len(evals))))
    keys = (Key("used", "at work"), Key("away", "away"), *((Key("bad", "stopped"),) if stops else ()))
    return Bars("", tuple(bars), keys if len(work) > 1 or stops else ())


def foretold(record: Record) -> list[Block]:
    """What `embark plan` said of this very machine, and what came."""
    if not record.predict:
        return []
    rows = []
    step_s = to_finite(record.end.get("step_s"))
    if step_s is None and "step_s" in record.train:
        step_s = record.train["step_s"].median
    peak_bytes = to_finite(record.end.get("peak_bytes"))
    pairs = (("a step", to_finite(record.predict.get("step_s")), step_s, milliseconds),
             ("memory, at its peak", to_finite(record.predict.get("peak_bytes")), peak_bytes, format_bytes))
    for what, said, took, words in pairs:
        if said is None:
            continue
        rows.append((what, words(said), words(took) if took is not None else "not measured yet", off_by(said, took)))
    basis = record.predict.get("basis")
    how = "Foretold from figures measured on this kind of machine" if record.predict.get("is_calibrated") else \
        "Estimated from data sheets: this kind of machine was not measured"
    bound = record.predict.get("bound_by")
    note = f"{how}{f' ({basis})' if basis else ''}.{f' The step was to be bound by {bound}.' if bound else ''}"
    table = Table(("", "foretold", "took", "off by"), tuple(rows), frozenset({1, 2, 3}))
    return [table, Words(note, is_small=True)] if rows else []


def money(record: Record, around: RunContext, *, is_running: bool) -> list[Block]:
    """Hours, and dollars where a price is known."""
    price = around.price
    spent = record.spending(price.usd_per_hour if price else None, around.now_s if is_running else None)
    if spent is None or record.last_s is None:
        return []
    bars = _time_bars(spent)
    rows = [("from first start to last word", format_duration(record.last_s - record.attempts[0].start_s))]
    samples = record.num_samples
    if samples and spent.held_s:
        rows.append(("samples learnt from", format_count(samples)))
        rows.append(("machine time for a million samples", format_duration(1e6 * spent.held_s / samples)))
    if spent.usd is None:
        note = around.no_price or "No price is known for where it ran: hours only."
        return [*bars, Table(("", ""), tuple(rows), frozenset({1})), Words(note, is_small=True)]
    rows.append(("spent", format_usd(spent.usd)))
    if samples:
        rows.append(("spent on a million samples", format_usd(1e6 * spent.usd / samples)))
    if spent.lost.num and spent.lost.usd is not None:
        rows.append(("of it for interruptions", format_usd(min(spent.usd, spent.lost.usd))))
    left = spent.usd_for(spent.left_s)
    if left:
        rows.append(("to go, at this pace", format_usd(left)))
    if spent.budget_usd is not None:
        rows.append(("budget", format_usd(spent.budget_usd)))
    words = price.words if price else f"{format_usd(spent.usd_per_hour or 0.0)} an hour, as the run was told"
    return [*bars, Table(("", ""), tuple(rows), frozenset({1})), Words(f"Price: {words}.", is_small=True)]


def faults(record: Record, around: RunContext, stops: Sequence[Interruption]) -> list[Block]:
    """What stopped it, what that cost, and what it went on from."""
    if not stops:
        return []
    spent = record.spending(around.price.usd_per_hour if around.price else None)
    told = losses_sentence(spent.lost) if spent is not None else ""
    rows = [
        (_when(stop.stopped_s), REASONS[stop.reason], format_count(stop.stopped_step),
         format_count(stop.resumed_step) if stop.resumed_step is not None else "not yet", format_count(stop.lost_steps),
         format_duration(stop.redone_s), format_duration(stop.down_s) if stop.resumed_s is not None else MISSING)
        for stop in stops[-MAX_ROWS:]
    ]
    columns = ("when (UTC)", "how", "at step", "went on from", "steps redone", "redone in", "waited")
    more = [Words(f"The last {MAX_ROWS} of {pluralize(len(stops), 'interruption')}.", is_small=True)] \
        if len(stops) > MAX_ROWS else []
    return [Words(told[:1].upper() + told[1:] + "."), Table(columns, tuple(rows), frozenset({2, 3, 4, 5, 6})), *more]


def ranks(record: Record) -> Bars | None:
    """Each rank's step, and what of it was waiting for input; those that the others wait for in red."""
    times = record.machine.ranks
    if not times:
        return None
    slow = set(record.machine.slow_ranks())
    longest = max(time.mean_s for time in times.values()) or 1.0
    # Where there are many, the slowest tell more than the first.
    shown = sorted(sorted(times, key=lambda rank: -times[rank].mean_s)[:MAX_ROWS])
    bars = []
    for rank in shown:
        time = times[rank]
        waited, whole = time.mean_input_s / longest, time.mean_s / longest
        pieces = (Piece(0.0, min(waited, whole), "wait", f"waiting for input {milliseconds(time.mean_input_s)}"),
                  Piece(min(waited, whole), whole, "slow" if rank in slow else "used",
                        f"a step {milliseconds(time.mean_s)}, at worst {milliseconds(time.worst_s)}"))
        bars.append(Bar(f"rank {rank}", pieces, milliseconds(time.mean_s), "bad" if rank in slow else ""))
    keys = (Key("used", "a step, on average"), Key("wait", "of it waiting for input"),
            *((Key("slow", "slower than the others by a third"),) if slow else ()))
    note = f"The slowest {MAX_ROWS} of {pluralize(len(times), 'rank')}." if len(times) > MAX_ROWS else ""
    return Bars("Step time by rank", tuple(bars), keys, note)


def phases(record: Record) -> Bars | None:
    """Where a step's time goes."""
    parts = record.machine.mean_phases()
    total_s = sum(parts.values())
    if not total_s:
        return None
    bars, start = [], 0.0
    for place, (name, seconds) in enumerate(parts.items()):
        share = seconds / total_s
        bars.append(Bar(name.replace("_", "-"), (Piece(start, start + share, f"k{place % 8}"),),
                        f"{milliseconds(seconds)} · {100 * share:.0f} %"))
        start += share
    return Bars("Where a step's time goes", tuple(bars))


def _time_bars(spent: Spending) -> list[Block]:
    """What machine time went into; left out where all of it was useful."""
    whole_s = spent.held_s
    if not whole_s:
        return []
    bars, start = [], 0.0
    for label, seconds, sign in (("training", spent.useful_s, "used"), ("steps done again", spent.redone_s, "bad"),
                                 ("starting and waiting", spent.waiting_s, "wait")):
        share = seconds / whole_s
        bars.append(Bar(label, (Piece(start, start + share, sign),), f"{format_duration(seconds)} · {100 * share:.0f} %"))
        start += share
    return [Bars(f"What {format_duration(whole_s)} of machine time went into", tuple(bars))]


def off_by(said: float | None, took: float | None) -> str:
    """`+3 %`: what was taken more than was said."""
    if said is None or took is None or said <= 0:
        return MISSING
    percent = 100 * (took / said - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 9.5 else f"{percent:+.1f} %"


def _when(time_s: float) -> str:
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return MISSING
