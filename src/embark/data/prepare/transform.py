"""Dense values, as the model wants them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embark.data.prepare.pieces import Schema
from embark.spec.data import PrepareSpec

Transform = Literal["mlperf", "log", "none"]


def transform_of(prepare: PrepareSpec, schema: Schema) -> Transform:
    """What `auto` means here."""
    if prepare.dense == "auto":
        return "mlperf" if schema.format == "criteo" else "log"
    return prepare.dense


def transformed(dense: NDArray[np.float32], how: Transform) -> NDArray[np.float32]:
    """The same array, changed. A missing value counts as 0 first, as in the MLPerf reference."""
    np.copyto(dense, 0, where=np.isnan(dense))
    if how == "mlperf":
        np.maximum(dense, np.float32(-2), out=dense)
        dense += np.float32(3)
        np.log(dense, out=dense)
    elif how == "log":
        size = np.abs(dense)
        np.log1p(size, out=size)
        np.copysign(size, dense, out=dense)
    return dense
