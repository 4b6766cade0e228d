"""Whatever a file holds, a command ends with a code of the table, in words, and writes nothing elsewhere.

Bounded here. With EMBARK_FUZZ=2000 in the environment each test tries so many inputs, each time others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_rows import RAGGED, make_prepared
from pyarrow import parquet

from embark.__main__ import run
from embark.data import open_source, resolve_from_data
from embark.errors import EmbarkError, ExitCode, UserError
from embark.spec import load_spec, resolve, to_toml
from embark.spec.toml import starter
from embark.store import ChecksumWriter, RunDir
from embark.store.checkpoint_arrays import INDEX, Index, unsharded, write_pieces

CODES = {int(code) for code in ExitCode}
NUM = int(os.environ.get("EMBARK_FUZZ", "0"))
fuzzed = settings(max_examples=NUM or 6, derandomize=not NUM, deadline=None, database=None,
                  suppress_health_check=list(HealthCheck))
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
PATHS = ("../outside/x", "/", "..", "a/../../outside/x", "", ".", "a\0b", "\ud800", "x" * 300, "outside/link")
HOSTILE = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 1e308, 0.5, float("nan"), [], {},
                     [[]], DEEP, {"a": DEEP}, *PATHS]),
    st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3),
)
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


def ends_in_words(*words: str) -> None:
    assert run([*words, "-q"]) in CODES


def read(spec: Any) -> None:
    """Every row of what the spec names, or an error of the tree."""
    with suppress(EmbarkError):
        source = open_source(resolve_from_data(spec))
        for start in range(0, min(source.num_train_samples, 256), 64):
            source.train_rows(0, start, min(start + 64, source.num_train_samples))
        if source.num_eval_samples:
            source.eval_rows(0, min(source.num_eval_samples, 64))


@st.composite
def changed_json(draw: st.DrawFn, value: Any) -> bytes:
    """The JSON with some values replaced or removed, as text; or other bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(BYTES)
    value = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        at: Any = value
        key: Any = ""
        while isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
            at = at[key]
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if draw(st.integers(0, 3)) or at is value:
            at[key] = copy.deepcopy(draw(HOSTILE))  # they may be changed further
        else:
            del at[key]
            if not at:
                break
    return json.dumps(value.get("")).encode()


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut, overwritten or inserted into."""
    at = draw(st.integers(0, len(data)))
    end = min(len(data), at + draw(st.sampled_from([0, 1, 8, 1000])))
    return data[:at] + draw(BYTES) + (data[end:] if draw(st.integers(0, 3)) else b"")


TOML = starter("laptop").encode()
FIELDS = [f"{section}.{name}" for section, fields in json.loads(load_spec("laptop").model_dump_json()).items()
          if isinstance(fields, dict) for name in fields]


@fuzzed
@given(text=changed_bytes(TOML), field=st.sampled_from(FIELDS), value=HOSTILE)
def test_any_spec_is_read_or_refused(place, text, field, value):
    (place / "run.toml").write_bytes(text)
    for source, sets in ((str(place / "run.toml"), ()), ("laptop", [f"{field}={value}"])):
        with suppress(UserError):
            to_toml(load_spec(source, sets))


CELLS = st.one_of(st.text(max_size=6), st.sampled_from(
    ["0", "1", "", "a", "-1", "9" * 30, "nan", "inf", '"', "1|2", "\0", "0x1", "1e400", "é", " 1"]))


@fuzzed
@given(rows=st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=6), ending=st.sampled_from(["\n", "\r\n", "\r"]),
       name=st.sampled_from(["rows.csv", "rows.tsv", "rows.csv.gz"]), odd=BYTES, is_odd=st.integers(0, 4))
def test_any_text_of_rows_is_read_or_refused(place, rows, ending, name, odd, is_odd):
    text = ending.join(",".join(row) for row in [["label", "a", "d"], *rows]).encode("utf-8", "replace")
    (place / name).write_bytes(text if is_odd else text + odd)
    read_columns(place, name)


TABLE = pa.table({"label": [0, 1, 1, 0], "a": [1, 2, 3, 4], "d": [0.5, 1.5, None, 2.5], "l": [[1], [], [2, 3], None]})


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(TABLE, sink)
    return bytes(sink.getvalue())


@fuzzed
@given(data=changed_bytes(parquet_bytes()))
def test_any_parquet_file_is_read_or_refused(place, data):
    (place / "rows.parquet").write_bytes(data)
    read_columns(place, "rows.parquet")


def read_columns(place: Path, name: str) -> None:
    read(resolve({"model": {"tables": [{"name": "a", "rows": 9}], "num_dense": 1}, "train": {"batch_size": 1},
                  "data": {"kind": "columns", "path": str(place / name), "dense_columns": ["d"]}}))
    ends_in_words("data", "prepare", "laptop", "--dry-run", "--set", 'data.kind="prepared"', "--set", 'data.path="out"',
                  "--set", f'data.prepare.input="{name}"')


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_prepared(tmp_path_factory.mktemp("prepared"), RAGGED, train=200, validation=70, test=10).path


@fuzzed
@given(data=st.data())
def test_any_prepared_data_is_read_or_refused(place, prepared, data):
    shutil.rmtree(place / "data", ignore_errors=True)
    shutil.copytree(prepared, place / "data")
    manifest = json.loads((prepared / "manifest.json").read_text())
    if data.draw(st.booleans()):
        (place / "data" / "manifest.json").write_bytes(data.draw(changed_json(manifest)))
    else:  # with its checksum right: forged, not damaged
        part = manifest["parts"]["train"][0]
        forged = data.draw(changed_bytes((prepared / part["file"]).read_bytes()))
        (place / "data" / part["file"]).write_bytes(forged)
        part |= {"bytes": len(forged), "sha256": hashlib.sha256(forged).hexdigest()}
        (place / "data" / "manifest.json").write_text(json.dumps(manifest))
    read(resolve({"data": {"kind": "prepared", "path": str(place / "data")}}))
    ends_in_words("data", "check", str(place / "data"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with two checkpoints and some events."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_dir = RunDir(str(folder))
    for step in (2, 4):
        writer = ChecksumWriter(run_dir.checkpoints.store)
        name = f"step-{step:09d}"
        pieces = [unsharded("t", np.full((8, 4), step, "f4")), unsharded("s", np.array(step))]
        writer.write(f"{name}/{INDEX}", Index(write_pieces(writer, name, 0, pieces)).to_json())
        writer.write(f"{name}/spec.toml", TOML)
        writer.write(f"{name}/plan.txt", b"t  rank 0\n")
        files = {path.removeprefix(f"{name}/"): mark for path, mark in writer.marks.items()}
        run_dir.checkpoints.commit(step, files, {"world_size": 1, "eval": {"auc": 0.7, "step": step}})
    (folder / "spec.toml").write_bytes(TOML)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    return folder


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "time_s": 100.0, "rank": 0, "num_steps": 10, "first_step": 0, "steps_per_epoch": 10,
     "world_size": 1, "batch_size": 8, "usd_per_hour": 3.0, "age_s": 1.0, "budget_usd": 5.0, "versions": {"t": "2"}},
    {"event": "plan", "time_s": 100.5, "rank": 0, "per_rank": [], "tables": [{"name": "t", "rows": 8}]},
    {"event": "step", "time_s": 101.0, "rank": 0, "step": 2, "epoch": 0, "loss": 0.6, "auc": 0.6, "samples_per_s": 80},
    {"event": "ranks", "time_s": 101.5, "rank": 0, "step": 2, "step_s": [0.1], "systems": [{"cpu_percent": 3.0}]},
    {"event": "eval", "time_s": 102.0, "rank": 0, "step": 4, "auc": 0.7, "log_loss": 0.5, "num_samples": 64},
    {"event": "save", "time_s": 102.5, "rank": 0, "step": 4, "bytes": 100, "save_s": 0.1, "pause_s": 0.01, "path": "x"},
    {"event": "note", "time_s": 103.0, "rank": 0, "level": "warning", "text": "words"},
    {"event": "end", "time_s": 104.0, "rank": 0, "outcome": "done", "step": 10, "step_s": 0.1},
]


@fuzzed
@given(data=st.data())
def test_any_checkpoint_is_read_or_refused(place, trained, data):
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(trained, place / "run")
    folder = place / "run" / "checkpoints" / "step-000000004"
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    before = (folder / name).read_bytes()
    is_json = name.endswith(".json") and data.draw(st.booleans())
    (folder / name).write_bytes(data.draw(changed_json(json.loads(before)) if is_json else changed_bytes(before)))
    kept = tree(place / "run")
    for flags in ((), ("--verify",), ("--diff", "2", "4"), ("--prune", "--dry-run")):
        ends_in_words("checkpoints", "run", *flags)
    assert tree(place / "run") == kept


@fuzzed
@given(data=st.data())
def test_any_events_are_read_or_refused(place, trained, data):
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(trained, place / "run")
    lines = [json.dumps(event).encode() for event in EVENTS]
    number = data.draw(st.integers(0, len(EVENTS) - 1))
    lines[number] = data.draw(changed_json(EVENTS[number]))
    ending = data.draw(st.sampled_from([b"\n", b"", b"\n\xff"]))
    (place / "run" / "events.jsonl").write_bytes(b"\n".join(lines) + ending)
    for words in (("cost", "run"), ("report", "run"), ("diagnose", "run"), ("checkpoints", "run"),
                  ("compare", "run", "run")):
        ends_in_words(*words)
