"""Rows of a request to scores: read as JSON Lines are, by the transforms of the training data."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embark.errors import DataError, EmbarkError, Fault
from embark.export.artifact import Artifact
from embark.export.outputs import Row
from embark.features.arrow.row_parser import Location, RowParser, json_array
from embark.features.rows import NumberRows, RawRows
from embark.values import JsonMap, frozen
from .score_file import NOT_FINITE

if TYPE_CHECKING:
    from embark.trainers.torch.scoring.open_model import ScoringModel
    from .retrieve import Retriever

JsonRow = JsonMap
_MAX_SHARED_BYTES = 64 << 20
OnRows = Callable[[Artifact, RawRows, Sequence[int]], None]  # Rows of a batch, and how many each request has of them.
_log = logging.getLogger("embark.serve")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scores of the rows of a request."""

    values: NDArray[np.float32]  # [n], or of several tasks [n, outputs of all]; NaN of a row without a score.
    errors: tuple[tuple[int, str], ...]  # Such rows, with the reason.
    version: int  # The version of the artifact that gave all of them.
    identity: str = ""

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and (self.scores, self.errors, self.version) == (
            other.scores, other.errors, other.version)

    @property
    def scores(self) -> tuple[Row | None, ...]:
        """The score of each row; None for a row without one."""
        rows: list[Row | None] = [tuple(row) for row in self.values.tolist()] if self.values.ndim == 2 else \
            self.values.tolist()
        for row, _ in self.errors:
            rows[row] = None
        return tuple(rows)


class RequestColumns(ABC):
    """The cells of a request."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The columns that a row has."""

    @abstractmethod
    def column(self, name: str, parser: RowParser) -> Any:
        """Return the cells of a column as an Arrow array, null where a row has none; as numpy's array if all of them
        are numbers and the parser takes them."""

    def numbers(self) -> NumberRows | None:
        """Return all cells, with keys; None if the columns must be read one by one."""
        return None


@frozen
class TensorColumns(RequestColumns):
    """A column for each tensor of a request."""

    num_rows: int
    columns: JsonMap
    shared: Collection[str] = ()  # Columns with a single value, which all rows share.

    @staticmethod
    def of(num_rows: Mapping[str, int], columns: JsonMap) -> TensorColumns:
        """Make columns that have as many rows as each other, or one row that all rows share."""
        most = max(num_rows.values(), default=0)
        shared = {name for name, num in num_rows.items() if num != most}
        if not num_rows or any(num_rows[name] != 1 for name in shared):
            raise ValueError("the inputs have no rows, or not the same number of rows")
        check_shared(sum(columns[name].nbytes for name in shared), most)
        return TensorColumns(most, columns, shared)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def names(self) -> Collection[str]:
        return self.columns.keys()

    def column(self, name: str, parser: RowParser) -> Any:
        found = self.columns[name]
        return repeated(found, self.num_rows) if name in self.shared else found

@frozen
class JsonColumns(RequestColumns):
    """Rows of JSON; a row without a cell of its own has that of `user`."""

    rows: Sequence[JsonRow]
    user: JsonRow = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> Collection[str]:
        return set(self.user).union(*self.rows)

    def column(self, name: str, parser: RowParser) -> Any:
        if name not in self.user:
            return _cells([row.get(name) for row in self.rows], name, parser)
        if any(name in row for row in self.rows):
            return _cells([row.get(name, self.user[name]) for row in self.rows], name, parser)
        return repeated(_cells([self.user[name]], name, parser), len(self.rows))

