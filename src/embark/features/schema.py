"""What each column of the input is; the same for a person, and as the lines of a spec."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import tomli_w

from embark.spec import FeaturesSpec, PrepareSpec, Table, Task, label_columns, main_task
from embark.spec.features import GUESSED, Statistic, TimePart
from embark.values import JsonDict, frozen
from .values import DecimalSign

TIME_ROWS = {"hour": 25, "weekday": 8, "day": 32, "month": 13}
"""Rows of the tables made of times: 0 for a missing one, then the hours from midnight, the days from Monday or from the
first of the month, the months from January."""

KINDS = {"hex": "hexadecimal ids", "integer": "integer ids", "text": "words", "hour": "hours", "weekday": "weekdays",
         "day": "days of the month", "month": "months", "number": "weights of ids",
         "cross": "values of several columns together", "bucket": "quantile buckets of numbers"}
MADE = ("cross", "bucket")
"""Kinds of columns that are made of others, which the input has."""
FIXED_ROWS = (*TIME_ROWS, "bucket")
"""Kinds of columns whose keys are the rows of the table."""


@frozen
class SparseColumn:
    """A column that becomes a table."""

    name: str
    kind: Literal["hex", "integer", "text", "hour", "weekday", "day", "month", "number", "cross", "bucket"]
    is_list: bool = False
    max_ids: int = 1  # Longer lists keep their last ids.
    rows: int | None = None  # Rows of its table, if the spec gives them.
    column: str = ""  # The name in the input, if a table cannot have that name.
    weights_of: str = ""  # The column whose ids these are the weights of; empty: these are ids.
    parts: tuple[str, ...] = ()  # Of a cross or of buckets: the names of the columns it is made of.
    buckets: tuple[tuple[float, ...], ...] = ()  # Of each part: boundaries if it is a number and they are known.
    is_words: bool = False  # A cell is text, and its words are the values.
    num_hashes: int = 1  # Rows of the table that a value has.
    min_count: int = 0  # Training rows that a value needs for an id of its own; 0: as the spec says for all.
    statistics: tuple[Statistic, ...] = ()  # Dense values that say something about the value.
    is_required: bool = False  # A row without a value is one that cannot be read.
    is_user: bool = False  # Of a log: whose sequence a row is of; it has no table.

    @staticmethod
    def of_weights(table: Table) -> SparseColumn:
        """Describe the weights of a table's ids."""
        return SparseColumn(table.weights_feature, "number", is_list=True, max_ids=table.multi_hot, rows=1,
                            column=table.weights_column, weights_of=table.name)

    @property
    def source(self) -> str:
        """The column of the input it comes from."""
        return self.column or self.name

    @property
    def most_ids(self) -> int:
        """The most ids of a row."""
        return self.max_ids * self.num_hashes


@frozen
class TimeColumn:
    """A column of dates or times."""

    name: str
    format: str  # A `TimeFormat`, or directives of Python's `strptime`.
    features: tuple[TimePart, ...] = ()
    zone: str = ""  # Of times that say none, and of the features; empty: UTC.


