"""The rows to evaluate a run on: another split of its own data, other prepared data, or raw files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from embark.errors import DataError, UserError
from embark.features.numbers import Numbers
from embark.features.schema import TIME_ROWS
from embark.spec import RunSpec
from embark.values import JsonDict, frozen
from . import LOOK, open_source, resolve_from_data
from .kept_maps import find_id_maps
from .loader import Batch, SampleSource
from .prepare.later_rows import PreparedWith
from .prepared import Manifest
from .prepared.cache import find_manifest, read_manifest
from .prepared.manifest import EARLIER, SEQUENCES

SplitName = Literal["train", "validation", "test"]


@frozen
class EvaluationRows:
    """Rows to evaluate on, as the held-out samples of a source, and a name for them."""

    source: SampleSource
    spec: RunSpec  # The spec with the data that was opened.
    path: str  # Empty for synthetic data.
    split: str  # Empty for a raw file.
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column of the input of each table that has another name."""
    dense: tuple[str, ...] = ()  # The column of each dense value, where columns have names.
    notes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """Describe the rows, such as `test split of data/prepared`."""
        data = self.path or (self.spec.data.kind if self.spec.data.is_custom else "synthetic data")
        kind = {"train": "training rows", "": "all rows"}.get(self.split, f"{self.split} split")
        return f"{kind} of {data}"


@contextmanager
def open_rows(
    spec: RunSpec, fingerprint: str, data: str = "", split: str = "", *, run_uri: str = ""
) -> Iterator[EvaluationRows]:
    """Open the rows to evaluate. `spec` is the run's, `fingerprint` its data's, as its checkpoint recorded it; id maps
    that cannot be read where they were are those that the run at `run_uri` keeps."""
    if split and split not in get_args(SplitName):
        raise UserError(f"--split {split}: no such split", f"one of: {', '.join(get_args(SplitName))}")
    if not data:
        yield _own(spec, fingerprint, split)
        return
    manifest = find_manifest(data, LOOK)[0] if "://" in data or Path(data).is_dir() else None
    if manifest is not None:
        note = _check_id_maps(spec, fingerprint, data, manifest, run_uri)
        yield replace(_prepared(spec, data, split, is_custom=False), notes=(note,) if note else ())
        return
    if split:
        raise UserError(f"{data}: --split is of prepared data, and all rows of a raw file are evaluated",
                        "leave --split out")
    if spec.data.kind == "columns":
        everything = spec.data.changed(path=data, eval_fraction=1.0, time_column="")
        opened = spec.changed(data=everything)
        yield EvaluationRows(open_source(opened), opened, data, "", dense=spec.data.dense_columns)
        return
    if spec.stream.is_on and spec.data.kind != "prepared":
        yield _of_stream(spec, data)
        return
    with TemporaryDirectory(prefix="embark-evaluate-") as folder:
        yield _raw(spec, fingerprint, data, Path(folder), run_uri)


def _own(spec: RunSpec, fingerprint: str, split: str) -> EvaluationRows:
    is_prepared = spec.data.kind == "prepared"
    if spec.data.kind == "interactions":
        split = split or spec.data.eval_split
        if split != "train":
            spec = spec.changed(data=spec.data.changed(eval_split=split))
    elif not is_prepared and split == "test":
        raise UserError(f"data.kind is {spec.data.kind!r}, which has training and held-out rows and no test split",
                        "--split train or --split validation")
    path = spec.data.path if spec.data.kind in ("columns", "interactions") else ""
    rows = _prepared(spec, spec.data.path, split, is_custom=True) if is_prepared else \
        _view(open_source(spec), spec, path, split or "validation")
    _refuse_other_data(spec, fingerprint, rows.source.fingerprint())
    return rows


def _refuse_other_data(spec: RunSpec, fingerprint: str, found: str) -> None:
    if fingerprint and found and found != fingerprint:
        was, now = (one.partition(" ")[2].strip("()") or "no table" for one in (fingerprint, found))
        raise DataError(f"{spec.data.path}: is not the data that the run was trained on: it was changed or prepared "
                        "again since, so its ids may be those of other values"
                        + (f"; {was} then, {now} now" if was != now else ""),
                        "put the run's data back; or name a copy of it: --data FOLDER")


def _prepared(spec: RunSpec, path: str, split: str, *, is_custom: bool) -> EvaluationRows:
    split = split or spec.data.eval_split
    changes: JsonDict = {"kind": "prepared", "path": path, "shuffle": "none"}
    if split != "train":
        changes["eval_split"] = split
    opened = resolve_from_data(spec.changed(data=spec.data.model_copy(update=changes)))
    rows = _with_names(_view(open_source(opened), opened, path, split), path, read_manifest(path))
    if not rows.source.num_eval_samples:
        raise DataError(f"{path}: its {split} split has no rows",
                        "name another: --split train" + ("" if is_custom else ", or other data"))
    return rows


def _view(source: SampleSource, spec: RunSpec, path: str, split: str) -> EvaluationRows:
    return EvaluationRows(TrainingRows(source) if split == "train" else source, spec, path, split,
                          dense=spec.data.dense_columns)


def _with_names(rows: EvaluationRows, path: str, manifest: Manifest) -> EvaluationRows:
    """Name the columns as the input does."""
    before = PreparedWith.of(path, manifest)
    columns = {column.name: column.parts[0] if column.kind == "bucket" else column.source
               for column in before.schema.sparse
               if column.kind not in TIME_ROWS} if before else {}  # Several may be made of one time.
    return replace(rows, columns=columns, dense=_columns_of(before, manifest))


