"""From raw files to prepared data: the same rows as plain Python gives, whatever happens on the way."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from limits import HANG_S

from embark.data.prepare import prepare as prepare_module
from embark.data.prepare.guess import guess_schema
from embark.data.prepare.prepare import prepare, prepare_from_spec
from embark.data.prepared import MANIFEST, SPLITS, Manifest
from embark.data.progress import tree_bytes
from embark.errors import DataError, UserError
from embark.features.numbers import NumberSample
from embark.spec import load_spec
from embark.spec.features import FeaturesSpec


@pytest.fixture
def many_segments(monkeypatch):
    """Segments of some hundred rows, and real workers even for them."""
    monkeypatch.setattr(prepare_module, "MIN_SEGMENT_BYTES", 40_000)
    monkeypatch.setattr("embark.data.prepare.prepare.SMALL_BYTES", 0)


def run(spec, schema, inputs, pattern, out: Path, **more) -> Manifest:
    return prepare(spec, schema, inputs, inputs.find(str(pattern)), out, **more).manifest


def contents(out: Path) -> dict[str, str]:
    """Every file's name and hash."""
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.rglob("*")) if path.is_file()}


def checked(rows: list[tuple], lines: list[bytes], criteo, id_of) -> None:
    """The rows are those of the lines, in order."""
    assert len(rows) == len(lines)
    for (label, dense, ids), line in zip(rows, lines, strict=True):
        wanted_label, integers, keys = criteo.parsed(line)
        assert label == wanted_label
        assert all(math.isclose(got, criteo.mlperf(v), rel_tol=2e-6, abs_tol=1e-7)
                   for got, v in zip(dense, integers, strict=True))
        assert [i for (i,) in ids] == [id_of(column, key) for column, key in enumerate(keys)]


def test_hashed_ids_and_dense_values_are_those_of_plain_python(criteo, make_spec, inputs, tmp_path, read_rows):
    lines = criteo.lines(3000)
    (tmp_path / "day_0").write_bytes(b"\n".join(lines[:2000]) + b"\n")
    (tmp_path / "day_1.gz").write_bytes(gzip.compress(b"\n".join(lines[2000:])))
    spec = make_spec({"split": "file", "validation_files": ["day_1"]})
    sizes = (10, 1000, 70_000, 3_000_000)
    columns = tuple(replace(c, rows=sizes[i % 4]) for i, c in enumerate(criteo.schema().sparse))
    manifest = run(spec, replace(criteo.schema(), sparse=columns), inputs, "day_*", tmp_path / "out")
    for split, some in (("train", lines[:2000]), ("validation", lines[2000:]), ("test", [])):
        checked(read_rows(tmp_path / "out", manifest, split), some, criteo,
                lambda column, key: 0 if key is None else key % sizes[column % 4])
    assert [f.rows for f in manifest.layout.features[:4]] == list(sizes)
    assert Manifest.from_text((tmp_path / "out" / MANIFEST).read_text(), "") == manifest
    for part in (part for parts in manifest.parts.values() for part in parts):
        assert hashlib.sha256((tmp_path / "out" / part.file).read_bytes()).hexdigest() == part.sha256
    assert not (tmp_path / "out" / ".preparing").exists()


@pytest.mark.parametrize(("min_count", "max_rows", "max_entries"), [(1, 40_000_000, None), (8, 40_000_000, 300),
                                                                    (None, 40_000_000, None), (1, 20, 300)])
