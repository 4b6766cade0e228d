"""Who is answered, with what, and who is not."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from limits import HANG_S
from watched_runs import write_run

from embark.dashboard import server as server_module
from embark.dashboard.runs import Runs
from embark.dashboard.server import Guard, PageServer, is_local, serve_page, static_files
from embark.errors import UserError
from embark.report.run_files import RunFiles

TOKEN = "a-token-of-some-length"


@contextmanager
def page_of(folder: Path, *, token: str = "") -> Iterator[tuple[PageServer, str]]:
    with Runs(lambda: [RunFiles(folder)]) as runs, serve_page(runs, token=token) as page:
        run = runs.all()[0]
        until = time.monotonic() + HANG_S
        while not run.record.num_events:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield page, run.id


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with page_of(write_run(tmp_path_factory.mktemp("page") / "demo", rich=True)) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with page_of(write_run(tmp_path_factory.mktemp("guarded") / "demo"), token=TOKEN) as served:
        yield served


def ask(page: PageServer, path: str, *, method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=HANG_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_runs_curves_charts_details_and_logs_are_reported(page):
    server, run_id = page
    runs = json.loads(ask(server, "/api/runs")[2])["runs"]
    assert [(run["id"], run["state"]) for run in runs] == [(run_id, "finished")]
    curves = json.loads(ask(server, f"/api/curves?ids={run_id}&by=time&points=100")[2])
    assert len(curves[run_id]["curves"]["loss"]["x"]) == 20
    assert json.loads(ask(server, f"/api/runs/{run_id}")[2])["plan"]["num_tables"] == 6
    assert json.loads(ask(server, f"/api/runs/{run_id}/charts")[2])["charts"]
    assert json.loads(ask(server, f"/api/runs/{run_id}/logs?words=save")[2])["lines"]
    found = json.loads(ask(server, f"/api/runs/{run_id}/diagnosis")[2])["found"]
    assert "straggler" in {one["name"] for one in found}


def test_prometheus_finds_the_newest_metrics_of_every_run(page):
    server, _ = page
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = body.decode().splitlines()
    assert [line for line in lines if line.startswith("embark_loss{") and 'run="demo"' in line]
    assert [line for line in lines if line.startswith("embark_gpu_used_bytes{")]


def test_the_page_and_all_that_it_names_are_served(page):
    server, _ = page
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"/static/main.js" in body
    for path, (kind, rows) in static_files().items():
        status, headers, body = ask(server, path)
        assert (status, headers["Content-Type"], body) == (200, kind, rows)


def test_every_answer_carries_the_headers_that_keep_scripts_out(page):
    server, run_id = page
    for path in ("/", "/static/main.js", "/api/runs", f"/api/runs/{run_id}", "/nowhere"):
        headers = ask(server, path)[1]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Python" not in headers["Server"]


@pytest.mark.parametrize("path", [
    "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/%2e%2e/server.py", "/../../etc/passwd",
    "//etc/passwd", "/static//etc/passwd", "/static/", "/static", "/etc/passwd", "/static/main.js/",
    "/static/main.js%00",
    "/api/runs/../../etc/passwd", "/api/runs/..%2f..", "/api/runs/%2e%2e/logs", "/api/runs//", "/api", "/api/runs/",
    "/events.jsonl", "/spec.toml", "/api/runs/x/logs?file=../../../../etc/passwd", "http://127.0.0.1/etc/passwd",
])
def test_no_path_leads_to_a_file(page, path: str):
    server, run_id = page
    for tried in (path, path.replace("/runs/x", f"/runs/{run_id}")):
        status, _, body = ask(server, tried)
        assert status in (400, 404) or b'"file":0' in body
        assert b"root:" not in body


def test_a_log_is_named_by_a_number_and_never_by_a_path(page):
    server, run_id = page
    for word in ("-1", "../x", "1e9", "nan", "0x1", ""):
        assert json.loads(ask(server, f"/api/runs/{run_id}/logs?file={word}")[2])["file"] == 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_changed(page, method: str):
    status, headers, _ = ask(page[0], "/api/runs", method=method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_head_tells_what_get_would_and_sends_no_body(page):
    server, _ = page
    assert ask(server, "/", method="HEAD")[0::2] == (200, b"")
    assert ask(server, "/", method="HEAD")[1]["Content-Length"] == str(len(static_files()["/"][1]))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8750", "127.0.0.1.evil.example",
                                  "localhost.evil.example", "10.0.0.7", "[::2]:80", "", "localhost@evil.example"])
def test_a_name_that_is_not_this_machine_s_is_refused(page, host: str):
    assert ask(page[0], "/api/runs", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "127.0.0.1:1", "[::1]:8750", "[::1]",
                                  "LOCALHOST:8750"])
def test_this_machine_s_own_names_are_answered_at_any_port(page, host: str):
    assert ask(page[0], "/api/runs", Host=host)[0] == 200


def test_without_the_token_nothing_is_reported(guarded):
    server, run_id = guarded
    for path in ("/", "/static/main.js", "/static/icon.svg", "/api/runs", f"/api/runs/{run_id}/logs", "/nowhere",
                 "/?token=wrong", "/?token=", "/api/runs?token=" + TOKEN[:-1]):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"},
                        {"Authorization": TOKEN}, {"Cookie": f"embark_watch_{server.port}=wrong"},
                        {"Cookie": f"embark_watch={TOKEN}"}, {"Cookie": "\x01=;;"}):
            status, payload, body = ask(server, path, **headers)
            assert status == 401
            assert b"embark watch printed" in body
            assert "Set-Cookie" not in payload


def test_the_token_is_accepted_as_header_and_as_http_only_cookie(guarded):
    server, _ = guarded
    assert ask(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
    status, headers, _ = ask(server, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert ask(server, "/api/runs", Cookie=cookie)[0] == 200
    assert ask(server, "/", Cookie=cookie)[0] == 200


def test_the_printed_address_has_the_token_and_the_one_without_has_none(guarded, page):
    assert guarded[0].url.endswith(f"/?token={TOKEN}")
    assert "token" not in page[0].url


def test_a_token_that_is_not_text_is_refused_and_breaks_nothing():
    guard = Guard(TOKEN)
    assert not guard.matches("\udcff")
    assert not guard.is_authorized({"Cookie": "embark_watch=\udcff", "Authorization": "Bearer \udcff"})


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("::1", True),
                                                ("127.8.8.8", True), ("0.0.0.0", False), ("::", False),
                                                ("10.1.2.3", False), ("my-host", False)])
def test_what_reaches_beyond_this_machine_is_known(host: str, expected: bool):
    assert is_local(host) is expected


def test_the_next_port_is_taken_where_the_first_is_not_free(tmp_path: Path):
    runs = Runs(list)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve_page(runs, ports=(port, 0)) as page:
            assert page.port != port
        with pytest.raises(UserError, match="cannot be served"), serve_page(runs, ports=(port,)):
            pass


def test_a_diagnosis_that_fails_is_shown_and_the_page_stays_up(tmp_path: Path, monkeypatch):
    def fails(_files):
        raise UserError("too long to be looked through here")

    monkeypatch.setattr(server_module, "diagnose_run", fails)
    with page_of(write_run(tmp_path / "demo")) as (server, run_id):
        payload = json.loads(ask(server, f"/api/runs/{run_id}/diagnosis")[2])
        assert payload == {"found": [], "error": "too long to be looked through here"}
        assert ask(server, "/api/runs")[0] == 200


@pytest.mark.parametrize("query", ["points=1e99&from=nan&to=x", "points=-5", "by=elsewhere", "ids=,,,",
                                   "ids=" + "x," * 5000, "&".join(f"a{i}=1" for i in range(100)), "from=5&to=1",
                                   "points=nan"])
def test_odd_questions_get_an_answer_or_a_refusal(page, query: str):
    assert ask(page[0], f"/api/curves?ids={page[1]}&{query}")[0] in (200, 400)
