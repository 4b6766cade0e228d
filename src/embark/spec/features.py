"""`[features]`: what the model sees of the columns of the data."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from embark.errors import Mistakes, conflict
from embark.values import JsonDict, JsonMap
from .model import Rows, Table
from .section import Many, PositiveInt, Section
from .tasks import main_task
from .time_formats import checked_format, checked_zone

if TYPE_CHECKING:
    from .run import RunSpec

MAX_NAME = 128
Statistic = Literal["count", "label_rate"]
TimePart = Literal["hour", "weekday", "day", "month", "age"]
NumberTransform = Literal["standardize", "quantiles", "piecewise_linear", "log", "mlperf", "clip", "none"]


class _OnlyGiven(Section):
    def left_out(self) -> Collection[str]:
        return [name for name in type(self).model_fields if self.has_default(name)]


class ColumnFeatures(_OnlyGiven):
    """`[features.columns.NAME]`: what differs for one column."""

    transform: Literal["auto", NumberTransform] | None = None
    """In place of `features.numbers`."""
    missing_flag: bool | None = None
    """In place of `features.missing_flags`."""
    num_buckets: int | None = Field(default=None, ge=2, le=1024)
    """In place of `features.num_buckets`."""
    bucket_table: bool | None = None
    """In place of `features.bucket_tables`."""
    min: float | None = None
    """Smaller values count as this."""
    max: float | None = None
    """Larger values count as this."""
    decimal: Literal["", ".", ","] = ""
    """In place of `data.prepare.decimal`."""
    parts: Many[TimePart] = ()
    """Features of a column of dates or times: `hour` of the day, `weekday`, `day` of the month and `month` become
    tables of 25, 8, 32 and 13 rows; `age`, the days from the column to the row's `data.time_column`, becomes a
    number."""
    time_format: Annotated[str, AfterValidator(checked_format)] = ""
    """How dates or times are written, in directives of Python's `strptime`, such as `"%d.%m.%Y %H:%M"`; empty: ISO
    8601, numbers since 1970, or a common format if no other fits as well."""
    time_zone: Annotated[str, AfterValidator(checked_zone)] = ""
    """IANA zone, such as `"Europe/Berlin"`, of times that say none, and of `parts`; empty: UTC."""
    rows: Rows | None = None
    """Ids: rows of the column's table, where `[model]` gives no tables; values are hashed modulo these."""
    min_count: PositiveInt | None = None
    """Ids by frequency: in place of `data.prepare.min_count`."""
    max_ids: PositiveInt | None = None
    """Lists and words: in place of `data.prepare.max_ids`."""
    num_hashes: int = Field(default=1, ge=1, le=8)
    """Hashed ids: how many rows a value has in its table, whose sum is its vector. Two values are the same to the model
    only if all their rows are: with 2, tables of a tenth of the values' number suffice."""
    words: bool = False
    """The column is text: its words, in lower case, are a list of ids, the first `max_ids` of them."""
    statistics: Many[Statistic] = ()
    """Ids: dense values beside the table. `count`: ln(1 + training rows with the value). `label_rate`: their smoothed
    label rate, in log odds less those of all rows. A training row gets those of earlier rows."""

    @property
    def is_of_ids(self) -> bool:
        """Whether something is said that only a column of ids has."""
        return not all(self.has_default(name) for name in ID_FIELDS)


ID_FIELDS = ("rows", "min_count", "max_ids", "num_hashes", "words", "statistics")


class ByColumn(JsonDict):
    """Settings by column; never changed, so that a spec can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class CrossFeatures(Section):
    """`[[features.crosses]]`: a table for the values that columns have together."""

    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=2, max_length=8)]
    """Two or more columns of one id a row, their tables, such as `at_hour`, or number columns with `buckets`. No value
    counts as a value."""
    name: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", max_length=128)
    """Name of the table; default: the columns' names with `_x_` between them."""
    rows: Rows | None = None
    """Rows of the table: values are hashed modulo these. Without them ids are by frequency."""
    min_count: PositiveInt | None = None
    """Ids by frequency: in place of `data.prepare.min_count`."""
    buckets: Annotated[dict[str, Annotated[tuple[float, ...], Field(strict=False, min_length=1, max_length=1000)]],
                       AfterValidator(ByColumn)] = Field(default=ByColumn())
    """Number columns among `columns`, each with the rising boundaries between its buckets."""

    omitted = ("name", "rows", "min_count", "buckets")


