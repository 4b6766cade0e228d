"""Which rows of the raw files were held out: the answer is that of the prepared data, row by row."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embark.__main__ import run
from embark.data.export.row_splits import write_splits
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared.parts import iter_blocks
from embark.errors import DataError
from embark.spec import resolve


def write(path: Path, first: int) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "number", "text", "at"])
        for number in range(first, first + 400):
            day = random.Random(number).randrange(28)
            writer.writerow(["" if number % 50 == 9 else number % 2, number, f"a\n{number % 9}",
                             f"2024-05-{day + 1:02}" if number % 80 else "soon"])
            file.write("\n" if number % 30 == 0 else "")
            file.write("1,2\n" if number % 90 == 0 else "")
    return path


@pytest.mark.parametrize("prepare", [
    {"test_fraction": 0.2}, {"split": "file", "validation_files": ["b.csv"]}, {"split": "time", "test_fraction": 0.2}],
    ids=lambda prepare: prepare.get("split", "fraction"))
def test_every_row_has_the_split_that_preparation_gave_it(tmp_path, prepare, capsys):
    files = [str(write(tmp_path / "a.csv", 0)), str(write(tmp_path / "b.csv", 400))]
    prepare = {"input": files, "sparse_columns": ["text"], "num_workers": 1, "max_bad_share": 0.2, **prepare}
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "out"), "dense_columns": ["number"], "seed": 5,
                             "time_column": "at", "prepare": prepare},
                    "features": {"numbers": "none", "missing_flags": False}})
    manifest = prepare_from_spec(spec, tmp_path / "out").manifest
    assert run(["export", str(tmp_path / "out"), "--splits", str(tmp_path / "splits.parquet")]) == 0
    assert "splits.parquet" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "splits.parquet").to_pylist()
    numbers, at = [], {}
    for name in files:
        with open(name, newline="") as file:
            body = [row for row in csv.reader(file) if row][1:]
        at[Path(name).name] = body
    for row in rows:
        cells = at[Path(row["file"]).name][row["row"]]
        numbers.append((row["split"], cells[1]))
        assert (row["split"] is None) == (len(cells) < 4 or cells[0] == "" or cells[3] == "soon")
    assert len(rows) == sum(map(len, at.values()))
    for split in ("train", "validation", "test"):
        blocks = iter_blocks(tmp_path / "out", manifest, split) if manifest.num_rows(split) else ()
        found = [round(number) for block in blocks for number in block.dense[:, 0].tolist()]
        assert found == [int(number) for of, number in numbers if of == split]


def test_raw_files_that_changed_since_have_no_splits(tmp_path):
    (tmp_path / "rows.csv").write_text("label,user\n" + "1,a\n0,b\n" * 50)
    spec = resolve({"data": {"kind": "prepared", "path": str(tmp_path / "out"), "prepare": {
        "input": str(tmp_path / "rows.csv"), "num_workers": 1}}})
    prepare_from_spec(spec, tmp_path / "out")
    (tmp_path / "rows.csv").write_text("label,user\n" + "1,a\n0,b\n" * 51)
    with pytest.raises(DataError, match="bytes, and had 411 when the data was prepared"):
        write_splits(str(tmp_path / "out"), tmp_path / "splits.parquet")
    assert not (tmp_path / "splits.parquet").exists()
