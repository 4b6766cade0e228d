"""Subjects of NATS JetStream: each is a partition, and the stream's sequence numbers are the offsets."""

import asyncio
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.errors import TimeoutError as NoMessage
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import NotFoundError

from embark.errors import DataError, Fault, UserError
from embark.spec import StreamSpec
from embark.values import JsonDict, JsonMap
from .records import Message, Offsets

T = TypeVar("T")
AT_A_TIME = 500
_LOST = "keep records longer than a trainer may be away; --fresh starts a new run at stream.start"
MAX_WAIT_S = 600.0  # Limit for waiting for a broker that is started at the same time.
_RETRY_S = 0.5
_WAIT_S = 10.0
_NEVER_AGAIN_S = 30 * 86_400  # Time until redelivery; long, because the checkpoint decides what to read again.


class NatsReader:
    """Reads each subject through a durable consumer, made anew behind the offset of the checkpoint on each connection,
    so that nothing depends on what the broker remembers of it. Consumers of an earlier process of the run, which
    `name` tells from any other, are deleted."""

    def __init__(self, stream: StreamSpec, name: str, options: JsonMap) -> None:
        self._stream, self._options = stream, options
        self._name = re.sub(r"[^A-Za-z0-9_-]", "-", f"embark-{name}")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="embark-nats", daemon=True)
        self._client: Any = None
        self._consumers: JsonDict = {}
        self._last: dict[str, int] = {}
        self._delivered: dict[str, deque[tuple[int, Any]]] = {}  # Messages by which a number can be acknowledged.
        self._problem = ""

    def open(self, offsets: Offsets) -> Sequence[str]:
        self._thread.start()
        for topic in self._stream.topics:
            last = offsets.get(topic)
            self._last[topic] = last if isinstance(last, int) else 0
        return self._stream.topics

    def poll(self, partition: str, timeout_s: float) -> list[Message]:
        try:
            return self._call(self._fetch(partition, timeout_s), timeout_s)
        except NoMessage:
            return []
        except (DataError, UserError):
            raise
        except Exception as error:  # the broker is away; it is asked again
            self._problem = (f"{', '.join(self._stream.servers)}: no answer from the broker "
                             f"({f'{type(error).__name__} {error}'.strip()})")
            self._consumers.pop(partition, None)
            threading.Event().wait(timeout_s)
            return []

    def acknowledge(self, offsets: Offsets) -> None:
        """Acknowledge records, so that streams which keep them until then can drop them; a lost acknowledgement is
        made up for by the next."""
        for topic, offset in offsets.items():
            newest, delivered = None, self._delivered.get(topic, deque())
            while delivered and isinstance(offset, int) and delivered[0][0] <= offset:
                newest = delivered.popleft()[1]
            if newest is not None:
                with suppress(Exception):
                    self._call(newest.ack(), 1.0)

    def problem(self) -> str:
        return self._problem

    def close(self) -> None:
        if self._client is not None:
            with suppress(Exception):
                self._call(self._client.close(), 2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s + _WAIT_S)
        except TimeoutError:
            future.cancel()
            raise

    async def _fetch(self, topic: str, timeout_s: float) -> list[Message]:
        if self._client is None or self._client.is_closed:
            self._client = await nats.connect(
                list(self._stream.servers), max_reconnect_attempts=-1, reconnect_time_wait=0.1, connect_timeout=2,
                error_cb=_ignore, **self._options)
        if topic not in self._consumers:
            self._consumers[topic] = await self._consumer(topic)
            self._delivered[topic] = deque()
        last = self._last[topic]
        try:
            found = [m for m in await self._consumers[topic].fetch(AT_A_TIME, timeout=timeout_s)
                     if m.metadata.sequence.stream > last]
        except NoMessage:
            if not self._client.is_connected:
                raise ConnectionError("the broker is away") from None
            await self._consumers[topic].consumer_info()  # a broker that was started again may have forgotten it
            raise
        self._problem = ""
        messages = [Message(m.metadata.sequence.stream, m.data, m.metadata.timestamp.timestamp()) for m in found]
        if found:
            self._last[topic] = found[-1].metadata.sequence.stream
            self._delivered[topic].append((self._last[topic], found[-1]))
        return messages

    async def _consumer(self, topic: str) -> Any:
        js, last = self._client.jetstream(timeout=2), self._last[topic]
        try:
            stream = await js.find_stream_name_by_subject(topic)
        except NotFoundError:
            raise UserError(f"stream.topics: {topic} is in no JetStream stream of {', '.join(self._stream.servers)}",
                            "embark follow SPEC --make-streams makes it; or name a subject of a stream") from None
        info = await js.stream_info(stream)
        state = info.state
        if info.config.retention == RetentionPolicy.WORK_QUEUE:  # it takes no consumer that acknowledges many at once
            raise UserError(f"NATS stream {stream}, which has stream.topics {topic}, is a work queue",
                            "name a subject of a stream with --retention limits")
        if last and state.first_seq > last + 1:
            raise DataError(f"NATS stream {stream} no longer has the records {last + 1:,} to {state.first_seq - 1:,}, "
                            "which the run has not trained on", _LOST)
        if state.last_seq < last:
            raise DataError(f"NATS stream {stream} ends at record {state.last_seq:,}, and the run's checkpoint has "
                            f"record {last:,}: it is another stream", _LOST)
        name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{self._name}-{topic}")
        for consumer in await js.consumers_info(stream):
            if re.fullmatch(rf"{name}(-[0-9a-f]{{8}})?", consumer.name):
                with suppress(NotFoundError):
                    await js.delete_consumer(stream, consumer.name)
        name += f"-{secrets.token_hex(4)}"  # of one that has the name of another, both would get a part of the records
        how = DeliverPolicy.ALL if self._stream.start == "earliest" else DeliverPolicy.NEW
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE if last else how, opt_start_seq=last + 1 if last else None,
            ack_policy=AckPolicy.ALL, ack_wait=_NEVER_AGAIN_S, max_ack_pending=-1)
        return await js.pull_subscribe(topic, durable=name, stream=stream, config=config)


