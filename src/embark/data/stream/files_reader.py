"""A folder or an object-store prefix that grows, read in the order of the files' names."""

import csv
import gzip
import io
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from embark.errors import DataError, EmbarkError, Fault
from embark.features.values import json_object
from embark.store import NotFound, ObjectStore, open_store
from .records import Message, Offsets, Row

KINDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".csv.gz", ".parquet")
AT_A_TIME = 1_000
MAX_KNOWN = 1_000  # Files that are remembered, those with the last names.
LIST_EVERY_S = {"local": 0.2, "remote": 2.0}  # A listing of an object store is a request that is paid for.
_UNREAD = (-1, 0, 0)  # What is known of a file that could not be opened.
_PUT_BACK = "the checkpoint needs the rows that follow its offset: put the file back"
_Record = tuple[Row | bytes, str]  # What was read, and why it cannot be used, if it cannot.


class FilesReader:
    """Reads one partition: the rows of all files, a file after the other. An offset has the name of a file, a row of
    it, and what is known of the files: the size, the checksum and the number of rows of each of the last ones, and the
    name up to which all others were read. So a file that appears under an earlier name, or grows, is noticed."""

    def __init__(self, path: str, late_files: Literal["read", "report"] = "read") -> None:
        self._path, self._reads_late = path, late_files == "read"
        self._store: ObjectStore = open_store(path)
        self._floor = ""
        self._known: dict[str, Sequence[int]] = {}  # Never changed, since offsets contain it.
        self._items: deque[Message] = deque()
        self._waiting: list[str] = []
        self._listed_s = 0.0
        self._problem = self._nothing_new = ""

    def open(self, offsets: Offsets) -> Sequence[str]:
        found = offsets.get("")
        if isinstance(found, list):
            name, row, self._floor, self._known = found
            self._continue(name, row + 1)
        return [""]

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        """Return the next rows; wait at most once for new files."""
        for is_listed in (False, True):
            while self._waiting and not self._items and self._read_next():
                pass
            if self._items or is_listed:
                break
            self._list(timeout_s)
        return [self._items.popleft() for _ in range(min(AT_A_TIME, len(self._items)))]

    def acknowledge(self, offsets: Offsets) -> None:
        """Do nothing: the files stay."""

    def problem(self) -> str:
        return self._problem or f"{self._path}: {self._nothing_new}"

    def close(self) -> None: ...

    def _list(self, timeout_s: float) -> None:
        every_s = LIST_EVERY_S["remote" if "://" in self._path else "local"]
        if (rest_s := self._listed_s + every_s - time.monotonic()) > 0:
            time.sleep(min(rest_s, timeout_s))
            if rest_s > timeout_s:
                return
        self._listed_s = time.monotonic()
        try:
            entries = sorted(self._store.list(), key=lambda entry: entry.path)
            self._problem = ""
        except (Fault, OSError) as error:  # the store cannot be reached; the next listing may
            self._problem = str(error)
            return
        self._nothing_new = "no new file"
        if not self._known and not self._floor:  # nothing was ever read: perhaps not what was meant
            is_there = "://" in self._path or Path(self._path).is_dir()
            self._nothing_new = "no file yet" if is_there else "there is no such folder yet"
            if entries:
                self._nothing_new = (f"no file with a name that ends with {', '.join(KINDS[:-1])} or {KINDS[-1]} among "
                                     f"its {len(entries)}")
        self._waiting, newest = [], max(self._known, default=self._floor)
        for name, size in ((entry.path, entry.size_bytes) for entry in entries if _is_data(entry.path)):
            before = self._known.get(name)
            if (before is None and name <= self._floor) or (before and before[0] == size):
                continue
            num_rows = before[2] if before else -1
            if self._reads_late or name > newest or num_rows == 0:
                self._waiting.append(name)
            else:
                self._know(name, (size, 0, num_rows))
                self._report(name, "the file grew or changed after it was read" if before else
                             "the file appeared after one with a later name was read")

    def _read_next(self) -> bool:
        """Read the first file that waits; return False if the store cannot be reached."""
        name = self._waiting[0]
        before = self._known.get(name, _UNREAD)
        try:
            data = self._store.read(name)
        except Fault as error:
            self._problem = str(error)
            return False
        except EmbarkError:  # it vanished or may not be read; each listing tries it again
            if name not in self._known:
                self._know(name, _UNREAD)
                self._report(name, "the file vanished, or may not be read")
            self._waiting.pop(0)
            return True
        self._waiting.pop(0)
        rows, why = read_rows(name, data)
        self._know(name, (len(data), crc32(data), len(rows)))
        if before[2] and crc32(data[: before[0]]) != before[1]:
            self._report(name, "the file was rewritten after it was read")
        else:
            self._add(name, rows, before[2], why, data)
        return True

    def _continue(self, name: str, first: int) -> None:
        """Read the rest of the file in which the checkpoint is, as it was then."""
        size, checksum, num_rows = self._known.get(name, (None, None, None))
        try:
            data = self._store.read(name)[:size]
        except NotFound as error:
            if num_rows is None or first < num_rows:
                raise DataError(f"{self._path}/{name}: {error.what}", _PUT_BACK) from None
            return
        if num_rows is None or crc32(data) == checksum:
            rows, why = read_rows(name, data)
            self._add(name, rows, first, why, data)
        elif first < num_rows:
            raise DataError(f"{self._path}/{name}: was rewritten since the run's checkpoint", _PUT_BACK)

    def _know(self, name: str, file: Sequence[int]) -> None:
        self._known = {**self._known, name: file}
        if len(self._known) > MAX_KNOWN:
            oldest = min(self._known)
            self._floor = max(self._floor, oldest)
            del self._known[oldest]

    def _add(self, name: str, rows: Sequence[_Record], first: int, why: str, data: bytes) -> None:
        self._items.extend(Message([name, number, self._floor, self._known], value, why=bad)
                           for number, (value, bad) in enumerate(rows[first:], first))
        if why and first <= len(rows):
            self._items.append(Message([name, len(rows), self._floor, self._known], data[:1_000], why=why, file=name))

    def _report(self, name: str, why: str) -> None:
        """Add a record that stands for a file."""
        self._items.append(Message([name, self._known[name][2], self._floor, self._known], b"", why=why, file=name))


