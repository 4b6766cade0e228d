"""`[features]`: what the model sees of the columns of the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from embark.errors import Mistake, conflict
from embark.spec.section import PositiveInt, Section
from embark.spec.time_formats import checked_format, checked_zone

if TYPE_CHECKING:
    from embark.spec.run import RunSpec

TimePart = Literal["hour", "weekday", "day", "month", "age"]
NumberTransform = Literal["standardize", "quantiles", "piecewise_linear", "log", "mlperf", "clip", "none"]


class ColumnFeatures(Section):
    """`[features.columns.NAME]`: what differs for one column."""

    transform: Literal["auto"] | NumberTransform | None = None
    """In place of `features.numbers`."""
    missing_flag: bool | None = None
    """In place of `features.missing_flags`."""
    num_buckets: int | None = Field(default=None, ge=2, le=1024)
    """In place of `features.num_buckets`."""
    min: float | None = None
    """Smaller values count as this."""
    max: float | None = None
    """Larger values count as this."""
    decimal: Literal["", ".", ","] = ""
    """In place of `data.prepare.decimal`."""
    parts: Annotated[tuple[TimePart, ...], Field(strict=False)] = ()
    """Features of a column of dates or times: `hour` of the day, `weekday`, `day` of the month and `month` become
    tables of 25, 8, 32 and 13 rows; `age`, the days from the column to the row's `data.time_column`, becomes a
    number."""
    time_format: Annotated[str, AfterValidator(checked_format)] = ""
    """How dates or times are written, in directives of Python's `strptime`, such as `"%d.%m.%Y %H:%M"`; empty: ISO
    8601, numbers since 1970, or a common format if no other fits as well."""
    time_zone: Annotated[str, AfterValidator(checked_zone)] = ""
    """IANA zone, such as `"Europe/Berlin"`, of times that say none, and of `parts`; empty: UTC."""

    def left_out(self) -> Collection[str]:
        return [name for name in type(self).model_fields if self.has_default(name)]


class FeatureColumns(dict[str, ColumnFeatures]):
    """Settings by column; never changed, so that a spec can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class FeaturesSpec(Section):
    """`[features]`: how columns become the values that the model takes, in training and in serving. Statistics are
    those of training rows."""

    numbers: Literal["auto"] | NumberTransform = "auto"
    """Transform of number columns. `standardize`: (x − mean) / standard deviation, at most 8 from 0. `quantiles`: the
    share of training rows below x, from −1 to 1. `piecewise_linear`: a value for each of `num_buckets` quantile
    buckets, how far x is through it. `log`: sign(x)·ln(1 + |x|), standardized. `mlperf`: ln(x + 3), below −2 as −2.
    `clip`: x itself, cut at the 1st and 99th percentile, or at `min` and `max`. `none`: x itself. `auto`: `mlperf`
    for Criteo; else by the values, and `embark data prepare --dry-run` says why."""
    missing_flags: Literal["auto"] | bool = "auto"
    """Add a value beside each number column that is 1 where the column has none, else 0. `auto`: for columns with
    missing values, except with `mlperf` and `none`. A missing number itself counts as the mean."""
    num_buckets: PositiveInt = Field(default=16, ge=2, le=1024)
    """Quantile buckets of `piecewise_linear`."""
    columns: Annotated[dict[str, ColumnFeatures], AfterValidator(FeatureColumns)] = Field(default=FeatureColumns())
    """Settings of single columns, by name."""
    fitted: str = Field(default="", max_length=10_000_000)
    """Means, scales and boundaries of `data.kind = "columns"`, which a run computes and which travel with its spec."""

    @property
    def times(self) -> dict[str, tuple[TimePart, ...]]:
        """The columns that hold dates or times, and the parts of them that are features."""
        return {name: one.parts for name, one in self.columns.items() if one.parts or one.time_format or one.time_zone}

    def of(self, column: str) -> ColumnFeatures:
        """Return the settings of a column; None where it has those of all."""
        return self.columns.get(column, ColumnFeatures())

    def left_out(self) -> Collection[str]:
        return [name for name in type(self).model_fields if self.has_default(name)]


GUESSED = FeaturesSpec()
"""The section of a spec that has none."""
LEGACY_OPTIONS = ("dense", "time_columns")
"""Options of `[data.prepare]` that `[features]` replaced; records of earlier data and artifacts have them."""


def legacy_features(prepare: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `[features]` that say the same as a record of earlier `[data.prepare]`."""
    dense, times = prepare.get("dense", "auto"), prepare.get("time_columns") or {}
    columns = {"columns": {name: {"parts": parts} for name, parts in times.items()}} if isinstance(times, dict) else {}
    return ({} if dense == "auto" else {"numbers": dense, "missing_flags": False}) | (columns if times else {})


def features_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Find conflicts of `[features]` with the data."""
    features, data = spec.features, spec.data
    is_of_log = data.kind == "interactions" and {*features.columns} == {data.time_column}
    if data.kind not in ("columns", "prepared") and not is_of_log:
        yield from features.unused("features", type(features).model_fields, f'while data.kind is "{data.kind}"',
                                   "leave it out")
        return
    for name, column in features.columns.items():
        where = f"features.columns.{name}"
        if column.min is not None and column.max is not None and column.min >= column.max:
            yield conflict(f"{where}.max", column.max, f"is not more than min = {column.min:g}", "swap them")
        if data.kind != "prepared" and (column.parts or column.decimal):
            yield conflict(f"{where}.{'parts' if column.parts else 'decimal'}", column.parts or column.decimal,
                           f'has no effect while data.kind is "{data.kind}"',
                           'set data.kind = "prepared"' if column.parts else "set data.prepare.decimal")
        transform = column.transform or features.numbers
        if column.num_buckets is not None and transform not in ("auto", "piecewise_linear"):
            yield conflict(f"{where}.num_buckets", column.num_buckets, f'has no effect with "{transform}"',
                           'leave it out, or set transform = "piecewise_linear"')
        if name in (data.label, *(task.column for task in spec.model.tasks)):
            yield conflict(where, name, "is the label, and no feature", "leave it out")
