"""A server takes deltas: in place, without failing or mixing an answer, and also where it missed some."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from exported_runs import EditedRun
from limits import HANG_S
from served_models import use_server

from embark import export_run, serve_model
from embark.export.delta import DELTA
from embark.serve.app import ServeLimits
from embark.serve.request_rows import JsonColumns
from embark.serve.served_model import ServedModel
from embark.serve.server import Endpoint
from embark.serve.version_poller import VersionPoller, load_scorer

ROWS = [{"dense_0": i / 9, "dense_1": -i, "a": 9 * i % 400, "b": i % 3} for i in range(40)]
TABLE = "tables.embedding_bags.a.weight"


def scores_of(scorer, num: int = 40):
    found, = scorer.score([JsonColumns(ROWS[:num])])
    return found.version, found.scores


class Polled:
    """An exported model that a server polls."""

    def __init__(self, folder: Path) -> None:
        self.run, self.uri = EditedRun(folder, rows=4_000), str(folder / "at")
        self.publish()
        self.model = ServedModel(load_scorer(self.uri, None), load=lambda version, onto: load_scorer(
            self.uri, version, onto=onto))
        self.poller = VersionPoller(self.uri, self.model, 10.0)

    def publish(self, num: int = 1, **settings) -> None:
        for _ in range(num):
            export_run(self.run.save(), self.uri, **{"delta": True, **settings})

    def poll(self) -> int:
        """The version that answers, with the scores of one that is opened for itself."""
        self.poller.poll()
        version, scores = scores_of(self.model)
        assert (version, scores) == scores_of(load_scorer(self.uri, version))
        return version


def test_deltas_go_in_turn_into_the_tables_of_two_versions(tmp_path):
    polled = Polled(tmp_path)
    tables = []
    for version in range(2, 6):
        polled.publish()
        assert polled.poll() == version
        tables.append(polled.model.artifact.weights[TABLE])
        assert tables[-1].shape == (4_000, 4)
    assert np.shares_memory(tables[0], tables[2])
    assert np.shares_memory(tables[1], tables[3])
    assert not np.shares_memory(tables[0], tables[1])


def test_a_server_that_missed_deltas_catches_up_over_a_rewritten_base(tmp_path):
    polled = Polled(tmp_path)
    found = []
    for num, delta in ((3, True), (1, True), (2, True), (1, False), (3, True), (1, True)):
        polled.publish(num, delta=delta)
        found.append(polled.poll())
    assert found == [4, 5, 7, 8, 11, 12]


def test_a_broken_chain_is_refused_and_the_next_full_version_taken(tmp_path):
    polled = Polled(tmp_path)
    polled.publish()
    assert polled.poll() == 2
    polled.publish()
    damaged = tmp_path / "at" / "version-000000003" / DELTA
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert polled.poll() == 2
    assert "version-000000003 is damaged" in polled.model.refused.refused
    polled.publish(2)  # of which the first is in full
    assert polled.poll() == 5
    assert len(polled.model.artifact.deltas) == 1


def test_a_version_that_a_batch_still_uses_is_not_written_into(tmp_path):
    polled = Polled(tmp_path)
    for _ in range(2):
        polled.publish()
        polled.poll()
    previous = polled.model.previous.artifact
    polled.model._uses[id(previous)] += 1  # as while a batch is scored
    before = previous.weights[TABLE].copy()
    polled.publish()
    assert polled.poll() == 4
    assert (previous.weights[TABLE] == before).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_deltas_under_load_fail_no_request_and_mix_no_answer(tmp_path, workers):
    run, uri, answers, failures = EditedRun(tmp_path), str(tmp_path / "at"), [], []
    stop, has_answered = threading.Event(), threading.Condition()
    export_run(run.save(), uri)

    def load(client, num: int) -> None:
        try:
            while not stop.is_set():
                status, answer, _ = client("POST", "/score", {"rows": ROWS[:num]})
                with has_answered:
                    answers.append((num, status, answer))
                    has_answered.notify_all()
        except Exception as error:
            failures.append(error)

    def use(client) -> None:
        clients = [threading.Thread(target=load, args=(client, num), daemon=True) for num in (3, 40)]
        for one in clients:
            one.start()
        for version in range(2, 8):
            export_run(run.save(), uri, delta=True)
            with has_answered:
                assert has_answered.wait_for(lambda wanted=version: failures or any(
                    answer.get("version") == wanted for _, _, answer in answers[-9:]), 60)
        stop.set()
        for one in clients:
            one.join(HANG_S)

    limits = ServeLimits(max_batch_rows=1)  # each request as it would be scored alone
    use_server(lambda on_start: serve_model(
        uri, endpoint=Endpoint(port=0), poll_s=0.01, limits=limits, on_start=on_start,
        workers=workers), use)
    assert failures == []
    expected = {(version, num): list(scores_of(scorer, num)[1]) for version in range(1, 8)
                for scorer in [load_scorer(uri, version)] for num in (3, 40)}
    for num, status, answer in answers:
        assert status == 200, answer
        assert answer["scores"] == expected[answer["version"], num]
    assert {answer["version"] for _, _, answer in answers} >= set(range(2, 8))
