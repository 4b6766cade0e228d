"""Training data: readers, preparation, the prepared format, loaders of numpy batches. May import events and below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embark.spec import with_absolute_paths, with_bucket_tables, with_train_defaults
from embark.spec.paths import without_local_input
from embark.spec.user_code import with_code
from embark.store.errors import RetryPolicy
from .loader import Batch, Loader, SampleSource, eval_batches

if TYPE_CHECKING:
    from embark.spec import RunSpec
    from .prepared.source import Allocate

__all__ = ["Batch", "Loader", "SampleSource", "eval_batches", "open_source", "open_training_source",
           "resolve_from_data", "resolve_if_readable"]
LOOK = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=20.0)
"""The retries of commands that read data where they can and do without it where they cannot."""


def resolve_from_data(spec: RunSpec) -> RunSpec:
    """Fill in what only the data can say: of prepared data the tables and the number of dense columns, and the fields
    of `[train]` that follow the number of samples, where that is known without reading them.

    The paths of the data become absolute: the spec is saved with the run, and may be read from another directory.
    """
    spec = with_bucket_tables(with_code(with_absolute_paths(spec), Path()))
    if spec.data.kind == "synthetic":
        return with_train_defaults(spec, spec.data.num_train_samples)
    if spec.data.kind != "prepared":
        return spec
    from .prepared.cache import read_manifest
    from .prepared.manifest import resolve_from_manifest

    return resolve_from_manifest(spec, read_manifest(spec.data.path))


def resolve_if_readable(spec: RunSpec) -> tuple[RunSpec, str]:
    """Resolve a spec that runs elsewhere. Where its data cannot be read from here, return it unchanged, and why.

    What the data would decide is then left out, so that the run decides it where it can read the data. So are local
    files to prepare: they stay here.
    """
    spec = with_bucket_tables(without_local_input(spec))
    is_given = "num_dense" in spec.model.model_fields_set and spec.model.gives_tables
    if spec.data.kind != "prepared" or (is_given and "://" in spec.data.path):
        return spec, ""
    from .prepared.cache import find_manifest
    from .prepared.manifest import resolve_from_manifest

    manifest, why = find_manifest(spec.data.path, LOOK)
    if manifest is not None:
        return resolve_from_manifest(spec, manifest), ""
    if is_given:
        return spec, ""
    return spec, f"{spec.data.path}: cannot be read from here, so the run takes its tables and dense columns from " \
                 f"the data where it starts ({why})"


def open_training_source(spec: RunSpec, *, allocate: Allocate | None) -> SampleSource:
    """Open what a run trains on: its stream if it has one, else its data."""
    if spec.stream.is_on:
        from .stream.source import StreamSource

        return StreamSource(spec)
    return open_source(spec, allocate=allocate)


def open_source(spec: RunSpec, *, allocate: Allocate | None = None) -> SampleSource:
    """Open and check the source that `data.kind` names. `allocate` provides the memory of prepared data's batches."""
    if spec.data.kind == "prepared":
        from .prepared.cache import open_prepared

        return open_prepared(spec, allocate)
    if spec.data.kind == "columns":
        from .columns import ColumnsSource

        # Rows of a stream are as their file has them: there are no training rows to compute statistics of.
        plain = {"numbers": "none", "missing_flags": False}
        features = spec.features.model_copy(update=plain) if spec.stream.is_on and not spec.features.fitted else \
            spec.features
        return ColumnsSource(spec.model, spec.data, features)
    if spec.data.kind == "interactions":
        from .interactions import InteractionsSource

        return InteractionsSource(spec.model, spec.data, spec.features)
    if spec.data.is_custom:
        from .custom_data import CustomSource

        return CustomSource(spec.model, spec.data)
    from .synthetic import SyntheticSource

    return SyntheticSource(spec.model, spec.data)
