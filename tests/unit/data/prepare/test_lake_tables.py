"""Delta and Iceberg tables are read row by row as their own libraries read them, at the version that is named."""

from __future__ import annotations

import datetime
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import lake_writers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embark.data import open_source
from embark.data.evaluation_rows import open_rows
from embark.data.prepare.inputs import Inputs, open_inputs
from embark.data.prepare.parquet_view import open_view
from embark.data.prepare.prepare import prepare_from_spec, preview
from embark.data.prepared import Manifest
from embark.errors import DataError, EmbarkError, MissingPackage, UserError
from embark.events.events import shown_value
from embark.spec import RunSpec, load_spec

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

pytestmark = pytest.mark.filterwarnings("ignore:::pyiceberg", "ignore::DeprecationWarning", "ignore::ResourceWarning")

UTC = datetime.UTC


def rows(start: int = 0, num: int = 12) -> pa.Table:
    numbers = range(start, start + num)
    return pa.table({
        "id": pa.array(numbers, pa.int64()),
        "small": pa.array([n if n % 5 else None for n in numbers], pa.int32()),
        "price": pa.array([n / 3 for n in numbers], pa.float64()),
        "weight": pa.array([n / 7 for n in numbers], pa.float32()),
        "word": ["", None, "ü/ö x", "plain"] * (num // 4),
        "raw": pa.array([b"\x00a", None] * (num // 2), pa.binary()),
        "likes": pa.array([[n, n + 1] if n % 3 else [] if n % 2 else None for n in numbers], pa.list_(pa.int64())),
        "words": pa.array([[f"w{n}"] for n in numbers], pa.list_(pa.string())),
        "at": pa.array([datetime.datetime(2026, 1, 1, n % 24, tzinfo=UTC) for n in numbers],
                       pa.timestamp("us", "UTC")),
        "local": pa.array([datetime.datetime(2026, 1, 1, n % 24) for n in numbers], pa.timestamp("us")),
        "cost": pa.array([Decimal(n) / 4 for n in numbers], pa.decimal128(12, 2)),
        "day": pa.array([datetime.date(2026, 1, 1 + n % 3) if n % 4 else None for n in numbers], pa.date32()),
        "country": [["NO", "a b", "é/%"][n % 3] for n in numbers],
        "is_new": [n % 2 == 0 for n in numbers],
        "label": [n % 2 for n in numbers],
    })


def read(path: str | Path, **of_inputs: Any) -> list[dict[str, Any]]:
    """Read all rows as `embark data prepare` does, with the columns by name."""
    inputs, files = open_inputs(str(path))
    inputs = pickle.loads(pickle.dumps(inputs))  # as a worker process gets it
    found: list[dict[str, Any]] = []
    for file in files:
        with open_view(inputs, file) as view:
            for column, positions, _ in view.batches(view.names, range(view.parquet.num_row_groups), 3):
                assert len(column(view.names[0])) == len(positions)
                found += pa.table({name: column(name) for name in view.names}).to_pylist()
    return found


def by_id(table: Any) -> list[dict[str, Any]]:
    return sorted(table if isinstance(table, list) else table.to_pylist(), key=lambda row: str(row))


def assert_same(path: str | Path, table: pa.Table) -> None:
    found = read(path)
    assert by_id(found) == by_id(table)
    assert not found or list(found[0]) == table.column_names


def write_delta(path: Path, table: pa.Table, **options: Any) -> None:
    deltalake.write_deltalake(path, table, **options)


def delta(path: Path, version: int | None = None) -> pa.Table:
    return deltalake.DeltaTable(path, version=version).to_pyarrow_table()


@pytest.mark.parametrize("by", [[], ["country"], ["day", "country", "is_new"], ["at"], ["cost", "small"]])
def test_a_delta_table_is_read_as_its_library_reads_it(tmp_path: Path, by: list[str]):
    table = tmp_path / "clicks"
    write_delta(table, rows(), partition_by=by)
    assert_same(table, delta(table))


def test_every_version_of_a_delta_table_gives_its_own_rows(tmp_path: Path):
    table = tmp_path / "clicks"
    write_delta(table, rows(), partition_by=["country"])
    write_delta(table, rows(12), mode="append")
    deltalake.DeltaTable(table).delete("id in (2, 3, 15)")
    deltalake.DeltaTable(table).update(predicate="id = 7", updates={"word": "'changed'", "price": "-1.0"})
    added = rows(24, 4).append_column("more", pa.array(["x"] * 4)).drop_columns(["weight"])
    write_delta(table, added, mode="append", schema_mode="merge")
    deltalake.DeltaTable(table).optimize.compact()
    assert deltalake.DeltaTable(table).version() == 5
    for version in range(6):
        assert_same(f"{table}#version={version}", delta(table, version))
    assert_same(table, delta(table))
    assert len(read(table)) == 25
    write_delta(table, rows(100, 4).select(["id", "country"]), mode="overwrite", schema_mode="overwrite")
    assert_same(table, delta(table))
    assert len(read(f"{table}#version=1")) == 24


def test_rows_of_deletion_vectors_are_left_out(tmp_path: Path):
    table = tmp_path / "clicks"
    write_delta(table, rows(), partition_by=["country"], configuration={"delta.enableDeletionVectors": "true"})
    lake_writers.delete_by_vector(table, [0, 2])
    expected = pa.table(deltalake.DeltaTable(table).scan().read_all())
    assert expected.num_rows == 10
    assert by_id(read(table)) == by_id(expected)
    assert len(read(f"{table}#version=0")) == 12


@pytest.mark.parametrize("without", [["local"], []])
def test_columns_of_a_delta_table_go_by_their_mapping(tmp_path: Path, without: list[str]):
    """With a column that takes table features, the library sets the mode and not the feature: it has no effect."""
    table = tmp_path / "clicks"
    write_delta(table, rows().drop_columns(without), partition_by=["country"],
                configuration={"delta.columnMapping.mode": "name"})
    protocol = deltalake.DeltaTable(table).protocol()
    assert (protocol.min_reader_version == 2) == bool(without)
    expected = pa.table(deltalake.DeltaTable(table).scan().read_all())
    assert expected["price"].null_count == 0
    assert by_id(read(table)) == by_id(expected)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from pyiceberg.catalog import load_catalog

    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", __import__("pyiceberg.utils.config").utils.config.Config())
    opened = load_catalog("shop")
    opened.create_namespace("logs")
    return opened


def create(catalog: Any, by: str = "", name: str = "logs.clicks", table: pa.Table | None = None) -> Any:
    from pyiceberg.transforms import IdentityTransform

    table = rows() if table is None else table
    created = catalog.create_table(name, schema=table.schema)
    if by:
        with created.update_spec() as update:
            update.add_field(by, IdentityTransform(), by)
    created.append(table)
    return created


NAME = "iceberg://shop/logs.clicks"


@pytest.mark.parametrize("by", ["", "country", "day"])
def test_an_iceberg_table_is_read_as_its_library_reads_it(catalog: Any, by: str):
    table = create(catalog, by)
    assert_same(NAME, table.scan().to_arrow())
    assert_same(table.metadata_location, table.scan().to_arrow())
    assert_same(table.metadata_location.removeprefix("file://"), table.scan().to_arrow())


def test_every_snapshot_of_an_iceberg_table_gives_its_own_rows(catalog: Any):
    from pyiceberg.types import DoubleType, LongType, StringType

    table = create(catalog, "country")
    table.append(rows(12))
    table.delete("id = 2")
    table.overwrite(rows(7, 4), "id >= 7 and id < 11")
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "monday").commit()
    with table.update_schema() as update:
        update.rename_column("word", "phrase")
        update.add_column("more", StringType())
        update.update_column("small", LongType())
        update.update_column("weight", DoubleType())
        update.delete_column("price")
        update.move_first("label")
    assert_same(NAME, table.scan().to_arrow())
    assert_same(f"{NAME}#ref=monday", table.scan().use_ref("monday").to_arrow())
    newest = rows(30, 4).rename_columns(["phrase" if name == "word" else name for name in rows().column_names])
    newest = newest.drop_columns(["price"]).append_column("more", pa.array(list("abcd")))
    table.append(newest)
    assert_same(NAME, table.scan().to_arrow())
    for snapshot in table.snapshots():
        assert_same(f"{NAME}#snapshot={snapshot.snapshot_id}", table.scan(snapshot_id=snapshot.snapshot_id).to_arrow())
    assert len({len(read(f"{NAME}#snapshot={one.snapshot_id}")) for one in table.snapshots()}) > 2
    assert_same(f"{NAME}#ref=main", table.scan().use_ref("main").to_arrow())


def test_a_file_of_a_table_is_found_again_with_the_names_it_had(catalog: Any):
    table = create(catalog)
    with table.update_schema() as update:
        update.rename_column("word", "phrase")
    (file,) = Inputs().find(NAME)
    with table.update_schema() as update:
        update.rename_column("phrase", "text")
    assert [row["phrase"] for row in read(file.uri)] == rows()["word"].to_pylist()
    assert [row["text"] for row in read(NAME)] == rows()["word"].to_pylist()


def test_rows_of_positional_delete_files_are_left_out(catalog: Any, tmp_path: Path):
    table = create(catalog)
    (task,) = table.scan().plan_files()
    lake_writers.delete_by_file(table, tmp_path / "a.parquet", task.file.file_path, [1, 4])
    lake_writers.delete_by_file(table, tmp_path / "b.parquet", task.file.file_path, [4, 11])
    assert table.scan().to_arrow()["id"].to_pylist() == [0, 2, 3, 5, 6, 7, 8, 9, 10]
    assert_same(NAME, table.scan().to_arrow())


def test_an_iceberg_file_without_its_partition_column_gets_its_value(catalog: Any, tmp_path: Path):
    table = create(catalog, "day")
    table.update_spec()
    lake_writers.append_file(table, pq.read_table(next(iter(table.scan().plan_files())).file.file_path.removeprefix(
        "file://")).drop_columns(["day", "word"]), tmp_path / "a.parquet", (20_454,))
    assert {datetime.date(2026, 1, 1)} <= {row["day"] for row in table.scan().to_arrow().to_pylist()}
    assert_same(NAME, table.scan().to_arrow())


def test_equality_deletes_are_refused_and_not_ignored(catalog: Any, tmp_path: Path):
    from pyiceberg.manifest import DataFileContent

    table = create(catalog)
    lake_writers.append_file(table, pa.table({"id": [3]}), tmp_path / "a.parquet", equality_ids=[1],
                             content=DataFileContent.EQUALITY_DELETES)
    with pytest.raises(DataError, match="equality deletes"):
        read(NAME)


@pytest.mark.parametrize(("path", "what", "fix"), [
    ("clicks#version=9", "no version 9", "#version=1"),
    ("clicks#version=x", "no such file", "files in this directory: clicks"),
    ("clicks#snapshot=1", "does not name a version", "#version=NUMBER"),
    ("clicks#version=1:country=NO/no.parquet", "has no rows", "name another version"),
    ("clicks/*/*.parquet", "within the table", "name the table: "),
    ("clicks/country=NO", "within the table", "name the table: "),
    (".", "no data files", "name the files"),
])
def test_what_is_no_version_of_a_delta_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, what: str, fix: str
):
    monkeypatch.chdir(tmp_path)
    write_delta(tmp_path / "clicks", rows(), partition_by=["country"])
    write_delta(tmp_path / "clicks", rows(), mode="append")
    with pytest.raises(DataError, match=what) as caught:
        read(path)
    assert fix in caught.value.fix


def test_a_delta_table_of_unknown_features_is_refused(tmp_path: Path):
    write_delta(tmp_path / "clicks", rows(), configuration={"delta.enableDeletionVectors": "true"})
    log = tmp_path / "clicks" / "_delta_log" / f"{0:020}.json"
    log.write_text(log.read_text().replace('"deletionVectors"', '"deletionVectors","rowsInTheMoon"'))
    with pytest.raises(DataError, match="rowsInTheMoon"):
        read(tmp_path / "clicks")


@pytest.mark.parametrize(("path", "what", "fix"), [
    (f"{NAME}#snapshot=5", "no snapshot=5", "#ref=main"),
    (f"{NAME}#ref=tuesday", "no ref=tuesday", "#snapshot="),
    (f"{NAME}#version=5", "does not name a version", "#snapshot=NUMBER"),
    ("iceberg://shop/logs.nothing", "Table does not exist: logs.nothing", "check its name"),
    ("iceberg://other/logs.clicks", "PYICEBERG_CATALOG__OTHER__URI", "pyiceberg.yaml"),
    ("warehouse/logs/clicks", "folder of an Iceberg table", "/metadata/*.metadata.json"),
    ("warehouse/logs/clicks/data/*.parquet", "within the table", "warehouse/logs/clicks"),
])
def test_what_is_no_snapshot_of_an_iceberg_table_is_refused(
    catalog: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, what: str, fix: str
):
    monkeypatch.chdir(tmp_path)
    create(catalog)
    with pytest.raises(DataError, match=what) as caught:
        read(path)
    assert fix in caught.value.fix


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: b"", lambda text: b"\xff{[" * 9,
                                    lambda text: text.replace(b'"', b"'"), lambda text: text.replace(b"int", b"imt"),
                                    lambda text: text.replace(b"long", b"lomg")])
