"""The server: the scores of `embark score`, errors of clients as 4xx, and every accepted request answered."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress

import numpy as np
import pyarrow.parquet as pq
import pytest
from exported_runs import COLUMNS, write_csv
from limits import HANG_S
from served_models import ROWS, BlockedScorer, is_closed, while_serving

from embark import score_file, serve_model
from embark.errors import Fault, UserError
from embark.serve import server
from embark.serve.app import ServeLimits
from embark.serve.endpoint import TOKEN, Endpoint, listen
from embark.serve.request_rows import JsonColumns, RequestScorer, Scores
from embark.serve.score_file import NOT_FINITE
from embark.serve.served_model import ServedModel
from embark.serve.server import serve_scorer
from embark.trainers.torch.scoring.cpu_model import ExportedModel


def test_scores_are_those_of_embark_score_by_both_protocols(artifact, tmp_path):
    source = write_csv(tmp_path / "rows.csv", [row.values() for row in ROWS])
    score_file(artifact.uri, str(source), tmp_path / "out.parquet")
    expected = pq.read_table(tmp_path / "out.parquet").column("score").to_pylist()
    names = [name for name in COLUMNS if name != "clicked"]
    tensors = [{"name": name, "shape": [len(ROWS), 1], "datatype": "BYTES", "data": [row[name] for row in ROWS]}
               for name in names if name != "tags"]
    tensors.append({"name": "tags", "shape": [len(ROWS)], "datatype": "BYTES", "data": [row["tags"] for row in ROWS]})
    user, candidates = {"word": ROWS[0]["word"], "tags": ROWS[0]["tags"]}, [
        {key: value for key, value in row.items() if key not in ("word", "tags")} for row in ROWS]

    def use(client):
        by_rows = client("POST", "/score", {"rows": ROWS})
        by_user = client("POST", "/score", {"user": user, "candidates": candidates})
        same = client("POST", "/score", {"rows": [{**row, **user} for row in ROWS]})
        return by_rows, by_user, same, client("POST", "/v2/models/clicks/infer", {"id": "a", "inputs": tensors})

    by_rows, by_user, same, inferred = while_serving(artifact, use)
    assert by_rows[:2] == (200, {"version": 1, "scores": expected, "errors": []})
    assert by_user[1]["scores"] == same[1]["scores"] != expected
    assert inferred[:2] == (200, {"model_name": "clicks", "model_version": "1", "id": "a", "outputs": [
        {"name": "score", "datatype": "FP32", "shape": [len(ROWS)], "data": expected}]})


def test_health_metadata_and_metrics(artifact):
    def use(client):
        client("POST", "/score", {"rows": ROWS[:3]})
        return {path: client("GET", path) for path in (
            "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/clicks", "/v2/models/clicks/ready",
            "/v2/models/clicks/versions/1", "/v2/models/other", "/v2/models/clicks/versions/2", "/metrics", "/nothing")}

    found = while_serving(artifact, use)
    assert {path: answer[0] for path, answer in found.items() if answer[0] != 200} == {
        "/v2/models/other": 404, "/v2/models/clicks/versions/2": 404, "/nothing": 404}
    assert found["/nothing"][1] == {"error": "GET /nothing: Not Found"}
    about = found["/v2/models/clicks"][1]
    assert about == found["/v2/models/clicks/versions/1"][1]
    assert {one["name"]: (one["datatype"], one["shape"]) for one in about["inputs"]} == {
        "price": ("FP32", [-1]), "word": ("BYTES", [-1]), "number": ("INT64", [-1]), "tags": ("BYTES", [-1, -1]),
        "seen at": ("BYTES", [-1]), "bought at": ("BYTES", [-1])}
    assert 'embark_serve_rows_total{scored="true",version="1"} 3.0' in found["/metrics"][1]
    assert 'embark_serve_requests_total{route="/score",status="200"} 1.0' in found["/metrics"][1]


HOSTILE = [
    (b"", 400), (b"{", 400), (b"[" * 100_000, 400), (b"\xff\xfe", 400), ([], 400), ({"rows": 5}, 400),
    ({"rows": []}, 400),
    ({"rows": [1]}, 400), ({"rows": [{}]}, 400), ({"rows": [{"wrod": 1}]}, 400), ({"candidates": {}}, 400),
    ({"user": 1, "candidates": []}, 400), (b'{"rows": [' + b"1," * 600_000 + b"1]}", 413),
    ({"rows": [ROWS[0]] * 101}, 413), ({"rows": [{**ROWS[0], "word": "\ud800"}]}, 400),
    ({"rows": [{**ROWS[0], "word": {"a": [[{}]]}}]}, 200), ({"rows": [{**ROWS[0], "price": [[1]]}]}, 400),
    ({"rows": [{**ROWS[0], "word": ["u7"]}]}, 400), (b"\x1f\x8b\x08", 400),
    (b'{"candidates": [{}], "user": {"tags": ' + b"[" * 900 + b"]" * 900 + b"}}", 400),
]
WRONG_TENSORS = [
    None, [], [{}], [{"name": "a"}], [{"name": "a", "shape": [1]}], [{"name": "a", "shape": [2], "data": [1]}],
    [{"name": "a", "shape": [-1], "data": []}], [{"name": "a", "shape": [1 << 40, 1 << 40], "data": [1]}],
    [{"name": "a", "shape": [True], "data": [1]}], [{"name": "a", "shape": [1, 1, 1], "data": [1]}],
    [{"name": "a", "shape": [1], "data": [1]}] * 2, [{"name": "a", "shape": [(1 << 31) - 1, 0], "data": []}],
    [{"name": "a" * 5_000, "shape": [-1], "data": []}],
]


def test_managed_endpoints_find_their_routes(artifact, monkeypatch):
    """SageMaker's by name, Vertex AI's as its variables say."""
    predict = "/v1/endpoints/7/deployedModels/8:predict"
    monkeypatch.setenv("AIP_PREDICT_ROUTE", predict)
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/healthy")

    def use(client):
        scores = client("POST", "/score", {"rows": ROWS[:3]})[1]["scores"]
        return (scores, client("POST", "/invocations", {"rows": ROWS[:3]}), client("POST", predict, {
            "instances": ROWS[:3], "parameters": {}}), client("GET", "/ping")[0], client("GET", "/healthy")[0])

    scores, invoked, predicted, *health = while_serving(artifact, use)
    assert invoked[:2] == (200, {"version": 1, "scores": scores, "errors": []})
    assert predicted[:2] == (200, {"version": 1, "predictions": scores, "errors": []})
    assert health == [200, 200]


@pytest.mark.parametrize("workers", [1, 2])
def test_hostile_requests_get_4xx_and_the_server_goes_on(artifact, workers):
    limits = ServeLimits(max_body_bytes=1 << 20, max_request_rows=100)

    def use(client):
        found = [(client("POST", "/score", body)[:2], status) for body, status in HOSTILE]
        found += [(client("POST", "/v2/models/clicks/infer", {"inputs": inputs})[:2], 400) for inputs in WRONG_TENSORS]
        binary = client("POST", "/v2/models/clicks/infer", b"{}", {"Inference-Header-Content-Length": "2"})
        named = client("POST", "/v2/models/clicks/infer", {"id": "\ud800", "inputs": [
            {"name": name, "shape": [1], "data": [ROWS[0][name]]} for name in COLUMNS]})
        return [*found, (binary[:2], 400), (named[:2], 400), (client("GET", "/score")[:2], 405),
                (client("POST", "/score", {"rows": ROWS[:1]})[:2], 200)]

    for number, ((status, answer), expected) in enumerate(
            while_serving(artifact, use, limits=limits, workers=workers)):
        assert status == expected, (number, answer)
        assert "Traceback" not in str(answer)
        assert status == 200 or (answer.keys() == {"error"} and len(answer["error"]) <= 1_000)


def test_an_unreadable_row_has_a_reason_and_the_others_their_scores(artifact):
    rows = [ROWS[0], {**ROWS[0], "price": "cheap"}, ROWS[0]]

    def use(client):
        return client("POST", "/score", {"rows": rows})[1], client("POST", "/v2/models/clicks/infer", {"inputs": [
            {"name": name, "shape": [3], "data": [row[name] for row in rows]} for name in COLUMNS]})

    scored, inferred = while_serving(artifact, use)
    assert scored["scores"][0] == pytest.approx(scored["scores"][2], abs=1e-6)
    assert scored["scores"][1] is None
    assert scored["errors"] == [{"row": 1, "why": "column 'price': 'cheap' is not a number"}]
    assert (inferred[0], "row 1" in inferred[1]["error"]) == (400, True)


def test_a_request_that_cannot_be_read_fails_alone(artifact, monkeypatch):
    scorer = RequestScorer(artifact, ExportedModel(artifact).score)
    (alone,) = scorer.score([JsonColumns(ROWS[:2])])

    def is_alone(found: Scores) -> bool:
        """The number of rows that are scored together may decide how a CPU sums."""
        return found.errors == alone.errors and found.scores == pytest.approx(alone.scores, abs=1e-6)

    nested = JsonColumns([{**ROWS[0], "word": ["u7"]}])
    before, _, after = scorer.score([JsonColumns(ROWS[:2]), nested, JsonColumns(ROWS[:2])])
    assert is_alone(before)
    assert is_alone(after)
    parse = scorer.parser.parse

    def broken(column, where, name):
        if "defect" in column("word").to_pylist():
            raise RuntimeError("a defect")
        return parse(column, where, name)

    monkeypatch.setattr(scorer.parser, "parse", broken)
    defect = JsonColumns([{**ROWS[0], "word": "defect"}])
    before, failed, after = scorer.score([JsonColumns(ROWS[:2]), defect, JsonColumns(ROWS[:2])])
    assert is_alone(before)
    assert is_alone(after)
    assert isinstance(failed, Fault)


def test_requests_that_are_read_together_have_the_answers_of_each_alone(artifact):
    scorer = RequestScorer(artifact, ExportedModel(artifact).score)
    numbers = {"price": 2.5, "number": 7}
    requests = [
        JsonColumns(ROWS[:20]), JsonColumns([{**row, **numbers} for row in ROWS[:3]]),
        JsonColumns([ROWS[0], {**ROWS[0], "price": "cheap"}, ROWS[1]]), JsonColumns([{"word": 1}]),
        JsonColumns([{**row, "price": float(number), "number": number} for number, row in enumerate(ROWS[:20])]),
        JsonColumns([{**ROWS[0], "number": 1 << 70}]), JsonColumns([{}] * 4, {**ROWS[3], **numbers}),
        JsonColumns([{**ROWS[0], "number": 7.0}, {**ROWS[0], "number": True}]),
        JsonColumns([{**ROWS[0], "tags": ["a|B", None]}, {**ROWS[0], "tags": "a|B"}])]
    alone = [scorer.score([one])[0] for one in requests]
    for batch in (range(9), (4, 1), (0, 2), (0, 8), (4, 6, 1), (2, 3, 5)):
        found = scorer.score([requests[number] for number in batch])
        for number, one in zip(batch, found, strict=True):
            expected = alone[number]
            if not isinstance(one, Scores):
                assert one.what == expected.what
                continue
            assert one.errors == expected.errors
            assert [score is None for score in one.scores] == [score is None for score in expected.scores]
            assert one.scores == pytest.approx(expected.scores, abs=1e-6)
    assert [one.what for one in alone if not isinstance(one, Scores)] == [
        "no row has column 'price', which the model takes"]
    assert alone[2].errors == ((1, "column 'price': 'cheap' is not a number"),)
    assert [row for one in (alone[5], alone[7]) for row, _ in one.errors] == [0, 0]


def test_a_score_that_is_not_finite_is_none(artifact):
    scorer = RequestScorer(artifact, lambda raw: np.where(raw.dense[:, 0] > 1, np.nan, 0.25).astype(np.float32))
    found, = scorer.score([JsonColumns([{**ROWS[0], "price": "0"}, {**ROWS[0], "price": "9"}])])
    assert found == Scores(np.array([0.25, np.nan], np.float32), ((1, NOT_FINITE),), 1)


def test_a_body_that_does_not_arrive_is_given_up(artifact):
    def use(client):
        with socket.create_connection(client.address.split(":"), timeout=HANG_S) as sent:
            sent.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            return sent.recv(1 << 16)

    assert while_serving(artifact, use, limits=ServeLimits(body_timeout_s=0.05)).startswith(b"HTTP/1.1 408")


def test_requests_in_flight_are_counted_until_they_are_answered(artifact):
    scorer = BlockedScorer(artifact)

    def use(client):
        body, name = json.dumps({"rows": ROWS[:1]}).encode(), "embark_serve_requests_in_flight"
        with socket.create_connection(client.address.split(":"), timeout=HANG_S) as sent:
            sent.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert scorer.entered.wait(HANG_S)
            during = client("GET", "/metrics")[1]
            scorer.release.set()
            assert sent.recv(1)
        return f"{name} 1.0" in during, f"{name} 0.0" in client("GET", "/metrics")[1]

    assert while_serving(artifact, use, scorer=scorer) == (True, True)


def test_a_long_cell_of_the_user_is_not_copied_to_every_row(artifact):
    user = {**ROWS[0], "tags": ["abcdefgh"] * 20_000}
    several = {**ROWS[0], "word": "a" * 9_000, "tags": "b" * 9_000}  # each short enough
    shared = [{"name": name, "shape": [1], "data": [value]} for name, value in several.items() if name != "price"]

    def use(client):
        found = [client("POST", "/score", {"user": of, "candidates": [*[{}] * num, {"tags": []}][:most]})[0]
                 for of, num, most in ((user, 1, 1), (user, 5_000, 5_000), (user, 5_000, 5_001),
                                       (several, 5_000, 5_000))]
        return [*found, client("POST", "/v2/models/clicks/infer", {"inputs": [
            *shared, {"name": "price", "shape": [5_000], "data": [1.0] * 5_000}]})[0]]

    assert while_serving(artifact, use) == [200, 400, 400, 400, 400]


def test_headers_without_end_are_refused_and_long_bodies_are_not(artifact):
    body = json.dumps({"rows": ROWS[:1]}).encode()
    start = b"POST /score HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    padded = b"\r\n" + b"".join(b"1\r\n \r\n" for _ in range(20_000)) + b"%x\r\n%s\r\n0\r\n" % (len(body), body)

    def use(client):
        found = []
        for endless in (b"X: " + b"a" * 70_000, b"X: a\r\n" * 20_000, padded + b"X: a\r\n" * 20_000, padded + b"\r\n"):
            found.append(b"")
            with (socket.create_connection(client.address.split(":"), timeout=HANG_S) as sent,
                  suppress(ConnectionError)):  # what the server did not read resets it, and its answer may be lost
                sent.sendall(start + endless)
                found[-1] = sent.recv(12)
        return found

    *refused, answered = while_serving(artifact, use)
    assert set(refused) <= {b"HTTP/1.1 431", b""}
    assert answered == b"HTTP/1.1 200"


def test_without_the_token_only_health_is_answered(artifact, monkeypatch):
    monkeypatch.setenv(TOKEN, "sécret")

    def use(client):
        return [client("GET", path, None, headers)[0] for path, headers in (
            ("/v2/health/ready", {}), ("/v2", {}), ("/metrics", {}), ("/v2", {"Authorization": "Bearer no"}),
            *(("/v2", {"Authorization": f"{words}sécret".encode().decode("latin-1")}) for words in (
                "Bearer ", "bearer ", "BEARER  ", "Basic ", "Bearer", "")))]

    assert while_serving(artifact, use) == [200, 401, 401, 401, 200, 200, 200, 401, 401, 401]


def test_a_tensor_whose_values_are_not_of_its_datatype_is_refused(artifact):
    def infer(client, **changes):
        tensors = {name: {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [ROWS[0][name]]}
                   for name in COLUMNS if name != "tags"}
        tensors["tags"] = {"name": "tags", "shape": [1], "datatype": "BYTES", "data": [["a"]]}
        tensors["number"] |= {"datatype": "INT64", "data": [3]} | changes
        status, answer, _ = client("POST", "/v2/models/clicks/infer", {"inputs": list(tensors.values())})
        return status, answer.get("error", "")

    def use(client):
        return [infer(client, **changes) for changes in (
            {}, {"data": [None]}, {"datatype": "FP128"}, {"datatype": "INT8", "data": [2.99]},
            {"datatype": "UINT8", "data": [-1]}, {"datatype": "INT8", "data": [300]})]

    *right, fp128, fraction, negative, large = while_serving(artifact, use)
    assert right == [(200, "")] * 2
    assert (fp128[0], fp128[1].partition(",")[0]) == (400, "input 'number': its datatype is 'FP128'")
    assert [fraction, negative, large] == [
        (400, f"input 'number': {value} is no {datatype}") for value, datatype in (
            ("2.99", "INT8"), ("-1", "UINT8"), ("300", "INT8"))]


@pytest.mark.parametrize("token", ["", " ", "secret\n", " secret"])
def test_a_token_that_is_empty_or_has_whitespace_around_it_is_refused(artifact, monkeypatch, token):
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(UserError, match="EMBARK_SERVE_TOKEN: is set, but"):
        serve_scorer(ServedModel(BlockedScorer(artifact)), Endpoint(port=0))


def test_an_empty_host_is_refused(artifact):
    with pytest.raises(UserError, match="--host: is empty"):
        serve_scorer(ServedModel(BlockedScorer(artifact)), Endpoint(host="", port=0))


def test_sigterm_answers_what_was_accepted(artifact):
    scorer, answers = BlockedScorer(artifact), []

    def use(client):
        sent = threading.Thread(target=lambda: answers.append(client("POST", "/score", {"rows": ROWS[:2]})),
                                daemon=True)
        sent.start()
        assert scorer.entered.wait(HANG_S)
        threading.Timer(0.2, scorer.release.set).start()  # after SIGTERM, which `while_serving` sends when this returns
        return sent

    while_serving(artifact, use, scorer=scorer).join(HANG_S)
    assert answers[0][0] == 200
    assert len(answers[0][1]["scores"]) == 2


def test_sigterm_under_load_answers_every_request_that_was_accepted(artifact):
    scorer, answers = BlockedScorer(artifact), {}

    def use(client):
        def send(number: int) -> None:
            answers[number] = client("POST", "/score", {"rows": ROWS[number : number + 2]})

        def release() -> None:
            while not is_closed(client):  # after SIGTERM, which `while_serving` sends when this returns
                pass
            scorer.release.set()

        threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(12)]
        for one in threads:
            one.start()
        while "embark_serve_requests_in_flight 12.0" not in client("GET", "/metrics")[1]:
            pass
        threads.append(threading.Thread(target=release, daemon=True))
        threads[-1].start()
        return threads

    limits = ServeLimits(num_threads=2)
    for one in while_serving(artifact, use, scorer=scorer, limits=limits):
        one.join(HANG_S)
    alone = RequestScorer(artifact, ExportedModel(artifact).score)
    for number in range(12):
        status, answer, _ = answers[number]
        assert status == 200
        expected, = alone.score([JsonColumns(ROWS[number : number + 2])])
        assert answer["scores"] == pytest.approx(expected.scores, abs=1e-6)


def test_no_part_of_a_request_waits_for_an_acknowledgement():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_each_scoring_thread_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert (server._share_cores(2), os.environ["OMP_NUM_THREADS"]) == (2, "6")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert server._share_cores(2) == 2  # torch is loaded here, and is told later
    monkeypatch.delitem(sys.modules, "torch")
    assert (server._share_cores(2), os.environ["OMP_NUM_THREADS"]) == (1, "8")


def test_a_port_in_use_and_limits_out_of_range_are_refused(artifact):
    def use(client):
        host, port = client.address.split(":")
        with pytest.raises(UserError, match="cannot listen there"):
            serve_scorer(ServedModel(RequestScorer(artifact, ExportedModel(artifact).score)),
                         Endpoint(host=host, port=int(port)))

    while_serving(artifact, use)
    with pytest.raises(UserError, match="out of range"):
        serve_model(artifact.uri, limits=ServeLimits(max_queued_rows=0))
