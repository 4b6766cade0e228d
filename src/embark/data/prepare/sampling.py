"""A look into the input before it is read: its format, delimiter, header and some rows, and what each column holds."""

from __future__ import annotations

import re
import shlex
import statistics
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from embark.errors import DataError
from embark.features.time_formats import common_formats
from embark.features.values import (
    GROUPED,
    INTEGER,
    ISO_PATTERNS,
    MEANINGS,
    NUMBER,
    TimeFormat,
    decimal_sign,
    json_line,
    json_object,
    meaning_of_format,
    time_formats,
)
from embark.spec import PrepareSpec
from embark.values import frozen
from .inputs import InputFile, Inputs
from .text_stream import BOM, fields_of, head, header_names, is_gzip

Format = Literal["criteo", "csv", "jsonl", "parquet"]
Type = Literal["text", "integer", "float", "boolean", "time", "list", "nested"]
Role = Literal["dense", "sparse", "list", "ignored"]
Kind = Literal["hex", "integer", "text"]

_HEAD_BYTES = 256 << 10
_MORE_BYTES = 128 << 10
_MAX_ROWS = 10_000
_DELIMITERS = (",", "\t", ";", "::", "|", "\x01", " ")  # The more common first.
CRITEO_COLUMNS = ("label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26)))
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "packed by zstd", b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz", b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16",
    b"ARROW1": "an Arrow file", b"ORC": "an ORC file"
}
_INTEGER = re.compile(INTEGER)
_NUMBER = re.compile(f"{NUMBER}|[+-]?inf(inity)?|nan", re.IGNORECASE)
_HEX_ID = re.compile(r"[0-9a-fA-F]{8}")
_NAME = re.compile(r"[A-Za-z_][\w .:/()-]*")
_CRITEO_LINE = re.compile(r"[01](\t(-?[0-9]+)?){13}(\t([0-9a-fA-F]{8})?){26}")  # Label, 13 integers, 26 ids.
_FEW = 50  # With no more distinct numbers than this, they rather name groups than measure amounts.
_MANY_ROWS = 100  # From this number of rows on, it is significant that no value repeats.
_LIST_SHARE = 0.05
_DENSE = 2  # Different integers that fill a range up to so many times as wide are numbers of rows.
_MANY_SHARE = 0.5
_SMALL = 200
_CONCENTRATED = 0.35  # Of the range; for ids it is a half.
_SKEW = 0.1
_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}")
USE_TIME = "features.columns.NAME.parts makes features of it, data.time_column splits by it"
WORDS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("column_words.toml").read_text(encoding="utf-8"))


@frozen
class Column:
    """A column of the sample."""

    name: str
    cells: tuple[str, ...]  # Text in order, without the missing ones; all values of lists.
    num_rows: int
    type: Type = "text"  # The type that the file declares; `text` if it declares none.

    @staticmethod
    def of(name: str, cells: Sequence[str], missing: Collection[str], kind: Type = "text") -> Column:
        """Make a column with one value in each row; values in `missing` count as empty."""
        there = tuple(cell for cell in cells if cell not in missing)
        return Column(name, there, len(cells), kind)


@frozen
class Sample:
    """Some rows of the input."""

    format: Format
    columns: tuple[Column, ...]
    delimiter: str = ""
    has_header: bool = False


def take_sample(
    prepare: PrepareSpec, known_names: Collection[str], inputs: Inputs, files: Sequence[InputFile]
) -> Sample:
    """Take some rows from the start of the first file, and from the middle and the end of the input. A
    delimiter that cuts the header into `known_names`, the names that the spec uses, is right."""
    empty = [file.uri for file in files if not file.size_bytes]
    if empty:
        raise DataError(f"{empty[0]}: the file is empty", "leave it out of data.prepare.input, or write it again")
    first = files[0]
    format = _format_of(prepare, inputs, first)
    if format == "parquet":
        from .readers import sample_parquet

        return Sample("parquet", sample_parquet(inputs, files, _MAX_ROWS, set(prepare.missing)))
    text = head(inputs, first, _HEAD_BYTES).removeprefix(BOM)
    if not text.strip():
        raise DataError(f"{first.uri}: has no rows", "data.prepare.input must name a file with at least one row")
    if prepare.format == "jsonl" or (prepare.format == "auto" and _is_json(first, text)):
        objects = [line for one in (text, *_more_text(inputs, files)) for line in one.splitlines()[:_MAX_ROWS]]
        return Sample("jsonl", _sample_json(prepare, first, objects))
    is_open = prepare.format == "auto" and prepare.delimiter in ("", "\t") and not prepare.column_names
    lines = text.decode(errors="replace").splitlines()[:100]
    num_criteo = sum(bool(_CRITEO_LINE.fullmatch(line)) for line in lines)
    has_names = {f"I{i}" for i in range(1, 14)} <= {*lines[0].split("\t")}
    is_criteo = is_open and prepare.header is not True and not has_names and num_criteo > 0.5 * len(lines)
    if format == "criteo" or is_criteo:
        rows = [row for row in (line.split("\t") for line in lines) if len(row) == len(CRITEO_COLUMNS)]
        return Sample("criteo", tuple(Column.of(name, [row[i] for row in rows], {""})
                                      for i, name in enumerate(CRITEO_COLUMNS)), "\t")
    return _sample_text(prepare, known_names, inputs, files, text)


