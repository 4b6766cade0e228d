"""Which records can be trained on, and what becomes of the others: each is skipped, counted by reason, and some of them
are kept for people to look at."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embark.errors import EmbarkError
from embark.features.rows import RawRows
from embark.features.values import json_object
from embark.values import JsonDict, frozen
from .event_order import OrderSettings
from .records import Message, Row

MAX_RECORD_BYTES = 16 << 20
FIRST_LETTERS, LATER_LETTERS = 20, 1_000  # Of each reason the first records are kept, then one of so many.
MAX_LETTERS_BYTES = 1 << 20
_EXCERPT = 400
_SMALL_PIECES = 8  # With fewer rows a piece, parsing them again takes less time than joining the pieces.
_SCALARS = {str, int, float, bool, type(None)}
Parse = Callable[[list[Row]], RawRows]


class CheckedRow(JsonDict):
    """A row of a record with what it was parsed to, so that it is parsed once: row `index` of `raw`."""

    __slots__ = ("index", "raw")
    raw: RawRows
    index: int


class RowCheck:
    """Finds the records that cannot be trained on, before they have any effect on the others. The verdict on a record
    depends on that record alone, so every run over the same records skips the same ones."""

    def __init__(self, settings: OrderSettings, columns: Sequence[str], parse_rows: Parse, parse_labels: Parse) -> None:
        self._settings, self._rows, self._labels = settings, parse_rows, parse_labels
        self.columns = {*columns, settings.label, settings.time_column, settings.key} - {""}

    def check(self, messages: Sequence[Message]) -> list[Message]:
        """Return the records with a flat row of the columns that are needed, or with why they cannot be used."""
        checked = [message if message.why else self._flat(message) for message in messages]
        key, label = self._settings.key, self._settings.label
        rows: dict[int, Row] = {index: message.value for index, message in enumerate(checked)
                                if not message.why and isinstance(message.value, Mapping)}
        labels = {index: row for index, row in rows.items() if key and row.get(label) is not None}
        others = {index: {**row, label: 0} if key else row for index, row in rows.items() if index not in labels}
        for parse, some in ((self._rows, others), (self._labels, labels)):
            indexes = list(some)
            for number, why in find_bad(parse, list(some.values())).items():
                checked[indexes[number]] = replace(checked[indexes[number]], why=why)
        return checked

    def _flat(self, message: Message) -> Message:
        value = message.value
        if isinstance(value, bytes | str) and len(value) > MAX_RECORD_BYTES:
            return replace(message, why=f"larger than {MAX_RECORD_BYTES >> 20} MiB")
        if (row := json_object(value)) is None:
            return replace(message, why="not a JSON object")
        flat = CheckedRow(row if self.columns >= row.keys() else
                          {name: cell for name, cell in row.items() if name in self.columns})
        if not _SCALARS.issuperset(map(type, flat.values())):
            for name, cell in flat.items():
                if not _SCALARS.issuperset(map(type, cell if isinstance(cell, list) else (cell,))):
                    return replace(message, why=f"column {name!r}: a cell is no text, number or list of these")
        return Message(message.offset, flat, message.time_s)


def find_bad(parse: Parse, rows: list[Row]) -> dict[int, str]:
    """Return why rows cannot be used, by their indexes."""
    if not rows:
        return {}
    try:
        raw = parse(rows)
    except Exception as error:  # whatever one row does to the parser, the others are read
        if len(rows) == 1:
            return {0: _why(error)}
        half = len(rows) // 2
        return find_bad(parse, rows[:half]) | {
            half + index: why for index, why in find_bad(parse, rows[half:]).items()}
    good = raw.positions.tolist()
    kept = replace(raw, reasons={}, bad=())
    for index, row in enumerate(rows[number] for number in good):
        if isinstance(row, CheckedRow):
            row.raw, row.index = kept, index
    bad = sorted(set(range(len(rows))).difference(good))
    if len(rows) == 1 or len(raw.reasons) == 1:
        return dict.fromkeys(bad, next(iter(raw.reasons), ""))
    return {index: why for index in bad for why in find_bad(parse, [rows[index]]).values()}


def parsed(parse: Parse, rows: list[Row]) -> RawRows:
    """Return the rows as the check parsed them. Those that were joined with a label or are of a checkpoint were not;
    then all are parsed, without the ones that cannot be."""
    pieces: list[tuple[RawRows, list[int]]] = []
    for row in rows:
        if not isinstance(row, CheckedRow) or _SMALL_PIECES * len(pieces) > len(rows):
            pieces.clear()
            break
        if not pieces or pieces[-1][0] is not row.raw or pieces[-1][1][-1] >= row.index:
            pieces.append((row.raw, []))
        pieces[-1][1].append(row.index)
    if pieces:
        return RawRows.join([raw.select(np.isin(np.arange(len(raw)), indexes)) for raw, indexes in pieces])
    try:
        return parse(rows)
    except Exception:  # one row does this to the others
        bad = find_bad(parse, rows)
        return parse([row for index, row in enumerate(rows) if index not in bad])


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeError):
        return "text that is not Unicode"
    return error.what if isinstance(error, EmbarkError) else f"cannot be read ({type(error).__name__})"


@frozen
class DeadLetters:
    """A file with some of the records that were skipped. What cannot be written is left out: the file never fails a
    run."""

    path: Path

    def add(self, partition: str, message: Message, why: str, number: int) -> bool:
        """Keep a record, the `number`th that was skipped for this reason, unless enough of them are there; a run that
        reads it again after a restart keeps it once. Return whether it is of those that are kept."""
        if number > FIRST_LETTERS and number % LATER_LETTERS:
            return False
        offset = message.offset[:2] if isinstance(message.offset, list) else message.offset
        line = json.dumps({"partition": partition, "offset": offset, "reason": why, "number": number,
                           "excerpt": _excerpt(message.value)}).encode() + b"\n"
        with suppress(OSError):
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
            if line not in lines:
                lines.append(line)
                if sum(map(len, lines)) > MAX_LETTERS_BYTES:
                    del lines[: len(lines) // 2]
                part = self.path.with_suffix(".part")
                part.write_bytes(b"".join(lines))
                part.replace(self.path)
        return True


def _excerpt(value: Any) -> str:
    if isinstance(value, bytes):
        return value[:_EXCERPT].decode(errors="backslashreplace")
    try:
        return (value if isinstance(value, str) else json.dumps(value, default=repr))[:_EXCERPT]
    except (TypeError, ValueError, RecursionError):
        return ""
