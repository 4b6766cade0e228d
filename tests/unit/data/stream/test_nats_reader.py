"""Records of a real nats-server: each reader gets all of them, also where another reads under the same name."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

pytest.importorskip("nats")
import nats
from nats_broker import broker

from embark.data.stream.open_reader import make_streams, open_reader
from embark.spec import resolve


def publish(url: str, first: int, last: int) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        for number in range(first, last + 1):
            await client.jetstream().publish("a.shown", str(number).encode())
        await client.close()

    asyncio.run(send())


def test_two_runs_of_one_name_each_read_every_record(tmp_path):
    with broker(tmp_path) as made:
        spec = resolve({"name": "clicks", "model": {"num_tables": 1, "rows_per_table": 9},
                        "stream": {"source": "nats", "servers": [made.url], "topics": ["a.shown"]}})
        make_streams(spec)
        publish(made.url, 1, 30)
        found: dict[str, list[int]] = {"one": [], "other": []}
        with closing(open_reader(spec)) as one, closing(open_reader(spec)) as other:
            readers = {"one": one, "other": other}

            def read(name: str, last: int) -> None:
                for _ in range(20):
                    if found[name][-1:] != [last]:
                        found[name] += [message.offset for message in readers[name].poll("a.shown", 0.3)]

            for name, reader in readers.items():
                reader.open({})
                read(name, 30)
            publish(made.url, 31, 60)
            read("one", 60)
            publish(made.url, 61, 90)
            read("other", 90)
            read("one", 90)
    assert found == {"one": list(range(1, 91)), "other": list(range(1, 91))}
