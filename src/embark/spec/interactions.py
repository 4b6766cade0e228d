"""`[data.interactions]`: how a log of users and items is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from embark.errors import Mistake
from embark.spec.section import Section

if TYPE_CHECKING:
    from embark.spec.run import RunSpec

Names = Annotated[tuple[str, ...], Field(strict=False)]


class InteractionsSpec(Section):
    """`[data.interactions]`: a text, Parquet or NPZ file with a row for each item that a user chose."""

    user: str = "user"
    """The column with the user: whole numbers or text."""
    item: str = "item"
    """The column with the item: its row in the history's table, a whole number."""
    column_names: Names = ()
    """The columns of a text file without a header, such as `["user", "item"]`."""
    delimiter: str = Field(default="", max_length=1)
    """Field delimiter of text files; empty: detected: tab, comma, semicolon or space."""
    num_eval_negatives: PositiveInt = Field(default=100, le=100_000)
    """Items that the user did not choose, among which an evaluation ranks the chosen one; drawn by `data.seed`."""


def interactions_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Of `data.kind = "interactions"`."""
    data, model = spec.data, spec.model
    if data.kind != "interactions":
        if data.interactions != InteractionsSpec():
            yield _mistake("data.interactions", "", f'has no effect while data.kind is "{data.kind}"', "leave it out")
        return
    if not model.sequence.is_next_item and not model.is_own:
        yield _mistake("data.kind", data.kind, f'gives sequences of items, and model.kind = "{model.kind}" does not '
                       "predict the next one", 'model.kind = "sasrec" or "hstu" with model.sequence.negatives')
    if model.sequence.times and not data.time_column:
        yield _mistake("model.sequence.times", model.sequence.times, "the rows have no time",
                       "name their column in data.time_column")


def _mistake(field: str, value: object, what: str, fix: str) -> Mistake:
    return Mistake(where="", field=field, value=str(value), what=what, fix=fix)
