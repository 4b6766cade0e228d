"""Tables that fit a terminal: what matters least is left out first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embark.cli.console import Console, cell_text

GAP = 2
"""Between two columns."""


def fitting_table(
    console: Console, rows: Sequence[Mapping[str, object]], headings: Mapping[str, str], leaves_out: Sequence[str]
) -> None:
    """A table that is no wider than the terminal, as far as leaving out columns goes. As JSON it has them all."""
    shown = dict(headings)
    if not console.json:
        for key in leaves_out:
            if _width(rows, shown) <= console.out.width:
                break
            shown.pop(key, None)
    console.table(rows, shown)


def _width(rows: Sequence[Mapping[str, object]], headings: Mapping[str, str]) -> int:
    widths = [max([len(heading), *(len(cell_text(row.get(key))) for row in rows)]) for key, heading in headings.items()]
    return sum(widths) + GAP * (len(widths) - 1)
