"""`[data]`: what the model learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from embark.spec.section import Section

ColumnNames = Annotated[tuple[str, ...], Field(strict=False)]


class DataSpec(Section):
    """Where the samples come from. The sparse columns are the tables' names."""

    kind: Literal["synthetic", "columns"] = "synthetic"
    """`synthetic`: drawn from a hidden model. `columns`: a CSV, Parquet or NPZ file of yours."""
    path: str = ""
    """`columns` only: the file."""
    label: str = "label"
    """`columns` only: the column that holds 0 or 1."""
    dense_columns: ColumnNames = ()
    """`columns` only: the dense columns, `model.num_dense` of them."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """`columns` only: share of the rows held out for evaluation, chosen by `data.seed`."""
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
