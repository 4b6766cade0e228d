"""Binary tensors, gRPC and TLS: the scores of `/score` by each of them, and hostile requests refused by all."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import struct
import threading
import urllib.request

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from limits import HANG_S
from served_models import ROWS, BlockedScorer, while_serving

from embark import serve_model
from embark.errors import UserError
from embark.serve.app import ServeLimits
from embark.serve.endpoint import TOKEN, Endpoint
from embark.serve.grpc_server import SERVICE, message_classes
from embark.serve.served_model import ServedModel
from embark.serve.server import serve_scorer

INFER = "/v2/models/clicks/infer"
NUM = 12
TYPED = [{"word": row["word"], "tags": ["a", "B"], "number": number, "price": float(np.float32(number) / 7),
          "seen at": row["seen at"], "bought at": row["bought at"]} for number, row in enumerate(ROWS[:NUM])]
TYPES = {"number": ("INT64", np.int64), "price": ("FP32", np.float32)}
GRPC = Endpoint(port=0, grpc_port=0)
MESSAGES = message_classes()


def raw_texts(values) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def raw_inputs():
    """Of `TYPED`: name, datatype, shape, bytes."""
    for name in TYPED[0]:
        values = [row[name] for row in TYPED]
        if name in TYPES:
            yield name, TYPES[name][0], [NUM], np.array(values, TYPES[name][1]).tobytes()
        elif name == "tags":
            yield name, "BYTES", [NUM, 2], raw_texts(tag for tags in values for tag in tags)
        else:
            yield name, "BYTES", [NUM, 1], raw_texts(values)


def binary_request(inputs, **header):
    tensors = [{"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
               for name, datatype, shape, data in inputs]
    text = json.dumps({"inputs": tensors, **header}).encode()
    return text + b"".join(data for _, _, _, data in inputs), {"Inference-Header-Content-Length": str(len(text))}


def grpc_request(inputs):
    return MESSAGES["ModelInferRequest"](model_name="clicks", id="7", raw_input_contents=[one[3] for one in inputs],
                                         inputs=[{"name": name, "datatype": datatype, "shape": shape}
                                                 for name, datatype, shape, _ in inputs])


class GrpcCaller:
    """Calls of the service; an error is its code and text."""

    def __init__(self, client, credentials=None, token="") -> None:
        self._channel = grpc.insecure_channel(client.grpc) if credentials is None else \
            grpc.secure_channel(client.grpc, credentials)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __call__(self, name, request=None, data=None):
        call = self._channel.unary_unary(f"/{SERVICE}/{name}", request_serializer=lambda sent: data or
                                         sent.SerializeToString(),
                                         response_deserializer=MESSAGES[f"{name}Response"].FromString)
        try:
            answer, done = call.with_call(request or MESSAGES[f"{name}Request"](), timeout=HANG_S,
                                          metadata=self._metadata)
            self.trailing = dict(done.trailing_metadata())
            return answer
        except grpc.RpcError as error:
            return error.code().name, error.details()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_binary_tensors_and_grpc_give_the_scores_of_json(artifact, workers):
    def use(client):
        expected = client("POST", "/score", {"rows": TYPED})
        body, headers = binary_request(list(raw_inputs()), id="é", parameters={"binary_data_output": True})
        named, _ = binary_request(list(raw_inputs()), outputs=[{"name": "score"}])
        with GrpcCaller(client) as call:
            raw = call("ModelInfer", grpc_request(list(raw_inputs())))
            assert call.trailing["embark-identity"] == expected[2]["Embark-Identity"]
            contents = call("ModelInfer", MESSAGES["ModelInferRequest"](model_name="clicks", inputs=[
                {"name": "number", "datatype": "INT64", "shape": [NUM],
                 "contents": {"int64_contents": [row["number"] for row in TYPED]}},
                {"name": "price", "datatype": "FP32", "shape": [NUM, 1],
                 "contents": {"fp32_contents": [row["price"] for row in TYPED]}},
                {"name": "tags", "datatype": "BYTES", "shape": [NUM, 2],
                 "contents": {"bytes_contents": [b"a", b"B"] * NUM}},
                *({"name": name, "datatype": "BYTES", "shape": [NUM],
                   "contents": {"bytes_contents": [row[name].encode() for row in TYPED]}}
                  for name in ("word", "seen at", "bought at"))]))
        length = {"Inference-Header-Content-Length": str(len(named) - sum(len(one[3]) for one in raw_inputs()))}
        return expected, client("POST", INFER, body, headers), client("POST", INFER, named, length), raw, contents

    expected, binary, named, raw, contents = while_serving(artifact, use, endpoint=GRPC, workers=workers)
    assert expected[0] == binary[0] == 200
    scores = np.array(expected[1]["scores"], np.float32).tobytes()
    split = int(binary[2]["Inference-Header-Content-Length"])
    header = json.loads(binary[1][:split])
    assert (header["id"], header["outputs"][0]["parameters"]) == ("é", {"binary_data_size": 4 * NUM})
    assert binary[1][split:] == scores
    assert named[1]["outputs"][0]["data"] == expected[1]["scores"]
    assert (raw.id, raw.model_version, list(raw.outputs[0].shape)) == ("7", "1", [NUM])
    assert list(raw.raw_output_contents) == [scores]
    assert np.array(contents.outputs[0].contents.fp32_contents, np.float32).tobytes() == scores


def test_the_official_clients_work(artifact):
    """tritonclient by HTTP and gRPC: health, metadata, inference."""
    def inputs_of(library):
        found = []
        for name in TYPED[0]:
            values = [row[name] for row in TYPED]
            dtype, kind = (*TYPES[name],) if name in TYPES else ("BYTES", np.object_)
            array = np.array([value.encode() if isinstance(value, str) else value for value in values], kind) \
                if name != "tags" else np.array([[b"a", b"B"]] * NUM, np.object_)
            tensor = library.InferInput(name, list(array.shape), dtype)
            tensor.set_data_from_numpy(array)
            found.append(tensor)
        return found

    def use(client):
        expected, found = client("POST", "/score", {"rows": TYPED})[1]["scores"], []
        for library, address in ((http_client, client.address), (grpc_client, client.grpc)):
            with library.InferenceServerClient(address) as server:
                metadata = server.get_model_metadata("clicks")
                found.append((
                    server.is_server_live(), server.is_server_ready(), server.is_model_ready("clicks", "1"),
                    metadata["name"] if isinstance(metadata, dict) else metadata.name,
                    server.infer("clicks", inputs_of(library), outputs=[library.InferRequestedOutput("score")],
                                 request_id="1").as_numpy("score").tolist()))
        return expected, found

    expected, found = while_serving(artifact, use, endpoint=GRPC)
    assert found == [(True, True, True, "clicks", expected)] * 2


def changed(position, **changes):
    """The inputs with one that is wrong."""
    inputs = list(raw_inputs())
    inputs[position] = tuple(changes.get(key, value) for key, value in
                             zip(("name", "datatype", "shape", "data"), inputs[position], strict=True))
    return inputs


NAMES = list(TYPED[0])
NUMBER, PRICE, WORD, TAGS = (NAMES.index(name) for name in ("number", "price", "word", "tags"))
MALFORMED = [
    changed(PRICE, data=b"\0" * 47), changed(PRICE, data=b""), changed(PRICE, shape=[NUM, 2]),
    changed(PRICE, shape=[-1]), changed(PRICE, shape=[1 << 40]), changed(PRICE, shape=[]),
    changed(PRICE, shape=[1, NUM, 1]), changed(PRICE, shape=[0], data=b""),
    changed(PRICE, shape=[NUM - 1], data=b"\0" * (4 * NUM - 4)), changed(PRICE, datatype="FP31"),
    changed(PRICE, datatype=""), changed(PRICE, name="number"), changed(PRICE, name="rice"),
    changed(PRICE, data=np.full(NUM, np.inf, np.float32).tobytes()), changed(WORD, data=b"\xff\xff\xff\xff" * NUM),
    changed(WORD, data=b"\0\0\0\0" * (NUM + 1)), changed(WORD, data=b"\0\0"), changed(WORD, shape=[NUM // 2, 2]),
    changed(NUMBER, datatype="FP64", data=np.full(NUM, 0.5).tobytes()),
    changed(TAGS, datatype="FP32", data=np.zeros(2 * NUM, np.float32).tobytes(), shape=[2 * NUM]),
]


def test_malformed_tensors_are_refused_and_the_server_goes_on(artifact):
    good = list(raw_inputs())
    missing = changed(PRICE, data=np.full(NUM, np.nan, np.float32).tobytes())

    def use(client):
        requests = [binary_request(inputs) for inputs in MALFORMED]
        body, headers = binary_request(good)
        requests += [(body, {"Inference-Header-Content-Length": length}) for length in
                     ("-1", "x", "²", str(len(body) + 1), "9" * 5_000, "0", "10")]
        requests += [(body[:-1], headers), (body + b"\0", headers)]
        text = json.dumps({"inputs": [{"name": "price", "shape": [1], "datatype": "FP32", "data": [1],
                                       "parameters": {"binary_data_size": 0}}]}).encode()
        requests += [(text, {}), (text.replace(b": 0}", b": true}"), {}),
                     (text.replace(b'{"binary_data_size": 0}', b"3"), {})]
        refused = [client("POST", INFER, *request)[:2] for request in requests]
        with GrpcCaller(client) as call:
            by_grpc = [call("ModelInfer", grpc_request(inputs)) for inputs in MALFORMED]
            by_grpc.append(call("ModelInfer", MESSAGES["ModelInferRequest"](
                model_name="clicks", inputs=[{"name": "price", "datatype": "FP16", "shape": [1]}])))
            by_grpc.append(call("ModelInfer", MESSAGES["ModelInferRequest"](
                model_name="clicks", inputs=[{"name": "price"}], raw_input_contents=[b"", b""])))
            others = [call("ModelInfer", MESSAGES["ModelInferRequest"](model_name="other" * 10_000)),
                      call("ModelReady", MESSAGES["ModelReadyRequest"](name="clicks", version="9")),
                      call("ModelInfer", data=b"\xff\xff\xff"),
                      call("ModelInfer", grpc_request([("a", "b", [1], b"\0" * (1 << 20))]))]
            last = call("ModelInfer", grpc_request(good)), call("ModelInfer", grpc_request(missing))
        return refused, by_grpc, others, last, client("POST", INFER, body, headers)[0]

    limits = ServeLimits(max_body_bytes=1 << 19)
    refused, by_grpc, others, last, status = while_serving(artifact, use, endpoint=GRPC, limits=limits)
    for number, (code, answer) in enumerate(refused):
        assert (code, answer.keys()) == (400, {"error"}), (number, answer)
    for number, answer in enumerate(by_grpc):
        assert answer[0] == "INVALID_ARGUMENT", (number, answer)
        assert "Traceback" not in answer[1]
    assert [code for code, _ in others] == ["NOT_FOUND", "NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    assert [len(answer.raw_output_contents[0]) for answer in last] == [4 * NUM] * 2  # NaN is a missing value
    assert status == 200


def test_grpc_needs_the_token_but_for_health(artifact, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")

    def use(client):
        with GrpcCaller(client) as call, GrpcCaller(client, token="secret") as allowed:
            return (call("ServerLive").live, call("ServerReady").ready, call("ServerMetadata")[0],
                    call("ModelInfer", grpc_request(list(raw_inputs())))[0],
                    list(allowed("ServerMetadata").extensions),
                    [one.name for one in
                     allowed("ModelMetadata", MESSAGES["ModelMetadataRequest"](name="clicks")).outputs])

    assert while_serving(artifact, use, endpoint=GRPC) == (
        True, True, "UNAUTHENTICATED", "UNAUTHENTICATED", ["binary_tensor_data"], ["score"])


def test_grpc_refuses_overload_and_answers_what_it_accepted_after_sigterm(artifact):
    scorer, answers = BlockedScorer(artifact), []

    def use(client):
        call = GrpcCaller(client)
        sent = threading.Thread(target=lambda: answers.append(call("ModelInfer", grpc_request(list(raw_inputs())))),
                                daemon=True)
        sent.start()
        assert scorer.entered.wait(HANG_S)
        answers.append(call("ModelInfer", grpc_request(list(raw_inputs()))))
        threading.Timer(0.2, scorer.release.set).start()  # after SIGTERM, which `while_serving` sends when this returns
        return sent

    limits = ServeLimits(max_queued_rows=NUM + 1)
    while_serving(artifact, use, scorer=scorer, limits=limits, endpoint=GRPC).join(HANG_S)
    assert answers[0] == ("RESOURCE_EXHAUSTED", "too many rows are waiting")
    assert len(answers[1].raw_output_contents[0]) == 4 * NUM


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Signed by itself, for 127.0.0.1; the key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    signed = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - datetime.timedelta(1),
        now + datetime.timedelta(1)).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False).sign(
        key, hashes.SHA256())
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_tls_for_http_and_grpc(artifact, certificate, workers):
    def use(client):
        context = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(f"{client.url}/v2/health/ready", context=context, timeout=HANG_S) as answer:
            status = answer.status
        root = certificate.read_bytes().partition(b"-----BEGIN PRIVATE KEY")[0]
        with GrpcCaller(client, grpc.ssl_channel_credentials(root)) as call:
            return client.url.partition(":")[0], status, call("ServerLive").live

    endpoint = Endpoint(port=0, grpc_port=0, tls_cert=str(certificate))
    assert while_serving(artifact, use, endpoint=endpoint, workers=workers) == ("https", 200, True)


def test_certificates_that_cannot_be_used_are_refused(artifact, certificate, tmp_path):
    (tmp_path / "none.pem").write_text("no certificate")
    for cert, key in ((tmp_path / "absent.pem", ""), (tmp_path / "none.pem", ""), (certificate, tmp_path / "none.pem"),
                      ("", certificate)):
        with pytest.raises(UserError, match="--tls-"):
            serve_scorer(ServedModel(BlockedScorer(artifact)), Endpoint(port=0, tls_cert=str(cert), tls_key=str(key)))


def test_a_grpc_port_in_use_is_refused(artifact):
    def use(client):
        port = int(client.grpc.rpartition(":")[2])
        with pytest.raises(UserError, match="cannot listen there for gRPC"):
            serve_scorer(ServedModel(BlockedScorer(artifact)), Endpoint(port=0, grpc_port=port))
        with pytest.raises(UserError, match="cannot listen there for gRPC"):
            serve_model(artifact.uri, endpoint=Endpoint(port=0, grpc_port=port), workers=2)

    while_serving(artifact, use, endpoint=GRPC)
