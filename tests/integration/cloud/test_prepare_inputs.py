"""Raw files are read from an object store as they are from a disk."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data.prepare.guess import guess_schema
from embark.data.prepare.inputs import open_inputs
from embark.data.prepare.tasks import Preparation
from embark.errors import DataError
from embark.spec.data import DataSpec, PrepareSpec
from embark.spec.run import RunSpec
from embark.store import open_store

SPEC = RunSpec(data=DataSpec(kind="prepared", path="x", prepare=PrepareSpec()))
TEXT = "label,user,note\n" + "".join(f'{i % 2},u{i % 30},"a, ""{i % 7}"""\n' for i in range(5_000))


@pytest.fixture
def bucket(s3_emulator, environment):
    """The uri of an empty prefix."""
    environment(s3_emulator.env)
    return f"{s3_emulator.uri}/{uuid4().hex}"


def rows_of(patterns):
    """All users and labels, read as a worker would that the inputs were sent to."""
    opened, files = open_inputs(patterns)
    schema = guess_schema(SPEC, opened, files)
    reader = Preparation(SPEC, schema, pickle.loads(pickle.dumps(opened)), Path(), None, ()).reader()
    portions = [rows for file in files for segment in reader.segments(file, 10_000)
                for rows in reader.read(segment, 16_000)]
    user = [column.name for column in schema.sparse].index("user")
    return [(float(label), int(key)) for rows in portions
            for label, key in zip(rows.label, rows.keys[user], strict=True)]


def test_text_plain_and_packed_reads_as_from_a_disk(bucket, tmp_path):
    (tmp_path / "data.csv").write_text(TEXT)
    store = open_store(bucket)
    store.write("raw/data.csv", TEXT.encode())
    store.write("raw/data.csv.gz", gzip.compress(TEXT.encode()))
    expected = rows_of(str(tmp_path / "data.csv"))
    assert len(expected) == 5_000
    assert rows_of(f"{bucket}/raw/data.csv") == expected
    assert rows_of(f"{bucket}/raw/data.csv.gz") == expected
    assert rows_of([str(tmp_path / "data.csv"), f"{bucket}/raw/*.gz"]) == expected * 2


def test_a_glob_of_parquet_reads_as_from_a_disk(bucket, tmp_path):
    store = open_store(bucket)
    for part in range(3):
        table = pa.table({"label": [0, 1] * 500, "user": [f"u{(i * part) % 40}" for i in range(1_000)]})
        pq.write_table(table, tmp_path / f"part_{part}.parquet", row_group_size=300)
        store.write(f"nvt/part_{part}.parquet", tmp_path / f"part_{part}.parquet")
    store.write("nvt/_metadata", b"not for reading")
    store.write("nvt/deeper/part_9.parquet", b"not meant")
    expected = rows_of(str(tmp_path))
    assert len(expected) == 3_000
    assert rows_of(f"{bucket}/nvt/*.parquet") == expected
    assert rows_of(f"{bucket}/nvt") == expected


def test_globs_mean_the_same_in_a_bucket(bucket):
    store = open_store(bucket)
    for path in ("day_0.gz", "day_1.gz", "day_10.gz", "more/day_2.gz", "more/deep/day_3.gz"):
        store.write(path, b"x" * 5)

    def names(pattern: str) -> list[str]:
        return [file.uri.removeprefix(f"{bucket}/") for file in open_inputs(f"{bucket}/{pattern}")[1]]

    assert names("day_?.gz") == ["day_0.gz", "day_1.gz"]
    assert names("day_*.gz") == ["day_0.gz", "day_1.gz", "day_10.gz"]
    assert names("*/day_*.gz") == ["more/day_2.gz"]
    assert names("**/day_[23].gz") == ["more/day_2.gz", "more/deep/day_3.gz"]
    inputs, files = open_inputs(f"{bucket}/day_0.gz")
    assert (files[0].size_bytes, bool(files[0].changed)) == (5, True)
    assert inputs.read(files[0].uri, 3, 99) == b"xx"
    assert inputs.read(f"{bucket}/day_10.gz", 4, 99) == b"x"
    assert inputs.local_path(files[0].uri) is None


def test_a_missing_file_of_a_bucket_is_reported_with_those_there(bucket):
    open_store(bucket).write("raw/day_0.gz", b"x")
    with pytest.raises(DataError, match=r"raw/day_7.gz: there is no such file") as caught:
        open_inputs(f"{bucket}/raw/day_7.gz")
    assert "raw/day_0.gz" in caught.value.fix
    with pytest.raises(DataError, match="names no bucket"):
        open_inputs("s3:///raw/x.csv")


def table_of_users() -> pa.Table:
    return pa.table({"label": [0, 1] * 500, "user": [f"u{i % 40}" for i in range(1_000)],
                     "country": ["NO", "FR", "a b", "DE"] * 250})


def test_partitions_and_delta_tables_read_as_from_a_disk(bucket, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    rows = table_of_users()
    pq.write_to_dataset(rows, tmp_path / "hive", ["country"], basename_template="part-{i}.parquet")
    for path in sorted((tmp_path / "hive").rglob("*.parquet")):
        open_store(bucket).write(str(path.relative_to(tmp_path)), path)
    expected = rows_of(str(tmp_path / "hive"))
    assert len(expected) == 1_000
    assert rows_of(f"{bucket}/hive") == expected
    assert rows_of(f"{bucket}/hive/country=NO/*.parquet") == rows_of(str(tmp_path / "hive/country=NO/*.parquet"))
    deltalake.write_deltalake(f"{bucket}/delta", rows, partition_by=["country"],
                              storage_options={"allow_http": "true"})
    deltalake.DeltaTable(f"{bucket}/delta", storage_options={"allow_http": "true"}).delete("country = 'FR'")
    assert sorted(rows_of(f"{bucket}/delta#version=0")) == sorted(expected)
    assert len(rows_of(f"{bucket}/delta")) == 750
    with pytest.raises(DataError, match="within the table"):
        rows_of(f"{bucket}/delta/*/*.parquet")


def test_an_iceberg_table_reads_as_from_a_disk(bucket, s3_emulator, tmp_path):
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    catalog = sql.SqlCatalog("shop", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=bucket, **{
        "s3.endpoint": s3_emulator.env["AWS_ENDPOINT_URL"], "s3.region": "us-east-1"})
    catalog.create_namespace("logs")
    table = catalog.create_table("logs.clicks", schema=table_of_users().schema)
    table.append(table_of_users())
    table.delete("country = 'FR'")
    first = table.snapshots()[0].snapshot_id
    assert len(rows_of(table.metadata_location)) == 750
    assert len(rows_of(f"{table.metadata_location}#snapshot={first}")) == 1_000
