"""Runs side by side: what differs in their specs, how each ended, and which was better by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

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
)
from embark.report.context import RunContext
from embark.report.curves import milliseconds, overlaid
from embark.report.document import Block, Code, Document, Table, Tile, Tiles, Tone, Words, sections_with_something
from embark.report.record import Record
from embark.report.report import TONES, when
from embark.report.spec_rows import differences
from embark.report.status import Standing, sentence, standing

SAME_QUALITY = 0.0005
"""Less than that is chance: two runs that differ in their seed differ by more."""
SAME_SHARE = 0.03
SAME_SAMPLES = frozenset(
    f"data.{name}" for name in ("num_train_samples", "shuffle", "cache_gb", "cache_dir", "on_bad_id")
)
"""Fields of `[data]` that leave the held-out samples what they are."""
_BARS = "▁▂▃▄▅▆▇█"

Say = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs."""

    name: str
    """No other has it."""
    record: Record
    around: RunContext
    now: Standing
    ends: Mapping[str, float | None]
    """By the names of `ROWS`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity that runs are compared by."""

    name: str
    label: str
    say: Say
    better: Literal["up", "down"] | None


ROWS = (
    Row("eval_auc", "held-out AUC", format_float, "up"),
    Row("eval_log_loss", "held-out log loss", format_float, "down"),
    Row("eval_normalized_entropy", "held-out NE", format_float, "down"),
    Row("loss", "training loss", format_float, "down"),
    Row("steps", "steps", format_count, None),
    Row("num_samples", "samples", format_si, None),
    Row("samples_per_s", "samples a second", format_si, "up"),
    Row("step_s", "step time", milliseconds, "down"),
    Row("held_s", "time at work", format_duration, "down"),
    Row("peak_bytes", "memory at its peak", format_bytes, "down"),
    Row("usd", "spent", format_usd, "down"),
    Row("num_interruptions", "interruptions", format_count, None),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer."""

    sides: tuple[Side, ...]
    spec: tuple[tuple[str, tuple[str, ...]], ...]
    """Field, and its value in each."""
    sentence: str
    best: str
    """The better run's name; empty where none is."""

    def best_of(self, row: Row) -> int | None:
        """Which side has the best of a row; None where there is none, or all are the same."""
        values = [side.ends.get(row.name) for side in self.sides]
        known = sorted(((value, place) for place, value in enumerate(values) if value is not None),
                       reverse=row.better == "up")
        if row.better is None or len(known) < 2 or _is_same(row, known[0][0], known[-1][0]):
            return None
        return known[0][1]

    def rows(self) -> list[Row]:
        """Those that some side knows."""
        return [row for row in ROWS if any(side.ends.get(row.name) is not None for side in self.sides)]


def compare(runs: Sequence[tuple[Record, RunContext]]) -> Comparison:
    names = _distinct([around for _, around in runs])
    sides = tuple(
        Side(name, record, around, standing(record, around.now_s, is_remote=around.is_remote), _ends(record, around))
        for name, (record, around) in zip(names, runs, strict=True)
    )
    best, told = _verdict(sides)
    spec = tuple(differences([around.spec for _, around in runs]))
    other = [field for field, _ in spec if field.startswith("data.") and field not in SAME_SAMPLES]
    if other:
        told += f" They did not see the same samples ({', '.join(other[:3])}), so take it with care."
    return Comparison(sides, spec, told, best)


def compare_document(found: Comparison) -> Document:
    """The page, in the look of a report."""
    sides = found.sides
    names = tuple(side.name for side in sides)
    states = {side.now.state for side in sides}
    tone: Tone = TONES[sides[0].now.state] if len(states) == 1 else ""
    return Document(
        kicker="Embark comparison of runs",
        title=" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more",
        sentence=found.sentence,
        badge=pluralize(len(sides), "run"),
        tone=tone,
        facts=tuple(f"{side.name}: {side.now.word}" for side in sides),
        lead=(_tiles(found),),
        sections=sections_with_something([
            ("How they went", [overlaid([side.record for side in sides], names)]),
            ("How they ended", [_ends_table(found)]),
            ("What differs in their specs", _spec_blocks(found, names)),
            ("The runs", [Table(("run", "how it went", "where"), tuple(
                (side.name, sentence(side.record, side.now), side.around.uri) for side in sides),
                code=frozenset({2}))]),
            ("Do it again", [Code("embark compare " + " ".join(side.around.uri for side in sides))]),
        ]),
        footer=f"Written {when(max(side.around.now_s for side in sides))} by Embark",
    )


def as_data(found: Comparison) -> dict[str, Any]:
    """For a program."""
    return {
        "sentence": found.sentence, "best": found.best or None,
        "runs": [{"name": side.name, "uri": side.around.uri, "state": side.now.state,
                  "sentence": sentence(side.record, side.now), **side.ends} for side in found.sides],
        "spec": [{"field": field, "values": list(values)} for field, values in found.spec],
    }


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """A small curve on one line; `low` and `high` are the same for all that are compared."""
    known = [value for value in values if to_finite(value) is not None]
    if not known:
        return ""
    width = min(width, len(known))
    edges = [round(i * len(known) / width) for i in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    span = high - low
    places = [round((min(max(mean, low), high) - low) / span * (len(_BARS) - 1)) if span > 0 else 3 for mean in means]
    return "".join(_BARS[place] for place in places)


def _ends(record: Record, around: RunContext) -> dict[str, float | None]:
    held, step, end = record.history.eval, record.history.step, record.end
    step_s = to_finite(end.get("step_s"))
    if step_s is None and "step_s" in record.train:
        step_s = record.train["step_s"].median
    spent = record.spending(around.price.usd_per_hour if around.price else None)
    return {
        **{f"eval_{name}": to_finite(held.get(name)) for name in ("auc", "log_loss", "normalized_entropy")},
        "loss": to_finite(step.get("loss")), "steps": float(record.steps_done), "num_samples": record.num_samples,
        "samples_per_s": record.samples_per_s, "step_s": step_s, "held_s": record.held_s if record.has_begun else None,
        "peak_bytes": to_finite(end.get("peak_bytes")),
        "usd": spent.usd if spent is not None else None,
        "num_interruptions": float(len(record.interruptions())),
    }


def _verdict(sides: Sequence[Side]) -> tuple[str, str]:
    """Which was better, by what it had on samples it had not seen; else by its training loss; else by its pace."""
    for name in ("eval_auc", "eval_log_loss", "loss"):
        row = next(row for row in ROWS if row.name == name)
        known = [(value, side) for side in sides if (value := side.ends.get(name)) is not None]
        if len(known) < 2:
            continue
        known.sort(key=lambda pair: pair[0], reverse=row.better == "up")
        (first, best), (second, next_best) = known[0], known[1]
        of = "" if len(known) == len(sides) else f" of the {len(known)} that have it"
        if _is_same(row, first, second):
            return _as_good(best, next_best, row, first, second)
        told = (f"{best.name} was better{of}: {row.label} {row.say(first)} against {row.say(second)} of "
                f"{next_best.name} ({first - second:+.4f})")
        return best.name, f"{told}{_at_what(best, next_best)}."
    return "", "Nothing to compare by: fewer than two of the runs have told of a step."


def _is_same(row: Row, a: float, b: float) -> bool:
    if row.name.startswith("eval_") or row.name == "loss":
        return abs(a - b) < SAME_QUALITY
    return abs(a - b) <= SAME_SHARE * max(abs(a), abs(b))


def _as_good(a: Side, b: Side, row: Row, first: float, second: float) -> tuple[str, str]:
    told = f"{a.name} and {b.name} learnt equally well ({row.label} {row.say(first)} and {row.say(second)})"
    for name, word in (("usd", "cheaper"), ("held_s", "quicker"), ("samples_per_s", "faster")):
        x, y = a.ends.get(name), b.ends.get(name)
        if x is None or y is None or min(x, y) <= 0 or abs(x / y - 1) < SAME_SHARE:
            continue
        say = next(row.say for row in ROWS if row.name == name)
        a_wins = (x > y) == (name == "samples_per_s")
        winner, mine, other = (a, x, y) if a_wins else (b, y, x)
        return winner.name, f"{told}; {winner.name} was {word}: {say(mine)} against {say(other)}."
    return "", f"{told}, and neither was quicker."


def _at_what(best: Side, other: Side) -> str:
    """What being better took."""
    parts = []
    x, y = best.ends.get("num_samples"), other.ends.get("num_samples")
    if x and y and abs(x / y - 1) >= SAME_SHARE:
        parts.append(f"after {format_si(x)} samples against {format_si(y)}")
    for name, more, less in (("usd", "dearer", "cheaper"), ("held_s", "slower", "quicker")):
        x, y = best.ends.get(name), other.ends.get(name)
        if x and y and abs(x / y - 1) >= SAME_SHARE:
            parts.append(f"{_times(x / y)} {more if x > y else less}")
            break
    return f", {' and '.join(parts)}" if parts else ""


def _times(ratio: float) -> str:
    if ratio > 2 or ratio < 0.5:
        return f"{max(ratio, 1 / ratio):.1f} times"
    return f"{100 * abs(ratio - 1):.0f} %"


def _tiles(found: Comparison) -> Tiles:
    tiles = []
    for side in found.sides:
        auc = side.ends.get("eval_auc")
        value = format_float(auc) if auc is not None else format_float(side.ends.get("loss"))
        label = "held-out AUC" if auc is not None else "training loss"
        tiles.append(Tile(side.name, value, f"{label} · {format_duration(side.ends.get('held_s'))}",
                          "good" if side.name == found.best else ""))
    return Tiles(tuple(tiles))


def _ends_table(found: Comparison) -> Block:
    rows = []
    for row in found.rows():
        best = found.best_of(row)
        cells = []
        for place, side in enumerate(found.sides):
            value = side.ends.get(row.name)
            cells.append(MISSING if value is None else f"{row.say(value)}{' ✓' if place == best else ''}")
        rows.append((row.label, *cells))
    return Table(("", *(side.name for side in found.sides)), tuple(rows), frozenset(range(1, len(found.sides) + 1)))


def _spec_blocks(found: Comparison, names: Sequence[str]) -> list[Block]:
    if not found.spec:
        return [Words("Nothing: the specs are the same but for their names.")]
    rows = tuple((field, *values) for field, values in found.spec)
    return [Table(("field", *names), rows, code=frozenset(range(len(names) + 1)))]


def _distinct(arounds: Sequence[RunContext]) -> list[str]:
    """The runs' names; where two are the same, their uris; where those are too, a number behind."""
    names = [around.name for around in arounds]
    if len(set(names)) < len(names):
        names = [around.uri for around in arounds]
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return distinct
