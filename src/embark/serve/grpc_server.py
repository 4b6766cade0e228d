"""The Open Inference Protocol v2 over gRPC, with the batches, limits and token of the HTTP server."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa

from embark.errors import MissingPackage, UserError
from embark.export.artifact import short_identity
from embark.export.outputs import tensors_of
from embark.values import JsonDict, read_table
from .app import IDENTITY, ModelServer, Refusal, all_scores, refused_if_malformed
from .infer_protocol import InferRequest, chosen_outputs
from .tensors import BYTES, DTYPES, read_tensor, tensor_columns

try:
    import grpc
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass
except ModuleNotFoundError as error:
    raise MissingPackage(f"--grpc-port needs {error.name}, which is not installed",
                         "pip install 'embark-rec[grpc]'") from None

Fields = JsonDict  # The fields of a response message; under `IDENTITY`, what its trailing metadata say.
Answer = Callable[[Any], Awaitable[Fields]]
_log = logging.getLogger("embark.serve")
_CODES = {400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED,
          404: grpc.StatusCode.NOT_FOUND, 413: grpc.StatusCode.INVALID_ARGUMENT,
          429: grpc.StatusCode.RESOURCE_EXHAUSTED, 500: grpc.StatusCode.INTERNAL}
_CONTENTS = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", BYTES: "bytes",
             **{f"INT{bits}": "int" for bits in (8, 16, 32)}, **{f"UINT{bits}": "uint" for bits in (8, 16, 32)}}
"""Which field has the values of a tensor that is not raw; FP16 has none."""
_IDLE_MS = 300_000
_HANDSHAKE_MS = 10_000
_MESSAGES: dict[str, dict[str, str]] = read_table(__file__, "open_inference.toml")
_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"


def message_classes() -> JsonDict:
    """Return the message classes by name. They are made here instead of generated, in a pool of their own, so that a
    client may have its own copy in the same process."""
    file = FileDescriptorProto(name="open_inference.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in fields.items():
            *repeated, kind, field_name = text.split()
            field = message.field.add(name=field_name, number=int(number), label=Field.Label.Value(
                "LABEL_REPEATED" if repeated else "LABEL_OPTIONAL"))
            if kind in _MESSAGES:
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


class GrpcServer:
    """Listens as soon as it is made, and answers in the event loop that it is made in."""

    def __init__(self, model: ModelServer, address: tuple[str, int], max_requests: int,
                 certificate: tuple[bytes, bytes] | None = None, *, is_shared: bool = False) -> None:
        """Other processes may listen on the address too if it `is_shared`; the kernel distributes connections.
        `certificate` is the chain and its private key."""
        self._model, self._messages = model, message_classes()
        self._server = grpc.aio.server(maximum_concurrent_rpcs=max_requests, options=[
            ("grpc.max_receive_message_length", model.limits.max_body_bytes), ("grpc.so_reuseport", int(is_shared)),
            ("grpc.max_connection_idle_ms", _IDLE_MS), ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS)])
        answers: dict[str, tuple[Answer, bool]] = {
            "ServerLive": (self._live, False), "ServerReady": (self._ready, False),
            "ModelReady": (self._model_ready, True), "ServerMetadata": (self._about_server, True),
            "ModelMetadata": (self._about_model, True), "ModelInfer": (self._infer, True)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {
            name: grpc.unary_unary_rpc_method_handler(
                self._answered(name, answer, is_private),
                response_serializer=lambda response: response.SerializeToString())
            for name, (answer, is_private) in answers.items()})])
        host, port = address
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                self.port = self._server.add_insecure_port(where)
            else:
                chain, key = certificate
                self.port = self._server.add_secure_port(where, grpc.ssl_server_credentials([(key, chain)]))
        except RuntimeError:
            raise UserError(f"{where}: cannot listen there for gRPC",
                            "choose another --grpc-port or --host") from None

    async def start(self) -> None:
        """Accept requests."""
        await self._server.start()

    async def stop(self, drain_s: float) -> None:
        """Accept no more requests, and answer those that were accepted."""
        await self._server.stop(drain_s)

    def _answered(self, name: str, answer: Answer, is_private: bool) -> Callable[[Any, Any], Awaitable[Any]]:
        read, respond = self._messages[f"{name}Request"].FromString, self._messages[f"{name}Response"]

        async def answered(data: bytes, context: Any) -> Any:
            status, what = 200, ""
            try:
                if is_private:
                    given = dict(context.invocation_metadata()).get("authorization", "")
                    self._model.check_token(given.encode() if isinstance(given, str) else given)
                fields = await answer(read(data))
                if identity := fields.pop(IDENTITY, ""):
                    context.set_trailing_metadata(((IDENTITY.lower(), short_identity(identity)),))
                return respond(**fields)
            except DecodeError:
                status, what = 400, f"the message is no {name}Request"
            except Refusal as refusal:
                status, what = refusal.status, refusal.what
            except Exception:
                _log.exception("%s failed", name)
                status, what = 500, "internal error"
            finally:
                self._model.count(f"grpc {name}", str(status))
            return await context.abort(_CODES[status], what)
        return answered

    async def _live(self, _: Any) -> Fields:
        return {"live": True}

    async def _ready(self, _: Any) -> Fields:
        return {"ready": True}

    async def _model_ready(self, request: Any) -> Fields:
        self._model.check_model(request.name, request.version)
        return {"ready": True}

    async def _about_server(self, _: Any) -> Fields:
        return self._model.about_server()

    async def _about_model(self, request: Any) -> Fields:
        self._model.check_model(request.name, request.version)
        return {**self._model.about_model(), IDENTITY: self._model.model.identity}

    async def _infer(self, request: Any) -> Fields:
        self._model.check_model(request.model_name, request.model_version)
        self._model.check_room()
        with self._model.holding(request.ByteSize()):
            with refused_if_malformed():
                asked = self._read(request)
            found = await self._model.scores("grpc infer", asked.columns)
        self._model.check_model(request.model_name, request.model_version, answered_by=found.version)
        tensors = list(tensors_of(asked.outputs, all_scores(found)))
        response = {"model_name": self._model.name, "model_version": str(found.version), "id": request.id,
                    IDENTITY: found.identity}
        if request.raw_input_contents:
            return {**response, "outputs": [tensor for tensor, _ in tensors],
                    "raw_output_contents": [values.tobytes() for _, values in tensors]}
        return {**response, "outputs": [
            {**tensor, "contents": {"fp32_contents": values.reshape(-1).tolist()}} for tensor, values in tensors]}

    def _read(self, request: Any) -> InferRequest:
        raw, inputs = list(request.raw_input_contents), request.inputs
        if raw and (len(raw) != len(inputs) or any(one.HasField("contents") for one in inputs)):
            raise ValueError("raw_input_contents has all inputs, in their order, or none")
        names, joined = [output.name for output in request.outputs], b"".join(raw)
        alike = (tuple(names), *((one.name, one.datatype, tuple(one.shape), len(data))
                                 for one, data in zip(inputs, raw, strict=True))) if raw else ()

        def parse() -> InferRequest:
            columns = tensor_columns([
                read_tensor(one.name, one.datatype, list(one.shape), raw[i] if raw else _contents(one))
                for i, one in enumerate(inputs)], self._model.info.rows.columns)
            return InferRequest(columns, chosen_outputs(names, self._model.info.model))

        return self._model.reader.read(alike, request.ByteSize() - len(joined), memoryview(joined), parse)


def _contents(tensor: Any) -> Any:
    if tensor.datatype not in _CONTENTS:
        raise ValueError(f"input {tensor.name!r}: {tensor.datatype!r} has no contents; send raw_input_contents")
    values = getattr(tensor.contents, f"{_CONTENTS[tensor.datatype]}_contents")
    values = list(map(int, values)) if tensor.datatype == "BOOL" else list(values)
    return pa.array(values, pa.binary() if tensor.datatype == BYTES else pa.from_numpy_dtype(DTYPES[tensor.datatype]))