def test_ids_by_frequency_are_those_of_a_counter_over_the_training_rows(
    criteo, make_spec, inputs, tmp_path, read_rows, monkeypatch, min_count, max_rows, max_entries
):
    if max_entries:
        wanted = prepare_module.plan_budget
        monkeypatch.setattr("embark.data.prepare.prepare.plan_budget", lambda *a, **k: replace(
            wanted(*a, **k), max_entries=max_entries, run_rows=500, chunk_bytes=1))
    lines = criteo.lines(3000, distinct=120)
    (tmp_path / "day_0").write_bytes(b"\n".join(lines[:2400]) + b"\n")
    (tmp_path / "day_1").write_bytes(b"\n".join(lines[2400:]) + b"\n")
    spec = make_spec({"split": "file", "validation_files": ["day_1"], "min_count": min_count, "max_rows": max_rows})
    out = tmp_path / "out"
    manifest = run(spec, criteo.schema(None), inputs, "day_*", out)
    maps: list[dict[int, int]] = []
    parsed = [criteo.parsed(line)[2] for line in lines[:2400]]
    for column in range(26):
        counts = Counter(keys[column] for keys in parsed)
        del counts[None]
        retained = sorted((k for k in counts if counts[k] >= (min_count or 3)), key=lambda k: (-counts[k], k))
        maps.append({key: rank for rank, key in enumerate(retained[: max_rows - 1], 1)})
    assert [f.rows for f in manifest.layout.features] == [1 + len(ids) for ids in maps]
    for split, some in (("train", lines[:2400]), ("validation", lines[2400:])):
        checked(read_rows(out, manifest, split), some, criteo, lambda column, key: maps[column].get(key, 0))
    for name, ids in zip((c.name for c in criteo.schema().sparse), maps, strict=True):
        about = manifest.settings["id_maps"][name]
        keys, numbers = np.load(out / about["keys"]), np.load(out / about["ids"])
        assert dict(zip(keys.tolist(), numbers.tolist(), strict=True)) == ids


def test_a_table_keeps_its_rows_under_frequency_and_auto_mixes_both(
    criteo, make_spec, inputs, tmp_path, read_rows
):
    lines = criteo.lines(800, distinct=100)
    (tmp_path / "day_0").write_bytes(b"\n".join(lines))
    columns = tuple(replace(c, rows=7 if i % 2 else None) for i, c in enumerate(criteo.schema().sparse))
    schema = replace(criteo.schema(), sparse=columns)
    manifest = run(make_spec(), schema, inputs, "day_0", tmp_path / "auto")
    assert {a["how"] for a in manifest.settings["id_maps"].values()} == {"hash", "frequency"}
    rows = read_rows(tmp_path / "auto", manifest, "train") + read_rows(tmp_path / "auto", manifest, "validation")
    got = Counter(tuple(i for (i,) in ids[1::2]) for _, _, ids in rows)
    assert got == Counter(tuple((key or 0) % 7 for key in criteo.parsed(line)[2][1::2]) for line in lines)
    manifest = run(make_spec({"ids": "frequency"}), schema, inputs, "day_0", tmp_path / "frequency")
    assert [f.rows for f in manifest.layout.features[1::2]] == [7] * 13
    assert max(ids[1][0] for _, _, ids in read_rows(tmp_path / "frequency", manifest, "train")) == 6


@pytest.mark.parametrize("rows", [1000, None])
def test_files_are_the_same_for_any_number_of_workers_and_any_memory(
    criteo, make_spec, inputs, tmp_path, many_segments, rows
):
    schema = criteo.schema(rows)
    if rows is None:
        schema = replace(schema, sparse=(replace(schema.sparse[0], statistics=("count", "label_rate")),
                                         *schema.sparse[1:]))
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(2500, distinct=400)) + b"\n")
    found = []
    for num_workers, memory_gb in ((1, 0.5), (2, 4.0)):
        out = tmp_path / f"out-{num_workers}"
        spec = make_spec({"num_workers": num_workers, "memory_gb": memory_gb, "test_fraction": 0.1})
        manifest = run(spec, schema, inputs, "day_0", out)
        assert len(manifest.parts["train"]) > 5
        assert all(manifest.num_rows(split) for split in SPLITS)
        found.append(contents(out))
    assert found[0] == found[1]