@frozen
class JoinedColumns(RequestColumns):
    """The rows of several requests."""

    requests: Sequence[RequestColumns]

    def __len__(self) -> int:
        return sum(map(len, self.requests))

    @property
    def names(self) -> Collection[str]:
        return self.requests[0].names

    def column(self, name: str, parser: RowParser) -> Any:
        """Join the cells of a column; raise if the requests have cells of different types: one would be read as
        another is."""
        arrays = [request.column(name, parser) for request in self.requests]
        if isinstance(arrays[0], np.ndarray):
            if any(not isinstance(array, np.ndarray) or array.dtype != arrays[0].dtype for array in arrays):
                raise TypeError(name)
            return np.concatenate(arrays)
        if any(isinstance(array, np.ndarray) or array.type != arrays[0].type for array in arrays):
            raise TypeError(name)
        return pa.concat_arrays(arrays)

def _cells(values: Sequence[Any], name: str, parser: RowParser) -> Any:
    """Return numbers of JSON as numbers if the text they stand for would be read as the same."""
    kind = parser.number_columns.get(name)
    if kind and set(map(type, values)) <= ({int, float} if kind == "number" else {int}):
        with suppress(OverflowError):
            return np.array(values, np.float64 if kind == "number" else np.int64)
    return json_array(values, parser.split_cell, parser.decimals.get(name, ""))


def check_shared(num_bytes: int, num_rows: int) -> None:
    """Raise if the cells that all rows share are too long: each row gets a copy of them."""
    if num_bytes * num_rows > _MAX_SHARED_BYTES:
        raise ValueError(f"what all {num_rows:,} rows share has {num_bytes:,} bytes, which is too long for so many")


def repeated(cell: Any, num_rows: int) -> Any:
    """Repeat a cell that all rows share."""
    return np.repeat(cell, num_rows) if isinstance(cell, np.ndarray) else \
        cell.take(pa.array(np.zeros(num_rows, np.int32)))


