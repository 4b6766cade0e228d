"""A run's embedding vectors as Parquet, with the values they stand for; read from the checkpoint with numpy alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from embark.data.kept_maps import find_id_maps
from embark.errors import UserError
from embark.store.checkpoint_arrays import CheckpointArrays, table_weight
from embark.store.checkpoint_inspect import TrainedRun, find_trained
from .id_values import TableValues, no_values, read_values
from .parquet_files import ROW_GROUP_BYTES, ParquetFiles, choose_tables, targets, write_parquet


def write_embeddings(
    run: str, to: str | Path, *, tables: Sequence[str] = (), step: int | None = None, force: bool = False
) -> ParquetFiles:
    """Write `value`, `id` and `vector` (float32) of every row of the run's tables into the folder `to`."""
    trained = find_trained(run, step)
    checkpoints = trained.run_dir.checkpoints
    names = choose_tables([table.name for table in trained.spec.model.stored_tables()], tables)
    files = targets(Path(to), names, force=force)
    if damage := checkpoints.damage(trained.checkpoint):
        raise UserError(f"{checkpoints.where(trained.checkpoint.step)} is damaged: {damage}",
                        "name another with --step; `embark checkpoints RUN --verify` reads all")
    arrays = CheckpointArrays(checkpoints.store, trained.checkpoint.name)
    values = _values(trained, names)
    found = []
    weights = {table.name: table_weight(table.name, is_sequence=table.is_sequence)
               for table in trained.spec.model.stored_tables()}
    for name in names:
        num_rows = arrays.entry(weights[name]).size[0]
        write_parquet(files[name], _batches(arrays, weights[name], values[name]),
                      {"run": trained.run_dir.uri, "step": str(trained.checkpoint.step), "table": name})
        found.append(values[name].file(files[name], num_rows))
    return ParquetFiles(trained.run_dir.uri, tuple(found), trained.checkpoint.step)


def _batches(arrays: CheckpointArrays, weight: str, values: TableValues) -> Iterator[pa.RecordBatch]:
    num_rows, dim = arrays.entry(weight).size
    at_once = max(1, ROW_GROUP_BYTES // (4 * dim))
    for start in range(0, num_rows, at_once):
        stop = min(start + at_once, num_rows)
        vectors = arrays.rows(weight, start, stop).astype(np.float32, copy=False)
        ids = np.arange(start, stop)
        columns = {"value": values.take(ids)} if values.values is not None else {}
        yield pa.RecordBatch.from_pydict({
            **columns, "id": pa.array(ids),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dim)})


def _values(trained: TrainedRun, names: Sequence[str]) -> dict[str, TableValues]:
    """Return the values that ids stand for, if the run's data is still there and unchanged."""
    data, rows = trained.spec.data, {table.name: table.rows for table in trained.spec.model.stored_tables()}
    why = {"columns": "they are those of the data itself", "interactions": "they are those of the data itself",
           "synthetic": "synthetic ids stand for nothing"}.get(data.kind)
    if why is None:
        found = find_id_maps(trained.run_dir.uri, trained.spec, trained.fingerprint)
        if found.manifest is not None and not trained.spec.model.has_dynamic_tables:
            return read_values(found.path, found.manifest, names)
        why = f"the id maps are with the run's data, {data.path}: {found.why}"
    dynamic = {table.name for table in trained.spec.model.stored_tables() if table.is_dynamic}
    of_dynamic = "they are rows of a dynamic table, and `embark export` writes which id has which"
    return {name: no_values(name, rows[name], of_dynamic if name in dynamic else why) for name in names}