def test_the_size_of_segments_moves_no_row_to_another_split(
    criteo, make_spec, inputs, tmp_path, read_rows, monkeypatch
):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(2000)) + b"\n")
    (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "day_0").read_bytes()))
    found = []
    for segment_bytes, name in ((8 << 20, "day_0"), (30_000, "day_0"), (30_000, "packed")):
        monkeypatch.setattr(prepare_module, "MIN_SEGMENT_BYTES", segment_bytes)
        out = tmp_path / f"out-{segment_bytes}-{name}"
        manifest = run(make_spec(), criteo.schema(), inputs, name, out)
        found.append([read_rows(out, manifest, split) for split in SPLITS])
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) == pytest.approx(200, abs=60)


def test_neither_the_segments_nor_the_workers_change_the_state_of_numbers(
    criteo, make_spec, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr("embark.features.numbers.MAX_SAMPLE_ROWS", 1024)
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(4000)) + b"\n")
    features = FeaturesSpec(numbers="standardize", missing_flags=True)
    states, sampled, write = [], [0], NumberSample.write

    def counted(sample: NumberSample, path: Path) -> None:
        sampled[-1] += len(sample.draws)
        write(sample, path)

    monkeypatch.setattr(NumberSample, "write", counted)
    for segment_bytes in (30_000, 100_000, 8 << 20):
        monkeypatch.setattr(prepare_module, "MIN_SEGMENT_BYTES", segment_bytes)
        sampled.append(0)
        spec = make_spec({"ids": "hash"}).model_copy(update={"features": features})
        manifest = run(spec, criteo.schema(100), inputs, "day_0", tmp_path / f"out-{segment_bytes}")
        states.append(manifest.settings["numbers"])
    assert states[0] == states[1] == states[2]
    assert len(states[0]) == 13
    assert 1024 == sampled[3] < sampled[1] < 3_400  # rows of all segments together


def test_lists_and_words_of_a_csv_keep_their_rows(make_spec, inputs, tmp_path, read_rows):
    text = 'click,user,tags\n' + "".join(
        f'{i % 2},"user, {i % 7}",{"|".join(f"t{j}" for j in range(i % 5))}\n' for i in range(500))
    (tmp_path / "rows.csv").write_text(text)
    spec = make_spec({"list_columns": ["tags"], "sparse_columns": ["user"], "max_ids": 3}, label="click")
    schema = guess_schema(spec, inputs, inputs.find("rows.csv"))
    out = tmp_path / "out"
    manifest = run(spec, schema, inputs, "rows.csv", out)
    names = [f.name for f in manifest.layout.features]
    tags = manifest.layout.features[names.index("tags")]
    assert (tags.is_ragged, tags.multi_hot, tags.rows) == (True, 3, 5)
    rows = [row for split in SPLITS for row in read_rows(out, manifest, split)]
    lengths = Counter(len(ids[names.index("tags")]) for _, _, ids in rows)
    assert lengths == Counter(min(3, i % 5) for i in range(500))
    # Seven users; t3, the rarest tag, ends the longest lists, which lost their first tag.
    assert {ids[names.index("user")][0] for _, _, ids in rows} == set(range(1, 8))
    assert sum(ids[names.index("tags")][-1:] == [4] for _, _, ids in rows) == 100
    assert manifest.bad_rows["num_lists_cut"] == 100