class RequestScorer:
    """Reads and scores the requests of a batch together. What one contains changes no other: where they cannot be read
    together, or not all rows of a request can, each is read on its own."""

    def __init__(
        self, artifact: Artifact, score: Callable[[RawRows], NDArray[np.float32]], device: str = "CPU",
        score_numbers: Callable[[Sequence[NumberRows]], NDArray[np.float32]] | None = None,
    ) -> None:
        """Score on `device` by `score`. `score_numbers` scores rows of several requests, with ids."""
        self.artifact, self.device, rows = artifact, device, artifact.info.rows
        self._score_number_rows = score_numbers
        self.on_rows: OnRows | None = None
        self.parser, self._encoder, self._score = RowParser(rows.columns, rows.prepare), artifact.encoder, score
        self.retriever: Retriever | None = None  # Set for a retrieval model.
        self.model: ScoringModel | None = None  # The model behind `score`, if another version may be made of it.

    @property
    def columns(self) -> list[str]:
        """The columns that the model takes."""
        return self.parser.columns

    def empty_request(self) -> RequestColumns:
        """Return a request of one row without a value."""
        return JsonColumns([dict.fromkeys(self.columns)])

    def score(self, requests: Sequence[RequestColumns]) -> list[Scores | EmbarkError]:
        """Return the scores of each request, or why it has none."""
        if (scored := self._score_numbers(requests)) is not None:
            return scored
        whole, joined = self._parse_together(requests) if len(requests) > 1 else ([], None)
        alone = {number: self.parse(rows) for number, rows in enumerate(requests) if number not in whole}
        several = [raw for raw in (joined, *alone.values()) if isinstance(raw, RawRows) and len(raw)]
        num_rows = [len(requests[number]) for number in whole] + [
            len(raw) for raw in alone.values() if isinstance(raw, RawRows) and len(raw)]
        scores, at = np.empty(0, np.float32), 0
        if several:
            together = RawRows.join(several)
            if self.on_rows:
                self.on_rows(self.artifact, together, num_rows)  # before the encoder changes the dense values
            scores = self._score(together)
        answers: dict[int, Scores | EmbarkError] = {}
        for number in (*whole, *alone):
            raw, rows = alone.get(number), requests[number]
            if isinstance(raw, EmbarkError):
                answers[number] = raw
                continue
            num = len(rows if raw is None else raw)
            answers[number] = _scores(len(rows), raw, scores[at : at + num], self.artifact)
            at += num
        return [answers[number] for number in range(len(requests))]

    def _score_numbers(self, requests: Sequence[RequestColumns]) -> list[Scores | EmbarkError] | None:
        """Score without a step for each column; None unless all cells of all requests are numbers that can be read."""
        score, read = self._score_number_rows, []
        for one in requests if score else ():
            rows = one.numbers()
            if rows is None or not self._encoder.are_readable(rows):
                return None
            read.append(rows)
        if score is None or not read:
            return None
        if self.on_rows:
            for rows in read:
                self.on_rows(self.artifact, rows.to_raw(), [len(rows)])
        scores, ends = score([self._encoder.encode_numbers(rows) for rows in read]), np.cumsum([0, *map(len, read)])
        return [_scores(len(rows), None, scores[end - len(rows) : end], self.artifact)
                for rows, end in zip(read, ends[1:].tolist(), strict=True)]

    def _parse_together(self, requests: Sequence[RequestColumns]) -> tuple[list[int], RawRows | None]:
        """Return the requests of which all rows can be read, and these rows."""
        numbers = [number for number, rows in enumerate(requests) if not self._lacking(rows)]
        try:
            raw = self._rows(JoinedColumns([requests[number] for number in numbers]))
        except Exception:  # whose it is turns out when each is read on its own
            return [], None
        ends = np.cumsum([len(requests[number]) for number in numbers])
        if len(raw) == ends[-1]:
            return numbers, raw
        nums = np.diff(np.searchsorted(raw.positions, ends), prepend=0)
        is_whole = nums == np.diff(ends, prepend=0)
        whole = [number for number, is_read in zip(numbers, is_whole, strict=True) if is_read]
        return whole, raw.select(np.repeat(is_whole, nums))

    def _rows(self, rows: RequestColumns) -> RawRows:
        numbers, parser = np.arange(len(rows)), self.parser
        return self._encoder.readable(parser.parse(
            lambda name: rows.column(name, parser), Location(numbers, numbers, len(rows)), "the request"))

    def _lacking(self, rows: RequestColumns) -> DataError | None:
        given = rows.names
        for name in self.columns:
            if name not in given:
                return DataError(f"no row has column {name!r}, which the model takes", "send it; null: missing")
        return None

    def parse(self, rows: RequestColumns) -> RawRows | EmbarkError:
        """Return the readable rows of a request, or why there are none."""
        try:
            return self._lacking(rows) or self._rows(rows)
        except EmbarkError as error:
            return error
        except UnicodeEncodeError:
            return DataError("a text is not valid Unicode: it has a lone surrogate", "send UTF-8")
        except Exception:  # of this request alone
            _log.exception("a request cannot be read")
            return Fault("internal error")


def _scores(num_rows: int, raw: RawRows | None, scores: NDArray[np.float32], artifact: Artifact) -> Scores:
    """Make the scores of a request; `raw` is None if every row was read."""
    is_finite = np.isfinite(scores)
    if len(scores) == num_rows and is_finite.all():
        return Scores(scores, (), artifact.version, artifact.identity)
    is_scored = is_finite if scores.ndim == 1 else is_finite.all(axis=1)
    positions = np.arange(num_rows) if raw is None else raw.positions
    values = np.full((num_rows, *scores.shape[1:]), np.nan, np.float32)
    values[positions[is_scored]] = scores[is_scored]
    whys = {} if raw is None else {bad.line: bad.why for bad in raw.bad}
    whys |= dict.fromkeys(positions[~is_scored].tolist(), NOT_FINITE)
    unquoted = "" if raw is None else "; ".join(raw.reasons)
    without = np.setdiff1d(np.arange(num_rows), positions[is_scored]).tolist()
    errors = tuple((row, whys.get(row, unquoted)) for row in without)
    return Scores(values, errors, artifact.version, artifact.identity)
