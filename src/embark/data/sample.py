"""A few rows of a spec's own data, written as prepared data of small tables: what a rehearsal trains on."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from embark.errors import EmbarkError
from embark.spec import RunSpec
from embark.store import open_store, write_atomic
from embark.values import JsonDict, frozen
from . import LOOK, open_source, resolve_from_data
from .loader import Batch
from .make import layout_of, rows_of
from .prepare.inputs import Inputs
from .prepared import MANIFEST, Layout, Manifest, Part, PartWriter, Split
from .prepared.cache import find_manifest, read_manifest


@frozen
class Sample:
    """Rows in the order of the data, and the spec with what the data decides."""

    spec: RunSpec
    batches: dict[Split, Batch]

    @property
    def num_train(self) -> int:
        return len(self.batches["train"].label)


def take_sample(spec: RunSpec, *, num_train: int, num_eval: int) -> tuple[Sample | None, str]:
    """Take at most so many rows; return None, and why, if the data cannot be read from here.

    Data that can be read and is not what the spec says raises, as it would where the run starts.
    """
    if why := _unreadable(spec):
        return None, why
    spec = resolve_from_data(spec)
    data = spec.data.changed(shuffle="none")  # the first rows are in one file
    source = open_source(spec.changed(data=data))
    batches: dict[Split, Batch] = {"train": source.train_rows(0, 0, min(num_train, source.num_train_samples))}
    if source.num_eval_samples:
        batches["validation"] = source.eval_rows(0, min(num_eval, source.num_eval_samples))
    return Sample(_with_own_columns(spec), batches), ""


def _with_own_columns(spec: RunSpec) -> RunSpec:
    """Give each task a label column of its own, as a sample has them."""
    tasks = tuple(task.changed(label="", above=None) for task in spec.model.tasks)
    return spec.changed(model=spec.model.changed(tasks=tasks)) if tasks else spec


def write_sample(sample: Sample, out: Path, *, max_rows: int) -> None:
    """Write prepared data whose tables have at most `max_rows` rows: ids are taken modulo that."""
    widths = np.asarray([[table.multi_hot] for table in sample.spec.model.table_list()])
    is_ragged = any((batch.lengths != widths).any() for batch in sample.batches.values())
    layout = layout_of(sample.spec, is_ragged=is_ragged, max_rows=max_rows)
    layout, settings = _with_preparation(sample.spec, layout)
    parts: dict[Split, tuple[Part, ...]] = {}
    for split, batch in sample.batches.items():
        per_feature = batch.lengths.sum(axis=1, dtype=np.int64)
        sizes = np.asarray([feature.rows for feature in layout.id_features], np.int32)
        writer = PartWriter(out, f"{split}/000000", layout)
        writer.add(rows_of(layout, replace(batch, ids=batch.ids % np.repeat(sizes, per_feature)),
                           sample.spec.model.tasks))
        parts[split] = tuple(writer.close())
    manifest = Manifest(layout, {"train": (), "validation": (), "test": (), **parts}, label=sample.spec.data.label,
                        settings=settings)
    write_atomic(out / MANIFEST, manifest.to_text())


def _with_preparation(spec: RunSpec, layout: Layout) -> tuple[Layout, JsonDict]:
    """Return the layout and settings of a sample. If all ids of the data are hashes, raw rows get those of the smaller
    tables, so that what is trained on the sample is exported with the columns of the data."""
    if spec.data.kind == "prepared" and not spec.model.tasks:
        manifest = read_manifest(spec.data.path)
        if {one["how"] for one in manifest.settings.get("id_maps", {}).values()} == {"hash"}:
            ids = {one.name: {"how": "hash", "rows": one.rows} for one in layout.id_features}
            return replace(layout, dense=manifest.layout.dense), {**manifest.settings, "id_maps": ids}
    return layout, {"made": "sample"}


def _unreadable(spec: RunSpec) -> str:
    """Return why there is nothing to read at `data.path` from here; empty if there is."""
    path = spec.data.path
    if spec.data.is_custom:
        return ""
    if spec.data.kind == "prepared":
        why = find_manifest(path, LOOK)[1]
        return f"{path}: {why}" if why else ""
    try:
        if "://" in path and not path.startswith("iceberg://"):  # without the many retries of what must be read
            open_store(path.rpartition("/")[0], LOOK).list()
        Inputs().find(path)
    except EmbarkError as error:  # no such file, no rights, no network, no package for the store
        return error.what
    return ""