def test_bad_rows_are_reported_by_line_and_too_many_leave_no_manifest(
    criteo, make_spec, inputs, tmp_path, many_segments
):
    lines = criteo.lines(1500)
    lines[700], lines[1400] = b"rubbish", b"\t".join([*lines[1400].split(b"\t")[:-1], b"xyz"])
    (tmp_path / "day_0").write_bytes(b"\n".join(lines) + b"\n")
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"(?s)2 of 1,500 rows cannot be read.*day_0, line 701: 1 field instead of 40"):
        run(make_spec({"num_workers": 2}), criteo.schema(), inputs, "day_0", out)
    assert not (out / MANIFEST).exists()
    parts_before = {path: path.stat().st_mtime_ns for path in out.rglob("*.bin")}
    manifest = run(make_spec({"num_workers": 2, "max_bad_share": 0.01}), criteo.schema(), inputs, "day_0", out)
    assert manifest.bad_rows["num"] == 2
    assert [(bad["line"], bad["file"]) for bad in manifest.bad_rows["examples"]] == [(701, "day_0"), (1401, "day_0")]
    assert manifest.bad_rows["files"]["day_0"] == {
        "1 field instead of 40": 1, "cat_25 is …, not 1 to 8 hexadecimal digits": 1}
    # Nothing was read again for it.
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.bin")} == parts_before
    assert sum(manifest.num_rows(split) for split in SPLITS) == 1498


def test_empty_files_and_files_without_rows_are_refused(criteo, make_spec, inputs, tmp_path):
    (tmp_path / "day_0").write_bytes(b"")
    with pytest.raises(DataError, match="day_0: has no rows"):
        run(make_spec(), criteo.schema(), inputs, "day_0", tmp_path / "empty")
    (tmp_path / "day_0").write_bytes(b"\n\n\n")
    with pytest.raises(DataError, match="3 of 3 rows cannot be read"):
        run(make_spec(), criteo.schema(), inputs, "day_0", tmp_path / "out")
    with pytest.raises(DataError, match="day_0: has no rows"):
        run(make_spec({"max_bad_share": 1.0}), criteo.schema(), inputs, "day_0", tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_gzip_file_cut_short_leaves_no_manifest(criteo, make_spec, inputs, tmp_path):
    packed = gzip.compress(b"\n".join(criteo.lines(2000)))
    (tmp_path / "day_0.gz").write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"day_0\.gz: the gzip file is cut short"):
        run(make_spec({"max_bad_share": 1.0}), criteo.schema(), inputs, "day_0.gz", tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_complete_data_is_left_alone_and_fresh_starts_over(
    criteo, make_spec, inputs, tmp_path
):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(300)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    first = run(make_spec(), criteo.schema(), inputs, "day_0", out)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert run(make_spec(), criteo.schema(), inputs, "day_0", out) == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == stamps
    with pytest.raises(UserError, match="other files or with other settings"):
        run(make_spec(seed=5), criteo.schema(), inputs, "day_0", out)
    other = run(make_spec(seed=5), criteo.schema(500), inputs, "day_0", out, fresh=True)
    assert other.layout.features[0].rows == 500
    assert (out / "notes.txt").read_text() == "mine"


def test_complete_and_unfinished_data_is_recognized_from_another_directory(tmp_path, monkeypatch):
    (tmp_path / "clicks.csv").write_text("user,click\n" + "".join(f"u{i % 7},{i % 2}\n" for i in range(200)))
    spec = tmp_path / "clicks.toml"
    spec.write_text('data = { kind = "prepared", path = "out", label = "click", prepare = { input = "clicks.csv" } }\n')
    (tmp_path / "elsewhere").mkdir()

    def prepare_in(directory: str):
        monkeypatch.chdir(tmp_path / directory)
        loaded = load_spec(os.path.relpath(spec))
        return prepare_from_spec(loaded, Path(loaded.data.path))

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "to_text", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_in(".")
    assert not prepare_in("elsewhere").was_complete
    assert [prepare_in(one).was_complete for one in (".", "elsewhere")] == [True, True]


def test_an_input_that_changed_meanwhile_is_not_resumed(criteo, make_spec, inputs, tmp_path, monkeypatch):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(300)))
    out = tmp_path / "out"
    (tmp_path / "day_1").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="1 of 301 rows"):
        run(make_spec(), criteo.schema(), inputs, "day_*", out)
    (tmp_path / "day_1").write_bytes(b"\n".join(criteo.lines(10)))
    with pytest.raises(UserError, match=r"files\[1\]\.bytes was 7, is"):
        run(make_spec(), criteo.schema(), inputs, "day_*", out)
    run(make_spec(), criteo.schema(), inputs, "day_*", out, fresh=True)


