"""Embedding vectors as Parquet: bit for bit those of the checkpoint, whatever its shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embark import write_embeddings
from embark.__main__ import run as embark
from embark.data.export import embeddings as module
from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared.cache import read_manifest
from embark.errors import UserError
from embark.spec import resolve, to_toml
from embark.spec.run import DATA, KEY
from embark.store import ChecksumWriter, RunDir, checkpoint_name
from embark.store.checkpoint_arrays import INDEX, Index, TensorChunk, merge_entries, write_pieces

DIM = 8


@pytest.fixture
def run_dir(tmp_path):
    """A run of two tables that two ranks hold, the one by columns and the other by rows, in steps 3 and 7."""
    raw = tmp_path / "rows.csv"
    raw.write_text("user,film,y\n" + "".join(f"u{i % 7},{900 + i % 11},{i % 2}\n" for i in range(300)))
    data = {"kind": "prepared", "path": str(tmp_path / "out"), "label": "y",
            "prepare": {"input": str(raw), "sparse_columns": ["user", "film"]}}
    prepare_from_spec(resolve({"data": data}), tmp_path / "out")
    spec = resolve({"name": "small", "data": data, "model": {
        "embedding_dim": DIM, "num_dense": 0, "tables": [{"name": "user", "rows": 8}, {"name": "film", "rows": 15}]}})
    run_dir = RunDir(str(tmp_path / "small"))
    for step in (3, 7):
        save(run_dir, spec, step, read_manifest(data["path"]).fingerprint())
    return run_dir


def weights(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"user": rng.normal(size=(8, DIM)).astype(np.float32),
            "film": rng.normal(size=(15, DIM)).astype(np.float16)}


def save(run_dir: RunDir, spec, step: int, fingerprint: str) -> None:
    store, folder, values = ChecksumWriter(run_dir.checkpoints.store), checkpoint_name(step), weights(step)
    parts = []
    for rank in range(2):
        half = slice(rank * DIM // 2, (rank + 1) * DIM // 2)
        rows = slice(0, 9) if rank == 0 else slice(9, 15)
        pieces = [TensorChunk("model.tables.embedding_bags.user.weight", (8, DIM), (0, half.start),
                              np.ascontiguousarray(values["user"][:, half])),
                  TensorChunk("model.tables.embedding_bags.film.weight", (15, DIM), (rows.start, 0),
                              values["film"][rows])]
        parts.append(write_pieces(store, folder, rank, pieces))
    store.write(f"{folder}/{INDEX}", Index(merge_entries(parts)).to_json())
    store.write(f"{folder}/spec.toml", to_toml(spec).encode())
    marks = {path.removeprefix(f"{folder}/"): mark for path, mark in store.marks.items()}
    run_dir.checkpoints.commit(step, marks, {KEY: {DATA: fingerprint}})


@pytest.mark.parametrize("row_group_bytes", [1, 64 << 20])
def test_vectors_are_those_of_the_checkpoint_bit_for_bit(
    run_dir, tmp_path, monkeypatch, row_group_bytes
):
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", row_group_bytes)
    result = write_embeddings(run_dir.uri, tmp_path / "vectors")
    assert result.step == 7
    for one in result.tables:
        file = pq.ParquetFile(one.path)
        table, expected = file.read(), weights(7)[one.table].astype(np.float32)
        assert file.num_row_groups == (len(expected) if row_group_bytes == 1 else 1)
        assert str(table.schema.field("vector").type) == f"fixed_size_list<element: float>[{DIM}]"
        found = np.array(table["vector"].to_pylist(), np.float32)
        assert found.tobytes() == expected.tobytes()
        assert table["id"].to_pylist() == list(range(len(expected)))
        assert table.schema.metadata[b"embark.step"] == b"7"
    users = pq.read_table(tmp_path / "vectors/user.parquet")["value"].to_pylist()
    assert users[0] is None
    assert set(users[1:]) == {f"u{i}" for i in range(7)}
    films = pq.read_table(tmp_path / "vectors/film.parquet")["value"].to_pylist()
    assert set(films[1:12]) == set(range(900, 911))
    assert films[12:] == [None] * 3  # the table has more rows than the data has ids


def test_another_step_and_one_table_can_be_named(run_dir, tmp_path, capsys):
    assert embark(["export", run_dir.uri, "--embeddings", str(tmp_path / "v"), "--step", "3", "--only", "user"]) == 0
    assert "wrote 1 Parquet file" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["user.parquet"]
    found = np.array(pq.read_table(tmp_path / "v/user.parquet")["vector"].to_pylist(), np.float32)
    assert found.tobytes() == weights(3)["user"].tobytes()
    assert embark(["export", run_dir.uri, "--embeddings", str(tmp_path / "v")]) == 64
    assert "--force" in capsys.readouterr().err


def test_without_the_run_s_data_as_it_was_there_are_ids_only_and_a_reason(run_dir, tmp_path):
    manifest = tmp_path / "out/manifest.json"
    changed = json.loads(manifest.read_text())
    changed["parts"]["train"][0]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(changed))
    first = write_embeddings(run_dir.uri, tmp_path / "changed").tables[0]
    manifest.unlink()
    second = write_embeddings(run_dir.uri, tmp_path / "gone").tables[0]
    assert "prepared again since" in first.note
    assert "there is no manifest.json" in second.note
    assert pq.read_schema(second.path).names == pq.read_schema(first.path).names == ["id", "vector"]


def test_a_damaged_checkpoint_is_refused_and_nothing_written(run_dir, tmp_path):
    damaged = next(Path(run_dir.uri, "checkpoints", checkpoint_name(7)).glob("rank-*.bin"))
    data = bytearray(damaged.read_bytes())
    data[3] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        write_embeddings(run_dir.uri, tmp_path / "vectors")
    assert not (tmp_path / "vectors").exists()
