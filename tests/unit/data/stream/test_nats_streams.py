"""Streams of a real nats-server: made where a topic is in none, refused where they keep records for a shorter time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

pytest.importorskip("nats")
import nats
from nats_broker import broker

from embark.data.stream.open_reader import make_streams, open_reader
from embark.errors import UserError
from embark.spec import resolve


def spec_of(url: str, *topics: str, hours: float = 24.0):
    stream = {"source": "nats", "servers": [url] if url else [], "topics": list(topics), "retention_hours": hours}
    return resolve({"name": "clicks", "stream": stream,
                    "place": {"target": "follow"}, "model": {"num_tables": 1, "rows_per_table": 9}})


def test_a_stream_is_made_once_and_one_that_keeps_less_is_refused(tmp_path):
    async def max_age_s(url: str, name: str) -> float:
        client = await nats.connect(url)
        found = await client.jetstream().stream_info(name)
        await client.close()
        return found.config.max_age

    with broker(tmp_path) as made:
        spec = spec_of(made.url, "a.shown", "b.clicked")
        assert make_streams(spec) == ["embark-clicks-a-shown", "embark-clicks-b-clicked"]
        assert make_streams(spec) == []
        assert asyncio.run(max_age_s(made.url, "embark-clicks-a-shown")) == 24 * 3600
        with pytest.raises(UserError, match="keeps records for 24 h") as caught:
            make_streams(spec_of(made.url, "a.shown", hours=48))
        assert "nats stream edit embark-clicks-a-shown --max-age 48h" in caught.value.fix


def test_a_broker_that_is_not_deployed_yet_cannot_be_followed_from_here():
    spec = spec_of("", "a.shown")
    for use in (partial(open_reader, run_uri="clicks"), make_streams):
        with pytest.raises(UserError, match=r"stream\.servers: is empty"):
            use(spec)