def texts(one_or_several: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of a field that takes one or several."""
    return (one_or_several,) if isinstance(one_or_several, str) else one_or_several


@frozen
class LabelColumn:
    """A column of labels of one or more tasks."""

    name: str
    is_binary: bool = False  # It holds 0 and 1, true and false, yes and no.
    num_classes: int = 0  # It holds classes from 0 to `num_classes` − 1; 0: any numbers.
    main_above: float | None = None  # The first binary task's label is 1 above this; None for other columns.
    ones: tuple[str, ...] = ()  # The texts for which the label is 1; empty: the column holds numbers.

    @staticmethod
    def of(tasks: tuple[Task, ...]) -> tuple[LabelColumn, ...]:
        """Return the columns that tasks name."""
        main = tasks[main_task(tasks)] if main_task(tasks) >= 0 else None
        found = []
        for name in label_columns(tasks):
            of_column = [task for task in tasks if task.column == name]
            is_binary = any(task.loss == "binary" and task.above is None for task in of_column)
            num_classes = min((task.num_classes for task in of_column if task.num_classes), default=0)
            above = None if main is None or main not in of_column else 0.5 if main.above is None else main.above
            ones = next((texts(task.label_is) for task in of_column if task.label_is), ())
            found.append(LabelColumn(name, is_binary, num_classes, above, ones))
        return tuple(found)


@frozen
class Schema:
    """The roles of the columns of the input."""

    format: Literal["criteo", "csv", "jsonl", "parquet"]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]  # Weights of ids behind all others.
    columns: tuple[str, ...]  # All columns of the input, in its order.
    ignored: tuple[str, ...] = ()
    delimiter: str = "\t"
    has_header: bool = False
    why: dict[str, str] = field(default_factory=dict)  # The reason for each column's role, for people to read.
    examples: dict[str, str] = field(default_factory=dict)  # Some values of each column, for people to read.
    list_delimiter: str = ""  # Between the values of a cell of text; empty: `|` or `;`.
    times: tuple[TimeColumn, ...] = ()
    time_column: str = ""  # The one of `times` that is the row's own.
    is_split_by_time: bool = False
    labels: tuple[LabelColumn, ...] = ()  # The labels of several tasks; `label` is then the first of them.
    decimals: dict[str, DecimalSign] = field(default_factory=dict)  # Of columns whose numbers may have commas.

    @property
    def ages(self) -> tuple[str, ...]:
        """The columns of `times` whose age is a dense value; they follow `dense`."""
        return tuple(column.name for column in self.times if "age" in column.features)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the dense values of a raw row."""
        return (*self.dense, *(f"{name}_age" for name in self.ages))

    @property
    def statistics_names(self) -> tuple[str, ...]:
        """The names of the dense values that say something about values of sparse columns; they are the last."""
        return tuple(f"{column.name}_{statistic}" for column in self.sparse for statistic in column.statistics)

    @property
    def read(self) -> tuple[SparseColumn, ...]:
        """The sparse columns that the input has; the others are made of them."""
        return tuple(column for column in self.sparse if column.kind not in MADE)

    @property
    def bucketed(self) -> tuple[str, ...]:
        """The numbers whose quantile buckets are tables."""
        return tuple(column.parts[0] for column in self.sparse if column.kind == "bucket")

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns of the input that rows are made of, each once."""
        names = (self.label, *(label.name for label in self.labels), *self.dense,
                 *(column.source for column in self.read), *(time.name for time in self.times))
        return tuple(name for name in dict.fromkeys(names) if name)

    @property
    def has_row_time(self) -> bool:
        """Whether the rows' own time is used, to split them or to tell which are earlier."""
        has_statistics = any(column.statistics for column in self.sparse)
        return self.is_split_by_time or (has_statistics and self.time_column in {time.name for time in self.times})

    def only_time(self) -> Schema:
        """Keep the label and the row's own time."""
        times = tuple(replace(time, features=()) for time in self.times if time.name == self.time_column)
        return replace(self, dense=(), sparse=(), times=times, is_split_by_time=True)

    def without_split(self) -> Schema:
        """Return a copy with the features and the columns they need, without those that only split rows."""
        times = tuple(time for time in self.times if time.features or (self.ages and time.name == self.time_column))
        return replace(self, times=times, is_split_by_time=False)

    def unlabelled(self) -> Schema:
        """Return a copy without the label, for rows to score."""
        return replace(self.without_split(), label="", labels=(), why={}, examples={}, ignored=())

    def describe(self) -> list[dict[str, object]]:
        """Return a row for each column of the input: its role, the reason, and some of its values."""
        sparse = {column.source: column for column in self.read if column.kind not in TIME_ROWS}
        rows = [(name, self._role(name, sparse.get(name)), self.why.get(name, ""), self.examples.get(name, ""))
                for name in self.columns]
        words = {"cross": ("cross", "is named in features.crosses"),
                 "bucket": ("quantile buckets", "features.bucket_tables: no column holds ids" if all(
                     column.kind == "bucket" for column in self.sparse) else "is named in [features]")}
        rows += [(column.name, f"{words[column.kind][0]} of {' and '.join(column.parts)}", words[column.kind][1], "")
                 for column in self.sparse if column.parts]
        return [dict(zip(("column", "taken_for", "why", "examples"), row, strict=True)) for row in rows]

    def to_toml(self, given: PrepareSpec, features: FeaturesSpec = GUESSED) -> str:
        """Return the lines of a spec that leave nothing to guess, with what is `given`."""
        found = self.to_features(given, features)
        return tomli_w.dumps({"data": self.to_spec(given), **({"features": found} if found else {})})

    def to_features(self, given: PrepareSpec, features: FeaturesSpec) -> JsonDict:
        """Return the values of `[features]` that leave nothing of the cells to guess, with what is `given`."""
        columns = {name: {key: value for key, value in one.model_dump(mode="json").items() if value is not None}
                   for name, one in features.columns.items()}
        labels = {self.label, *(label.name for label in self.labels)}
        found = [(time.name, {"time_format": time.format}) for time in self.times if "%" in time.format]
        found += [(name, {"decimal": sign}) for name, sign in self.decimals.items() if given.decimal != sign]
        for name, one in found:
            if name not in labels:
                columns[name] = columns.get(name, {}) | one
        rest = features.model_dump(mode="json") | {"columns": columns}
        if features.bucket_tables == "auto" and self.bucketed:
            rest["bucket_tables"] = True
        return {key: value for key, value in rest.items() if value != {}}

    def to_spec(self, given: PrepareSpec) -> JsonDict:
        """Return the values of `[data]` that leave nothing to guess, with what is `given`."""
        data: JsonDict = {} if self.labels else {"label": self.label}
        prepare = given.model_dump(mode="json", exclude_defaults=True) | {"format": self.format}
        if self.format != "criteo":
            data["dense_columns"] = list(self.dense)
            if self.format == "csv":
                prepare |= {"delimiter": self.delimiter, "header": self.has_header}
                if not self.has_header:
                    prepare["column_names"] = list(self.columns)
            prepare["sparse_columns"] = [column.source for column in self.read
                                         if not column.is_list and column.kind not in TIME_ROWS]
            if self.time_column:
                data["time_column"] = self.time_column
            units = {column.format for column in self.times} & {"s", "ms"}
            optional = {
                "list_columns": [column.source for column in self.sparse
                                 if column.is_list and not column.weights_of and not column.is_words],
                "hex_columns": [column.source for column in self.sparse if column.kind == "hex"],
                "list_delimiter": self.list_delimiter if any(column.is_list for column in self.sparse) else "",
                "ignored_columns": list(self.ignored),
                "time_unit": units.pop() if len(units) == 1 else ""
            }
            prepare |= {key: value for key, value in optional.items() if value}
        return data | {"prepare": prepare}

    def _role(self, name: str, column: SparseColumn | None) -> str:
        if name in (self.label, *(label.name for label in self.labels)):
            return "label"
        if name in self.dense:
            return "dense"
        if column is None and (time := next((time for time in self.times if time.name == name), None)):
            return "time" + (f": {', '.join(time.features)}" if time.features else "")
        if column is None:
            return "ignored"
        if column.weights_of:
            others = [one.weights_of for one in self.sparse if one.weights_of and one.source == name]
            return f"weights of the ids of {', '.join(others)}"
        if column.is_user:
            return "users"
        of = KINDS[column.kind]
        table = f", table {column.name}" if column.column else ""
        if column.is_words:
            return f"words of a text, at most {column.max_ids}{table}"
        return (f"list of {of}, at most {column.max_ids}" if column.is_list else of) + table
