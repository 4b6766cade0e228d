"""Training data: readers, preparation, the prepared format, loaders of numpy batches. May import events and below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.data.loader import Batch, Loader, Source, eval_batches

if TYPE_CHECKING:
    from embark.data.prepared.source import Allocate
    from embark.spec.run import RunSpec

__all__ = ["Batch", "Loader", "Source", "eval_batches", "open_source", "resolve_from_data"]


def resolve_from_data(spec: RunSpec) -> RunSpec:
    """The spec with what only its data can say; of prepared data, the tables and the number of dense columns."""
    if spec.data.kind != "prepared":
        return spec
    from embark.data.prepared.cache import read_manifest
    from embark.data.prepared.manifest import resolve_from_manifest

    return resolve_from_manifest(spec, read_manifest(spec.data.path))


def open_source(spec: RunSpec, *, allocate: Allocate | None = None) -> Source:
    """The source that `data.kind` names, checked and ready; `allocate` gives the memory of prepared data's batches."""
    if spec.data.kind == "prepared":
        from embark.data.prepared.cache import open_prepared

        return open_prepared(spec, allocate)
    if spec.data.kind == "columns":
        from embark.data.columns import ColumnsSource

        return ColumnsSource(spec.model, spec.data)
    from embark.data.synthetic import SyntheticSource

    return SyntheticSource(spec.model, spec.data)