class FeaturesSpec(_OnlyGiven):
    """`[features]`: how columns become the values that the model takes, in training and in serving. Statistics are
    those of training rows."""

    numbers: Literal["auto", NumberTransform] = "auto"
    """Transform of number columns. `standardize`: (x − mean) / standard deviation, at most 8 from 0. `quantiles`: the
    share of training rows below x, from −1 to 1. `piecewise_linear`: a value for each of `num_buckets` quantile
    buckets, how far x is through it. `log`: sign(x)·ln(1 + |x|), standardized. `mlperf`: ln(x + 3), below −2 as −2.
    `clip`: x itself, cut at the 1st and 99th percentile, or at `min` and `max`. `none`: x itself. `auto`: `mlperf`
    for Criteo; else `piecewise_linear` for up to 262,144 training rows, or by the values, and `embark data prepare
    --dry-run` says why."""
    missing_flags: Literal["auto", True, False] = "auto"
    """Add a value beside each number column that is 1 where the column has none, else 0. `auto`: for columns with
    missing values, except with `mlperf` and `none`. A missing number itself counts as the mean."""
    num_buckets: PositiveInt = Field(default=16, ge=2, le=1024)
    """Quantile buckets of `piecewise_linear` and of `bucket_tables`. If left out, `piecewise_linear` has three times as
    many for a column with a value that stands in more rows than a bucket has, such as amounts that are mostly 0."""
    bucket_tables: Literal["auto", True, False] = "auto"
    """Make a table `NAME_bucket` of each number column too, beside its dense value: a row for each of `num_buckets`
    quantile buckets of training rows, and row 0 for a missing number. `auto`: where no column holds ids."""
    columns: Annotated[dict[str, ColumnFeatures], AfterValidator(ByColumn)] = Field(default=ByColumn())
    """Settings of single columns, by name."""
    crosses: Many[CrossFeatures] = ()
    """Tables for the values that columns have together, one `[[features.crosses]]` each."""
    fitted: str = Field(default="", max_length=10_000_000)
    """Means, scales and boundaries of `data.kind = "columns"`, which a run computes and which travel with its spec."""

    @property
    def times(self) -> dict[str, tuple[TimePart, ...]]:
        """The columns that hold dates or times, and the parts of them that are features."""
        return {name: one.parts for name, one in self.columns.items() if one.parts or one.time_format or one.time_zone}

    def of(self, column: str) -> ColumnFeatures:
        """Return the settings of a column; None where it has those of all."""
        return self.columns.get(column, ColumnFeatures())

    def has_buckets(self, column: str, *, auto: bool = False) -> bool:
        """Whether the quantile buckets of a number column are a table; `auto`: what `bucket_tables` then says."""
        said = self.of(column).bucket_table
        everywhere = auto if self.bucket_tables == "auto" else self.bucket_tables
        return everywhere if said is None else said

    def bucket_rows(self, column: str) -> int:
        """Return the rows of that table."""
        return (self.of(column).num_buckets or self.num_buckets) + 1


def table_name(column: str) -> str:
    """Return a name of letters, digits and underscores only: `User ID` becomes `User_ID`."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", column).strip("_") or "column"
    return (name if not name[0].isdigit() else f"_{name}")[:MAX_NAME]


def bucket_table_name(column: str) -> str:
    """Return the name of the table of a number column's quantile buckets."""
    return f"{table_name(column)[: MAX_NAME - 8]}_bucket"


def with_bucket_tables(spec: RunSpec) -> RunSpec:
    """Return a spec of a file in memory with the tables of its numbers' quantile buckets: those that `[features]` asks
    for, and those of all numbers if no other table is named."""
    model, features = spec.model, spec.features
    if spec.data.kind != "columns" or spec.stream.is_on:
        return spec
    is_auto = not model.gives_tables and features.bucket_tables == "auto"
    columns = [name for name in spec.data.dense_columns if features.has_buckets(name, auto=is_auto)]
    given = model.table_list() if model.gives_tables or not columns else ()
    taken = {table.name for table in given}
    made = tuple(Table(name=bucket_table_name(name), rows=features.bucket_rows(name)) for name in columns
                 if bucket_table_name(name) not in taken)
    if not made:
        return spec
    return spec.changed(
        model=model.changed(tables=(*given, *made)),
        features=features.changed(bucket_tables=True) if is_auto else features)


