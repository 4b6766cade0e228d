"""Kafka's client against librdkafka's own mock cluster: partitions merged by event time, offsets from checkpoints."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from limits import HANG_S

from embark.data.loader import Batch
from embark.data.stream.source import StreamSource
from embark.errors import DataError, UserError
from embark.spec import RunSpec, resolve
from embark.store import Checkpoint, RunDir

kafka = pytest.importorskip("confluent_kafka")

BATCH = 8
NUM_PARTITIONS = 4  # What the mock cluster gives a topic.


@dataclass
class Cluster:
    producer: Any
    servers: str

    def publish(self, topic: str, row: dict, partition: int) -> None:
        self.producer.produce(topic, json.dumps(row).encode(), partition=partition)

    def flush(self) -> None:
        assert self.producer.flush(30) == 0


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    brokers = producer.list_topics(timeout=HANG_S).brokers.values()
    return Cluster(producer, ",".join(f"{one.host}:{one.port}" for one in brokers))


def row(second: float, number: int) -> dict:
    return {"t": 1.7e9 + second, "label": number % 2, "dense_0": number, "cat_0": number % 20}


def spec_of(cluster: Cluster, *topics: str, **stream: object) -> RunSpec:
    return resolve({
        "model": {"num_dense": 1, "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8], "num_tables": 1,
                  "rows_per_table": 20},
        "train": {"batch_size": BATCH},
        "stream": {"source": "kafka", "servers": [cluster.servers], "topics": list(topics), "time_column": "t",
                   **stream},
    })


def take(source: StreamSource, num: int, first: int = 0) -> list[Batch]:
    return [source.train_rows(0, step * BATCH, (step + 1) * BATCH) for step in range(first, first + num)]


def numbers(batches: list[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.dense[:, 0]]


def test_partitions_are_merged_by_event_time_and_resumed_at_offsets(
    cluster: Cluster, tmp_path: Path
) -> None:
    topic = f"events-{uuid4().hex[:8]}"
    for number in range(6 * BATCH):
        cluster.publish(topic, row(number, number), partition=number % NUM_PARTITIONS)
    cluster.flush()
    spec = spec_of(cluster, topic)
    with closing(StreamSource(spec)) as source:
        found = take(source, 5)
        files = source.checkpoint_files(2)
        source.committed(2)
        state = source.status(5)
    assert numbers(found) == list(range(5 * BATCH))
    assert (state["num_late"], state["num_unreadable"]) == (0, 0)
    run_dir = RunDir(str(tmp_path))
    run_dir.checkpoints.store.write("step-000000002/stream.json", files["stream.json"])
    offsets = json.loads(files["stream.json"])["offsets"]
    assert set(offsets) == {f"{topic}/{number}" for number in range(NUM_PARTITIONS)}
    with closing(StreamSource(spec)) as again:
        again.restore(run_dir.checkpoints, Checkpoint(2, dict.fromkeys(files, None), {}))  # type: ignore[arg-type]
        assert numbers(take(again, 3, 2)) == list(range(2 * BATCH, 5 * BATCH))
    # What was acknowledged is in the group, for people and monitors.
    group = kafka.Consumer({"bootstrap.servers": cluster.servers, "group.id": f"embark-{spec.name}", "log_level": 0})
    parts = [kafka.TopicPartition(topic, number) for number in range(NUM_PARTITIONS)]
    committed = group.committed(parts, timeout=HANG_S)
    group.close()
    assert {f"{one.topic}/{one.partition}": one.offset - 1 for one in committed} == offsets


def test_labels_of_another_topic_are_joined(cluster: Cluster) -> None:
    name = uuid4().hex[:8]
    for number in range(4 * BATCH):
        shown = {key: value for key, value in row(number, number).items() if key != "label"}
        cluster.publish(f"shown-{name}", {**shown, "id": number}, partition=0)
        if number % 3 == 0:
            cluster.publish(f"clicks-{name}", {"t": 1.7e9 + number + 4, "id": number, "label": 1}, partition=0)
    for topic in ("shown", "clicks"):  # idle partitions would hold the others up
        for partition in range(NUM_PARTITIONS):
            cluster.publish(f"{topic}-{name}", {**row(500, 0), "id": -1, "label": 0}, partition)
    cluster.flush()
    spec = spec_of(cluster, f"shown-{name}", f"clicks-{name}", key="id", label_window_s=6.0)
    with closing(StreamSource(spec)) as source:
        found = take(source, 4)
        state = source.status(4)
    assert numbers(found) == list(range(4 * BATCH))
    assert [int(label) for batch in found for label in batch.label] == [int(n % 3 == 0) for n in range(4 * BATCH)]
    assert state["num_labels_joined"] + state["num_without_label"] == 4 * BATCH


def test_a_topic_that_is_not_there_and_records_that_are_gone_are_said(cluster: Cluster, tmp_path: Path) -> None:
    with closing(StreamSource(spec_of(cluster, "bad topic!"))) as source, pytest.raises(UserError, match="no topic"):
        take(source, 1)
    topic = f"short-{uuid4().hex[:8]}"
    cluster.publish(topic, row(0, 0), partition=0)
    cluster.flush()
    run_dir = RunDir(str(tmp_path))
    state = {"offsets": {f"{topic}/0": 999}, "newest_s": {}, "watermark_s": None, "num_added": 0, "early": [],
             "waiting": [], "labels": {}, "label_ends": [], "ready": [], "counts": {}}
    run_dir.checkpoints.store.write("step-000000001/stream.json", json.dumps(state).encode())
    with closing(StreamSource(spec_of(cluster, topic))) as source:
        source.restore(run_dir.checkpoints, Checkpoint(1, {"stream.json": None}, {}))  # type: ignore[dict-item]
        with pytest.raises(DataError, match="no longer has"):
            take(source, 1, 1)
