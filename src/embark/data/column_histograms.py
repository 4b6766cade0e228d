"""Columns as rows of a table, each with a picture one line high."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from embark.data.leaks import ColumnScore
from embark.data.prepared import Manifest

_BARS = " ▁▂▃▄▅▆▇█"


def column_rows(
    manifest: Manifest, statistics: Mapping[str, Any], scores: Mapping[str, ColumnScore]
) -> list[dict[str, Any]]:
    """One of each column: what it is, how it spreads, how well it alone predicts the label."""
    rows = [_dense_row(name, statistics["dense"].get(name, {})) for name in manifest.layout.dense]
    for feature in manifest.layout.features:
        kind = "list" if feature.is_ragged else "ids" if feature.multi_hot == 1 else f"{feature.multi_hot} ids"
        rows.append(_sparse_row(feature.name, kind, statistics["sparse"].get(feature.name, {})))
    for row in rows:
        found = scores.get(row["column"], ColumnScore(None))
        row |= {"new": _percent(found.new_share), "auc_alone": None if found.auc is None else round(found.auc, 3)}
    return rows


def bars(values: Sequence[float]) -> str:
    """A bar for each value, the largest of full height; what is not nothing shows."""
    most = max(values, default=0)
    if most <= 0:
        return ""
    return "".join(_BARS[0] if v <= 0 else _BARS[max(1, round(v / most * (len(_BARS) - 1)))] for v in values)


def _dense_row(name: str, column: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "column": name, "kind": "dense", "rows": None, "used": None, "top": None,
        "missing": _percent(column.get("zero_share")), "label_rate": None,
        "range": f"{column['min']:.4g} … {column['max']:.4g}" if column.get("min") is not None else None,
        "picture": bars(column.get("histogram", ())),
    }


def _sparse_row(name: str, kind: str, column: Mapping[str, Any]) -> dict[str, Any]:
    rates = [top["label_rate"] for top in column.get("top", ())]
    shares = column.get("top_share", {})
    lengths = column.get("lengths")
    return {
        "column": name, "kind": kind, "rows": column.get("rows"), "used": column.get("num_used"),
        "top": _percent(shares.get("1")), "missing": _percent(column.get("id_0_share")),
        "label_rate": f"{min(rates):.3f} … {max(rates):.3f}" if rates else None,
        "range": f"{lengths['min']} … {lengths['max']} ids, mean {lengths['mean']:.1f}" if lengths else None,
        "picture": bars(_by_rank(shares)),
    }


def _by_rank(shares: Mapping[str, float]) -> list[float]:
    """Share of the lookups of the first id, of the second, of the third to the fifth, …"""
    before, found = 0.0, []
    for share in shares.values():
        found.append(share - before)
        before = share
    return found


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{share:.1%}" if share >= 0.0005 or not share else "< 0.1%"