GUESSED = FeaturesSpec()
"""The section of a spec that has none."""
LEGACY_OPTIONS = ("dense", "time_columns")
"""Options of `[data.prepare]` that `[features]` replaced; records of earlier data and artifacts have them."""


def legacy_features(prepare: JsonMap, given: JsonMap = MappingProxyType({})) -> JsonDict:
    """Return the values of `[features]` that say the same as a record of earlier `[data.prepare]`, with what else is
    given."""
    dense, times = prepare.get("dense", "auto"), prepare.get("time_columns") or {}
    numbers = {} if dense == "auto" else {"numbers": dense, "missing_flags": False}
    found = {**numbers, **given}
    columns = given.get("columns", {})
    if times and isinstance(times, dict) and isinstance(columns, dict):
        names = dict.fromkeys((*times, *columns))
        parts = {name: {"parts": times[name]} if name in times else {} for name in names}
        found["columns"] = {name: {**parts[name], **columns.get(name, {})} for name in names}
    return found


_ONE_VALUE = 'makes several values of a column, and data.kind = "columns" has one for each'
_PREPARE = "prepare the data, or use another transform"


def features_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of `[features]` with the data."""
    features, data = spec.features, spec.data
    is_of_log = data.kind == "interactions" and {*features.columns} == {data.time_column}
    if data.kind not in ("columns", "prepared") and not is_of_log:
        yield from features.unused("features", type(features).model_fields, f'while data.kind is "{data.kind}"',
                                   "leave it out")
        return
    if data.kind != "prepared" and features.crosses:
        yield conflict("features.crosses", "", f'has no effect while data.kind is "{data.kind}"',
                       'data.kind = "prepared", which `embark data prepare` writes')
    for number, cross in enumerate(features.crosses):
        for name, bounds in cross.buckets.items():
            where = f"features.crosses[{number}].buckets.{name}"
            if name not in cross.columns:
                yield conflict(where, name, "is not among the columns of the cross", "add it there, or leave it out")
            if any(low >= high for low, high in pairwise(bounds)):
                yield conflict(where, list(bounds), "does not rise", "sort the boundaries, each once")
    has_rate = main_task(spec.model.tasks) >= 0 or not spec.model.tasks
    if data.kind == "columns" and features.missing_flags is True:
        yield conflict("features.missing_flags", True, 'data.kind = "columns" has no missing values', "leave it out")
    if data.kind == "columns" and features.numbers == "piecewise_linear":
        yield conflict("features.numbers", features.numbers, _ONE_VALUE, _PREPARE)
    for name, column in features.columns.items():
        where = f"features.columns.{name}"
        if data.kind != "prepared":
            yield from column.unused(where, ID_FIELDS, f'while data.kind is "{data.kind}"', "leave it out")
        if column.num_hashes > 1 and column.min_count is not None:
            yield conflict(f"{where}.min_count", column.min_count, "has no effect on hashed ids", "leave it out")
        if "label_rate" in column.statistics and not has_rate:
            yield conflict(f"{where}.statistics", "label_rate", "no task of [model] has labels 0 and 1", "leave it out")
        if column.min is not None and column.max is not None and column.min >= column.max:
            yield conflict(f"{where}.max", column.max, f"is not more than min = {column.min:g}", "swap them")
        if data.kind != "prepared" and (column.parts or column.decimal):
            yield conflict(f"{where}.{'parts' if column.parts else 'decimal'}", column.parts or column.decimal,
                           f'has no effect while data.kind is "{data.kind}"',
                           'set data.kind = "prepared"' if column.parts else "set data.prepare.decimal")
        transform = column.transform or features.numbers
        if data.kind == "columns" and column.transform == "piecewise_linear":
            yield conflict(f"{where}.transform", transform, _ONE_VALUE, _PREPARE)
        if data.kind == "columns" and column.missing_flag:
            yield conflict(f"{where}.missing_flag", True, 'data.kind = "columns" has no missing values', "leave it out")
        has_bins = transform in ("auto", "piecewise_linear") or features.has_buckets(name, auto=True)
        if column.num_buckets is not None and not has_bins:
            yield conflict(f"{where}.num_buckets", column.num_buckets, f'has no effect with "{transform}"',
                           'leave it out, or set transform = "piecewise_linear" or bucket_table = true')
        if name in (data.label, *(task.column for task in spec.model.tasks)):
            yield conflict(where, name, "is the label, and no feature", "leave it out")
