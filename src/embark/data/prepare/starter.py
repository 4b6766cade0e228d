"""The spec that `embark init FILE` writes: of a table with a label, or of a log of users and items."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from embark.formatting import shortlist
from embark.spec import PrepareSpec
from embark.values import JsonDict
from .guess import find_time_column, holds_times
from .inputs import Inputs
from .sampling import Column, find_called, holds_numbers, is_zero_one, judge, take_sample

# Trials behind these numbers: bench/LOG.md. A batch of 64 to 128 shares 3,072 to 6,144 negatives.
NUM_NEGATIVES, DROPOUT = 48, 0.3
_LABELS = ("label", "target", "click", "clicked", "class", "y", "outcome", "bought", "converted", "churn")
_MAX_RATINGS = 20  # Different ones; of users and items there are more, where no times tell a log from a table.


def starter_of_file(file: Path, path: Path, *, may_be_log: bool = True) -> str:
    """Return the lines of a spec at `path` for a file of one's own, with what may be its label, or its users and
    items."""
    inputs = Inputs()
    sample = take_sample(PrepareSpec(), (), inputs, inputs.find(str(file)))
    columns, is_bare = sample.columns, sample.format == "csv" and not sample.has_header
    prepare: JsonDict = {"input": os.path.relpath(file, path.parent)}
    data: JsonDict = {"kind": "prepared", "path": f"{path.stem}-prepared"}
    named = _named_as_log(columns) if is_bare else columns
    about, more = _log_of(named, "places" if is_bare else "names") if may_be_log else ("", {})
    header = "# The file has no header: data.prepare.column_names names its columns, in order.\n" if is_bare else ""
    if more:
        if is_bare:
            prepare["column_names"] = [column.name for column in named]
        more["interactions"] |= {"negatives": "frequency", "num_negatives": NUM_NEGATIVES}
        written = tomli_w.dumps({
            "model": {"kind": "sasrec", "dropout": DROPOUT, "sequence": {"share_negatives": True}},
            "data": data | more | {"prepare": prepare}})
        return about + header + written.replace('"sasrec"', '"sasrec"  # or "hstu"', 1)
    values = {column.name: [value for value, _ in Counter(column.cells).most_common(3)] for column in columns}
    zero_one = {column.name for column in columns if is_zero_one(column)}
    found = [name for name, cells in values.items() if len(cells) == 2 or name in zero_one] or [columns[-1].name]
    likely = [*(name for name in found if name.lower() in _LABELS), columns[-1].name, columns[0].name, found[-1]]
    label = next(name for name in likely if name in found)
    if label not in zero_one and values[label]:
        prepare["label_is"] = values[label][-1]  # the rarer one
    of = f"; these may be it: {shortlist(found, 12)}" if len(found) > 1 else ""
    written = tomli_w.dumps({"data": data | {"label": label, "prepare": prepare}})
    return f"# The label is the column to predict{of}.\n{header}{written}"


def _named_as_log(columns: Sequence[Column]) -> list[Column]:
    """Name columns without a header, if they can be users, items, and behind them ratings, times or both; else return
    none."""
    are_times = [holds_times(replace(column, name="time")) for column in columns]
    different = [len({*column.cells}) for column in columns]
    names = ["user", "item"] + ["time" if is_time else "rating" for is_time in are_times[2:]]
    is_log = len({*names}) == len(columns) and not any(are_times[:2]) and all(
        not holds_numbers(column) or all(map(str.isdigit, column.cells)) for column in columns[:2])
    if "rating" in names:
        at = names.index("rating")
        is_log &= holds_numbers(columns[at]) and different[at] <= _MAX_RATINGS
    if "time" not in names:
        is_log &= min(different[:2]) > _MAX_RATINGS
    return [replace(column, name=name) for column, name in zip(columns, names, strict=True)] if is_log else []


def _log_of(columns: Sequence[Column], known_by: str) -> tuple[str, JsonDict]:
    """Return why the columns are those of a log, as comments, and which are its own; nothing if they are not.
    `known_by` is what tells users and items."""
    user = find_called(columns, "users")
    item = find_called([column for column in columns if column.name != user], "items")
    by_name = {column.name: column for column in columns}
    if not user or not item or any(map(_is_label, columns)) or not all(
            map(_has_repeats, (by_name[user], by_name[item]))):
        return "", {}
    rest = [column for column in columns if column.name not in (user, item)]
    time = find_time_column(rest)
    num, (num_users, num_items) = by_name[user].num_rows, (len({*by_name[name].cells}) for name in (user, item))
    when = f"{time!r} has their times, such as {by_name[time].cells[0]!r}." if time else \
        "no column has times, so that the rows of a user count as in order."
    about = f"""\
# This file is taken for a log, with a row for each item that a user chose; no column looks like a label of 0 and 1.
# In {num:,} rows checked {user!r} has {num_users:,} users and {item!r} {num_items:,} items, by their {known_by};
# {when}
# The model learns what a user chooses next. To predict a column instead, name it in data.label, and leave out [model],
# time_column and [data.interactions].
"""
    return about, {**({"time_column": time} if time else {}), "interactions": {"user": user, "item": item}}


def _is_label(column: Column) -> bool:
    values = {cell.lower() for cell in column.cells}
    return len(values) > 1 and (is_zero_one(column) or column.name.lower() in _LABELS)


def _has_repeats(column: Column) -> bool:
    """Tell whether some values are in several rows, one value in each."""
    return 1 < len({*column.cells}) < len(column.cells) and judge(column, "|").role != "list"
