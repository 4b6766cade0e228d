"""`[data]`: the training samples, with `[data.prepare]` and `[data.interactions]`."""

from __future__ import annotations

import codecs
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from embark.errors import Mistakes, conflict
from .section import Names, NonNegativeInt, PositiveInt, Section
from .user_code import CUSTOM_KIND, is_custom

if TYPE_CHECKING:
    from .run import RunSpec


class InteractionsSpec(Section):
    """`[data.interactions]`: a log with a row for each item that a user chose."""

    user: str = "user"
    """The column with the user: whole numbers or text."""
    item: str = "item"
    """The column with the item: text, or with `data.kind = "interactions"` its row in the history's table."""
    column_names: Names = ()
    """`data.kind = "interactions"`: the columns of a text file without a header, such as `["user", "item"]`."""
    delimiter: str = Field(default="", max_length=1)
    """`data.kind = "interactions"`: field delimiter of text files; empty: detected: tab, comma, semicolon or space."""
    max_length: PositiveInt = Field(default=50, le=2**20)
    """Prepared logs, where `[model]` has no tables: items of a history that the model reads, the newest ones."""
    num_negatives: PositiveInt = Field(default=128, le=100_000)
    """Prepared logs, where `[model]` has no tables: items that each next item is told from in training."""
    negatives: Literal["uniform", "frequency", "in_batch"] = "uniform"
    """Items that training tells the next one from. `uniform`: items that the user did not choose, all equally likely.
    `frequency`: such items, as likely as they are frequent. `in_batch`: items of the batch, which need no further
    lookups; those that the user's own history has do not count. The last two subtract the logarithm of an item's
    frequency from its score in training, so that frequent items are not pushed down for being negatives more often."""
    num_eval_negatives: PositiveInt = Field(default=100, le=100_000)
    """Items that the user did not choose, among which an evaluation ranks the chosen one; drawn by `data.seed`."""


def is_of_log(spec: RunSpec) -> bool:
    """Tell whether `embark data prepare` makes sequences of a log, and not a sample of each row."""
    data, model = spec.data, spec.model
    is_next_item = model.kind in ("sasrec", "hstu") and not model.sequence.candidate and not data.prepare.list_columns
    return data.kind == "prepared" and (
        is_next_item or data.prepare.split == "last" or data.interactions != InteractionsSpec())


def interactions_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of `[data.interactions]` with the model and with how the data is prepared."""
    data, model = spec.data, spec.model
    if data.kind == "prepared" and is_of_log(spec):
        for field, value, fix in (("ids", "hash", 'leave it out: items have ids by frequency'),
                                  ("split", "file", 'use "last" or "time"')):
            if getattr(data.prepare, field) == value:
                yield conflict(f"data.prepare.{field}", value, "does not apply to a log of users and items", fix)
        return
    if data.kind != "interactions":
        if data.interactions != InteractionsSpec():
            yield conflict("data.interactions", "", f'has no effect while data.kind is "{data.kind}"', "leave it out")
        return
    if not model.sequence.is_next_item and not model.is_custom:
        yield conflict("data.kind", data.kind, f'gives sequences of items, and model.kind = "{model.kind}" does not '
                       "predict the next one", 'model.kind = "sasrec" or "hstu" with model.sequence.negatives')
    if model.sequence.times and not data.time_column:
        yield conflict("model.sequence.times", model.sequence.times, "the rows have no time",
                       "name their column in data.time_column")


def moment(text: str) -> datetime:
    """Parse a date or time of ISO 8601; without a zone it is in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is not an ISO 8601 date or time, such as 2024-05-31 or 2024-05-31T18:00:00Z") from None
    return found.replace(tzinfo=found.tzinfo or UTC)


def _checked_moment(text: str) -> str:
    if text:
        moment(text)
    return text


Moment = Annotated[str, BeforeValidator(lambda value: value.isoformat() if isinstance(value, date) else value),
                   AfterValidator(_checked_moment)]


_ASCII = bytes(range(128)) + b"\x1b$B!!~{!!~}"  # With what switches ISO 2022 and HZ to other characters.


def _checked_encoding(name: str) -> str:
    """Refuse encodings in which a byte of ASCII may be something else: fields and rows are cut at such bytes."""
    try:
        if _ASCII.decode(name) == _ASCII.decode():
            return codecs.lookup(name).name
    except (LookupError, UnicodeError):
        pass
    raise ValueError('is no encoding that contains ASCII, such as "latin-1", "cp1252" or "gb18030"; convert the file '
                     f"with: iconv -f {name} -t utf-8 FILE > converted.csv")


