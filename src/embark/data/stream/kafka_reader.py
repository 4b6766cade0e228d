"""Topics of Kafka: each of their partitions is one, with Kafka's own offsets."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition

from embark.errors import DataError, Fault, UserError
from embark.spec import StreamSpec
from .records import Message, Offsets

AT_A_TIME = 500
MANY, FEW = 5_000, 1_000  # Records in memory at which a partition is paused, and resumed.
_LIST_S = 20.0


class KafkaReader:
    """Assigns the partitions itself, at the offsets of the checkpoint; what it commits to the group is for people and
    monitors to see."""

    def __init__(self, stream: StreamSpec, name: str, options: Mapping[str, Any]) -> None:
        self._stream = stream
        self._consumer = Consumer({
            "bootstrap.servers": ",".join(stream.servers), "group.id": f"embark-{name}", "enable.auto.commit": False,
            "auto.offset.reset": "error", "error_cb": self._on_error, "log_level": 0, **options})
        self._records: dict[str, deque[Message]] = {}
        self._paused: set[str] = set()
        self._problem = ""

    def open(self, offsets: Offsets) -> Sequence[str]:
        assigned = []
        for topic in self._stream.topics:
            try:
                about = self._consumer.list_topics(topic, timeout=_LIST_S).topics[topic]
            except KafkaException as error:
                raise Fault(f"Kafka at {', '.join(self._stream.servers)}: {error.args[0]}",
                            "start the broker, and run the same command again") from None
            if about.error or not about.partitions:
                raise UserError(f"stream.topics: no topic {topic} at {', '.join(self._stream.servers)}",
                                "make the topic, or correct its name")
            for number in about.partitions:
                last = offsets.get(f"{topic}/{number}")
                first = OFFSET_BEGINNING if self._stream.start == "earliest" else OFFSET_END
                assigned.append(Partition(topic, number, last + 1 if isinstance(last, int) else first))
        self._records = {f"{one.topic}/{one.partition}": deque() for one in assigned}
        self._consumer.assign(assigned)
        return list(self._records)

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        records = self._records[partition]
        if not records:
            for message in self._consumer.consume(AT_A_TIME, timeout_s):
                self._keep(message)
        self._pause_full(partition)
        return [records.popleft() for _ in range(min(AT_A_TIME, len(records)))]

    def acknowledge(self, offsets: Offsets) -> None:
        ends = [Partition(*_parts(name), offset + 1) for name, offset in offsets.items() if isinstance(offset, int)]
        with suppress(KafkaException):  # the next one makes up for it
            self._consumer.commit(offsets=ends, asynchronous=True)

    def problem(self) -> str:
        return self._problem

    def close(self) -> None:
        self._consumer.close()

    def _keep(self, message: Any) -> None:
        if error := message.error():
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise DataError(f"Kafka topic {message.topic()}, partition {message.partition()}: it no longer has the "
                                f"records that follow the run's checkpoint ({error.str()})",
                                "keep records longer than a trainer may be away; --fresh starts a new run at "
                                    "stream.start")
            self._problem = str(error.str())
            return
        self._problem = ""
        kind, millis = message.timestamp()
        time_s = None if kind == TIMESTAMP_NOT_AVAILABLE else millis / 1000
        self._records[f"{message.topic()}/{message.partition()}"].append(
            Message(message.offset(), message.value() or b"", time_s))

    def _pause_full(self, wanted: str) -> None:
        """Pause partitions that no one waits for, so that they do not fill the memory."""
        full = {name for name, records in self._records.items()
                if len(records) > (FEW if name in self._paused else MANY) and name != wanted}
        if new := full - self._paused:
            self._consumer.pause([Partition(*_parts(name)) for name in new])
        if gone := self._paused - full:
            self._consumer.resume([Partition(*_parts(name)) for name in gone])
        self._paused = full

    def _on_error(self, error: Any) -> None:
        self._problem = str(error.str())


def _parts(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("/")
    return topic, int(number)
