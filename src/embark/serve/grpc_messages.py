"""Messages of inference.GRPCInferenceService, the Open Inference Protocol v2 over gRPC. They are described here instead
of generated, in a pool of their own, so that a client may have its own copy in the same process. `parameters` are left
out: nothing here has any, and what a message has beyond its description is skipped."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_NAME_AND_VERSION = {1: "string name", 2: "string version"}
_TENSOR = {1: "string name", 2: "string datatype", 3: "repeated int64 shape"}
_MESSAGES: dict[str, dict[int, str]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {1: "bool live"},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {1: "bool ready"},
    "ModelReadyRequest": _NAME_AND_VERSION,
    "ModelReadyResponse": {1: "bool ready"},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {**_NAME_AND_VERSION, 3: "repeated string extensions"},
    "ModelMetadataRequest": _NAME_AND_VERSION,
    "TensorMetadata": _TENSOR,
    "ModelMetadataResponse": {1: "string name", 2: "repeated string versions", 3: "string platform",
                              4: "repeated TensorMetadata inputs", 5: "repeated TensorMetadata outputs"},
    "InferTensorContents": {
        1: "repeated bool bool_contents", 2: "repeated int32 int_contents", 3: "repeated int64 int64_contents",
        4: "repeated uint32 uint_contents", 5: "repeated uint64 uint64_contents", 6: "repeated float fp32_contents",
        7: "repeated double fp64_contents", 8: "repeated bytes bytes_contents"},
    "InferTensor": {**_TENSOR, 5: "InferTensorContents contents"},
    "InferRequestedOutputTensor": {1: "string name"},
    "ModelInferRequest": {
        1: "string model_name", 2: "string model_version", 3: "string id", 5: "repeated InferTensor inputs",
        6: "repeated InferRequestedOutputTensor outputs", 7: "repeated bytes raw_input_contents"},
    "ModelInferResponse": {
        1: "string model_name", 2: "string model_version", 3: "string id", 5: "repeated InferTensor outputs",
        6: "repeated bytes raw_output_contents"},
}
_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"


def message_classes() -> dict[str, Any]:
    """Return the message classes by name."""
    file = FileDescriptorProto(name="open_inference.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in fields.items():
            *repeated, kind, field_name = text.split()
            field = message.field.add(name=field_name, number=number, label=Field.Label.Value(
                "LABEL_REPEATED" if repeated else "LABEL_OPTIONAL"))
            if kind in _MESSAGES:
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}
