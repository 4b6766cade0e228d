"""What happens to the files of a served version changes no answer of its server and ends none of its processes."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from exported_runs import EditedRun
from limits import HANG_S
from served_models import served_by_process

from embark import export_run, rollback_model
from embark.export.artifact import WEIGHTS
from embark.serve.request_rows import JsonColumns
from embark.serve.version_poller import load_scorer

ROWS = [{"dense_0": i / 9, "dense_1": -i, "a": 97 * i % 4_000, "b": i % 3} for i in range(40)]
POLL = ("--poll-s", "0.05")


def scores_of(uri: str, version: int | None = None) -> list[float]:
    return list(load_scorer(uri, version).score([JsonColumns(ROWS)])[0].scores)


def are_same(scores: list[float], expected: list[float]) -> bool:
    """Whether they are the scores of one version: a CPU may sum a row otherwise beside the rows of another request."""
    return len(scores) == len(expected) and np.allclose(scores, expected, rtol=0, atol=1e-6)


def wait_until(is_true) -> None:
    for _ in range(int(HANG_S / 0.02)):
        if is_true():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it does not happen")


class Asking:
    """Requests from several threads while the block runs; `answers` are status, scores and identity."""

    def __init__(self, client) -> None:
        self._client, self._stop, self.answers, self.failures = client, threading.Event(), [], []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(4)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                status, answer, headers = self._client("POST", "/score", {"rows": ROWS})
                self.answers.append((status, answer.get("version"), answer.get("scores"), headers["Embark-Identity"]))
            except Exception as error:
                self.failures.append(error)

    def __enter__(self) -> Asking:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for one in self._threads:
            one.join(HANG_S)

    def wait(self, *, may_fail: bool = False) -> None:
        """Until each thread has had an answer to a request that began later than this, or one has failed."""
        num = len(self.answers)
        wait_until(lambda: (self.failures and not may_fail) or len(self.answers) > num + 2 * len(self._threads))


def shorten(place: Path) -> None:
    (place / "version-000000001" / WEIGHTS).write_bytes(b"")


def write_over(place: Path) -> None:
    path = place / "version-000000001" / WEIGHTS
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


DAMAGES = {"shortened": shorten, "written over": write_over, "removed": shutil.rmtree,
           "without current.json": lambda place: (place / "current.json").write_text("{")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_below_a_server_changes_no_answer_and_ends_nothing(tmp_path, damage, warm_python, workers):
    place = tmp_path / "at"
    export_run(EditedRun(tmp_path, rows=4_000).save(), str(place))
    expected = scores_of(str(place))
    words = ("--workers", str(workers), *POLL)
    with served_by_process(str(place), *words, python=warm_python) as (process, client), Asking(client) as asking:
        asking.wait()
        DAMAGES[damage](place)
        asking.wait()
        assert asking.failures == []
        if workers > 1:
            replace_a_worker(client)
            asking.wait()
        ready = client("GET", "/v2/health/ready")[1]
        process.send_signal(signal.SIGTERM)
    assert {(status, version) for status, version, *_ in asking.answers} == {(200, 1)}
    assert all(are_same(scores, expected) for _, _, scores, _ in asking.answers)
    assert (ready["live"], ready["ready"], ready["version"]) == (True, True, 1)


def workers_of_server() -> set[psutil.Process]:
    """They run the program of their parent, a child of a child of this process, since they are forked by it."""
    return {worker for ours in psutil.Process().children() for forking in ours.children()
            for worker in forking.children() if has_program_of(forking, worker)}


def has_program_of(forking: psutil.Process, worker: psutil.Process) -> bool:
    try:
        return forking.cmdline() == worker.cmdline()
    except psutil.NoSuchProcess:
        return False


def replace_a_worker(client) -> None:
    """Kill one of two, and wait until there are two again, which answer."""
    before = workers_of_server()
    killed = before.pop()
    killed.kill()

    def is_replaced() -> bool:
        now = workers_of_server()
        try:
            return len(now) == 2 and killed not in now and "embark_serve_workers 2.0" in client("GET", "/metrics")[1]
        except (OSError, http.client.HTTPException):  # It was handed to the killed one.
            return False

    wait_until(is_replaced)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_place_that_is_wiped_and_exported_again_is_a_new_version(tmp_path, warm_python, workers):
    run, place = EditedRun(tmp_path, rows=4_000), tmp_path / "at"
    first = export_run(run.save(), str(place))
    expected = {first.identity[:12]: scores_of(str(place))}
    words = ("--workers", str(workers), *POLL)
    with served_by_process(str(place), *words, python=warm_python) as (_, client), Asking(client) as asking:
        asking.wait()
        shutil.rmtree(place)
        second = export_run(run.save(), str(place))
        expected[second.identity[:12]] = scores_of(str(place))
        wait_until(lambda: asking.failures or asking.answers[-1][3] == second.identity[:12])
        asking.wait()
        assert asking.failures == []
        if workers > 1:
            replace_a_worker(client)
        num = len(asking.answers)
        asking.wait(may_fail=True)  # The requests that a killed worker had fail.
        about, metrics = client("GET", "/v2/models/edited")[1], client("GET", "/metrics")[1]
    assert (first.version, second.version) == (1, 1)
    assert {(status, version) for status, version, *_ in asking.answers} == {(200, 1)}
    assert all(are_same(scores, expected[identity]) for _, _, scores, identity in asking.answers)
    assert {identity for *_, identity in asking.answers[num + 4 :]} == {second.identity[:12]}
    assert about["parameters"]["identity"] == second.identity[:12]
    assert f'embark_serve_version_info{{identity="{second.identity[:12]}",version="1"}} 1.0' in metrics


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_switching_between_deltas_is_at_once_and_without_a_traceback(tmp_path, warm_python, workers):
    run, place = EditedRun(tmp_path, rows=4_000), str(tmp_path / "at")
    for _ in range(3):
        export_run(run.save(), place, delta=True)
    expected = {version: scores_of(place, version) for version in (1, 2, 3)}
    versions, changes = (2, 3, 2, 1, 3, 2, 3, 2), []
    words = ("--workers", str(workers), *POLL)
    with served_by_process(place, *words, python=warm_python) as (process, client), Asking(client) as asking:
        reader = threading.Thread(target=lambda: [changes.append(json.loads(line)) for line in process.stdout])
        reader.start()
        for num, version in enumerate(versions, 1):
            rollback_model(place, version)
            # A worker that still has the version before this one answers too: only the report says that all have it.
            wait_until(lambda wanted=num: asking.failures or len(changes) == wanted)
        asking.wait()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=HANG_S)
        reader.join()
        errors = process.stderr.read()
    assert [(change["version"], change["refused"]) for change in changes] == [(version, "") for version in versions]
    assert errors == b""
    assert not are_same(expected[2], expected[3])
    assert all(are_same(scores, expected[version]) for _, version, scores, _ in asking.answers)


@pytest.mark.slow
def test_a_server_leaves_the_copies_of_another_server_alone(tmp_path, warm_python):
    run, place = EditedRun(tmp_path, rows=4_000), tmp_path / "at"
    export_run(run.save(), str(place))
    expected = scores_of(str(place))
    with served_by_process(str(place), "--version", "1", "--workers", "2", python=warm_python) as (_, client), \
            served_by_process(str(place), "--workers", "1", *POLL, python=warm_python) as (_, other):
        for version in (2, 3):
            export_run(run.save(), str(place))
            wait_until(lambda wanted=version: other("GET", "/v2/health/ready")[1]["version"] == wanted)
        shorten(place)
        replace_a_worker(client)
        answers = [client("POST", "/score", {"rows": ROWS})[1] for _ in range(4)]
    assert [(answer["version"], answer["scores"]) for answer in answers] == [(1, expected)] * 4