def test_progress_comes_by_stages_with_the_memory(criteo, make_spec, inputs, tmp_path, many_segments):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(1500)))
    reports = []
    before = tree_bytes(os.getpid())
    result = prepare(make_spec({"num_workers": 2}), criteo.schema(None), inputs, inputs.find("day_0"), tmp_path / "out",
                     on_progress=reports.append)
    assert list(dict.fromkeys(p.stage for p in reports)) == ["reading", "numbering ids", "writing", "done"]
    last = reports[-1]
    assert (last.stage, last.rows) == ("done", 1500)
    assert result.memory_bytes >= last.memory_bytes > 10_000_000
    assert last.memory_bytes - before < make_spec().data.prepare.memory_gb * 1e9  # pytest is not the preparation's


def test_hash_without_rows_is_refused(criteo, make_spec, inputs, tmp_path):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(3)))
    with pytest.raises(UserError, match="needs the rows of every table"):
        run(make_spec({"ids": "hash"}), criteo.schema(None), inputs, "day_0", tmp_path / "out")


KILLED = textwrap.dedent("""
    import multiprocessing, os, signal, sys
    from pathlib import Path

    if __name__ == "__main__":
        from embark.data.prepare import prepare as prepare_module
        from embark.data.prepare.inputs import Inputs
        from embark.features.schema import Schema, SparseColumn
        from embark.spec.run import RunSpec

        folder, out, rows, whom, after = sys.argv[1:]
        prepare_module.MIN_SEGMENT_BYTES = 40_000
        prepare_module.SMALL_BYTES = 0
        names = tuple(f"cat_{i}" for i in range(26))
        dense = tuple(f"int_{i}" for i in range(13))
        columns = tuple(SparseColumn(name, "hex", rows=int(rows) or None) for name in names)
        schema = Schema("criteo", "label", dense, columns, ("label", *dense, *names))
        spec = RunSpec.model_validate({"data": {"prepare": {"num_workers": 2, "test_fraction": 0.1}}})
        inputs = Inputs(folder)
        left = int(after)

        class Deadly(prepare_module.WorkerPool):
            def run(self, *given):
                global left
                for done in super().run(*given):
                    left -= 1
                    if left == 0:
                        victim = os.getpid() if whom == "parent" else multiprocessing.active_children()[0].pid
                        os.kill(victim, signal.SIGKILL)
                    yield done

        prepare_module.WorkerPool = Deadly
        prepare_module.prepare(spec, schema, inputs, inputs.find("day_0"), Path(out))
""")
"""Prepares, and kills itself or a worker after so many tasks."""


@pytest.mark.parametrize("rows", [1000, 0])
def test_killed_at_any_point_and_resumed_it_ends_with_the_same_bytes(criteo, tmp_path, rows):
    (tmp_path / "day_0").write_bytes(b"\n".join(criteo.lines(2500, distinct=300)) + b"\n")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def call(out: Path, whom: str = "nobody", after: int = 0) -> int:
        command = [sys.executable, str(script), str(tmp_path), str(out), str(rows), whom, str(after)]
        return subprocess.run(command, capture_output=True, timeout=HANG_S).returncode

    assert call(tmp_path / "whole") == 0
    out = tmp_path / "out"
    points = [("parent", 2), ("worker", 9)] if rows else [("parent", 9), ("parent", 15)]
    for whom, after in points:
        assert call(out, whom, after) == (-signal.SIGKILL if whom == "parent" else 1)
        assert not (out / MANIFEST).exists()
    assert call(out) == 0
    assert contents(out) == contents(tmp_path / "whole")