def dense_columns(spec: RunSpec) -> tuple[str, ...]:
    """Return the column of each dense value that a run trains on."""
    if spec.data.kind != "prepared":
        return spec.data.dense_columns
    manifest = read_manifest(spec.data.path)
    return _columns_of(PreparedWith.of(spec.data.path, manifest), manifest)


def _columns_of(before: PreparedWith | None, manifest: Manifest) -> tuple[str, ...]:
    numbers = before.numbers if before else Numbers(())
    return tuple(numbers.code_of(name).column for name in manifest.layout.dense)


def _raw(spec: RunSpec, fingerprint: str, data: str, folder: Path, run_uri: str) -> EvaluationRows:
    from .prepare.later_rows import write_later_rows
    from .prepared.parts import LocalParts
    from .prepared.source import PreparedSource

    before = None
    if spec.data.kind == "prepared":
        found = find_id_maps(run_uri, spec, fingerprint)
        if found.manifest is None:
            raise DataError(f"{data}: raw rows need the id maps of the run's data, {spec.data.path}, which cannot be "
                            f"read from here: {found.why}", found.fix)
        before = PreparedWith.of(found.path, found.manifest)
    if before is None:
        raise DataError(f"{data}: the run was trained on {spec.data.kind} ids, which raw rows do not have",
                        "evaluate it on prepared data that `embark data make` wrote, or on a split of its own")
    own = before.manifest
    if SEQUENCES in own.settings:
        return _raw_log(spec, before.path, data, folder)
    limit = {"max_bad_share": spec.data.prepare.max_bad_share}  # which changes no row, so the manifest is silent
    manifest, bad = write_later_rows(replace(before, prepare=before.prepare.model_copy(update=limit)), data, folder)
    if not manifest.num_rows("validation"):
        raise DataError(f"{data}: has no rows", "name a file with at least one row")
    opened = spec.changed(data=spec.data.changed(eval_split="validation"))
    source = PreparedSource(manifest, spec.model.table_list(), opened.data,
                            LocalParts(folder, manifest.layout, manifest.block_rows), tasks=spec.model.tasks)
    notes = (f"skipped {bad.num_bad:,} unreadable rows, {bad.share:.4%} of all",) if bad.num_bad else ()
    return _with_names(EvaluationRows(source, opened, data, "", notes=notes), before.path, own)


def _raw_log(spec: RunSpec, maps: str, data: str, folder: Path) -> EvaluationRows:
    """Prepare a log with the ids of the run's data; items that this does not have are left out. Each user's last item
    is to be found."""
    from .prepare.prepare import prepare_from_spec

    prepare = spec.data.prepare.changed(input=data, id_map_from=maps, min_count=1 << 53, split="last",
                                        validation_from="", test_from="", test_fraction=0.0, executor="local")
    bad = prepare_from_spec(spec.changed(data=spec.data.changed(prepare=prepare)), folder).manifest.bad_rows
    rows = _prepared(spec, str(folder), "test", is_custom=True)
    notes = (f"skipped {bad['num']:,} unreadable rows, {bad['share']:.4%} of all",) if bad.get("num") else ()
    return replace(rows, path=data, split="", notes=notes)


def _of_stream(spec: RunSpec, data: str) -> EvaluationRows:
    """Read rows that hold ids, as the records of the run's stream do."""
    from .permuted_rows import RowsInMemory
    from .stream.source import StreamSource

    batch, num_bad = StreamSource(spec).rows_of_files(data)
    notes = (f"skipped {num_bad:,} unreadable rows",) if num_bad else ()
    dense = spec.data.dense_columns or tuple(f"dense_{i}" for i in range(spec.model.num_dense))
    return EvaluationRows(RowsInMemory(batch), spec, data, "", dense=dense, notes=notes)


def _check_id_maps(spec: RunSpec, fingerprint: str, path: str, manifest: Manifest, run_uri: str) -> str:
    """Refuse ids of other maps, which mean other values. Return a note if the run's own maps cannot be read."""
    own: Manifest | None = None
    if spec.data.kind == "prepared":
        found = find_id_maps(run_uri, spec, fingerprint)
        own = found.manifest
        if own is None:
            return "" if manifest.fingerprint() == fingerprint else \
                f"not verified that the ids of {path} are the run's: {spec.data.path} cannot be compared ({found.why})"
    maps = own.settings.get("id_maps") if own is not None else None
    continued = manifest.settings.get(EARLIER, {})
    if own is not None and continued.get("data") == own.fingerprint():
        return ""  # the ids that the run knows are as they were
    if spec.data.kind == "columns" or manifest.settings.get("id_maps") != maps:
        raise DataError(f"{path}: was prepared with other id maps than the run's data, so its ids mean other values",
                        "evaluate on the raw file that it was prepared from (--data FILE); or prepare that with "
                            f"data.prepare.id_map_from = {spec.data.path}" if maps else
                        "name data whose ids are the run's")
    return ""


class TrainingRows:
    """A source whose held-out samples are another's training samples, each once."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.num_train_samples = self.num_eval_samples = source.num_train_samples
        self.notes, self.catalog = source.notes, getattr(source, "catalog", None)

    def fingerprint(self) -> str:
        return self._source.fingerprint()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        return self._source.train_rows(epoch, start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        return self._source.train_rows(0, start, stop)