def _format_of(prepare: PrepareSpec, inputs: Inputs, file: InputFile) -> Format:
    if file.table:
        return "parquet"
    start = inputs.read(file.uri, 0, 8)
    is_parquet = start.startswith(b"PAR1")
    is_called_so = file.name.lower().endswith((".parquet", ".pq"))
    if prepare.format == "parquet" or (prepare.format == "auto" and (is_parquet or is_called_so)):
        return "parquet"
    if is_parquet:
        raise DataError(f"{file.uri}: is a Parquet file", 'set data.prepare.format = "parquet", or leave it out')
    if what := next((what for magic, what in _NOT_TEXT.items() if start.startswith(magic)), ""):
        raise DataError(f"{file.uri}: is {what}, which is not read",
                        "make it UTF-8 text, plain or packed by gzip, or Parquet")
    return "criteo" if prepare.format == "criteo" else "csv"


def _sample_text(prepare: PrepareSpec, known_names: Collection[str], inputs: Inputs, files: Sequence[InputFile],
                 text: bytes) -> Sample:
    first = files[0]
    if prepare.encoding != "utf-8" and _is_utf8(text, prepare.encoding):
        raise DataError(f"{first.uri}: is UTF-8, and data.prepare.encoding says {prepare.encoding}",
                        "leave data.prepare.encoding out; rows to score are in the encoding of the training data, "
                            "or JSON Lines, which are always UTF-8")
    delimiter = prepare.delimiter or _guess_delimiter(first, text, prepare.encoding, known_names)
    rows = _complete_rows(text, delimiter, prepare.encoding, is_cut=len(text) >= _HEAD_BYTES - len(BOM))
    if not rows:
        raise DataError(f"{first.uri}: has no complete row in its first {len(text):,} bytes",
                        "say in data.prepare.delimiter what stands between the fields")
    has_header = _has_header(prepare, known_names, rows)
    if has_header and prepare.column_names:
        raise DataError("data.prepare.column_names is for files without a header, and data.prepare.header is true",
                        "leave one of them out")
    num_fields = len(rows[0]) if has_header else Counter(map(len, rows)).most_common(1)[0][0]
    names = header_names(rows[0]) if has_header else tuple(prepare.column_names)
    if not names:
        names = tuple(f"column_{i}" for i in range(num_fields))
    if len(names) != num_fields:
        raise DataError(f"{first.uri}: has {num_fields} fields a row between {delimiter!r}, and "
                        f"data.prepare.column_names has {len(names)} names", "name every column, in order")
    refuse_twins(first, names)
    if wrong := next((name for name in names if is_undecoded(name)), ""):
        raise DataError(f"{first.uri}: the name of column {readable(wrong)!r} is not {prepare.encoding}",
                        say_encoding(first))
    body = [row for row in (*rows[int(has_header) :], *_more_rows(inputs, files, delimiter, prepare.encoding))
            if len(row) == num_fields and (not has_header or header_names(row) != names)]
    if not body:
        raise DataError(f"{first.uri}: has columns, but no rows", "add at least one row below its header")
    missing = set(prepare.missing)
    columns = tuple(Column.of(name, [row[i].strip() for row in body], missing) for i, name in enumerate(names))
    return Sample("csv", columns, delimiter, has_header)


def _is_utf8(text: bytes, encoding: str) -> bool:
    """Return whether text is rather UTF-8 than of another encoding: several characters beyond ASCII, or one where
    each byte is a character."""
    try:
        words = text[: text.rfind(b"\n") + 1 or len(text)].decode()
    except UnicodeDecodeError:
        return False
    is_of_bytes = len(bytes(range(256)).decode(encoding, "replace")) == 256
    return sum(not word.isascii() for word in words) >= (1 if is_of_bytes else 4)


