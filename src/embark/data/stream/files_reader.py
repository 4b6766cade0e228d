"""A folder or an object-store prefix that grows, read in the order of the files' names."""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from embark.data.stream.records import Message, Offset, Row
from embark.errors import DataError, EmbarkError, Fault
from embark.store import open_store
from embark.store.object_store import ObjectStore

KINDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".csv.gz", ".parquet")
AT_A_TIME = 1_000
LIST_EVERY_S = {"local": 0.2, "remote": 2.0}  # A listing of an object store is a request that is paid for.


class FilesReader:
    """Reads one partition: the rows of all files, a file after the other. An offset is a file's name and a row of it.
    A file is never read again, so it must appear whole and with a name behind the others'."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._store: ObjectStore = open_store(path)
        self._name, self._row = "", -1
        self._rows: Iterator[tuple[int, Row | bytes]] = iter(())
        self._waiting: list[str] = []
        self._listed_s = 0.0
        self._problem = self._nothing_new = ""

    def open(self, offsets: Mapping[str, Offset]) -> Sequence[str]:
        found = offsets.get("")
        if isinstance(found, list):
            self._nothing_new = "no new file"
            self._name, self._row = found
            self._rows = self._read(self._name, self._row + 1)
        return [""]

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        """Return the next rows; wait at most once for new files."""
        for _ in range(2):
            while True:
                if found := [Message([self._name, row], value) for row, value in islice(self._rows, AT_A_TIME)]:
                    return found
                if not self._waiting:
                    break
                self._name, self._nothing_new = self._waiting.pop(0), "no new file"
                self._rows = self._read(self._name, 0)
            self._list(timeout_s)
        return []

    def acknowledge(self, offsets: Mapping[str, Offset]) -> None:
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
            names = [entry.path for entry in self._store.list()]
            self._problem = ""
        except (Fault, OSError) as error:  # the store cannot be reached; the next listing may
            self._problem = str(error)
            return
        self._waiting = [name for name in sorted(names) if name > self._name and _is_data(name)]
        if not self._name:  # nothing was ever read: perhaps not what was meant
            is_there = "://" in self._path or Path(self._path).is_dir()
            others = f"no file with a name that ends with {', '.join(KINDS[:-1])} or {KINDS[-1]} among its {len(names)}"
            self._nothing_new = others if names else "no file yet" if is_there else "there is no such folder yet"

    def _read(self, name: str, first: int) -> Iterator[tuple[int, Row | bytes]]:
        try:
            data = self._store.read(name)
        except EmbarkError as error:
            raise DataError(f"{self._path}/{name}: {error.what}",
                            fix="the checkpoint needs the rows that follow its offset: put the file back") from None
        try:
            for number, row in enumerate(_rows(name, data)):
                if number >= first:
                    yield number, row
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}/{name}: cannot be read ({error})",
                            fix="write a file under another name and rename it when it is complete") from None


def read_records(path: str) -> Iterator[Row | bytes]:
    """Yield the records of a file, or of all files of a folder or a prefix, as they are now."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if _is_data(name):
        store, names = open_store(folder or "."), [name]
    else:
        store = open_store(path)
        names = sorted(entry.path for entry in store.list() if _is_data(entry.path))
    for one in names:
        try:
            yield from _rows(one, store.read(one))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {one} cannot be read ({error})", fix="JSON Lines, CSV or Parquet") from None


def _is_data(name: str) -> bool:
    return name.endswith(KINDS) and not any(part.startswith((".", "_")) for part in name.split("/"))


def _rows(name: str, data: bytes) -> Iterator[Row | bytes]:
    if name.endswith(".gz"):
        data, name = gzip.decompress(data), name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        yield from (line for line in data.splitlines() if line.strip())
        return
    import pyarrow as pa

    if name.endswith(".csv"):
        from pyarrow import csv

        header = data.partition(b"\n")[0].rstrip(b"\r").decode("utf-8-sig")
        names = next(csv.read_csv(io.BytesIO(header.encode() + b"\n")).column_names for _ in (0,))
        options = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        table = csv.read_csv(io.BytesIO(data), convert_options=options)
    else:
        from pyarrow import parquet

        table = parquet.read_table(io.BytesIO(data))
    for row in table.to_pylist():
        yield {column: _json_value(value) for column, value in row.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_value(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # as a preparation reads it, whatever the column is for
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
