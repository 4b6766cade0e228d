"""Parts of Delta and Iceberg tables that engines write and the Python libraries only read: deletion vectors, delete
files, and data files without their partition column."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ROARING_ARRAY = 1681511377


def delete_by_vector(table: Path, positions: list[int]) -> None:
    """Commit a deletion vector, stored inline, for the first file of the newest version of a Delta table."""
    from pyroaring import BitMap

    logs = sorted((table / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    add = next(line["add"] for line in lines if "add" in line)
    vector = struct.pack("<IQI", _ROARING_ARRAY, 1, 0) + BitMap(positions).serialize()
    stored = {"storageType": "i", "pathOrInlineDv": _z85(vector + b"\0" * (-len(vector) % 4)),
              "sizeInBytes": len(vector), "cardinality": len(positions)}
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True, "extendedFileMetadata": True,
              "partitionValues": add["partitionValues"], "size": add["size"]}
    commit = [{"commitInfo": {"timestamp": 2, "operation": "DELETE"}}, {"remove": remove},
              {"add": add | {"deletionVector": stored}}]
    (table / "_delta_log" / f"{len(logs):020}.json").write_text("\n".join(map(json.dumps, commit)))


def _z85(data: bytes) -> str:
    words = [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)]
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))


def append_file(table: Any, rows: pa.Table, path: Path, partition: tuple[Any, ...] = (), **fields: Any) -> None:
    """Commit a Parquet file to an Iceberg table as it is; `content` and others are fields of its manifest entry."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    pq.write_table(rows, path)
    file = DataFile.from_args(**{
        "content": DataFileContent.DATA, "file_path": f"file://{path}", "file_format": FileFormat.PARQUET,
        "partition": Record(*partition), "record_count": rows.num_rows, "file_size_in_bytes": path.stat().st_size,
        **fields})
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def delete_by_file(table: Any, path: Path, file: str, positions: list[int]) -> None:
    """Commit a file of positional deletes for a data file of an Iceberg table."""
    from pyiceberg.manifest import DataFileContent

    rows = pa.table({"file_path": [file] * len(positions), "pos": pa.array(positions, pa.int64())})
    append_file(table, rows, path, content=DataFileContent.POSITION_DELETES)
