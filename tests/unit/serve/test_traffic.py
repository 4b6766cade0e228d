"""Served traffic as events and metrics: every request counted, drift found, labels joined with their scores."""

from __future__ import annotations

import json
import shutil

import pytest
from exported_runs import COLUMNS, draw_rows, prepared_spec, save_run, write_csv
from served_models import use_server

from embark.events.events import read_events
from embark.events.traffic import TrafficView
from embark.export.artifact import open_artifact
from embark.export.export_run import export_run
from embark.report.record import Record
from embark.serve.request_rows import JsonColumns, RequestScorer
from embark.serve.served_model import ServedModel
from embark.serve.server import Endpoint, serve_scorer
from embark.serve.traffic import MAX_VERSIONS, Traffic, TrafficLog, about_version, read_labels
from embark.trainers.torch.scoring.cpu_model import ExportedModel

DRAWN = [dict(zip(COLUMNS, row, strict=True)) for row in draw_rows(600, 11)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """A model whose number column is one dense value, and so one column of its traffic."""
    folder = tmp_path_factory.mktemp("traffic")
    train, later = (write_csv(folder / f"{num}.csv", draw_rows(num, num)) for num in (300, 20))
    spec = prepared_spec(folder, train, later, features={"numbers": "standardize"})
    return open_artifact(export_run(save_run(spec).uri, str(folder / "models")).uri)


def scorer_of(artifact):
    return RequestScorer(artifact, ExportedModel(artifact).score)


def test_a_server_records_its_traffic_and_labels(artifact, tmp_path):
    model = ServedModel(scorer_of(artifact))

    def use(client):
        scores = [client("POST", "/score", {"rows": DRAWN[5 * i : 5 * i + 5]})[1]["scores"] for i in range(40)]
        answers = [
            client("POST", "/feedback", {"version": 1, **body})[:2] for body in (
                {"scores": scores[0], "labels": [1, 0, None, 1, 0]}, {"scores": scores[1], "labels": [1]},
                {"scores": [0.5], "labels": [2]}, {"scores": scores[2], "labels": [1] * 5}, {"labels": [1]},
                {"scores": [], "labels": []})]
        assert client("POST", "/score", {"rows": 5})[0] == 400
        return answers, client("GET", "/metrics")[1]

    answers, metrics = use_server(lambda on_start: serve_scorer(model, Endpoint(port=0), None, on_start,
                                                                str(tmp_path)), use)
    assert [status for status, _ in answers] == [200, 400, 400, 200, 400, 400]
    assert answers[0][1] == {"rows": 5}
    assert "1 labels, and 5 scores" in answers[1][1]["error"]
    assert "embark_serve_column_psi" in metrics
    folder, = tmp_path.iterdir()
    events = list(read_events(folder / "events.jsonl"))
    assert (events[0].kind, events[-1].kind) == ("serve", "serve_end")
    record = Record(events)
    windows = record.traffic.windows
    assert sum(one.num_rows for one in windows) == 40 * 5
    assert sum(one.statuses.get("200", 0) for one in windows) == 40
    assert sum(one.statuses.get("400", 0) for one in windows) == 1
    assert sum(int(one.latency.sum()) for one in windows) == 40
    view = TrafficView([record.traffic])
    assert all(0 < column.drift.num <= 40 for column in view.columns if column.column.kind != "ids")  # a sample
    assert view.calibration.num == 4 + 5
    assert view.calibration.clicks == 2 + 5


def counted(artifact, rows):
    """Traffic of a request for each of the rows, of a version that was switched to."""
    model = ServedModel(scorer_of(artifact))
    traffic, log = Traffic(model), TrafficLog()
    model.observe(traffic.add_rows)
    model.answer_with(scorer_of(artifact))
    log.add_version(about_version(model), is_start=True)
    for start in range(0, len(rows), 100):
        for found in model.score([JsonColumns([row, row]) for row in rows[start : start + 100]]):
            traffic.add_answer(found, 0.001)
        traffic.count()
    log.write([traffic.take()])
    return log


def test_planted_drift_is_found_and_the_rows_of_training_have_none(artifact):
    same = TrafficView([counted(artifact, DRAWN).record])
    assert {one.column.title for one in same.columns} >= {"price", "word", "tags", "tags (length)"}
    assert [one.sentence() for one in same.columns if one.drift.level] == []
    drifted = counted(artifact, [{**row, "price": ""} for row in DRAWN])
    worst, *others = TrafficView([drifted.record]).columns
    assert (worst.column.title, worst.drift.level) == ("price", "large")
    assert worst.missing_share == 1
    assert not any(one.drift.level for one in others)
    psi = {sample.labels["column"]: sample.value for metric in drifted.collect() for sample in metric.samples
           if metric.name == "embark_serve_column_psi"}
    assert psi["price"] > 0.25 > psi["word"]


def test_one_row_of_each_request_of_one_batch_is_sampled(artifact):
    model = ServedModel(scorer_of(artifact))
    traffic = Traffic(model)
    model.observe(traffic.add_rows)
    for _ in range(3):
        model.score([JsonColumns(DRAWN[:5]), JsonColumns(DRAWN[5:7])])
    traffic.count()
    assert traffic.take()[1]["columns"]["rows"] == 2
    traffic.count()
    assert "columns" not in traffic.take()[1]


def test_a_full_disk_stops_no_answer(artifact, tmp_path):
    model = ServedModel(scorer_of(artifact))
    traffic, log = Traffic(model), TrafficLog()
    with log.recording(tmp_path / "gone", "", about_version(model), lambda: [traffic.take()]), traffic.running():
        (tmp_path / "gone" / "events.jsonl").unlink()
        log.write([traffic.take()])
        assert len(model.score([JsonColumns(DRAWN[:2])])) == 1
    assert (tmp_path / "gone" / "events.jsonl").exists()  # again


def test_a_record_that_was_deleted_or_emptied_is_begun_again_with_a_word(artifact, tmp_path, caplog):
    log, file = TrafficLog(), tmp_path / "events.jsonl"
    window = {1: {"statuses": {"200": 3}}}

    def kinds() -> list[str]:
        return [event.kind for event in read_events(file)]

    def is_recorded() -> list[float]:
        return [sample.value for family in log.collect() if family.name == "embark_serve_recorded"
                for sample in family.samples]

    with log.recording(tmp_path, "here", about_version(ServedModel(scorer_of(artifact))), list):
        file.write_text("")
        log.write([window])
        assert kinds() == ["serve", "traffic"]
        assert (is_recorded(), caplog.text) == ([1.0], "")
        shutil.rmtree(tmp_path)
        tmp_path.write_text("in its way")
        for _ in range(3):
            log.write([window])
        assert is_recorded() == [0.0]
        assert caplog.text.count("traffic is not recorded until") == 1
        tmp_path.unlink()
        log.write([window])
        assert kinds() == ["serve", "traffic"]
        assert is_recorded() == [1.0]
        assert caplog.text.count("traffic is recorded again") == 1
    assert kinds() == ["serve", "traffic", "serve_end"]


def test_labels_of_too_many_versions_are_left_out(artifact):
    traffic = Traffic(ServedModel(scorer_of(artifact)))
    for version in range(1, MAX_VERSIONS + 2):
        traffic.add_labels(*read_labels({"version": version, "scores": [0.5], "labels": [1]}))
    traffic.count()
    assert list(traffic.take()) == list(range(1, MAX_VERSIONS + 1))
    with pytest.raises(ValueError, match="scores"):
        read_labels(json.loads('{"version": 1, "scores": [NaN], "labels": [1]}'))