def is_undecoded(cell: str) -> bool:
    return not cell.isascii() and any("\udc80" <= letter <= "\udcff" for letter in cell)


def readable(cell: str) -> str:
    """Return text for people to read: what was not decoded becomes U+FFFD."""
    return "".join("\ufffd" if is_undecoded(letter) else letter for letter in cell) if is_undecoded(cell) else cell


def say_encoding(file: InputFile) -> str:
    """Return the fix for text in another encoding."""
    return ('if it is in Latin-1, set data.prepare.encoding = "latin-1"; or convert the file: iconv -f latin1 -t utf-8 '
            f"{file.name} > converted.csv")


def refuse_twins(file: InputFile, names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file.uri}: has two columns named " + ", ".join(map(repr, twice)), "rename one of them")


def _more_rows(
    inputs: Inputs, files: Sequence[InputFile], delimiter: str, encoding: str
) -> Iterator[list[str]]:
    for text in _more_text(inputs, files):
        yield from _complete_rows(text, delimiter, encoding, is_cut=True)


def _more_text(inputs: Inputs, files: Sequence[InputFile]) -> Iterator[bytes]:
    """Yield text from further on: rows at the start of a file are often of one kind."""
    for file in dict.fromkeys([files[0], files[len(files) // 2], files[-1]]):
        if is_gzip(inputs, file):
            if file is not files[0]:
                yield head(inputs, file, _MORE_BYTES).removeprefix(BOM)
            continue
        for start in (file.size_bytes // 2, file.size_bytes - _MORE_BYTES):
            if start > _HEAD_BYTES:
                # From the middle of a quoted field, or of a row; rows of a wrong length are dropped by the caller.
                yield inputs.read(file.uri, start, _MORE_BYTES).partition(b"\n")[2]


def _complete_rows(text: bytes, delimiter: str, encoding: str, *, is_cut: bool) -> list[list[str]]:
    rows = [row for row in fields_of(text, delimiter, encoding) if row]
    return rows[:-1] if is_cut and len(rows) > 1 else rows


def _guess_delimiter(file: InputFile, text: bytes, encoding: str, known_names: Collection[str]) -> str:
    """Find what cuts the header into the known names, else what cuts most rows into the same number of fields, and the
    most."""
    best: tuple[tuple[Any, ...], str] = ((), "")
    for rank, candidate in enumerate(_DELIMITERS):
        rows = _complete_rows(text, candidate, encoding, is_cut=len(text) >= _HEAD_BYTES - len(BOM))[:200]
        num_fields, count = Counter(map(len, rows)).most_common(1)[0] if rows else (0, 0)
        num_named = len(set(header_names(rows[0])) & set(known_names)) if rows else 0
        is_header = 1 < num_named == len(set(known_names))  # However many rows below it are broken.
        score = (num_named, candidate != " ", round(count / max(len(rows), 1), 1), num_fields, -rank)
        if (is_header or (num_fields > 1 and count >= 0.7 * len(rows))) and score > best[0]:
            best = score, candidate
    if not best[1]:
        raise DataError(f"{file.uri}: nothing cuts its rows into fields: tried comma, tab, ';', '::', '|' and space",
                        'say it: data.prepare.delimiter = "…"')
    return best[1]


def _has_header(prepare: PrepareSpec, known_names: Collection[str], rows: Sequence[Sequence[str]]) -> bool:
    if prepare.header != "auto":
        return bool(prepare.header)
    if prepare.column_names:
        return False
    first = [cell.strip() for cell in rows[0]]
    if set(first) & set(known_names):
        return True
    filled = [cell for cell in first if cell]
    if any(_NUMBER.fullmatch(cell) for cell in filled) or len(set(filled)) < len(filled):
        return False
    # Files that were joined repeat the header.
    others = [cells for row in rows[1:] if (cells := [cell.strip() for cell in row]) != first]
    below = [[cells[i] for cells in others if i < len(cells)] for i in range(len(first))]
    if any(cell in cells for cell, cells in zip(first, below, strict=True) if cell):
        return False
    has_numbers = any(cells and all(_NUMBER.fullmatch(c) for c in cells if c) and any(cells) for cells in below)
    return has_numbers or all(_NAME.fullmatch(cell) for cell in filled)


@frozen
class Judgement:
    """The role of a column and the reason for it."""

    role: Role
    why: str
    kind: Kind = "text"  # The parser of a sparse column or a list.


def judge(column: Column, list_delimiter: str) -> Judgement:
    """Judge the role of a column that the spec does not name."""
    cells = column.cells
    different = len(set(cells))
    seen = f"{different:,} different in {len(cells):,} rows checked"
    if column.type == "nested":
        return Judgement("ignored", "holds structures, which are not read")
    if column.type == "list":
        return Judgement("list", "the file says that it holds lists", kind_of(column))
    if not cells:
        return Judgement("ignored", f"empty in every row ({column.num_rows:,} checked)")
    format = _time_format(cells)
    if format in ISO_PATTERNS:
        return Judgement("ignored", f"holds {MEANINGS[format]}; {USE_TIME}")
    if column.type == "text" and (common := common_formats(cells, may_be_digits=False)):
        return Judgement("ignored", f"holds {' or '.join(map(meaning_of_format, common))}; " + (
            "say which in features.columns.NAME.time_format" if len(common) > 1 else USE_TIME))
    if column.type == "time" or all(_DATE.match(cell) for cell in cells):
        return Judgement("ignored", "holds times, but none that are read: 2024-05-31 and 2024-05-31T18:00:00Z are")
    share = sum(list_delimiter in cell for cell in cells) / len(cells)
    if column.type == "text" and share >= _LIST_SHARE:
        return Judgement("list", f"{list_delimiter!r} stands in {share:.0%} of its cells",
                         kind_of(column, list_delimiter))
    if len(cells) > 1 and all(map(_HEX_ID.fullmatch, cells)) and not all(map(str.isdigit, cells)):
        return Judgement("sparse", "holds hexadecimal numbers of 8 digits", "hex")
    if all(map(_INTEGER.fullmatch, cells)):
        return _judge_integers(column, different, seen)
    if all(map(_NUMBER.fullmatch, cells)):
        return Judgement("dense", "holds numbers with fractions")
    if column.type == "text" and decimal_sign(cells):
        return Judgement("dense", f"holds numbers such as {next(cell for cell in cells if ',' in cell)}")
    if column.type == "text" and all(re.fullmatch(GROUPED[","], cell) for cell in cells):
        return Judgement("sparse", f"holds words, {seen}; if these are numbers, say their data.prepare.decimal", "text")
    if different == len(cells) >= _MANY_ROWS:
        return Judgement("ignored", f"different text in every row ({len(cells):,} checked)")
    return Judgement("sparse", f"holds words, {seen}", "text")


def _time_format(cells: Sequence[str]) -> TimeFormat | None:
    """Return the one format of times that all cells have."""
    formats = time_formats(cells)
    return next(iter(formats)) if len(formats) == 1 else None


def kind_of(column: Column, list_delimiter: str = "") -> Kind:
    """Return how the values of a sparse column are read; words can be anything."""
    cells = column.cells
    if list_delimiter:
        cells = tuple(value.strip() for cell in cells for value in cell.split(list_delimiter) if value.strip())
    if column.type in ("integer", "boolean"):
        return "integer"
    if column.type == "float":
        return "integer" if cells and all(float(cell).is_integer() for cell in cells) else "text"
    if cells and all(_INTEGER.fullmatch(cell) and not _has_leading_zero(cell) and len(cell) < 19 for cell in cells):
        return "integer"
    return "text"


def is_zero_one(column: Column) -> bool:
    """Return whether the column could be the label."""
    if column.type in ("list", "nested", "time") or not column.cells:
        return False
    return {cell.lower() for cell in column.cells} <= {"0", "1", "0.0", "1.0", "true", "false", "yes", "no"}


def list_delimiter_of(columns: Sequence[Column], named: Collection[str]) -> str:
    """Return `|` or `;`, whichever stands in the cells of `named` list columns or in a good share of any other's."""
    for delimiter in ("|", ";"):
        for column in columns:
            share = sum(delimiter in cell for cell in column.cells) / max(1, len(column.cells))
            if column.type == "text" and (share >= _LIST_SHARE or (share and column.name in named)):
                return delimiter
    return "|"


def _words_of(name: str) -> set[str]:
    """Return the words of a name: `userId`, `user_id` and `User ID` all have `user` and `id`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def find_called(columns: Sequence[Column], what: str) -> str:
    """Return the name of the column that is called most like `users`, `items` or `times`; empty if none is. The words
    of each are in falling order; `page_views` are no pages."""
    words, found = WORDS[what], []
    amounts = {*WORDS["amounts"]} - {"num", "number"} if what != "times" else set()
    for column in columns:
        own = _words_of(column.name)
        if amounts & own:
            continue
        if ranks := [words.index(word) for word in own | {word.removesuffix("id") for word in own} if word in words]:
            found.append(((min(ranks), not column.name.lower().endswith("id"), len(own)), column.name))
    return min(found, key=lambda one: one[0])[1] if found else ""


def holds_numbers(column: Column) -> bool:
    return column.type in ("integer", "float") or all(map(_NUMBER.fullmatch, column.cells))


def _judge_integers(column: Column, different: int, seen: str) -> Judgement:
    cells = column.cells
    words = _words_of(column.name)
    says_time, says_id, says_amount = (not words.isdisjoint(WORDS[what]) for what in ("times", "ids", "amounts"))
    if any(len(cell) > 40 or not -(2**63) <= int(cell) < 2**64 for cell in cells):
        return Judgement("sparse", f"holds integers of more than 64 bits, so they are names; {seen}", "text")
    if any(map(_has_leading_zero, cells)):
        return Judgement("sparse", f"holds digits with zeros in front, so they are names; {seen}", "text")
    values = [int(cell) for cell in cells]
    low, high = min(values), max(values)
    is_unique = different == len(cells) >= _MANY_ROWS
    if len(values) >= _MANY_ROWS and values[:_MANY_ROWS] == list(range(values[0], values[0] + _MANY_ROWS)):
        return Judgement("ignored", "numbers the rows")
    if is_unique and (not words.isdisjoint(WORDS["rows"]) or high - low < _DENSE * different):
        return Judgement("ignored", f"different number in every row ({len(cells):,} checked), of {low:,} to {high:,}: "
                                    "numbers the rows")
    says_part = not words.isdisjoint(WORDS["parts_of_times"])
    if (says_time or says_part) and len(common := common_formats(cells, may_be_digits=True)) == 1:
        return Judgement("ignored", f"holds {meaning_of_format(common[0])}; {USE_TIME}")
    if (says_time or (not says_id and different > 0.1 * len(cells))) and (format := _time_format(cells)):
        return Judgement("ignored", f"holds {MEANINGS[format]}; {USE_TIME}")
    if different <= _FEW and not (says_amount and different > 10):
        return Judgement("sparse", f"holds integers, only {seen}", "integer")
    if says_amount and words.isdisjoint(("id", "ids")):
        return Judgement("dense", f"holds integers from {low:,} to {high:,}, and its name says amounts")
    is_skewed = low < 0 or statistics.median(values) - low < _SKEW * (high - low)
    is_named_id = says_id or column.name.lower().endswith("id")
    if is_skewed and not is_named_id:
        return Judgement("dense", f"holds integers from {low:,} to {high:,}, most of them small: amounts")
    is_many = different >= _MANY_SHARE * len(cells)
    if (is_many or high - low < _SMALL) and not is_named_id and _is_concentrated(values):
        return Judgement("dense", f"holds integers from {low:,} to {high:,}, " + (
            f"{different / len(cells):.0%} of them different" if is_many else "small ones")
            + ", half of them close together: amounts")
    if is_unique:
        return Judgement("ignored", f"different number in every row ({len(cells):,} checked)")
    return Judgement("sparse", f"holds integers from {low:,} to {high:,}, {seen}: ids", "integer")


def _is_concentrated(values: Sequence[int]) -> bool:
    """Return whether the middle half lies in less of the range than that of ids, which are spread evenly."""
    first, _, last = statistics.quantiles(values, n=4)
    return last - first < _CONCENTRATED * (max(values) - min(values))


def _has_leading_zero(cell: str) -> bool:
    digits = cell.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0"


def _is_json(file: InputFile, text: bytes) -> bool:
    """Return whether the first line is a JSON object."""
    line = next((line for line in text.splitlines() if line.strip()), b"").strip()
    if line.startswith(b"[") and file.name.lower().removesuffix(".gz").endswith(".json"):
        raise DataError(f"{file.uri}: is one JSON array, which is not read",
                        f"write one object a line: jq -c '.[]' {shlex.quote(file.name)} > rows.jsonl")
    return line.startswith(b"{") and json_object(line) is not None


def _sample_json(prepare: PrepareSpec, file: InputFile, lines: Sequence[bytes]) -> tuple[Column, ...]:
    """Return the columns of some lines."""
    rows = [row for row in map(json_line, lines) if row is not None]
    if not rows:
        raise DataError(f"{file.uri}: none of its first {len(lines):,} lines is a JSON object",
                        "write one object a line, or set data.prepare.format")
    from .readers import sample_values

    names, missing = dict.fromkeys(name for row in rows for name in row), {"", *prepare.missing}
    return tuple(sample_values(name, [row.get(name) for row in rows], missing) for name in names)
