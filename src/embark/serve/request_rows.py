"""Rows of a request to scores: read as JSON Lines are, by the transforms of the training data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embark.data.prepare.arrow.json_lines import json_array
from embark.data.prepare.arrow.row_parser import Location, RowParser
from embark.data.prepare.rows import RawRows
from embark.errors import DataError, EmbarkError, Fault, nearest
from embark.export.artifact import Artifact
from embark.serve.outputs import Row
from embark.serve.score_file import NOT_FINITE

if TYPE_CHECKING:
    from embark.serve.retrieve import Retriever

JsonRow = Mapping[str, Any]
_MAX_SHARED_BYTES = 64 << 20
OnRows = Callable[[Artifact, RawRows, Sequence[int]], None]  # Rows of a batch, and how many each request has of them.
_log = logging.getLogger("embark.serve")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the rows of a request."""

    scores: tuple[Row | None, ...]  # None of a row that cannot be read.
    errors: tuple[tuple[int, str], ...]  # Such rows, with the reason.
    version: int  # Of the artifact that gave all of them.


class RequestColumns(Protocol):
    """The cells of a request."""

    def __len__(self) -> int:
        """Its rows."""

    @property
    def names(self) -> Collection[str]:
        """Columns that a row has."""

    def column(self, name: str) -> Any:
        """Its cells, as an Arrow array; null where a row has none."""


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """A column for each tensor of a request."""

    num_rows: int
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return self.num_rows

    @property
    def names(self) -> Collection[str]:
        return self.columns.keys()

    def column(self, name: str) -> Any:
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Rows of JSON, which share the cells of `user` where they have none of their own."""

    rows: Sequence[JsonRow]
    user: JsonRow = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> Collection[str]:
        return set(self.user).union(*self.rows)

    def column(self, name: str) -> Any:
        if name not in self.user:
            return json_array([row.get(name) for row in self.rows])
        shared = json_array([self.user[name]])
        if shared.nbytes * len(self.rows) > _MAX_SHARED_BYTES:
            raise DataError(f"column {name!r} of 'user' is too long for {len(self.rows):,} rows", fix="shorten it")
        if any(name in row for row in self.rows):
            return json_array([row.get(name, self.user[name]) for row in self.rows])
        return shared.take(pa.array(np.zeros(len(self.rows), np.int32)))


class RequestScorer:
    """Reads each request on its own, so that what one contains changes no other, and scores them together."""

    def __init__(self, artifact: Artifact, score: Callable[[RawRows], NDArray[np.float32]]) -> None:
        self.artifact, rows = artifact, artifact.info.rows
        self.on_rows: OnRows | None = None
        self._parser, self._encoder, self._score = RowParser(rows.columns, rows.prepare), artifact.encoder, score
        self.retriever: Retriever | None = None  # Of a retrieval model.

    @property
    def columns(self) -> list[str]:
        """Those that the model takes."""
        return self._parser.columns

    def empty_request(self) -> RequestColumns:
        """One row without a value."""
        return JsonColumns([dict.fromkeys(self.columns)])

    def score(self, requests: Sequence[RequestColumns]) -> list[Scores | EmbarkError]:
        """Of each request its scores, or why it has none."""
        parsed = [self.parse(rows) for rows in requests]
        read = [found for found in parsed if isinstance(found, RawRows) and len(found)]
        scores = iter(self._split_scores(read) if read else ())
        version = self.artifact.version
        return [found if isinstance(found, EmbarkError) else
                _scores(len(rows), found, next(scores) if len(found) else np.empty(0, np.float32), version)
                for rows, found in zip(requests, parsed, strict=True)]

    def _split_scores(self, read: Sequence[RawRows]) -> list[NDArray[np.float32]]:
        raw, num_rows = RawRows.join(read), [len(one) for one in read]
        if self.on_rows:
            self.on_rows(self.artifact, raw, num_rows)  # before the encoder changes the dense values
        return np.split(self._score(raw), np.cumsum(num_rows)[:-1])

    def parse(self, rows: RequestColumns) -> RawRows | EmbarkError:
        """Its readable rows, or why there are none."""
        given = rows.names
        if lacking := [name for name in self.columns if name not in given]:
            return DataError(f"no row has column {lacking[0]!r}, which the model takes",
                             fix=nearest(lacking[0], sorted(given)))
        numbers = np.arange(len(rows))
        try:
            raw = self._parser.parse(rows.column, Location(numbers, numbers, len(rows)), "the request")
            return self._encoder.readable(raw)
        except EmbarkError as error:
            return error
        except UnicodeEncodeError:
            return DataError("a text is not valid Unicode: it has a lone surrogate", fix="send UTF-8")
        except Exception:  # of this request alone
            _log.exception("a request cannot be read")
            return Fault("internal error")


def _scores(num_rows: int, raw: RawRows, scores: NDArray[np.float32], version: int) -> Scores:
    found: list[Row | None] = [None] * num_rows
    quoted = {bad.line: bad.why for bad in raw.bad}
    for position, score in zip(raw.positions.tolist(), scores.tolist(), strict=True):
        if isinstance(score, list):
            score = tuple(score)
        if all(map(math.isfinite, score)) if isinstance(score, tuple) else math.isfinite(score):
            found[position] = score
        else:
            quoted[position] = NOT_FINITE
    unquoted = "; ".join(raw.reasons)
    return Scores(tuple(found), tuple((row, quoted.get(row, unquoted)) for row, score in enumerate(found)
                                      if score is None), version)
