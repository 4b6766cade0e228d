"""`[data]`: what the model learns from, and `[data.prepare]`: how raw files become it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from embark.spec.section import Section

Names = Annotated[tuple[str, ...], Field(strict=False)]


class PrepareSpec(Section):
    """`[data.prepare]`: what `embark data prepare` reads, and how. It writes to `data.path`."""

    input: Annotated[str, Field(min_length=1)] | Names = ()
    """Files to read: a path, a glob or a list of them, local or `s3://`, `gs://`, `az://`; `.gz` too."""
    format: Literal["auto", "criteo", "csv", "parquet"] = "auto"
    """`criteo`: label, 13 integers, 26 hexadecimal ids, tab-separated, no header. `csv`: any delimited text."""
    delimiter: str = Field(default="", max_length=4)
    """Between the fields of delimited text; guessed where it is empty."""
    header: bool | Literal["auto"] = "auto"
    """The first line of a text file names the columns."""
    column_names: Names = ()
    """Names of the columns where there is no header; else `column_0`, `column_1`, …"""
    list_delimiter: str = Field(default="|", min_length=1, max_length=4)
    """Between the values of a multi-valued cell of text."""
    label_above: float | None = None
    """The label is 1 where its column is larger than this, such as a rating above 3; else it holds 0 and 1."""
    sparse_columns: Names = ()
    """Columns that become tables, one id a row; guessed where none are named. Words, integers, anything."""
    list_columns: Names = ()
    """Columns that become tables, several ids a row: lists, or text cut at `list_delimiter`."""
    hex_columns: Names = ()
    """Those of them that hold hexadecimal numbers."""
    ignored_columns: Names = ()
    """Columns to leave out of the guess."""
    missing: Names = ("", "NA", "null", "NULL", "None", "nan", "NaN", "\\N")
    """Text that stands for no value. A missing dense value is 0, a missing id is id 0."""
    max_ids: PositiveInt = 32
    """The most ids one row keeps of a multi-valued column that is no table of `[model]`; more are cut and counted."""
    ids: Literal["auto", "frequency", "hash"] = "auto"
    """`frequency`: id 0 for rare and missing values, then by falling count. `hash`: modulo the table's rows.
    `auto`: `hash` where `[model]` gives the rows, else `frequency`."""
    min_count: PositiveInt = 1
    """`frequency` only: values seen less often in the training rows share id 0."""
    max_rows: PositiveInt = 40_000_000
    """`frequency` only: the most rows of a table that `[model]` does not give."""
    dense: Literal["auto", "mlperf", "log", "none"] = "auto"
    """`mlperf`: ln(x + 3), below −2 as −2. `log`: sign(x)·ln(1 + |x|). `auto`: `mlperf` for Criteo, else `log`."""
    dense_bits: Literal[16, 32] = 32
    """Width of a stored dense value."""
    split: Literal["fraction", "file", "column"] = "fraction"
    """What decides which rows train: chance, the file they are in (a day), or a column."""
    test_fraction: NonNegativeFloat = Field(default=0.0, lt=1)
    """`fraction` only: share of the rows for the test split, besides `data.eval_fraction` for validation."""
    validation_files: Names = ()
    """`file` only: names or globs of files for validation, such as `day_23`."""
    test_files: Names = ()
    """`file` only: names or globs of files for the test split."""
    split_column: str = ""
    """`column` only: the column that says `train`, `validation` (or `valid`, `val`, `eval`) or `test`."""
    max_bad_share: NonNegativeFloat = Field(default=0.001, le=1)
    """Rows that cannot be read are left out, counted and told; a larger share of them is refused."""
    memory_gb: PositiveFloat = 2.0
    """The most memory that all processes together take."""
    num_workers: NonNegativeInt = 0
    """Processes; 0: one for each core, or fewer where the memory is too little for that."""


class DataSpec(Section):
    """Where the samples come from. The sparse columns are the tables' names."""

    kind: Literal["synthetic", "columns", "prepared"] = "synthetic"
    """`synthetic`: drawn from a hidden model. `columns`: a CSV, Parquet or NPZ file of yours, held in memory.
    `prepared`: what `embark data prepare` or `embark data make` wrote."""
    path: str = ""
    """`columns`: the file, or a folder or glob of Parquet files. `prepared`: the folder, or its `s3://…` uri."""
    label: str = "label"
    """`columns` and `[data.prepare]`: the column that holds 0 or 1."""
    dense_columns: Names = ()
    """`columns` and `[data.prepare]`: the dense columns, `model.num_dense` of them."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """`columns` and `[data.prepare]`: share of the rows held out for evaluation, chosen by `data.seed`."""
    eval_split: Literal["validation", "test"] = "validation"
    """`prepared` only: the rows to evaluate on."""
    shuffle: Literal["auto", "rows", "blocks", "none"] = "auto"
    """`prepared` only: a new order each epoch of files, blocks of 32,768 rows and the rows in them (`rows`), of files
    and blocks (`blocks`, some times faster), or none. `auto`: `rows` up to 4 million rows, then `blocks`."""
    cache_gb: PositiveFloat = 50.0
    """`prepared` from an object store only: how much of it is kept on the local disk."""
    cache_dir: str = ""
    """`prepared` from an object store only: where; the user's cache directory where it is empty."""
    on_bad_id: Literal["refuse", "clip"] = "refuse"
    """An id outside its table: stop before training, or clip it to the last row. Both count and say."""
    num_train_samples: PositiveInt = 1_000_000
    """`synthetic` only: samples in one epoch."""
    num_eval_samples: NonNegativeInt = 131_072
    """`synthetic` only: samples held out for evaluation."""
    zipf_exponent: float = Field(default=1.2, ge=0, le=4)
    """`synthetic` only: how unequal the ids are; 0 makes all equally likely."""
    signal: float = Field(default=1.0, ge=0, le=10)
    """`synthetic` only: strength of the hidden model; 0 makes the labels coin flips."""
    ragged: bool = False
    """`synthetic` only: draw 0 to `multi_hot` ids a sample instead of exactly `multi_hot`."""
    seed: NonNegativeInt = 1
    """Same seed, same samples in the same order, at any number of ranks."""
    prepare: PrepareSpec = PrepareSpec()
