"""The sharding plan as text that people read and diffs compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30
COLUMNS = ("table", "rows", "dim", "sharding", "kernel", "ranks", "GiB")


def plan_text(layout: Mapping[str, Any]) -> str:
    """Every table on a line of its own, then how full each rank is."""
    rows = [COLUMNS, *(_row(table) for table in layout["tables"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ranks = [f"rank {r['rank']}: {r['bytes'] / GIB:.3f} GiB of tables" for r in layout["per_rank"]]
    return "\n".join([*lines, "", *ranks]) + "\n"


def _row(table: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        table["table"], f"{table['rows']:,}", str(table["dim"]), table["sharding"], table["kernel"],
        ",".join(map(str, table["ranks"])), f"{table['bytes'] / GIB:.3f}",
    )
