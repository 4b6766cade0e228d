"""Columns out of a CSV, Parquet or NPZ file, as arrays of numbers; what they must hold is for the caller to check."""

from __future__ import annotations

import csv
import glob
import itertools
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embark.errors import DataError, MissingPackage, nearest

SUFFIXES = (".csv", ".parquet", ".npz")
_CSV_ROWS_AT_A_TIME = 20_000
_INTEGERS_FIX = "ids are integers from 0 up: number the values first, one number for each distinct value"
_NUMBERS_FIX = "the label and the dense columns are numbers; make a column of words a table"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A column to read."""

    name: str
    kind: Literal["number", "ids"]
    may_be_empty: bool = False
    """Of a CSV cell of ids: no text means no ids."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A column as it stands in the file."""

    values: NDArray[Any]
    """float64 of a number; integers of ids, all rows' one behind the other."""
    lengths: NDArray[np.int64] | None = None
    """How many ids each row has, where that may differ from 1."""

    @property
    def num_rows(self) -> int:
        """Of the file."""
        return len(self.values if self.lengths is None else self.lengths)


def read_columns(path: Path, wanted: Sequence[Wanted]) -> list[Cells]:
    """The wanted columns in the order asked for, all of the same number of rows, at least one.

    A folder or a glob means all its Parquet files, in order of their names, one behind the other.
    """
    if path.is_dir() or (not path.exists() and glob.has_magic(str(path))):
        return _read_many(path, wanted)
    if not path.is_file():
        raise DataError(f"{path}: no such file", fix="data.path is looked up from the directory the run starts in")
    readers = {".csv": _read_csv, ".parquet": _read_parquet, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: files that end in {path.suffix!r} are not read", fix="one of: " + ", ".join(SUFFIXES))
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    columns = reader(path, wanted)
    counts = {column.num_rows for column in columns}
    if counts == {0}:
        raise DataError(f"{path}: has columns, but no rows")
    if len(counts) > 1:
        sizes = ", ".join(f"{w.name} {c.num_rows}" for w, c in zip(wanted, columns, strict=True))
        raise DataError(f"{path}: the columns differ in their number of rows: {sizes}")
    return columns


def _read_many(path: Path, wanted: Sequence[Wanted]) -> list[Cells]:
    """Such as NVTabular writes them; `_metadata` and `_file_list.txt` stand beside them and are not read."""
    found = path.glob("*.parquet") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file() and not file.name.startswith(("_", ".")))
    if not files:
        raise DataError(f"{path}: there is no Parquet file",
                        fix="data.path names a file, or a folder or a glob of .parquet files")
    if others := [file.name for file in files if file.suffix.lower() != ".parquet"]:
        raise DataError(f"{path}: {others[0]} is not Parquet; several files are read only of that",
                        fix="narrow the glob, such as *.parquet; or name the one file")
    columns = [_read_parquet(file, wanted) for file in files]
    joined = [_joined(list(parts)) for parts in zip(*columns, strict=True)]
    if not joined[0].num_rows:
        raise DataError(f"{path}: the files have columns, but no rows")
    return joined


def bad_cell(path: Path, column: str, row: int, what: str, fix: str = "") -> DataError:
    """Row 0 is the first below the header; people count from 1."""
    return DataError(f"{path}: column {column!r}, row {row + 1} of the data: {what}", fix=fix)


