"""What a model learns from: numpy batches that any rank can take any slice of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.data.batch import Batch, Source
from embark.data.loader import Loader, eval_batches, steps_per_epoch

if TYPE_CHECKING:
    from embark.spec.run import RunSpec

__all__ = ["Batch", "Loader", "Source", "eval_batches", "open_source", "steps_per_epoch"]


def open_source(spec: RunSpec) -> Source:
    """The source that `data.kind` names, checked and ready."""
    if spec.data.kind == "columns":
        from embark.data.columns import ColumnsSource

        return ColumnsSource(spec.model, spec.data)
    from embark.data.synthetic import SyntheticSource

    return SyntheticSource(spec.model, spec.data)
