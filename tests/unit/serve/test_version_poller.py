"""A server polls `current.json`: it switches without failing or mixing an answer, and refuses a version that is bad."""

from __future__ import annotations

import re
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv
from limits import HANG_S
from served_models import ROWS, use_server

from embark import export_run, serve_model
from embark.errors import DataError, Fault, UserError
from embark.export.artifact import WEIGHTS, open_versions, set_current
from embark.export.rollback import rollback
from embark.serve import served_model, version_poller
from embark.serve.app import ServeLimits
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.serve.served_model import ServedModel
from embark.serve.server import Endpoint
from embark.serve.version_poller import VersionPoller, load_scorer
from embark.spec import resolve

HERE = Endpoint(port=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of one model: two runs with other weights; one of another name; one that takes other columns."""
    folder = tmp_path_factory.mktemp("runs")
    train, later = (write_csv(folder / f"{name}.csv", draw_rows(num, num)) for name, num in
                    (("train", 300), ("later", 20)))
    spec = prepared_spec(folder, train, later)
    found = {name: save_run(spec.model_copy(update={"store": spec.store.model_copy(
        update={"root": str(folder / name)})}), seed).uri for name, seed in (("first", 0), ("second", 1))}
    found["renamed"] = save_run(spec.model_copy(update={"name": "views"}), 2).uri
    found["columns"] = save_run(resolve({
        "name": "clicks", "model": {"num_tables": 2, "rows_per_table": 9, "embedding_dim": 4},
        "store": {"root": str(folder / "columns")}})).uri
    return found


class Polled:
    """A model whose version 1 is served, and what was reported."""

    def __init__(self, uri: str, run: str) -> None:
        export_run(run, uri)
        self.uri, self.changes, self.num_loaded = uri, [], 0
        self.model = ServedModel(load_scorer(uri, None), load=self._load)
        self.model.listeners.append(self.changes.append)
        self.load = lambda version, onto=None: load_scorer(uri, version, onto=onto)  # tests replace it
        self.poller = VersionPoller(uri, self.model, 10.0)

    def _load(self, version: int, onto: RequestScorer | None) -> RequestScorer:
        self.num_loaded += 1
        return self.load(version) if onto is None else self.load(version, onto)

    def poll(self) -> int:
        """The version that answers after a poll, and gives a score."""
        self.poller.poll()
        scores, = self.model.score([JsonColumns(ROWS[:1])])
        assert scores.scores[0] is not None
        assert scores.version == self.model.artifact.version
        return scores.version


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_starts_with_the_newest_version_that_is_not_damaged(runs, tmp_path, workers):
    uri, changes = str(tmp_path / "models"), []
    for run in ("first", "second", "second", "second"):
        export_run(runs[run], uri)
    for version in (3, 4):
        weights = Path(uri) / f"version-{version:09}" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1])

    def use(client):
        return {path: client("GET", path)[1] for path in ("/v2/health/ready", "/v2/models/clicks", "/metrics")}, \
            client("POST", "/score", {"rows": ROWS[:1]})[1]

    def serve(on_start, **options):
        serve_model(uri, endpoint=HERE, on_start=on_start, on_change=changes.append, workers=workers, **options)

    found, scored = use_server(serve, use)
    assert scored["version"] == 2
    (change,) = changes
    assert (change.version, change.previous) == (4, 2)
    assert "version-000000004 is damaged" in change.refused
    assert found["/v2/health/ready"] == {"live": True, "ready": True, "version": 2, "refused_version": 4}
    assert found["/v2/models/clicks"]["parameters"]["refused_because"] == change.refused
    assert 'embark_serve_version_changes_total{result="refused"} 1.0' in found["/metrics"]
    assert "embark_serve_current_version 4.0" in found["/metrics"]
    with pytest.raises(DataError, match="version-000000004 is damaged"):
        serve(lambda _: None, version=4)
    (Path(uri) / "current.json").write_text("{")
    changes.clear()
    assert use_server(serve, use)[1]["version"] == 2
    assert changes[0].version is None


def mapped_versions(folder: Path) -> set[int]:
    """Those whose files this process maps from below a folder."""
    return {int(number) for number in re.findall(rf"{folder}/.*version-(\d+)/", Path("/proc/self/maps").read_text())}


@pytest.fixture
def polled(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    monkeypatch.setattr(served_model, "RECORD_EVERY_S", 0.0)
    return Polled(str(tmp_path / "models"), runs["first"])


def wait_until(is_true) -> None:
    end = time.monotonic() + HANG_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [1, 2])
def test_swaps_under_load_fail_no_request_and_mix_no_answer(runs, tmp_path, monkeypatch, workers):
    uri, answers, failures, changes, stop = str(tmp_path / "models"), [], [], [], threading.Event()
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    export_run(runs["first"], uri)

    def load(client, first: int) -> None:
        """Requests of many sizes, one after the other."""
        try:
            while not stop.is_set():
                for num in (1, 7, 40 - first):
                    answers.append((first, num, client("POST", "/score", {"rows": ROWS[first : first + num]})))
        except Exception as error:
            failures.append(error)

    def use(client):
        clients = [threading.Thread(target=load, args=(client, first), daemon=True) for first in (0, 3)]
        for one in clients:
            one.start()
        for act, version in ((lambda: export_run(runs["second"], uri), 2), (lambda: rollback(uri), 1),
                             (lambda: rollback(uri, 2), 2)):
            num_changes = len(changes)
            act()
            wait_until(lambda before=num_changes: len(changes) > before)  # in all processes
            wait_until(lambda wanted=version: answers and answers[-1][2][1].get("version") == wanted)
        stop.set()
        for one in clients:
            one.join(HANG_S)
        wait_until(lambda: mapped_versions(tmp_path) <= {2})
        return client("GET", "/metrics")[1]

    limits = ServeLimits(max_batch_rows=1)  # each request as it would be scored alone
    metrics = use_server(
        lambda on_start: serve_model(uri, endpoint=HERE, poll_s=0.01, limits=limits, on_start=on_start,
                                     on_change=changes.append, workers=workers), use)
    scorers = {version: load_scorer(uri, version) for version in (1, 2)}
    seen = []
    assert failures == []
    for first, num, (status, answer, _) in answers:
        assert status == 200, answer
        expected, = scorers[answer["version"]].score([JsonColumns(ROWS[first : first + num])])
        assert answer["scores"] == list(expected.scores)
        seen.append(answer["version"])
    assert {1, 2} == set(seen)
    assert scorers[1].score([JsonColumns(ROWS)])[0].scores != scorers[2].score([JsonColumns(ROWS)])[0].scores
    assert 'embark_serve_version_changes_total{result="switched"} 3.0' in metrics
    assert "embark_serve_version 2.0\n" in metrics
    assert "embark_serve_current_version 2.0\n" in metrics
    num_rows = sum(num for _, num, (_, answer, _) in answers if answer["version"] == 1)
    assert f'embark_serve_rows_total{{scored="true",version="1"}} {float(num_rows)}' in metrics


def test_all_requests_of_a_batch_are_scored_by_one_version(runs, polled):
    """Which switches while the batch is being scored."""
    export_run(runs["second"], polled.uri)
    other, answering = load_scorer(polled.uri, 2), polled.model.scorer
    score = answering.score

    def switching(requests):
        polled.model.answer_with(other)
        return score(requests)

    expected = [scores.scores for scores in score([JsonColumns(ROWS[:3]), JsonColumns(ROWS[3:40])])]
    answering.score = switching
    found = polled.model.score([JsonColumns(ROWS[:3]), JsonColumns(ROWS[3:40])])
    assert [(one.version, one.scores) for one in found] == [(1, scores) for scores in expected]
    assert [one.version for one in polled.model.score([JsonColumns(ROWS[:3])])] == [2]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


BAD = {
    "corrupt": ("second", lambda folder: damage(folder / WEIGHTS), "weights.safetensors: its bytes changed"),
    "truncated": ("second", lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
                  "bytes instead of"),
    "incomplete": ("second", lambda folder: (folder / WEIGHTS).unlink(), "there is no"),
    "without a readable mark": ("second", lambda folder: (folder / "commit.json").write_text("{"), "cannot be read"),
    "removed": ("second", lambda folder: (folder / "commit.json").unlink(), "has no version 2"),
    "of another run": ("renamed", lambda folder: None, "its run is called 'views', and the model that is served"),
    "of other columns": ("columns", lambda folder: None, "it has other inputs or outputs than version 1"),
    "not named": ("second", lambda folder: (folder.parent / "current.json").write_text('{"version": "2"}'),
                  "current.json is damaged: it names no version"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_version_is_refused_once_and_the_old_one_goes_on(runs, polled, kind):
    run, spoil, why = BAD[kind]
    assert polled.poll() == 1
    spoil(Path(export_run(runs[run], polled.uri).path))
    for _ in range(3):
        assert polled.poll() == 1
    change, = polled.changes
    assert (change.version, change.previous) == (None if kind == "not named" else 2, 1)
    assert why in change.refused
    assert change == polled.model.refused
    assert export_run(runs["second"], polled.uri).version == 3  # which is good
    assert polled.poll() == 3
    assert polled.model.refused is None
    assert [one.refused for one in polled.changes[1:]] == [""]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refused_version_is_in_metadata_and_metrics(runs, tmp_path, workers):
    uri = str(tmp_path / "models")
    first = export_run(runs["first"], uri)
    changes = []

    def use(client):
        (tmp_path / "models" / "current.json").write_text("7")
        wait_until(lambda: changes)
        unread = client("GET", "/metrics")[1]
        export_run(runs["renamed"], uri)
        wait_until(lambda: len(changes) == 2)
        return unread, client("GET", "/v2/models/clicks")[1], client("GET", "/metrics")[1], client(
            "POST", "/v2/models/clicks/versions/1/infer", {"inputs": [
                {"name": name, "shape": [2], "datatype": "BYTES", "data": [row[name] for row in ROWS[:2]]}
                for name in COLUMNS]})

    unread, about, metrics, answer = use_server(lambda on_start: serve_model(
        uri, endpoint=HERE, poll_s=0.01, on_start=on_start, on_change=changes.append, workers=workers), use)
    assert "embark_serve_current_version NaN" in unread
    assert about["versions"] == ["1"]
    assert about["parameters"] == {"run": runs["first"], "step": 3, "identity": first.identity[:12],
                                   "refused_version": 2, "refused_because": changes[1].refused}
    assert 'embark_serve_version_changes_total{result="refused"} 2.0' in metrics
    assert "embark_serve_version 1.0\n" in metrics
    assert "embark_serve_current_version 2.0\n" in metrics
    assert (answer[0], answer[1]["model_version"]) == (200, "1")


def test_an_unreachable_store_is_reported_and_polled_again(runs, polled, monkeypatch):
    export_run(runs["second"], polled.uri)
    store = polled.poller._versions.store
    with monkeypatch.context() as broken:
        broken.setattr(store, "read", lambda path: (_ for _ in ()).throw(Fault("the store does not answer")))
        assert [polled.poll(), polled.poll()] == [1, 1]
        assert polled.model.current is None
    assert [change.refused for change in polled.changes] == ["the store does not answer"]
    assert polled.poll() == 2
    Path(polled.uri).rename(f"{polled.uri}-away")
    assert polled.poll() == 2
    assert "has no exported model" in polled.changes[-1].refused


def test_a_server_stays_at_its_version_while_current_json_is_gone(runs, polled):
    """Whoever removes a folder may remove this file first: versions that were current before do not answer again."""
    export_run(runs["second"], polled.uri)
    rollback(polled.uri)
    assert polled.poll() == 1
    (Path(polled.uri) / "current.json").unlink()
    assert [polled.poll(), polled.poll()] == [1, 1]
    assert polled.model.current is None
    assert [change.refused for change in polled.changes] == [f"{polled.uri}/current.json is gone"]
    rollback(polled.uri, 2)
    assert polled.poll() == 2


def test_before_its_first_poll_a_server_stays_at_its_version_too(runs, polled):
    export_run(runs["second"], polled.uri)
    (Path(polled.uri) / "current.json").unlink()
    assert polled.poll() == 1
    assert [change.refused for change in polled.changes] == [f"{polled.uri}/current.json is gone"]


def test_a_version_that_gives_recorded_rows_no_finite_score_is_refused(runs, polled):
    export_run(runs["second"], polled.uri)
    polled.poll()
    export_run(runs["first"], polled.uri)
    polled.load = lambda version: RequestScorer(
        load_scorer(polled.uri, version).artifact, lambda raw: np.full(len(raw), np.nan, np.float32))
    assert polled.poll() == 2
    assert "1 recorded row that version 2 gave a score got none" in polled.changes[-1].refused
    assert polled.model.refused.version == 3


def test_rows_that_had_no_score_before_need_none_now(runs, polled):
    cheap = {**ROWS[0], "price": "cheap"}
    scored, = polled.model.score([JsonColumns([ROWS[0], cheap])])
    assert scored.scores[1] is None
    export_run(runs["second"], polled.uri)
    assert polled.poll() == 2


def test_any_error_of_loading_refuses_the_version(runs, polled):
    export_run(runs["second"], polled.uri)
    polled.load = lambda version: 1 / 0
    assert polled.poll() == 1
    assert (polled.changes[0].refused, polled.changes[0].fix) == ("internal error", "see the log")


def test_a_named_model_takes_versions_of_runs_of_any_name(runs, polled):
    polled.model._is_named = ServedModel(polled.model.scorer, "ranker")._is_named
    export_run(runs["renamed"], polled.uri)
    assert polled.poll() == 2
    assert ServedModel(polled.model.scorer, "ranker").name == "ranker"


def test_a_version_that_becomes_current_during_a_load_is_served(runs, polled):
    versions, load = open_versions(polled.uri), polled.load
    for _ in range(2):
        export_run(runs["second"], polled.uri)
    set_current(versions, 2)
    pointed_at = iter([3, 2, 3])  # during the loads of 2, 3 and 2

    def changing(version: int) -> RequestScorer:
        if (number := next(pointed_at, None)) is not None:
            set_current(versions, number)
        return load(version)

    polled.load = changing
    assert polled.poll() == 3
    assert [change.version for change in polled.changes] == [3]
    assert polled.num_loaded == 4


def test_a_rollback_while_the_version_is_loaded_is_heeded(runs, polled):
    export_run(runs["second"], polled.uri)
    load = polled.load
    polled.load = lambda version: (rollback(polled.uri), load(version))[1]
    assert polled.poll() == 1
    assert polled.changes == []
    assert polled.num_loaded == 1


def test_a_refused_version_is_loaded_again_at_growing_intervals(runs, polled, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(version_poller, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    damage(Path(export_run(runs["second"], polled.uri).path) / WEIGHTS)
    loaded_at = []
    for second in range(0, 200, 10):
        clock[0], before = float(second), polled.num_loaded
        assert polled.poll() == 1
        if polled.num_loaded > before:
            loaded_at.append(second)
    assert loaded_at == [0, 10, 30, 70, 150]
    assert len(polled.changes) == 1
    export_run(runs["second"], polled.uri)
    assert polled.poll() == 3  # another one is not waited for


def test_memory_and_mapped_files_of_the_old_version_are_released(runs, tmp_path, polled):
    old = weakref.ref(polled.model.scorer)
    assert mapped_versions(tmp_path) == {1}
    export_run(runs["second"], polled.uri)
    assert polled.poll() == 2
    wait_until(lambda: old() is None)  # a thread may let go of it a moment later
    wait_until(lambda: mapped_versions(tmp_path) == {2})


def test_the_active_and_the_previous_fetched_version_are_kept_on_disk(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path))
    polled = Polled(f"memory://models-{tmp_path.name}", runs["first"])
    for version in (2, 3, 4):
        export_run(runs["second"], polled.uri)
        assert polled.poll() == version
    assert sorted(path.name for path in tmp_path.glob("exported/*/*/*")) == ["version-000000003", "version-000000004"]
    rollback(polled.uri, 1)
    assert polled.poll() == 1


@pytest.mark.parametrize("settings", [{"version": 1}, {"poll_s": 0.0}])
def test_a_server_of_one_version_polls_nothing(runs, tmp_path, monkeypatch, settings):
    uri = export_run(runs["first"], str(tmp_path / "models")).uri
    polling = []
    monkeypatch.setattr(VersionPoller, "_run", polling.append)
    assert use_server(lambda on_start: serve_model(uri, endpoint=HERE, on_start=on_start, **settings),
                      lambda client: client("GET", "/v2/health/ready")[0]) == 200
    assert not polling
    with pytest.raises(UserError, match="--poll-s -1: out of range"):
        serve_model(uri, poll_s=-1)


def test_pollers_that_start_together_do_not_poll_together(runs, tmp_path):
    """Replicas would otherwise fetch a new version at the same moment, all of them."""
    polled = Polled(str(tmp_path / "models"), runs["first"])

    def waits() -> list[float]:
        poller, waited = VersionPoller(polled.uri, polled.model, 10.0), []
        poller._stopping = SimpleNamespace(wait=lambda s: waited.append(s) or len(waited) == 20, is_set=lambda: False)
        poller._run()
        return waited

    first, second = waits(), waits()
    assert first != second
    assert all(5.0 <= wait_s <= 15.0 for wait_s in first + second)


def test_a_third_version_makes_room_before_it_is_fetched(runs, tmp_path, monkeypatch):
    """And a rollback to the version before it finds it on the disk."""
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    polled = Polled(str(tmp_path / "models"), runs["first"])
    on_disk = []

    def load(version, onto=None):
        on_disk.append(sorted(path.name for path in (tmp_path / "cache" / "exported").glob("*/*/version-*")))
        return load_scorer(polled.uri, version, onto=onto)

    polled.load = load
    for run in ("second", "first"):
        export_run(runs[run], polled.uri)
        polled.poller.poll()
    rollback(polled.uri, 2)
    polled.poller.poll()
    assert on_disk == [["version-000000001"], ["version-000000002"], ["version-000000002", "version-000000003"]]