def test_a_table_whose_log_is_damaged_is_refused(catalog: Any, tmp_path: Path, damage: Any):
    write_delta(tmp_path / "clicks", rows())
    table = create(catalog)
    metadata = Path(table.metadata_location.removeprefix("file://"))
    for path, name in ((tmp_path / "clicks" / "_delta_log" / f"{0:020}.json", tmp_path / "clicks"), (metadata, NAME),
                       (next(metadata.parent.glob("snap-*.avro")), NAME)):
        whole = path.read_bytes()
        if (broken := damage(whole)) == whole:
            continue
        path.write_bytes(broken)
        with pytest.raises(EmbarkError) as caught:
            read(name)
        assert caught.value.fix
        path.write_bytes(whole)


@pytest.mark.parametrize(("module", "extra"), [("deltalake", "delta"), ("pyiceberg", "iceberg")])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
):
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020}.json").touch()
    for name in (module, "pyiceberg.catalog"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MissingPackage) as caught:
        Inputs().find(str(tmp_path) if extra == "delta" else NAME)
    assert f"embark-rec[{extra}]" in caught.value.fix


def spec_of(tmp_path: Path, source: str, **data: str) -> RunSpec:
    return load_spec("quickstart", [
        "model.embedding_dim=8", "data.kind=prepared", f"data.path={tmp_path}/prepared", f"data.prepare.input={source}",
        "data.label=label", "data.prepare.sparse_columns=['word', 'country', 'likes']", "data.eval_fraction=0.3",
        "data.dense_columns=['price', 'cost']", *(f"{name}={value}" for name, value in data.items())])