class PrepareSpec(Section):
    """`[data.prepare]`: what `embark data prepare` reads, and how. The output goes to `data.path`."""

    input: Annotated[str, Field(min_length=1)] | Names = ()
    """Files to read: a path, a glob or a list of them, local or `s3://`, `gs://`, `az://`; `.gz` too. A folder is its
    data files, its folders `column=value` of Parquet files, or a Delta table (`clicks`, `clicks#version=12`).
    An Iceberg table is `iceberg://CATALOG/NAMESPACE.TABLE` or a metadata file, with `#snapshot=NUMBER` or `#ref=NAME`.
    Relative paths go by the spec's own folder; given with `--set`, by the current directory."""
    format: Literal["auto", "criteo", "csv", "jsonl", "parquet"] = "auto"
    """`criteo`: label, 13 integers, 26 hexadecimal ids, tab-separated, no header. `csv`: any delimited text.
    `jsonl`: JSON Lines, one object per line."""
    delimiter: str = Field(default="", max_length=4)
    """Field delimiter of text files; empty: detected."""
    header: Literal["auto", True, False] = "auto"
    """Whether the first line of a text file names the columns."""
    column_names: Names = ()
    """Column names for files without a header; default `column_0`, `column_1`, …"""
    list_delimiter: str = Field(default="", max_length=4)
    """Delimiter between the values of a multi-valued cell; empty: detected, `|` or `;`."""
    encoding: Annotated[str, AfterValidator(_checked_encoding)] = "utf-8"
    """Encoding of delimited text, such as `latin-1`, `cp1252` or `gb18030`; JSON Lines are always in UTF-8."""
    label_above: float | None = None
    """Threshold for the label: 1 where the column is larger, such as a rating above 3. Without it or `label_is` the
    label column holds 0 or 1, `true` or `false`, `yes` or `no`."""
    label_is: Annotated[str, Field(min_length=1)] | Names = ()
    """The text, or a list of texts, for which the label is 1, such as `">50K"`; it is 0 for any other."""
    sparse_columns: Names = ()
    """Columns that become tables, one id per row, of any type; detected if none are named."""
    list_columns: Names = ()
    """Columns that become tables, several ids per row: lists, or text split at `list_delimiter`."""
    hex_columns: Names = ()
    """Sparse columns that hold hexadecimal numbers."""
    ignored_columns: Names = ()
    """Columns to drop."""
    decimal: Literal["", ".", ","] = ""
    """Decimal sign of numbers in text, whose other sign may stand between thousands: `","` for `1.234,50`, `"."` for
    `1,234.50`. Empty: by the values of each column, if only one can be meant."""
    time_unit: Literal["auto", "s", "ms"] = "auto"
    """Unit of times that are numbers, counted from 1970; `auto`: seconds or milliseconds if all are of 1995 to 2039."""
    missing: Names = ("", "NA", "null", "NULL", "None", "nan", "NaN", "\\N")
    """Text that means no value, also with spaces around it. A missing number counts as the mean of its column, a
    missing id becomes id 0."""
    max_ids: PositiveInt = 32
    """Maximum ids per row of a multi-valued column that `[model]` does not name; longer lists keep their last ones, and
    are counted."""
    ids: Literal["auto", "frequency", "hash"] = "auto"
    """`frequency`: id 0 for rare and missing values, then by descending count. `hash`: modulo the table's rows.
    `auto`: `hash` if `[model]` gives the rows, else `frequency`."""
    min_count: PositiveInt | None = None
    """`frequency` only: values with fewer training rows share id 0. If left out, 3, or one of 500 training rows where
    those are fewer; 1 for logs, and for models of sequences or retrieval."""
    max_rows: PositiveInt = 40_000_000
    """`frequency` only: maximum rows of a table that `[model]` does not name."""
    id_map_from: str = ""
    """Earlier prepared data, a folder or its URI, whose ids keep their table rows here; new values get rows behind
    them, up to `max_rows`. Tables, columns and the transforms of numbers are taken from it; of a log, the items. A
    relative path goes by the spec's own folder; given with `--set`, by the current directory."""
    dense_bits: Literal[16, 32] = 32
    """Width of a stored dense value."""
    split: Literal["fraction", "file", "time", "last"] = "fraction"
    """How rows are split: at random, by file (a day each), or by time, the newest being held out. Logs of users and
    items: `last`, the default, holds out each user's last item for testing and the one before it for validation;
    `time` the first item of each user in either period."""
    test_fraction: NonNegativeFloat = Field(default=0.0, lt=1)
    """`fraction` and `time`: share of rows in the test split, in addition to `data.eval_fraction` for validation."""
    validation_from: Moment = ""
    """`time` only: first moment of validation, such as `2024-05-31` or `2024-05-31T18:00:00Z`, in place of shares."""
    test_from: Moment = ""
    """`time` only: first moment of the test split; it follows `validation_from`."""
    validation_files: Names = ()
    """`file` only: names or globs of files for validation, such as `day_23`."""
    test_files: Names = ()
    """`file` only: names or globs of files for the test split."""
    max_bad_share: NonNegativeFloat = Field(default=0.001, le=1)
    """Unreadable rows are skipped, counted and reported; a larger share of them is an error."""
    executor: Literal["local", "ray"] = "local"
    """`local`: processes of this machine. `ray`: tasks of the Ray cluster that `RAY_ADDRESS` names; input and
    `data.path` are in an object store, or in folders that all its machines share."""
    memory_gb: PositiveFloat = 2.0
    """Memory limit for all worker processes together; with `ray`, for each task."""
    num_workers: NonNegativeInt = 0
    """Worker processes; 0: one per core, or fewer if `memory_gb` requires it. With `ray`, tasks at once; 0: as many as
    the cluster has cores and memory for."""

    omitted = ("encoding", "decimal", "label_is", "executor")


