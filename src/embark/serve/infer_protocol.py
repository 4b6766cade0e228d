"""What requests and answers over HTTP look like: the Open Inference Protocol v2, in JSON and with binary tensors, and
`/score`."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.export.outputs import Output, answer_of, outputs_of, tensors_of
from embark.features.schema import TIME_ROWS, Schema
from embark.spec.model import ModelSpec
from embark.values import JsonDict, JsonMap, frozen
from .raw_tensors import RawLayout, RawTensors
from .request_rows import JsonColumns, Scores, TensorColumns, check_shared
from .tensors import read_tensor, tensor_columns

INSTANCES = "instances"
EXTENSIONS = ["binary_tensor_data"]
MAX_REMEMBERED, MAX_REMEMBERED_BYTES = 64, 1 << 16  # Kinds of requests, and the length of each without its values.


def metadata(name: str, version: int, columns: Schema, model: ModelSpec) -> JsonDict:
    """Describe a model by the protocol: a tensor for each column, with a second dimension for lists."""
    inputs = {column: _tensor(column, "FP32") for column in columns.dense}
    for column in columns.read:
        if column.kind not in TIME_ROWS:
            datatype = {"integer": "INT64", "number": "FP32"}.get(column.kind, "BYTES")
            inputs[column.source] = _tensor(column.source, datatype, is_list=column.is_list and not column.is_words)
    for time in columns.times:
        inputs.setdefault(time.name, _tensor(time.name, "INT64" if time.format in ("s", "ms") else "BYTES"))
    return {"name": name, "versions": [str(version)], "platform": "embark", "inputs": list(inputs.values()),
            "outputs": [{**_tensor(output.name, "FP32"), "shape": output.shape} for output in outputs_of(model)]}


def _tensor(name: str, datatype: str, *, is_list: bool = False) -> JsonDict:
    return {"name": name, "datatype": datatype, "shape": [-1, -1] if is_list else [-1]}


@frozen
class InferRequest:
    """An inference request."""

    columns: TensorColumns | RawTensors
    outputs: tuple[Output, ...]  # The requested outputs.
    id: str = ""
    raw_outputs: frozenset[str] = frozenset()  # Names of the outputs that are sent as raw bytes over HTTP.


def read_infer(header: JsonMap, raw: memoryview, schema: Schema, model: ModelSpec) -> InferRequest:
    """Read a request over HTTP: its JSON, and the bytes of the binary tensors after it."""
    request_id, tensors, at = header.get("id", ""), [], 0
    if not isinstance(request_id, str):
        raise ValueError("'id' is not a string")
    request_id.encode()  # raises where it could not be sent back
    for tensor in _listed(header, "inputs"):
        name, data, size = tensor.get("name"), tensor.get("data"), _parameters(tensor).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(raw) - at or data is not None:
                raise ValueError(f"input {name!r}: {size!r} bytes of {len(raw) - at} that remain, or data beside them")
            data, at = raw[at : at + size], at + size
        elif not isinstance(data, list):
            raise ValueError(f"input {name!r}: has no data as a JSON array")
        tensors.append(read_tensor(name, tensor.get("datatype"), tensor.get("shape"), data))
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes after the header belong to no input")
    asked = _listed(header, "outputs", [])
    outputs = chosen_outputs([output.get("name") for output in asked], model)
    is_raw = _parameters(header).get("binary_data_output", False)
    raw_by_name = {output.name: is_raw for output in outputs}
    raw_by_name |= {output["name"]: _parameters(output).get("binary_data", is_raw) for output in asked}
    raw_outputs = frozenset(name for name, wanted in raw_by_name.items() if wanted is True)
    return InferRequest(tensor_columns(tensors, schema), outputs, request_id, raw_outputs)


class InferReader:
    """Reads requests. Clients repeat their headers, so what was read of one is remembered: if all tensors are raw
    numbers, one for each row, only the bytes after the header change."""

    def __init__(self, schema: Schema) -> None:
        """`schema` is the same for all versions."""
        self._schema = schema
        self._remembered: dict[Hashable, tuple[InferRequest, RawLayout]] = {}

    def read(self, header: Hashable, header_bytes: int, raw: memoryview,
             parse: Callable[[], InferRequest]) -> InferRequest:
        """Read a request by what is known of its header, or by `parse`. `raw` are the bytes of its tensors."""
        if (known := self._remembered.get(header)) and known[1].num_bytes == len(raw):
            return replace(known[0], columns=RawTensors(known[1], raw))
        found = parse()
        assert isinstance(found.columns, TensorColumns)
        layout = RawLayout.of(found.columns, self._schema)
        if layout is None or layout.num_bytes != len(raw):
            return found
        if header_bytes <= MAX_REMEMBERED_BYTES:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[header] = replace(found, columns=RawTensors(layout, memoryview(b""))), layout
        return replace(found, columns=RawTensors(layout, raw))


def chosen_outputs(names: Sequence[Any], model: ModelSpec) -> tuple[Output, ...]:
    """Return the named outputs, or all; refuse those that the model does not have."""
    has = outputs_of(model)
    known = [output.name for output in has]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no output {unknown[0]!r}; the model has {', '.join(map(repr, known))}")
    return tuple(output for output in has if not names or output.name in names)


def infer_response(name: str, version: int, request: InferRequest, scores: NDArray[np.float32]) -> \
        tuple[JsonDict, bytes]:
    """Return the answer to an inference request: its JSON, and the bytes after it."""
    echoed = {"id": request.id} if request.id else {}
    outputs, after = [], []
    for tensor, values in tensors_of(request.outputs, scores):
        if tensor["name"] in request.raw_outputs:
            after.append(values.tobytes())
            outputs.append({**tensor, "parameters": {"binary_data_size": len(after[-1])}})
        else:
            outputs.append({**tensor, "data": values.reshape(-1).tolist()})
    return {"model_name": name, "model_version": str(version), **echoed, "outputs": outputs}, b"".join(after)


def read_score(body: JsonMap) -> JsonColumns:
    """Read `rows`, which Vertex AI calls `instances`, or `candidates`, each with the columns of `user`."""
    for name in ("rows", INSTANCES):
        if name in body:
            return JsonColumns(_listed(body, name))
    user = body.get("user", {})
    if "candidates" not in body or not isinstance(user, dict):
        raise ValueError('send {"rows": [{…}, …]}, or {"user": {…}, "candidates": [{…}, …]}')
    rows = _listed(body, "candidates")
    check_shared(_num_bytes(user), len(rows))
    return JsonColumns(rows, user)


def _num_bytes(value: Any) -> int:
    """Estimate the memory of a cell of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_num_bytes, value), 8) if isinstance(value, list) else len(value) if isinstance(value, str) else 8


def score_response(body: JsonMap, found: Scores, model: ModelSpec) -> JsonDict:
    """Return the answer to a request with that body. Vertex AI wants one prediction for each instance."""
    is_by_row = INSTANCES in body
    return {"version": found.version,
            "predictions" if is_by_row else "scores": answer_of(model, found.scores, is_by_row=is_by_row),
            "errors": [{"row": row, "why": why} for row, why in found.errors]}


def json_object(text: bytes | bytearray) -> JsonDict:
    """Parse a body, or the part of it that is JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        is_gzip = text.startswith(b"\x1f\x8b")
        raise ValueError("the body is compressed; send it as it is" if is_gzip else "the body is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("the body is not a JSON object")
    return value


def _parameters(of: JsonMap) -> JsonMap:
    found = of.get("parameters", {})
    if not isinstance(found, dict):
        raise ValueError("'parameters' is not an object")
    return found


def _listed(body: JsonMap, key: str, default: list[Any] | None = None) -> list[JsonDict]:
    found = body.get(key, default)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{key!r} is not an array of objects")
    return found