def prepared(spec: RunSpec) -> Manifest:
    return prepare_from_spec(spec.model_copy(update={"model": type(spec.model)(embedding_dim=8)})).manifest


def test_another_version_is_other_data(tmp_path: Path):
    table = tmp_path / "clicks"
    write_delta(table, rows(0, 400), partition_by=["country"])
    spec = spec_of(tmp_path, str(table))
    assert preview(spec.model_copy(update={"model": type(spec.model)(embedding_dim=8)})).tables == [
        "Delta table clicks#version=0"]
    first = prepared(spec)
    assert [(one["kind"], one["version"]) for one in first.settings["tables"]] == [("Delta", "version=0")]
    assert sum(first.rows_by_split.values()) == 400
    assert prepared(spec).fingerprint() == first.fingerprint()
    deltalake.DeltaTable(table).alter.set_table_description("The same rows.")
    with pytest.raises(UserError, match="version was 'version=0', is 'version=1'"):
        prepared(spec)
    assert prepared(spec_of(tmp_path, f"{table}#version=0")).fingerprint() == first.fingerprint()
    second = prepared(spec_of(tmp_path / "second", str(table)))
    assert [one.sha256 for one in second.all_parts()] == [one.sha256 for one in first.all_parts()]
    assert first.fingerprint()[:64] != second.fingerprint()[:64]
    assert first.fingerprint().endswith(" (Delta version=0)")
    assert second.fingerprint().endswith(" (Delta version=1)")