def read_records(path: str) -> Iterator[Row | bytes]:
    """Yield the records of a file, or of all files of a folder or a prefix, as they are now."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if _is_data(name):
        store, names = open_store(folder or "."), [name]
    else:
        store = open_store(path)
        names = sorted(entry.path for entry in store.list() if _is_data(entry.path))
    for one in names:
        rows, why = read_rows(one, store.read(one))
        if why and not rows:
            raise DataError(f"{path}: {one}: {why}", "JSON Lines, CSV or Parquet")
        yield from (value for value, _ in rows)
        if why:
            yield b""


def _is_data(name: str) -> bool:
    return name.endswith(KINDS) and not any(part.startswith((".", "_")) for part in name.split("/"))


def read_rows(name: str, data: bytes) -> tuple[list[_Record], str]:
    """Read the records of a file; return also why the rest of it cannot be read, if there is one."""
    try:
        if name.endswith(".gz"):
            data, name = gzip.decompress(data), name.removesuffix(".gz")
        if name.endswith(".parquet"):
            from pyarrow import parquet

            table = parquet.read_table(io.BytesIO(data))
            return [row for batch in table.to_batches() for row in _parquet_rows(batch)], ""
        lines = [line for line in data.splitlines() if line.strip()]
        rows: list[_Record] = [(line, "") for line in lines]
        if name.endswith(".csv"):
            rows = _csv_rows(lines)
    except Exception as error:  # whatever is wrong with a file, the next ones are read
        return [], f"the file cannot be read: {str(error).partition(chr(10))[0]:.200}"
    if rows and not data.endswith((b"\n", b"\r")) and (rows[-1][1] or json_object(rows[-1][0]) is None):
        return rows[:-1], "the file ends within a record"
    return rows, ""


def _csv_rows(lines: Sequence[bytes]) -> list[_Record]:
    """Read each line on its own, so that a quote that is not closed takes no other line with it."""
    csv.field_size_limit(1 << 30)
    cells = [next(csv.reader([line.decode("utf-8", "surrogateescape").replace("\0", "")])) for line in lines]
    names = [name.removeprefix("\ufeff") for name in cells[0]] if cells else []
    return [(dict(zip(names, row, strict=True)), "") if len(row) == len(names) else
            (line, f"its fields are {len(row)} instead of {len(names)}")
            for line, row in zip(lines[1:], cells[1:], strict=True)]


def _parquet_rows(batch: Any) -> list[_Record]:
    try:
        return [({column: _json_value(value) for column, value in row.items()}, "") for row in batch.to_pylist()]
    except Exception as error:  # a date that Python does not have, perhaps
        if batch.num_rows == 1:
            return [(b"", f"the row cannot be read ({type(error).__name__})")]
        half = batch.num_rows // 2
        return _parquet_rows(batch.slice(0, half)) + _parquet_rows(batch.slice(half))


def _json_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_value(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # as a preparation reads it, whatever the column is for
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
