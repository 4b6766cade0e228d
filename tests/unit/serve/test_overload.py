"""More than a server can answer: it refuses at once what would wait too long or fill its memory."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

from limits import HANG_S
from served_models import ROWS, BlockedScorer, while_serving

from embark.serve.app import ServeLimits


def test_bodies_that_fill_the_memory_are_refused_until_others_are_answered(artifact):
    scorer = BlockedScorer(artifact)
    long = {"rows": ROWS[:1], "more": "x" * 60_000}

    def use(client):
        first: list[object] = []
        sent = threading.Thread(target=lambda: first.append(client("POST", "/score", long)), daemon=True)
        sent.start()
        assert scorer.entered.wait(HANG_S)
        refused = client("POST", "/score", long)
        scorer.release.set()
        sent.join(HANG_S)
        return first[0][0], refused[:2], client("POST", "/score", long)[0]

    limits = ServeLimits(max_buffered_bytes=100_000)
    assert while_serving(artifact, use, scorer=scorer, limits=limits) == (
        200, (429, {"error": "requests fill the memory that they may"}), 200)


def test_overload_is_answered_with_429_and_retry_after(artifact):
    scorer = BlockedScorer(artifact)

    def use(client):
        first: list[object] = []
        sent = threading.Thread(target=lambda: first.append(client("POST", "/score", {"rows": ROWS[:8]})), daemon=True)
        sent.start()
        assert scorer.entered.wait(HANG_S)
        refused = client("POST", "/score", {"rows": ROWS[:8]})
        scorer.release.set()
        sent.join(HANG_S)
        return first[0], refused, client("POST", "/score", {"rows": ROWS[:8]})

    limits = ServeLimits(max_queued_rows=10)
    first, refused, later = while_serving(artifact, use, scorer=scorer, limits=limits)
    assert (first[0], refused[0], later[0]) == (200, 429, 200)
    assert refused[2]["Retry-After"] == "1"


def test_an_overloaded_server_answers_what_its_queue_holds(artifact):
    scorer, num_waves, num_held = BlockedScorer(artifact), 6, 4

    def use(client):
        statuses = []
        with ThreadPoolExecutor(5 * num_held) as threads:
            for _ in range(num_waves):
                scorer.release.clear()
                sent = [threads.submit(client, "POST", "/score", {"rows": ROWS[:8]}) for _ in range(5 * num_held)]
                done = as_completed(sent)
                first = [next(done).result()[0] for _ in range(4 * num_held)]  # while nothing is scored
                scorer.release.set()
                statuses.append((first, [one.result()[0] for one in done]))
        return statuses, client("GET", "/metrics")[1]

    limits = ServeLimits(max_queued_rows=8 * num_held)
    statuses, metrics = while_serving(artifact, use, scorer=scorer, limits=limits)
    assert statuses == [([429] * 4 * num_held, [200] * num_held)] * num_waves
    assert "embark_serve_queued_rows 0.0" in metrics


def test_a_full_queue_refuses_a_request_before_its_body_arrives(artifact):
    scorer = BlockedScorer(artifact)

    def use(client):
        first: list[object] = []
        sent = threading.Thread(target=lambda: first.append(client("POST", "/score", {"rows": ROWS[:8]})), daemon=True)
        sent.start()
        assert scorer.entered.wait(HANG_S)
        with socket.create_connection(client.address.split(":"), timeout=HANG_S) as refused:
            refused.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            answer = refused.recv(1 << 16)
        health = client("GET", "/v2/health/ready")[0]
        scorer.release.set()
        sent.join(HANG_S)
        return first[0][0], answer, health, client("GET", "/metrics")[1]

    first, answer, health, metrics = while_serving(
        artifact, use, scorer=scorer, limits=ServeLimits(max_queued_rows=15))
    assert (first, health) == (200, 200)
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"retry-after: 1\r\n" in answer.lower()
    assert 'embark_serve_requests_total{route="/score",status="429"} 1.0' in metrics
