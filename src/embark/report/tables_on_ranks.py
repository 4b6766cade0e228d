"""The sharding plan as a picture: which table is on which rank, and how full each rank is."""

from collections.abc import Mapping, Sequence
from typing import Any

from embark.events.sharding import plan_rows, ranks_text
from embark.formatting import format_bytes, format_count, to_finite, to_one_line
from embark.report.document import Bar, Bars, Block, Folded, Key, Piece, Table
from embark.report.record import Record, gpus_of

MAX_RANKS = 32
MAX_TABLES = 400
MAX_KEYS = 8
LEAST_SHARE = 0.05


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
        drawn.append(Piece(start, max(start, stop - 0.0015), f"k{order[id(table)] % 8}",
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
