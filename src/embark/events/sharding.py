"""A sharding plan as text: in a few lines where similar tables share one, or table by table for plan.txt."""

from collections.abc import Sequence

from embark.formatting import format_bytes, format_count, pluralize, to_finite, to_one_line
from embark.values import JsonMap

MAX_LINES = 5
GIB = 2**30
SHAPE = ("sharding", "kernel", "rows", "dim")
COLUMNS = ("table", "rows", "dim", "sharding", "kernel", "ranks", "GiB")

Table = JsonMap
Row = tuple[str, str, str, str]  # Tables, their size, their sharding and ranks, and their bytes.


def plan_rows(tables: Sequence[Table]) -> list[Row]:
    """Group similar tables, as finely as fits into a few lines; with very unlike tables, show the largest and how many
    more there are."""
    for alike in (SHAPE, SHAPE[:2]):
        groups: dict[str, list[Table]] = {}
        for table in tables:
            groups.setdefault(repr([table.get(name) or None for name in alike]), []).append(table)
        if len(groups) <= MAX_LINES:
            return [_row(group) for group in groups.values()]
    largest_first = sorted(groups.values(), key=_bytes, reverse=True)
    rest = [table for group in largest_first[MAX_LINES - 1 :] for table in group]
    return [*map(_row, largest_first[: MAX_LINES - 1]),
            ("and", pluralize(len(rest), "more table"), "", format_bytes(_bytes(rest)))]


def rank_line(per_rank: Sequence[JsonMap]) -> str:
    """Say how full the ranks are, such as `83.2 MB to 91.0 MB on each of 8 ranks`; empty for one rank."""
    held = [read for read in (to_finite(rank.get("bytes")) for rank in per_rank) if read is not None]
    if len(held) < 2:
        return ""
    least, most = format_bytes(min(held)), format_bytes(max(held))
    return f"{least if least == most else f'{least} to {most}'} on each of {len(held):,} ranks"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 0`, `ranks 0–7`, `12 ranks`."""
    there = sorted(set(ranks))
    if not there:
        return "no rank"
    if len(there) == 1:
        return f"rank {there[0]}"
    if there[-1] - there[0] == len(there) - 1:
        return f"ranks {there[0]}–{there[-1]}"
    return f"{len(there)} ranks"


def _row(group: Sequence[Table]) -> Row:
    names = [to_one_line(table.get("table", "")) for table in group]
    label = ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"
    shape = f"{_span(group, 'rows')} rows × {_span(group, 'dim')}"
    if len(group) > 1:
        shape = f"{pluralize(len(group), 'table')} × {shape}"
    first = group[0]
    how = to_one_line(first.get("sharding", ""))
    kernel = to_one_line(first.get("kernel", ""))
    ranks = [rank for table in group for rank in table.get("ranks") or ()]
    spread = any(table.get("ranks") != first.get("ranks") for table in group)
    where = f"{how}{f' ({kernel})' if kernel else ''} {'over' if spread else 'on'} {ranks_text(ranks)}"
    return label, shape, where, format_bytes(_bytes(group))


def _span(group: Sequence[Table], name: str) -> str:
    values = [read for read in (to_finite(table.get(name)) for table in group) if read is not None]
    if not values:
        return format_count(None)
    low, high = format_count(min(values)), format_count(max(values))
    return low if low == high else f"{low} to {high}"


def _bytes(group: Sequence[Table]) -> float:
    return sum(to_finite(table.get("bytes")) or 0 for table in group)


def plan_text(layout: JsonMap) -> str:
    """Write every table on a line of its own, then how full each rank is."""
    rows = [COLUMNS, *(_text_row(table) for table in layout["tables"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ranks = [f"rank {r['rank']}: {r['bytes'] / GIB:.3f} GiB of tables" for r in layout["per_rank"]]
    return "\n".join([*lines, "", *ranks]) + "\n"


def _text_row(table: JsonMap) -> tuple[str, ...]:
    return (
        table["table"], f"{table['rows']:,}", str(table["dim"]), table["sharding"], table["kernel"],
        ",".join(map(str, table["ranks"])), f"{table['bytes'] / GIB:.3f}"
    )
