"""Records of a real nats-server: each run gets all of them, also where another has its name."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

pytest.importorskip("nats")
import nats
from nats_broker import broker

from embark.data.stream.open_reader import make_streams, open_reader
from embark.errors import UserError
from embark.spec import resolve

STREAM = "embark-clicks-a-shown"


def publish(url: str, first: int, last: int) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        for number in range(first, last + 1):
            await client.jetstream().publish("a.shown", str(number).encode())
        await client.close()

    asyncio.run(send())


def consumers(url: str) -> set[str]:
    async def names() -> set[str]:
        client = await nats.connect(url)
        try:
            return {one.name for one in await client.jetstream().consumers_info(STREAM)}
        finally:
            await client.close()

    return asyncio.run(names())


def read(reader, last: int) -> list[int]:
    """Up to that record, which has been published."""
    found: list[int] = []
    for _ in range(20):
        if found[-1:] != [last]:
            found += [message.offset for message in reader.poll("a.shown", 0.3)]
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with broker(tmp_path_factory.mktemp("nats")) as made:
        yield made.url


@pytest.fixture
def spec(url):
    async def remove() -> None:
        client = await nats.connect(url)
        await client.jetstream().delete_stream(STREAM)
        await client.close()

    spec = resolve({"name": "clicks", "model": {"num_tables": 1, "rows_per_table": 9},
                    "stream": {"source": "nats", "servers": [url], "topics": ["a.shown"]}})
    make_streams(spec)
    yield spec
    asyncio.run(remove())


def test_two_runs_of_one_name_each_read_every_record(spec, url):
    publish(url, 1, 30)
    with closing(open_reader(spec, "/a/clicks")) as one, closing(open_reader(spec, "/b/clicks")) as other:
        for reader in (one, other):
            reader.open({})
            assert read(reader, 30) == list(range(1, 31))
        before = consumers(url)
        assert len(before) == 2
        publish(url, 31, 60)
        for reader in (one, other):
            assert read(reader, 60) == list(range(31, 61))
        assert consumers(url) == before


def test_a_killed_run_leaves_no_consumer_behind(spec, url):
    publish(url, 1, 30)
    with closing(open_reader(spec, "s3://b/clicks")) as killed, closing(open_reader(spec, "s3://b/clicks")) as again:
        killed.open({})
        assert read(killed, 30) == list(range(1, 31))
        again.open({"a.shown": 20})
        assert read(again, 30) == list(range(21, 31))
        assert len(consumers(url)) == 1
        publish(url, 31, 60)
        assert read(killed, 60) == list(range(31, 61))


def test_a_work_queue_is_refused(spec, url):
    async def make_work_queue() -> None:
        client = await nats.connect(url)
        await client.jetstream().delete_stream(STREAM)
        await client.jetstream().add_stream(name=STREAM, subjects=["a.shown"], retention="workqueue")
        await client.close()

    asyncio.run(make_work_queue())
    with closing(open_reader(spec, "/a/clicks")) as reader:
        reader.open({})
        with pytest.raises(UserError, match="is a work queue"):
            reader.poll("a.shown", 0.1)
