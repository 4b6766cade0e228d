"""Records and files that cannot be trained on, each of another form, for the model of `integration.faults.conftest`."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROW: dict[str, Any] = {"t": 1.7e9, "label": 1, "user": 7, "item": [1, 2], "shop": 3,
                       **{f"dense_{column}": 0.5 for column in range(4)}}


def changed(**cells: Any) -> bytes:
    return json.dumps({**ROW, **cells}).encode()


def lacking(name: str) -> bytes:
    return json.dumps({column: cell for column, cell in ROW.items() if column != name}).encode()


def in_text(name: str, text: str) -> bytes:
    """A record in which the cell is this text of JSON."""
    return json.dumps({**ROW, name: "HERE"}).replace('"HERE"', text).encode()


DEEP = 50_000
RECORDS: dict[str, bytes] = {
    "nothing": b"", "white space": b"\x0b", "a zero byte": b"\0", "random bytes": bytes(range(128, 256)),
    "not JSON": b"label=1 user=7", "HTML": b"<html>502 Bad Gateway</html>", "cut short": changed()[:-9],
    "two objects": changed() + changed(),
    "an object and more": changed() + b" x", "a comma too much": b'{"label": 1,}',
    "single quotes": b"{'label': 1}",
    "a list": b"[1, 2]", "a list of rows": b"[" + changed() + b"]", "a number": b"17",
    "a text": b'"label"', "null": b"null", "true": b"true", "an empty object": b"{}",
    "Latin-1": json.dumps({**ROW, "user": "café"}, ensure_ascii=False).encode("latin-1"),
    "UTF-8 cut short": b'{"user": "caf\xc3', "UTF-16 of nothing": b"\xff\xfe",
    "lists in lists": b"[" * DEEP + b"]" * DEEP, "objects in objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "lists in lists in a table": in_text("user", "[" * DEEP + "]" * DEEP),
    "lists 900 deep in a table": in_text("user", "[" * 900 + "]" * 900),
    "objects 900 deep in the time": in_text("t", '{"a":' * 900 + "1" + "}" * 900),
    "an integer of 5,000 digits": in_text("user", "7" * 5_000),
    "no time": lacking("t"), "no label": lacking("label"), "no table": lacking("user"),
    "no dense": lacking("dense_0"),
    "the time null": changed(t=None), "the time true": changed(t=True), "the time a word": changed(t="noon"),
    "the time a list": changed(t=[1.7e9]), "the time an object": changed(t={"s": 1.7e9}),
    "the time of 400 digits": in_text("t", "9" * 400), "the time of 400 digits as text": changed(t="9" * 400),
    "the time NaN": in_text("t", "NaN"), "the time infinite": in_text("t", "-Infinity"),
    "the time 1e999": in_text("t", "1e999"),
    "the year 1,000,000,000": changed(t=3.15e16), "the year 10,000": changed(t="10000-01-01"),
    "the month 13": changed(t="2024-13-01"), "a time before all others": changed(t=-5),
    "the year 1": changed(t="0001-01-01"),
    "a lone surrogate as time": in_text("t", r'"\ud800"'),
    "the label null": changed(label=None), "the label a list": changed(label=[1]), "the label 2": changed(label=2),
    "the label -1": changed(label=-1), "the label half": changed(label=0.5),
    "the label a word": changed(label="maybe"),
    "the label an object": changed(label={}), "the label NaN": in_text("label", "NaN"),
    "the label empty": changed(label=""),
    "a lone surrogate as label": in_text("label", r'"\udfff"'),
    "an id too large": changed(user=301), "an id negative": changed(user=-1),
    "an id of 400 digits": changed(user=10**400),
    "an id of 65 bits": changed(user=2**64), "an id half": changed(user=0.5), "an id a word": changed(user="u7"),
    "an id null": changed(user=None), "an id a list": changed(user=[7]), "an id an object": changed(user={"id": 7}),
    "an id infinite": in_text("user", "Infinity"), "a lone surrogate as id": in_text("user", r'"\ud800"'),
    "a list of words": changed(item=["a"]), "a list of lists": changed(item=[[1], [2]]),
    "a list of objects": changed(item=[{}]),
    "a list with an id too large": changed(item=[1, 100]),
    "a list as an object": changed(item={"0": 1}), "a lone surrogate in a list": in_text("item", r'["\ud800"]'),
    "a dense word": changed(dense_1="dear"), "a dense list": changed(dense_1=[0.5]),
    "a dense object": changed(dense_1={}),
    "a dense NaN": in_text("dense_1", "NaN"), "a dense infinity": in_text("dense_1", "1e999"),
    "a dense null": changed(dense_1=None),
    "a dense of 400 digits": changed(dense_1=10**400), "a dense beyond 32 bits": changed(dense_1=1e39),
    "a lone surrogate as dense": in_text("dense_1", r'"\ud800"'),
}
NO_LINES = {"nothing", "white space"}  # In a file there is nothing where these records are.
LARGE = changed(comment="x" * (17 << 20))


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


PACKED = gzip.compress(changed() + b"\n", mtime=0)
FILES: dict[str, bytes] = {  # By the ends of their names.
    "cut.jsonl.gz": PACKED[:-20], "tail.jsonl.gz": PACKED + b"garbage", "plain.jsonl.gz": changed() + b"\n",
    "checksum.jsonl.gz": PACKED[:-8] + bytes(8),
    "header.json.gz": b"\x1f\x8b", "broken.parquet": parquet_of([ROW])[:-9],
    "text.parquet": changed(), "magic.parquet": b"PAR1", "nothing.parquet": b"", "cut.csv.gz": PACKED[:15],
}
ODD_FILES: dict[str, tuple[bytes, int]] = {  # With the number of records in them, of which none can be used.
    "empty.jsonl": (b"", 0), "empty.csv": (b"", 0), "lines.jsonl": (b"\n\n\n", 0), "header.csv": (b"label,user\n", 0),
    "columns.csv": (b"a,b\n1,2\n3,4\n", 2), "ragged.csv": (b"label,user\n1\n1,2,3\n", 2),
    "zero.csv": (b"\0\n\0\n", 1),
    "latin.csv": ("label,user\n1,café\n".encode("latin-1"), 1), "quote.csv": (b'label,user\n1,"7\n1,8\n', 2),
    "columns.parquet": (parquet_of([{"a": 1}, {"a": 2}]), 2),
    "struct.parquet": (parquet_of([{**ROW, "user": {"a": 1}}]), 1),
    "within.jsonl": (changed()[:-5], 1),
}


def write_files(folder: Path, good: list[list[dict[str, Any]]]) -> int:
    """Write files of good rows, with those that cannot be read and a directory between them; return how many records
    and files cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    odd = [*((name, data, 1) for name, data in FILES.items()), *((name, *about) for name, about in ODD_FILES.items())]
    for number, (name, data, _) in enumerate(odd):
        (folder / f"{number % len(good):03d}-odd-{number:03d}-{name}").write_bytes(data)
    (folder / "000-folder.jsonl").mkdir()
    (folder / "000-link.jsonl").symlink_to("nowhere")
    for number, rows in enumerate(good):
        lines = [json.dumps(row).encode() for row in rows]
        bad = [record for name, record in RECORDS.items() if name not in NO_LINES]
        mixed = [line for at, row in enumerate(lines) for line in (row, bad[(at + 7 * number) % len(bad)])]
        (folder / f"{number:03d}.jsonl").write_bytes(b"".join(line + b"\n" for line in mixed))
    return sum(num for _, _, num in odd) + 1 + sum(map(len, good))
