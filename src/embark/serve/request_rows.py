"""Rows of a request to scores: read as JSON Lines are, by the transforms of the training data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.arrow.json_lines import json_column
from embark.data.prepare.arrow.row_parser import Location, RowParser
from embark.data.prepare.rows import RawRows
from embark.errors import DataError, EmbarkError, Fault, nearest
from embark.export.artifact import Artifact
from embark.serve.score_file import NOT_FINITE

JsonRow = Mapping[str, Any]
_log = logging.getLogger("embark.serve")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the rows of a request."""

    scores: tuple[float | None, ...]  # None of a row that cannot be read.
    errors: tuple[tuple[int, str], ...]  # Such rows, with the reason.


class RequestScorer:
    """Reads each request on its own, so that what one contains changes no other, and scores them together."""

    def __init__(self, artifact: Artifact, score: Callable[[RawRows], NDArray[np.float32]]) -> None:
        rows = artifact.info.rows
        self._parser, self._encoder, self._score = RowParser(rows.columns, rows.prepare), artifact.encoder, score

    @property
    def columns(self) -> list[str]:
        """Those that the model takes."""
        return self._parser.columns

    def score(self, requests: Sequence[Sequence[JsonRow]]) -> list[Scores | EmbarkError]:
        """Of each request its scores, or why it has none."""
        parsed = [self._parse(rows) for rows in requests]
        read = [found for found in parsed if isinstance(found, RawRows) and len(found)]
        scores = iter(np.split(self._score(RawRows.join(read)), np.cumsum([len(raw) for raw in read])[:-1])
                      if read else ())
        return [found if isinstance(found, EmbarkError) else
                _scores(len(rows), found, next(scores) if len(found) else np.empty(0, np.float32))
                for rows, found in zip(requests, parsed, strict=True)]

    def _parse(self, rows: Sequence[JsonRow]) -> RawRows | EmbarkError:
        given: set[str] = set().union(*rows)
        if lacking := [name for name in self.columns if name not in given]:
            return DataError(f"no row has column {lacking[0]!r}, which the model takes",
                             fix=nearest(lacking[0], sorted(given)))
        numbers = np.arange(len(rows))
        try:
            raw = self._parser.parse(partial(json_column, rows), Location(numbers, numbers, len(rows)), "the request")
            return self._encoder.readable(raw)
        except EmbarkError as error:
            return error
        except UnicodeEncodeError:
            return DataError("a text is not valid Unicode: it has a lone surrogate", fix="send UTF-8")
        except Exception:  # of this request alone
            _log.exception("a request cannot be read")
            return Fault("internal error")


def _scores(num_rows: int, raw: RawRows, scores: NDArray[np.float32]) -> Scores:
    found: list[float | None] = [None] * num_rows
    quoted = {bad.line: bad.why for bad in raw.bad}
    for position, score in zip(raw.positions.tolist(), scores.tolist(), strict=True):
        if math.isfinite(score):
            found[position] = score
        else:
            quoted[position] = NOT_FINITE
    unquoted = "; ".join(raw.reasons)
    return Scores(tuple(found), tuple((row, quoted.get(row, unquoted)) for row, score in enumerate(found)
                                      if score is None))
