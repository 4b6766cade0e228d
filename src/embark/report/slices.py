"""Metrics by the values of a feature, of one run or of several side by side, with 95 % intervals."""

from collections.abc import Mapping, Sequence

from embark.formatting import MISSING, format_count, format_float
from embark.report.document import Block, Table, Words
from embark.run.feature_metrics import Estimate, Slice, SliceResult


def slice_rows(named: Sequence[tuple[str, SliceResult]]) -> list[dict[str, str]]:
    """By the name of the run. Runs differ in a slice where their intervals do not overlap."""
    (_, first), *others = named
    rows = []
    by_value = [{one.value: one for one in (found.all_rows, *found.slices)} for _, found in named]
    for one in (first.all_rows, *first.slices):
        row = {first.feature: one.value, "rows": format_count(one.num_samples)}
        for (name, _), known in zip(named, by_value, strict=True):
            prefix = f"{name}: " if others else ""
            found = known.get(one.value)
            row[f"{prefix}AUC"] = _figure(found.auc, found.auc_interval) if found else MISSING
            row[f"{prefix}calibration"] = _figure(found.calibration, found.calibration_interval) if found else MISSING
        if others:
            row["differ in"] = _differences([known[one.value] for known in by_value if one.value in known])
        rows.append(row)
    return rows


def slice_blocks(named: Sequence[tuple[str, SliceResult]]) -> list[Block | None]:
    """For a page; empty without any."""
    if not named:
        return []
    rows: Sequence[Mapping[str, str]] = slice_rows(named)
    columns = tuple(rows[0])
    method = named[0][1].method
    return [Words(f"{named[0][1].rows}. {method[:1].upper()}{method[1:]}.", is_small=True),
            Table(columns, tuple(tuple(row[name] for name in columns) for row in rows),
                  frozenset(range(1, len(columns))))]


def _figure(value: float | None, interval: Estimate | None) -> str:
    if value is None:
        return MISSING
    return format_float(value) + (f" ({interval.low:.4f} to {interval.high:.4f})" if interval else "")


def _differences(slices: Sequence[Slice]) -> str:
    found = []
    for name, intervals in (("AUC", [one.auc_interval for one in slices]),
                            ("calibration", [one.calibration_interval for one in slices])):
        known = [one for one in intervals if one]
        if len(known) > 1 and max(one.low for one in known) > min(one.high for one in known):
            found.append(name)
    return " and ".join(found)