class DataSpec(Section):
    """The training samples. Sparse columns have the names of their tables."""

    kind: Literal["synthetic", "columns", "prepared", "interactions"] | \
        Annotated[str, Field(pattern=CUSTOM_KIND, max_length=200)] = "synthetic"
    """`synthetic`: drawn from a teacher model. `columns`: a CSV, JSON Lines or Parquet file, held in memory.
    `prepared`: the output of `embark data prepare` or `embark data make`. `interactions`: a log of users and items,
    held in memory; a sample is a user's items in order (docs/guides/sequences.md). `my_data:Source`: the class `Source`
    of `my_data.py` beside the spec, whose code is run (docs/start/custom-data.md)."""
    code: str = Field(default="", max_length=1_000_000)
    """The text of that file, which travels with the spec; read from the file if empty."""
    path: str = ""
    """`columns`: the file, or what else `data.prepare.input` may name. `prepared`: the folder, or its `s3://…` URI.
    For your own code: what it makes of it, or nothing. A relative path goes by the spec's own folder; given with
    `--set`, by the current directory."""
    label: str = "label"
    """`columns` and `[data.prepare]`: the column that holds 0 or 1. `columns` and `model.kind = "two_tower"`: may be
    empty, every row is a positive then."""
    dense_columns: Names = ()
    """`columns` and `[data.prepare]`: the dense columns, `model.num_dense` of them."""
    time_column: str = ""
    """The column that holds each row's date or time. `columns`: the newest rows are held out; `[data.prepare]`: if
    `split = "time"`; `interactions`: the order of a user's rows, instead of the file's."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """`columns` and `[data.prepare]`: share of rows held out for evaluation, selected by `data.seed` or by
    `data.time_column`."""
    eval_split: Literal["validation", "test"] = "validation"
    """`prepared`: the split to evaluate on. `interactions`: `test` is each user's last item, `validation` the one
    before it; neither is trained on."""
    shuffle: Literal["auto", "rows", "blocks", "none"] = "auto"
    """`prepared` only: shuffle each epoch by file, block of 32,768 rows and row (`rows`), by file and block (`blocks`,
    several times faster), or not at all. `auto`: `rows` up to 4 million rows, then `blocks`; `rows` for sequences."""
    cache_gb: PositiveFloat = 50.0
    """`prepared` from an object store only: size of the local disk cache."""
    cache_dir: str = ""
    """`prepared` from an object store only: location of that cache; empty: the user's cache directory."""
    on_bad_id: Literal["refuse", "clip"] = "refuse"
    """Ids outside their table: refuse to train, or clip to the last row. Either way they are counted and reported."""
    num_train_samples: PositiveInt = 1_000_000
    """Samples per epoch of `synthetic` data; for other data, what `embark plan` assumes if it cannot read them."""
    num_eval_samples: NonNegativeInt = 131_072
    """Samples held out for evaluation, of the same data."""
    zipf_exponent: float = Field(default=1.2, ge=0, le=4)
    """`synthetic` only: skew of the ids; 0 makes all equally likely."""
    signal: float = Field(default=1.0, ge=0, le=10)
    """`synthetic` only: strength of the teacher model; 0 makes the labels coin flips."""
    task_conflict: float = Field(default=0.0, ge=0, le=1)
    """`synthetic` only, with `[[model.tasks]]`: how little the tasks have in common. 0: one teacher model for all; 1:
    one for each. The logits of two tasks have a correlation of about 1 − `task_conflict`."""
    ragged: bool = False
    """`synthetic` only: draw 0 to `multi_hot` ids per sample instead of exactly `multi_hot`."""
    seed: NonNegativeInt = 1
    """The same seed gives the same samples in the same order, at any number of ranks."""
    prepare: PrepareSpec = PrepareSpec()
    interactions: InteractionsSpec = InteractionsSpec()

    omitted = ("task_conflict",)

    @property
    def is_custom(self) -> bool:
        """Whether the samples come from the user's own code."""
        return is_custom(self.kind)