def _read_csv(path: Path, wanted: Sequence[Wanted]) -> list[Cells]:
    chunks: list[list[Cells]] = [[] for _ in wanted]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            at = [_position(path, header, w.name) for w in wanted]
            first_row = 0
            lines = (line for line in reader if line)
            while rows := list(itertools.islice(lines, _CSV_ROWS_AT_A_TIME)):
                for offset, row in enumerate(rows):
                    if len(row) != len(header):
                        raise DataError(
                            f"{path}: row {first_row + offset + 1} of the data has {len(row)} fields, "
                            f"the header has {len(header)}"
                        )
                for column, position, parsed in zip(wanted, at, chunks, strict=True):
                    texts = [row[position] for row in rows]
                    parsed.append(_parse_texts(path, column, texts, first_row))
                first_row += len(rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not CSV text in UTF-8: {error}") from error
    return [_joined(parts) for parts in chunks]


def _position(path: Path, names: Sequence[str], wanted: str) -> int:
    if wanted not in names:
        raise DataError(
            f"{path}: has no column {wanted!r}",
            fix=f"{nearest(wanted, names)} The sparse columns are named as the tables, "
            "the others by data.label and data.dense_columns",
        )
    if list(names).count(wanted) > 1:
        raise DataError(f"{path}: has {list(names).count(wanted)} columns named {wanted!r}", fix="rename all but one")
    return list(names).index(wanted)


def _parse_texts(path: Path, column: Wanted, texts: list[str], first_row: int) -> Cells:
    lengths: NDArray[np.int64] | None = None
    words = texts
    if column.kind == "ids" and (column.may_be_empty or any("|" in t or " " in t.strip() for t in texts)):
        lists = [text.replace("|", " ").split() for text in texts]
        lengths = np.array([len(ids) for ids in lists], np.int64)
        words = list(itertools.chain.from_iterable(lists))
    try:
        if lengths is not None and not column.may_be_empty and not lengths.all():
            raise ValueError
        return Cells(_parsed(column, words), lengths)
    except (ValueError, OverflowError) as error:
        raise _explain_texts(path, column, texts, first_row) from error


def _parsed(column: Wanted, words: list[str]) -> NDArray[Any]:
    if column.kind == "number":
        return np.fromiter(map(float, words), np.float64, len(words))
    return np.fromiter(map(int, words), np.int64, len(words))


def _explain_texts(path: Path, column: Wanted, texts: Iterable[str], first_row: int) -> DataError:
    """The first cell that does not parse."""
    for offset, text in enumerate(texts):
        row = first_row + offset
        if not text.strip():
            if not column.may_be_empty:
                return bad_cell(path, column.name, row, "is empty", "drop the row, or fill the value in")
            continue
        for word in text.replace("|", " ").split() if column.kind == "ids" else [text]:
            try:
                _parsed(column, [word])
            except ValueError:
                kind, fix = ("a number", _NUMBERS_FIX) if column.kind == "number" else ("an integer", _INTEGERS_FIX)
                return bad_cell(path, column.name, row, f"{word.strip()!r} is not {kind}", fix)
            except OverflowError:
                return bad_cell(path, column.name, row, f"{word} does not fit in 64 bits", _INTEGERS_FIX)
    return DataError(f"{path}: column {column.name!r} cannot be read")


def _joined(parts: list[Cells]) -> Cells:
    if not parts:
        return Cells(np.zeros(0))
    values = np.concatenate([part.values for part in parts])
    if all(part.lengths is None for part in parts):
        return Cells(values)
    lengths = [np.ones(p.num_rows, np.int64) if p.lengths is None else p.lengths for p in parts]
    return Cells(values, np.concatenate(lengths))


def _read_npz(path: Path, wanted: Sequence[Wanted]) -> list[Cells]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            names = list(arrays.files)
            loaded = [arrays[names[_position(path, names, w.name)]] for w in wanted]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise DataError(
            f"{path}: is not an NPZ file of plain arrays: {error}", fix="write it with numpy.savez, without objects"
        ) from error
    return [_array_cells(path, w, array) for w, array in zip(wanted, loaded, strict=True)]


def _array_cells(path: Path, column: Wanted, array: NDArray[Any]) -> Cells:
    kinds, what = ("biuf", "numbers") if column.kind == "number" else ("iu", "integers")
    if array.dtype.kind not in kinds:
        raise DataError(
            f"{path}: column {column.name!r} holds {array.dtype} and must hold {what}",
            fix=_INTEGERS_FIX if column.kind == "ids" else _NUMBERS_FIX,
        )
    if array.ndim == 2 and column.kind == "ids":
        return Cells(array.reshape(-1), np.full(array.shape[0], array.shape[1], np.int64))
    if array.ndim != 1:
        most = "1 or 2 dimensions (rows, ids)" if column.kind == "ids" else "1 dimension"
        raise DataError(f"{path}: column {column.name!r} has {array.ndim} dimensions and must have {most}")
    return Cells(array.astype(np.float64) if column.kind == "number" else array)


def _read_parquet(path: Path, wanted: Sequence[Wanted]) -> list[Cells]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(f"{path}: pyarrow reads Parquet", fix='pip install "embark-rec[columns]"') from error
    try:
        names = pyarrow.parquet.read_schema(path).names
        for column in wanted:
            _position(path, names, column.name)
        table = pyarrow.parquet.read_table(path, columns=list(dict.fromkeys(w.name for w in wanted)))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a Parquet file that can be read: {error}") from error
    return [_arrow_cells(path, column, table.column(column.name).combine_chunks()) for column in wanted]


def _arrow_cells(path: Path, column: Wanted, array: Any) -> Cells:
    import pyarrow.compute as pc
    import pyarrow.types as types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise bad_cell(
            path, column.name, row, f"is null; nulls in the column: {array.null_count}",
            "drop those rows, or fill the values in",
        )
    is_list = types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type)
    if is_list and column.kind == "ids":
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = pc.list_flatten(array)
        if flat.null_count:
            position = pc.index(flat.is_null(), True).as_py()
            row = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            raise bad_cell(path, column.name, row, "a null stands among the ids", "leave it out of the list")
        return Cells(_array_cells(path, column, _to_numpy(path, column, flat)).values, lengths)
    return _array_cells(path, column, _to_numpy(path, column, array))


def _to_numpy(path: Path, column: Wanted, array: Any) -> NDArray[Any]:
    import pyarrow.types as types

    if types.is_decimal(array.type) and column.kind == "number":
        array = array.cast("float64")
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        what, fix = ("numbers", _NUMBERS_FIX) if column.kind == "number" else ("integers", _INTEGERS_FIX)
        raise DataError(f"{path}: column {column.name!r} holds {array.type} and must hold {what}", fix=fix)
    result: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return result