async def _ignore(_: Exception) -> None:
    """Ignore errors that the caller sees as well."""


def make_streams(stream: StreamSpec, name: str, options: JsonMap) -> list[str]:
    """Make a stream on disk for each topic that is in none, with records that are kept for `retention_hours`; return
    their names. A stream that keeps records for a shorter time is refused."""
    return asyncio.run(_make_streams(stream, name, options))


async def _make_streams(stream: StreamSpec, name: str, options: JsonMap) -> list[str]:
    client, made = await _connected(stream, options), []
    try:
        js, kept_s = client.jetstream(timeout=10), 3600 * stream.retention_hours
        for topic in stream.topics:
            try:
                found = await js.find_stream_name_by_subject(topic)
            except NotFoundError:
                own = re.sub(r"[^A-Za-z0-9_-]", "-", f"embark-{name}-{topic}")
                await js.add_stream(StreamConfig(name=own, subjects=[topic], max_age=kept_s))
                made.append(own)
                continue
            max_age_s = (await js.stream_info(found)).config.max_age
            if max_age_s and max_age_s < kept_s:
                raise UserError(f"NATS stream {found} keeps records for {max_age_s / 3600:g} h, and "
                                f"stream.retention_hours is {stream.retention_hours:g}",
                                f"nats stream edit {found} --max-age {stream.retention_hours:g}h, or a smaller "
                                    "value")
    finally:
        await client.close()
    return made


async def _connected(stream: StreamSpec, options: JsonMap) -> Any:
    until_s = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            return await nats.connect(list(stream.servers), connect_timeout=2, max_reconnect_attempts=1,
                                      error_cb=_ignore, **options)
        except Exception as error:  # whatever it is, the broker does not answer yet
            if time.monotonic() > until_s:
                raise Fault(f"{', '.join(stream.servers)} does not answer: {type(error).__name__} {error}",
                            "start the broker, or correct stream.servers") from None
            await asyncio.sleep(_RETRY_S)
