"""Metrics that were sent to CloudWatch are read back from it; one that does not answer costs a run nothing."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from tiny_runs import TINY

from embark.events.events import Event
from embark.events.sinks.services import MAX_AT_ONCE, cloudwatch_sink
from embark.spec import resolve

SINK = 'watch.sinks=["cloudwatch"]'


@pytest.fixture
def cloudwatch(s3_emulator, environment):
    environment({**s3_emulator.env, "AWS_DEFAULT_REGION": "us-east-1"})
    return boto3.client("cloudwatch")


def read_back(client, namespace, name, statistic="Maximum", **dimensions):
    now = datetime.now(UTC)
    result = client.get_metric_statistics(
        Namespace=namespace, MetricName=name, Statistics=[statistic], Period=3600, StartTime=now - timedelta(hours=2),
        EndTime=now + timedelta(hours=2), Dimensions=[{"Name": k, "Value": v} for k, v in dimensions.items()])
    return [point[statistic] for point in result["Datapoints"]]


def test_a_run_s_metrics_are_read_back(cloudwatch, tmp_path):
    from embark.trainers import train

    namespace = f"Embark{time.monotonic_ns()}"
    values = train(resolve(TINY, [f"store.root={tmp_path}", SINK, f"watch.cloudwatch_namespace={namespace}"]))
    events = [json.loads(line) for line in Path(values["run_dir"], "events.jsonl").read_text().splitlines()]
    last = [e for e in events if e["event"] == "step"][-1]
    assert read_back(cloudwatch, namespace, "loss", run="tiny") == [pytest.approx(last["loss"])]
    assert read_back(cloudwatch, namespace, "auc", run="tiny", split="eval") == [pytest.approx(values["auc"])]
    assert read_back(cloudwatch, namespace, "last_step", run="tiny") == [6]
    assert read_back(cloudwatch, namespace, "is_running", run="tiny") == [0]
    assert not [e for e in events if e["event"] == "note" and "CloudWatch" in e["text"]]


def test_many_ranks_go_in_several_requests_with_their_units(cloudwatch):
    sink = cloudwatch_sink("wide", "Wide", 60)
    num = 2 * MAX_AT_ONCE + 3
    sink.emit(Event("ranks", {"step": 1, "step_s": [float(rank) for rank in range(num)], "input_s": []}))
    sink.emit(Event("step", {"step": 1, "loss": float("nan")}))
    sink.close()
    assert sink.take_problem() == ""
    assert read_back(cloudwatch, "Wide", "rank_step_s", run="wide", rank=str(num - 1)) == [num - 1]
    assert read_back(cloudwatch, "Wide", "loss", run="wide") == []
    rows = cloudwatch.get_metric_statistics(
        Namespace="Wide", MetricName="rank_step_s", Statistics=["Sum"], Period=3600,
        StartTime=datetime.now(UTC) - timedelta(hours=2), EndTime=datetime.now(UTC) + timedelta(hours=2),
        Dimensions=[{"Name": "run", "Value": "wide"}, {"Name": "rank", "Value": "1"}])
    assert rows["Datapoints"][0]["Unit"] == "Seconds"


def test_what_has_not_changed_is_not_sent_again(cloudwatch):
    sink = cloudwatch_sink("steady", "Steady", 0.05)
    sink.emit(Event("step", {"step": 1, "loss": 0.5}))
    time.sleep(0.8)
    sink.close()
    assert read_back(cloudwatch, "Steady", "loss", "SampleCount", run="steady") == [1]


def test_a_service_that_does_not_answer_is_reported_once_and_stops_nothing(environment, tmp_path, monkeypatch):
    from embark.trainers import train

    environment({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_DEFAULT_REGION": "us-east-1",
                 "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "Wq7-do-not-show-me"})
    values = train(resolve(TINY, [f"store.root={tmp_path}", SINK, "watch.send_every_s=0.01", "train.num_steps=20"]))
    text = Path(values["run_dir"], "events.jsonl").read_text()
    notes = [e["text"] for e in map(json.loads, text.splitlines()) if e["event"] == "note"]
    assert values["step"] == 20
    assert len([note for note in notes if note.startswith("CloudWatch does not receive the metrics")]) == 1
    assert "do-not-show-me" not in text