def test_rows_in_memory_know_their_version(tmp_path: Path):
    table = tmp_path / "clicks"
    write_delta(table, rows(0, 40).select(["small", "price", "label"]).set_column(0, "small", [[1] * 40]))
    deltalake.DeltaTable(table).alter.set_table_description("The same rows.")

    def spec(version: int) -> RunSpec:
        return load_spec("quickstart", [
            "data.kind=columns", f"data.path={table}#version={version}", "data.dense_columns=['price']",
            "model.num_dense=1", "model.tables=[{name='small', rows=9}]"])

    first, second = open_source(spec(0)), open_source(spec(1))
    np.testing.assert_array_equal(first.train_rows(0, 0, 20).dense, second.train_rows(0, 0, 20).dense)
    assert first.fingerprint().endswith(" (Delta version=0)")
    assert first.fingerprint()[:64] != second.fingerprint()[:64]
    with open_rows(spec(0), first.fingerprint()) as opened:
        assert opened.source.num_eval_samples == first.num_eval_samples
    with pytest.raises(DataError, match="Delta version=0 then, Delta version=1 now"), \
            open_rows(spec(1), first.fingerprint()):
        pass
    assert shown_value(second.fingerprint()) == f"sha256 {second.fingerprint()[:12]}… (Delta version=1)"
