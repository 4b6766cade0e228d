"""What a model learns from: numpy batches that any rank can take any slice of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.data.batch import Batch, Source
from embark.data.loader import Loader, eval_batches, steps_per_epoch

if TYPE_CHECKING:
    from embark.data.prepared.opening import OpenStore
    from embark.data.prepared.source import Allocate
    from embark.spec.run import RunSpec

__all__ = ["Batch", "Loader", "Source", "eval_batches", "fit_spec", "open_source", "steps_per_epoch"]


def fit_spec(spec: RunSpec, *, open_store: OpenStore | None = None) -> RunSpec:
    """The spec with what only its data can say; of prepared data, the tables and the number of dense columns."""
    if spec.data.kind != "prepared":
        return spec
    from embark.data.prepared.opening import read_manifest
    from embark.data.resolve import fitted

    return fitted(spec, read_manifest(spec.data.path, open_store))


def open_source(spec: RunSpec, *, open_store: OpenStore | None = None, allocate: Allocate | None = None) -> Source:
    """The source that `data.kind` names, checked and ready.

    `open_store` leads into object stores; `allocate` gives the memory of batches, where the source can choose it.
    """
    if spec.data.kind == "prepared":
        from embark.data.prepared.opening import open_prepared

        return open_prepared(spec, open_store, allocate)
    if spec.data.kind == "columns":
        from embark.data.columns import ColumnsSource

        return ColumnsSource(spec.model, spec.data)
    from embark.data.synthetic import SyntheticSource

    return SyntheticSource(spec.model, spec.data)
