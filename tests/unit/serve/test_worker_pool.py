"""A server of several processes keeps the promises of one: every request counted and answered, whichever dies."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import socket
import threading
from contextlib import ExitStack, closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from limits import HANG_S
from prometheus_client.parser import text_string_to_metric_families
from served_models import ROWS, is_closed, use_server, while_serving

from embark import serve_model
from embark.errors import Fault, UserError
from embark.events.events import read_events
from embark.report.record import Record
from embark.serve import server, worker_pool
from embark.serve.app import ServeLimits
from embark.serve.endpoint import Endpoint
from embark.serve.server import limits_of_worker, workers_on
from embark.spec.serve import ScoringDevice


def send(connection, path, body):
    """By a connection that stays open, and so in the same process each time."""
    connection.request("POST", path, json.dumps(body).encode())
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def values(client):
    """Of the metrics, by name and labels."""
    found = text_string_to_metric_families(client("GET", "/metrics")[1])
    return {(sample.name, *sample.labels.values()): sample.value for family in found for sample in family.samples}


def wait_until(is_true) -> None:
    for _ in range(int(HANG_S / 0.02)):
        if is_true():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it does not happen")


def test_metrics_labels_and_the_record_are_those_of_the_whole_server(artifact, tmp_path):
    def use(client):
        with ExitStack() as stack:
            first, second = (stack.enter_context(closing(http.client.HTTPConnection(client.address, timeout=HANG_S)))
                             for _ in range(2))
            for i in range(6):
                for connection in (first, second):
                    status, found = send(connection, "/score", {"rows": ROWS[i : i + 5]})
                    assert status == 200
            labels = [send(connection, "/feedback", {**found, "labels": [1, 0, 1, None, 1]})
                      for connection in (first, second, first)]
            wrong = send(first, "/feedback", {**found, "labels": [1]})
            assert send(second, "/score", {"rows": 5})[0] == 400
        return labels, wrong, values(client)

    labels, wrong, metrics = use_server(lambda on_start: serve_model(
        artifact.uri, endpoint=Endpoint(port=0), on_start=on_start, record=str(tmp_path), workers=2), use)
    assert [status for status, _ in labels] == [200, 200, 200]
    assert wrong == (400, {"error": "1 labels, and 5 scores"})
    assert metrics["embark_serve_workers",] == 2
    assert metrics["embark_serve_version",] == metrics["embark_serve_current_version",] == 1
    assert metrics["embark_serve_requests_total", "/score", "200"] == 12
    assert metrics["embark_serve_rows_total", "true", "1"] == 60
    assert metrics["embark_serve_request_seconds_count", "score"] == 12
    assert metrics["embark_serve_requests_in_flight",] == metrics["embark_serve_queued_rows",] == 0
    folder, = tmp_path.iterdir()
    events = list(read_events(folder / "events.jsonl"))
    assert [event.kind for event in events if event.kind != "traffic"] == ["serve", "serve_end"]
    traffic = Record(events).traffic
    assert sum(one.num_rows for one in traffic.windows) == 60
    assert sum(one.statuses.get("400", 0) for one in traffic.windows) == 1
    assert sum(int(one.latency.sum()) for one in traffic.windows) == 12
    assert sum(int(one.labels[0].sum()) for one in traffic.versions.values()) == 12


def test_a_killed_process_is_replaced_and_others_fail_no_request(artifact):
    def use(client):
        connections = [http.client.HTTPConnection(client.address, timeout=HANG_S) for _ in range(4)]
        statuses = [send(one, "/score", {"rows": ROWS[:2]})[0] for one in connections]
        killed = multiprocessing.active_children()[0]
        before = values(client)
        os.kill(killed.pid, signal.SIGKILL)
        killed.join(HANG_S)
        alive = []
        for one in connections:
            try:
                alive.append(send(one, "/score", {"rows": ROWS[:2]})[0])
            except (ConnectionError, http.client.HTTPException):
                continue
        wait_until(lambda: values(client)["embark_serve_workers",] == 2)
        new = [client("POST", "/score", {"rows": ROWS[:2]})[0] for _ in range(4)]
        for one in connections:
            one.close()
        return statuses, alive, new, before, values(client)

    statuses, alive, new, before, after = while_serving(artifact, use, workers=2)
    assert (statuses, alive, new) == ([200] * 4, [200] * 2, [200] * 4)  # two of the four connections were the other's
    counted = "embark_serve_requests_total", "/score", "200"
    assert (before[counted], after[counted]) == (4, 10)


def test_clients_wait_while_all_processes_are_replaced(artifact):
    def use(client):
        counted = values(client)["embark_serve_workers",]
        for _ in range(2):
            killed = multiprocessing.active_children()
            for process in killed:
                os.kill(process.pid, signal.SIGKILL)
            for process in killed:
                process.join(HANG_S)
            assert client("POST", "/score", {"rows": ROWS[:2]})[0] == 200  # answered by a process started since
            wait_until(lambda: values(client)["embark_serve_workers",] == 2)
        return counted

    assert while_serving(artifact, use, workers=2) == 2


@pytest.mark.parametrize(("where", "name", "error", "why"), [
    (worker_pool, "fetch_version", Fault("the versions are gone"), "the versions are gone"),
    (ForkServerProcess, "start", EOFError("unexpected EOF"), "cannot be started: unexpected EOF"),
    (multiprocessing, "Pipe", OSError(24, "Too many open files"), "Too many open files")])
def test_a_server_without_processes_ends_when_none_can_be_started(artifact, monkeypatch, where, name, error, why):
    def refuse(*_args):
        raise error

    def kill_all(_listening):
        monkeypatch.setattr(where, name, refuse)
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(Fault, match=f"no worker process is left.*{why}"):
        server.serve(artifact.uri, endpoint=Endpoint(port=0), on_start=kill_all, workers=2)


def test_sigterm_answers_every_request_that_a_process_has_begun_to_read(artifact):
    body, answers = json.dumps({"rows": ROWS[:3]}).encode(), []

    def use(client):
        opened = [socket.create_connection(client.address.split(":"), timeout=HANG_S) for _ in range(6)]
        for one in opened:
            one.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
                        % len(body))
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 100")

        def finish() -> None:
            wait_until(lambda: is_closed(client))  # after SIGTERM, which `while_serving` sends when this returns
            for one in opened:
                with one, one.makefile("rb") as answer:
                    one.sendall(body)
                    answers.append(answer.read())

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        return thread

    while_serving(artifact, use, limits=ServeLimits(body_timeout_s=HANG_S), workers=2).join(HANG_S)
    assert len(answers) == 6
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["scores"]) == 3


def test_each_process_has_its_share_of_the_limits():
    limits = ServeLimits(max_request_rows=100, max_queued_rows=1_000)
    assert limits_of_worker(limits, 4).max_queued_rows == 250
    assert limits_of_worker(limits, 64).max_queued_rows == 100
    assert limits_of_worker(ServeLimits(), 2).max_buffered_bytes == ServeLimits().max_buffered_bytes // 2


def test_there_are_as_many_processes_as_cores_and_one_on_a_gpu(artifact, monkeypatch):
    monkeypatch.setattr(server, "usable_cores", lambda: 4)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    assert [workers_on(ScoringDevice(kind)) for kind in ("cpu", "auto", "cuda")] == [4, 4, 1]
    monkeypatch.setattr(server, "usable_cores", lambda: 64)
    assert workers_on(ScoringDevice()) == 8
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    assert (workers_on(ScoringDevice("cpu")), workers_on(ScoringDevice())) == (8, 1)
    for workers, why in ((0, "is no number of processes"), (2, "a GPU is served by one process")):
        with pytest.raises(UserError, match=f"--workers {workers}: {why}"):
            serve_model(artifact.uri, workers=workers)
