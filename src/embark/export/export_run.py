"""`embark export`: a checkpoint as an artifact; numpy alone, and tables may exceed memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec

import numpy as np

from embark import __version__
from embark.data.dynamic_ids import FREE, MAP, table_key, unmixed
from embark.data.kept_maps import find_id_maps
from embark.data.loader import SampleSource
from embark.data.prepare.later_rows import PreparedWith, next_item_rows
from embark.data.prepared.manifest import SEQUENCES
from embark.errors import DataError, UserError
from embark.features.arrays import Array, Int32s
from embark.features.encoding import PLAIN_FEATURES, IdMap, RowEncoder, by_rising_key, plain_row_format
from embark.features.numbers import NumberCode, Numbers
from embark.features.rows import Keys
from embark.features.schema import Schema
from embark.formatting import to_finite
from embark.spec import FeaturesSpec, RunSpec, StoredTable, user_code
from embark.store.checkpoint_arrays import CheckpointArrays, table_weight
from embark.store.checkpoint_inspect import TrainedRun, find_trained
from embark.values import frozen
from .artifact import (
    DENSE,
    ArtifactInfo,
    ItemIndexInfo,
    RowFormat,
    code_digest,
    open_versions,
    set_current,
)
from .quantize import TABLE_DTYPES, TableDtype, quantize_rows, row_format
from .reference import make_reference
from .safetensors_file import TensorSource, in_memory
from .write_version import VersionContents, write_version

READ_BYTES = 32 << 20
_MODEL = "model."
Maps = dict[str, tuple[Keys, Int32s]]  # The id and the row of each slot, by dynamic table.


@frozen
class ExportResult:
    """The version that `embark export` wrote."""

    run: str
    step: int
    uri: str
    path: str  # URI of the version.
    version: int
    identity: str  # The checksum of the version's content.
    tables: TableDtype
    num_bytes: int
    table_bytes: int
    fp32_table_bytes: int
    model_file: str  # The file that scoring and serving a custom model need.
    best_step: int | None  # The step that the run's early stopping found best.
    item_index: ItemIndexInfo | None = None  # Set for a retrieval model.
    why_no_index: str = ""  # Why a server cannot retrieve the model's items.
    parent: int | None = None  # The version that a delta changes.
    num_changed_rows: int = 0  # Rows in a delta.
    why_full: str = ""  # Why no delta was written, although one was asked for.
    why_no_reference: str = ""  # Why requests cannot be compared with the rows that the model was evaluated on.


BuildIndex = Callable[[TrainedRun, CheckpointArrays], tuple[ItemIndexInfo | None, list[TensorSource]]]


def export_run(
    run: str, to: str = "", *, tables: TableDtype = "fp32", step: int | None = None,
    build_index: BuildIndex | None = None, delta: bool = False
) -> ExportResult:
    """Write the newest checkpoint of a run, or that of `step`, as the next version at `to`, a folder or an object store
    (by default the run's folder `export`), and make it current. `build_index` makes the index of a retrieval model's
    items. With `delta` only what changed since the current version is written, if that is smaller."""
    trained = find_trained(run, step)
    contents = read_contents(trained, tables, build_index)
    uri = export_uri(trained, to)
    written = write_version(contents, uri, delta=delta)
    set_current(open_versions(uri), written.version, reason="export")
    model = trained.spec.model

    def table_bytes(dtype: TableDtype) -> int:
        formats = [(table.rows, *row_format(dtype, table.dim)) for table in model.stored_tables()]
        return sum(rows * element.itemsize * num for rows, element, num in formats)

    return ExportResult(
        run=trained.run_dir.uri, step=trained.checkpoint.step, uri=uri, tables=tables,
        table_bytes=table_bytes(tables), fp32_table_bytes=table_bytes("fp32"), item_index=contents.info.item_index,
        model_file=user_code.file_of(model.kind) if model.is_custom else "", best_step=trained.best_step,
        why_no_reference=contents.reference.why_none, why_no_index="" if contents.info.item_index or not model.retrieved
        else "the log with the items' own ids is not there" if find_spec("faiss")
        else "faiss is not installed, which pip install 'embark-rec[retrieval]' does", **asdict(written))


def export_uri(trained: TrainedRun, to: str) -> str:
    """Return the URI that a run's versions are written to."""
    return (to or f"{trained.run_dir.uri}/export").rstrip("/") or to


def read_contents(
    trained: TrainedRun, tables: TableDtype = "fp32", build_index: BuildIndex | None = None,
    source: SampleSource | None = None
) -> VersionContents:
    """Read what a version of a checkpoint consists of; tables are read when they are written. `source` has the rows for
    the reference statistics, if they are not the run's own."""
    if tables not in TABLE_DTYPES:
        raise UserError(f"--tables {tables}: no such type", f"one of: {', '.join(TABLE_DTYPES)}")
    arrays = _checked_arrays(trained)
    rows, maps, encoder = _row_format(trained, arrays)
    evaluated = trained.checkpoint.values.get("eval")
    model = trained.spec.model
    item_index, items = build_index(trained, arrays) if build_index and model.retrieved else (None, [])
    info = ArtifactInfo(
        embark=__version__, run=trained.run_dir.uri, step=trained.checkpoint.step, tables=tables,
        model=model.changed(tables=model.table_list(), code=""), rows=rows,
        code_sha256=code_digest(model.code) if model.is_custom else "", item_index=item_index,
        metrics={key: number for key, value in evaluated.items() if (number := to_finite(value)) is not None}
        if isinstance(evaluated, dict) else {})
    return VersionContents(info, make_reference(trained.spec, encoder, evaluated, source), maps,
                           _weights(arrays, model.stored_tables(), tables), items, trained.checkpoint)


def _checked_arrays(trained: TrainedRun) -> CheckpointArrays:
    checkpoints = trained.run_dir.checkpoints
    if damage := checkpoints.damage(trained.checkpoint):
        raise UserError(f"{checkpoints.where(trained.checkpoint.step)} is damaged: {damage}",
                        "name another with --step; `embark checkpoints RUN --verify` reads all")
    return CheckpointArrays(checkpoints.store, trained.checkpoint.name)


def _weights(arrays: CheckpointArrays, tables: Sequence[StoredTable], dtype: TableDtype) -> list[TensorSource]:
    """Return the weights under the names of the model's state, without the checkpoint's prefix `model.`."""
    found = [in_memory(name.removeprefix(_MODEL), arrays.tensor(name, entry.size))  # an own model may have integers
             for name, entry in arrays.entries.items() if name.startswith(_MODEL + DENSE)]
    for one in found:
        if any(np.isnan(values).any() for values in one.pieces()):  # a mask of the user's own may be infinite
            raise DataError(f"{one.name} has values that are NaN", "export another checkpoint with --step")
    for table in tables:
        name = table_weight(table.name, is_sequence=table.is_sequence)
        num_rows, dim = arrays.entry(name, (table.rows, table.dim)).size
        element, num = row_format(dtype, dim)

        def pieces(name: str = name, num_rows: int = num_rows, dim: int = dim) -> Iterator[Array]:
            at_once = max(1, READ_BYTES // (4 * dim))
            for start in range(0, num_rows, at_once):
                rows = arrays.rows(name, start, min(start + at_once, num_rows)).astype(np.float32, copy=False)
                try:
                    yield quantize_rows(rows, dtype)
                except DataError as error:
                    raise DataError(f"{name.removeprefix(_MODEL)} {error.what}", error.fix) from None

        found.append(TensorSource(name.removeprefix(_MODEL), element, (num_rows, num), pieces))
    return found


def _row_format(trained: TrainedRun, arrays: CheckpointArrays) -> tuple[RowFormat, list[TensorSource], RowEncoder]:
    """Return what turns raw rows into ids, the id maps, and the encoder made of both."""
    data, model = trained.spec.data, trained.spec.model
    manifest = None
    if data.kind == "prepared" and model.has_dynamic_tables:
        raise UserError(f"{trained.run_dir.uri}: has dynamic tables over prepared ids, and is not exported",
                        'train on the values themselves, data.kind = "columns"')
    if data.kind in ("prepared", "interactions"):
        found = find_id_maps(trained.run_dir.uri, trained.spec, trained.fingerprint)
        manifest = found.manifest
        if manifest is None and data.kind == "prepared":
            raise DataError(f"{data.path}: the id maps of the run's data cannot be read: {found.why}", found.fix)
        before = PreparedWith.of(found.path, manifest) if manifest else None
        if before and manifest and SEQUENCES in manifest.settings:
            schema, prepare, encoder = next_item_rows(model, data, before)
            rows = RowFormat(
                columns=schema.unlabelled(), prepare=prepare, layout=encoder.layout, plain_ids=data.on_bad_id,
                hashed_rows={one.feature.name: one.hashed_rows for one in encoder.maps}, features=PLAIN_FEATURES,
                numbers=_with_state(encoder.numbers, PLAIN_FEATURES))
            return rows, _tensors(encoder.maps), encoder
        if before and manifest:
            encoder = before.row_encoder()
            rows = RowFormat(
                columns=before.schema.unlabelled(), prepare=before.prepare, layout=manifest.layout,
                hashed_rows={one.feature.name: one.hashed_rows for one in encoder.maps}, features=before.features,
                numbers=_with_state(encoder.numbers, before.features))
            return rows, [*_tensors(encoder.maps), *_statistics(before.schema, encoder)], encoder
    schema, prepare, encoder = plain_row_format(model, data, manifest.layout if manifest else None,
                                                has_words=data.kind == "columns" or trained.spec.stream.is_on,
                                                features=trained.spec.features)
    dynamic = _dynamic_maps(arrays, trained.spec)
    slots = {table.name: dynamic[table.weights] for table in model.table_list() if table.is_dynamic}
    by_slot = _with_slots(encoder.maps, slots)
    maps = _with_slots(encoder.maps, {name: by_rising_key(*arrays) for name, arrays in slots.items()})
    rows = RowFormat(
        columns=schema.unlabelled(), prepare=prepare, layout=encoder.layout,
        hashed_rows={one.feature.name: one.hashed_rows for one in maps}, plain_ids=data.on_bad_id,
        features=PLAIN_FEATURES, numbers=_with_state(encoder.numbers, PLAIN_FEATURES))
    return rows, _tensors(by_slot), replace(encoder, maps=maps)


def _with_state(numbers: Numbers, features: FeaturesSpec) -> tuple[NumberCode, ...] | None:
    """Return the codes, unless they have no state and `features` names the transform."""
    return None if all(code.is_plain and code.transform == features.numbers for code in numbers.codes) else \
        numbers.codes


def _with_slots(maps: Sequence[IdMap], slots: Maps) -> tuple[IdMap, ...]:
    """Return the id maps with the ids and rows of dynamic tables."""
    found = {one.feature.name: one for one in maps}
    found |= {name: replace(found[name], keys=keys, ids=rows, hashed_rows=0) for name, (keys, rows) in slots.items()}
    return tuple(found.values())


def _tensors(maps: Sequence[IdMap]) -> list[TensorSource]:
    return [in_memory(f"{one.feature.name}.{kind}", np.asarray(values)) for one in maps
            for kind, values in (("keys", one.keys), ("ids", one.ids)) if values is not None]


def _statistics(schema: Schema, encoder: RowEncoder) -> list[TensorSource]:
    return [in_memory(f"{schema.sparse[one.column].name}.statistics{kind}", np.asarray(values))
            for one in encoder.statistics for kind, values in ((".keys", one.keys), ("", one.values))]


def _dynamic_maps(arrays: CheckpointArrays, spec: RunSpec) -> Maps:
    """Return the id and the row of each slot, by table; both are 0 in a free slot."""
    found: Maps = {}
    for table in spec.model.stored_tables():
        if table.is_dynamic:
            hashes, seen = (arrays.tensor(f"dynamic.{table.name}.{part}", (table.rows - 1,))
                            for part in ("hashes", "seen"))
            ids = unmixed(hashes, table_key(spec.train.seed, table.name, MAP)).view(np.uint64)
            is_taken = seen != FREE
            found[table.name] = (np.where(is_taken, ids, np.uint64(0)),
                                 np.where(is_taken, np.arange(1, table.rows), 0).astype(np.int32))
    return found
