"""What requests and answers look like: the Open Inference Protocol v2 in JSON, and `/score`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from embark.data.prepare.schema import TIME_ROWS, Schema
from embark.serve.request_rows import JsonRow

SCORE = "score"


def metadata(name: str, version: int, columns: Schema) -> dict[str, Any]:
    """Of a model: a tensor for each column; a list is a second dimension."""
    inputs = {column: _tensor(column, "FP32") for column in columns.dense}
    for column in columns.sparse:
        if column.kind not in TIME_ROWS:
            inputs[column.source] = _tensor(column.source, "INT64" if column.kind == "integer" else "BYTES",
                                            is_list=column.is_list)
    for time in columns.times:
        inputs.setdefault(time.name, _tensor(time.name, "INT64" if time.format in ("s", "ms") else "BYTES"))
    return {"name": name, "versions": [str(version)], "platform": "embark", "inputs": list(inputs.values()),
            "outputs": [_tensor(SCORE, "FP32")]}


def _tensor(name: str, datatype: str, *, is_list: bool = False) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, -1] if is_list else [-1]}


def rows_of_infer(body: Mapping[str, Any], columns_of: Schema) -> list[JsonRow]:
    """The tensors of an inference request as rows. Columns of one value may come as [rows, 1] too."""
    str(body.get("id")).encode()  # raises where it could not be sent back
    lists = {column.source for column in columns_of.sparse if column.is_list}
    columns: dict[str, list[Any]] = {}
    for tensor in _listed(body, "inputs"):
        name, shape, data = (tensor.get(key) for key in ("name", "shape", "data"))
        if not isinstance(name, str) or name in columns:
            raise ValueError("every input has a name of its own")
        if not isinstance(shape, list) or len(shape) not in (1, 2) or not all(
                type(size) is int and 0 <= size < 1 << 31 for size in shape):
            raise ValueError(f"input {name!r}: its shape is not [rows] or [rows, values]")
        if not isinstance(data, list):
            raise ValueError(f"input {name!r}: has no data as a JSON array")
        width = shape[1] if len(shape) == 2 else 1
        if len(data) == shape[0] and len(shape) == 2 and all(isinstance(one, list) for one in data):
            data = [value for one in data for value in one]
        if len(data) != math.prod(shape):
            raise ValueError(f"input {name!r}: {len(data)} values for the shape {shape}")
        is_one = len(shape) == 1 or (width == 1 and name not in lists)
        columns[name] = data if is_one else [data[i * width : (i + 1) * width] for i in range(shape[0])]
    if unknown := [tensor.get("name") for tensor in _listed(body, "outputs", []) if tensor.get("name") != SCORE]:
        raise ValueError(f"no output {unknown[0]!r}; the model has {SCORE!r}")
    sizes = {len(values) for values in columns.values()}
    if len(sizes) != 1:
        raise ValueError("the inputs have no rows, or not the same number of rows")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def infer_response(name: str, version: int, body: Mapping[str, Any], scores: Sequence[float | None]) -> dict[str, Any]:
    """The answer to an inference request."""
    echoed = {"id": body["id"]} if isinstance(body.get("id"), str) else {}
    return {"model_name": name, "model_version": str(version), **echoed,
            "outputs": [{**_tensor(SCORE, "FP32"), "shape": [len(scores)], "data": list(scores)}]}


def rows_of_score(body: Mapping[str, Any]) -> list[JsonRow]:
    """`rows`; or `candidates`, each with the columns of `user`."""
    if "rows" in body:
        return list(_listed(body, "rows"))
    user = body.get("user", {})
    if "candidates" not in body or not isinstance(user, dict):
        raise ValueError('send {"rows": [{…}, …]}, or {"user": {…}, "candidates": [{…}, …]}')
    return [{**user, **candidate} for candidate in _listed(body, "candidates")]


def _listed(body: Mapping[str, Any], key: str, default: list[Any] | None = None) -> list[dict[str, Any]]:
    found = body.get(key, default)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{key!r} is not an array of objects")
    return found
