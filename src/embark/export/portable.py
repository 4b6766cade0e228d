"""The tensors of a model that runs without Embark: their names, types and shapes, and their values for encoded rows."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from embark.features.arrays import Array
from embark.features.layout import Rows
from embark.values import frozen
from .artifact import ArtifactInfo
from .outputs import outputs_of

Format = Literal["aoti", "triton", "onnx"]
DENSE_INPUT, ROWS = "dense", "rows"
_TRITON_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}


@frozen
class TensorInfo:
    """An input or an output of a model."""

    name: str
    dtype: Literal["float32", "int64"]
    shape: tuple[int | str, ...]  # Words are sizes that each call chooses; the same word is the same size.


def inputs_of(info: ArtifactInfo) -> list[TensorInfo]:
    """Return the inputs of a model, in the order of a call."""
    layout = info.rows.layout
    found = [TensorInfo(DENSE_INPUT, "float32", (ROWS, len(layout.dense)))] if layout.dense else []
    for feature in layout.features:
        has_one_id = feature.multi_hot == 1 and not feature.is_ragged
        found.append(TensorInfo(f"{feature.name}.ids", "int64", (ROWS if has_one_id else f"num_{feature.name}",)))
        if not has_one_id:
            found.append(TensorInfo(f"{feature.name}.offsets", "int64", (ROWS,)))
    return found


def input_arrays(info: ArtifactInfo, rows: Rows) -> dict[str, Array]:
    """Return the inputs for encoded rows, by name."""
    found: dict[str, Array] = {DENSE_INPUT: rows.dense.astype(np.float32)}
    for feature, ids, lengths in zip(info.rows.layout.features, rows.ids, rows.lengths, strict=True):
        found[f"{feature.name}.ids"] = ids.reshape(-1).astype(np.int64)
        lengths = np.full(len(rows), feature.multi_hot) if lengths is None else lengths
        found[f"{feature.name}.offsets"] = np.cumsum(lengths, dtype=np.int64) - lengths
    return {one.name: found[one.name] for one in inputs_of(info)}


def output_tensors(info: ArtifactInfo) -> list[TensorInfo]:
    """Return the outputs of a model, in their order."""
    return [TensorInfo(one.name, "float32", (ROWS, *one.shape[1:])) for one in outputs_of(info.model)]


def triton_config(name: str, device: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> str:
    """Return config.pbtxt. Triton knows tensors by their positions. It forms no batches, since the tensors of one
    request have different numbers of rows."""
    tensors = [
        f'{kind} {{ name: "{kind.upper()}__{number}" data_type: {_TRITON_TYPES[one.dtype]} '
        f"dims: {[-1 if isinstance(size, str) else size for size in one.shape]} }}  # {one.name}\n"
        for kind, several in (("input", inputs), ("output", outputs)) for number, one in enumerate(several)]
    return f'name: "{name}"\nbackend: "pytorch"\nplatform: "torch_aoti"\nmax_batch_size: 0\n{"".join(tensors)}' \
           f"instance_group {{ count: 1 kind: {'KIND_GPU' if device == 'cuda' else 'KIND_CPU'} }}\n"
