"""The format "raw rows": whatever a file holds, it is read or refused in words; nothing is written elsewhere.

With EMBARK_FUZZ=200 in the environment each test tries so many inputs, each time others.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from embark.__main__ import run
from embark.data import open_source, resolve_from_data
from embark.errors import EmbarkError, ExitCode
from embark.spec import resolve

CODES = {int(code) for code in ExitCode}
NUM = int(os.environ.get("EMBARK_FUZZ", "0"))
fuzzed = settings(max_examples=NUM or 6, derandomize=not NUM, deadline=None, database=None,
                  suppress_health_check=list(HealthCheck))
BYTES = st.one_of(st.binary(max_size=64), st.sampled_from([
    b"", b"\xff" * 300, b"\0" * 300, b"[" * 100_000, b'{"a":' * 9_000, b"9" * 5_000, b"\n" * 10, "\ufeff".encode()]))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, beside one in which nothing may change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("precious")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here" / "cache"))
    yield tmp_path / "here"
    assert tree(tmp_path / "outside") == {"x": b"precious"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "outside"]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(spec: Any) -> None:
    """Every row of what the spec names, or an error of the tree."""
    with suppress(EmbarkError):
        source = open_source(resolve_from_data(spec))
        for start in range(0, min(source.num_train_samples, 256), 64):
            source.train_rows(0, start, min(start + 64, source.num_train_samples))
        if source.num_eval_samples:
            source.eval_rows(0, min(source.num_eval_samples, 64))


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut, overwritten or inserted into."""
    at = draw(st.integers(0, len(data)))
    end = min(len(data), at + draw(st.sampled_from([0, 1, 8, 1000])))
    return data[:at] + draw(BYTES) + (data[end:] if draw(st.integers(0, 3)) else b"")


CELLS = st.one_of(st.text(max_size=6), st.sampled_from(
    ["0", "1", "", "a", "-1", "9" * 30, "nan", "inf", '"', "1|2", "\0", "0x1", "1e400", "é", " 1"]))


@fuzzed
@example(rows=[["", "", ""]], ending="\n", name="rows.csv", odd=b"", is_odd=1)
@given(rows=st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=6), ending=st.sampled_from(["\n", "\r\n", "\r"]),
       name=st.sampled_from(["rows.csv", "rows.tsv", "rows.csv.gz"]), odd=BYTES, is_odd=st.integers(0, 4))
def test_any_text_of_rows_is_read_or_refused(place, rows, ending, name, odd, is_odd):
    text = ending.join(",".join(row) for row in [["label", "a", "d"], *rows]).encode("utf-8", "replace")
    data = text if is_odd else text + odd
    (place / name).write_bytes(data)
    assert read_columns(place, name) in CODES
    assert tree(place)[name] == data


TABLE = pa.table({"label": [0, 1, 1, 0], "a": [1, 2, 3, 4], "d": [0.5, 1.5, None, 2.5], "l": [[1], [], [2, 3], None]})


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(TABLE, sink)
    return bytes(sink.getvalue())


@fuzzed
@given(data=changed_bytes(parquet_bytes()))
def test_any_parquet_file_is_read_or_refused(place, data):
    (place / "rows.parquet").write_bytes(data)
    assert read_columns(place, "rows.parquet") in CODES
    assert tree(place)["rows.parquet"] == data


def read_columns(place: Path, name: str) -> int:
    """Read a file as columns, and return the exit code of its preparation."""
    read(resolve({"model": {"tables": [{"name": "a", "rows": 9}], "num_dense": 1}, "train": {"batch_size": 1},
                  "data": {"kind": "columns", "path": str(place / name), "dense_columns": ["d"]}}))
    return run(["data", "prepare", "laptop", "--dry-run", "--set", 'data.kind="prepared"', "--set", 'data.path="out"',
                "--set", f'data.prepare.input="{name}"', "-q"])
