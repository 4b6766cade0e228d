"""Publisher and server killed at random instants: no torn version is ever current, and none is ever served.

`EMBARK_KILLS` says how often (3), `EMBARK_KILL_SEED` when.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from exported_runs import EditedRun
from integration.faults.zygote import free_port
from limits import HANG_S

from embark import export_run
from embark.export.artifact import CURRENT, current_version, open_artifact, open_versions
from embark.serve.request_rows import JsonColumns
from embark.serve.version_poller import load_scorer

ROWS = [{"dense_0": i / 9, "dense_1": -i, "a": 97 * i % 4_000, "b": i % 3} for i in range(20)]
PUBLISH = """
import sys
from embark.publish import publisher
publisher.POLL_S = 0.0
print("ready", flush=True)
publisher.watch(sys.argv[1], gate=False, on_result=lambda _: None, on_error=lambda error: print(error, flush=True),
                is_stopped=lambda: False)
"""


class Server:
    """A process that serves, and is started again when it is killed."""

    def __init__(self, python: str, place: str) -> None:
        self.command, self.port = [python, "-m", "embark", "serve", place, "--poll-s", "0.02"], free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([*self.command, "--port", str(self.port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == self.port and one.pid:
                psutil.Process(one.pid).kill()
        assert self.process
        self.process.kill()
        self.process.wait(HANG_S)

    def ask(self) -> dict[str, object] | None:
        """An answer; None while there is no server."""
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)) as connection:
                connection.request("POST", "/score", json.dumps({"rows": ROWS}))
                response = connection.getresponse()
                body = json.loads(response.read())
        except (OSError, http.client.HTTPException):
            return None
        assert response.status == 200, body
        return body


@pytest.mark.slow
def test_publisher_and_server_killed_at_random_serve_no_torn_version(tmp_path, warm_python):
    num_kills = int(os.environ.get("EMBARK_KILLS", "3"))
    draw = random.Random(int(os.environ.get("EMBARK_KILL_SEED", "0")))
    place = str(tmp_path / "at")
    run = EditedRun(tmp_path, rows=4_000, publish={
        "to": place, "every_minutes": 1e-9, "keep_versions": 0, "tables": "int8"})
    uri, stop, answers, failures = run.save(), threading.Event(), [], []
    server = Server(warm_python, place)

    def train() -> None:
        while not stop.wait(0.3):
            run.save()

    def ask() -> None:
        try:
            while not stop.is_set():
                if (answer := server.ask()) is not None:
                    answers.append((answer["version"], answer["scores"]))
                time.sleep(0.05)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, daemon=True) for one in (train, ask)]
    num_versions = 0
    try:
        threads[0].start()
        for number in range(num_kills):
            with subprocess.Popen([sys.executable, "-c", PUBLISH, uri], stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"}) as publisher:
                assert publisher.stdout.readline() == "ready\n"
                wait_until(lambda before=num_versions: len(open_versions(place).committed()) > before + 1)
                if number == 0:
                    server.start()
                    threads[1].start()
                num_answers = len(answers)
                wait_until(lambda num=num_answers: failures or len(answers) > num)
                time.sleep(draw.random() / 2)
                publisher.kill()
            if number % 2:
                server.kill()
                server.start()
            assert open_artifact(place).version == json.loads((Path(place) / CURRENT).read_text())["version"]
            num_versions = len(open_versions(place).committed())
    finally:
        stop.set()
        for one in threads:
            one.join(HANG_S)
        server.kill()
    assert failures == []
    expected = {}
    for version, scores in answers:
        if version not in expected:
            expected[version] = list(load_scorer(place, version).score([JsonColumns(ROWS)])[0].scores)
        assert scores == expected[version]
    assert len(expected) > 1
    assert any(open_artifact(place, version).deltas for version in expected)


HELD = """
import sys
from embark.__main__ import run
from embark.publish import publisher
function = getattr(publisher, sys.argv[1])
def held(*args, **named):
    found = function(*args, **named)
    print("held", flush=True)
    sys.stdin.readline()
    return found
setattr(publisher, sys.argv[1], held)
sys.exit(run(["publish", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "is_killed"), [("_judged", False), ("_judged", True), ("set_current", True)])
def test_a_publisher_that_was_held_or_killed_does_not_undo_a_rollback(tmp_path, warm_python, at, is_killed):
    """A rollback while `embark publish` judges, and one between its switch and its end by SIGKILL."""
    place = str(tmp_path / "at")
    run = EditedRun(tmp_path, rows=4_000, publish={"to": place, "max_calibration_error": 9.0, "max_auc_drop": 0.2})
    run.weights = {name: values / 20 for name, values in run.weights.items()}
    for _ in range(2):
        uri = run.save(scale=0.001)
        export_run(uri, place, delta=True)
    run.save(scale=0.001)
    with subprocess.Popen([sys.executable, "-c", HELD, at, uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as publisher:
        assert publisher.stdout.readline() == "held\n"
        assert current_version(open_versions(place)) == (3 if at == "set_current" else 2)
        assert subprocess.run([warm_python, "-m", "embark", "rollback", place, "1"], check=False).returncode == 0
        if is_killed:
            publisher.kill()
        printed, _ = publisher.communicate("\n", timeout=HANG_S)
    says = "version 1 was made current by `embark rollback`"
    assert is_killed or (publisher.returncode, says in printed) == (1, True)
    again = subprocess.run([warm_python, "-m", "embark", "publish", uri], capture_output=True, text=True, check=False)
    assert (again.returncode, current_version(open_versions(place))) == (1, 1), again
    assert says in again.stdout


def wait_until(condition, limit_s: float = HANG_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.02)
