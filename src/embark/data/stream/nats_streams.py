"""The JetStream streams that `embark follow` reads: made where they do not exist, checked where they do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import nats
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from embark.errors import Fault, UserError
from embark.spec.stream import StreamSpec

MAX_WAIT_S = 600.0  # For a broker that is started at the same time.
_RETRY_S = 0.5


def make_streams(stream: StreamSpec, name: str, options: Mapping[str, Any]) -> list[str]:
    """One for each topic that is in none, on disk, with records that are kept for `retention_hours`; returns their
    names. One that keeps them for a shorter time is refused."""
    return asyncio.run(_make_streams(stream, name, options))


async def _make_streams(stream: StreamSpec, name: str, options: Mapping[str, Any]) -> list[str]:
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
                                fix=f"nats stream edit {found} --max-age {stream.retention_hours:g}h, or a smaller "
                                    "value")
    finally:
        await client.close()
    return made


async def _connected(stream: StreamSpec, options: Mapping[str, Any]) -> Any:
    until_s = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            return await nats.connect(list(stream.servers), connect_timeout=2, max_reconnect_attempts=1,
                                      error_cb=_ignore, **options)
        except Exception as error:  # whatever it is, the broker does not answer yet
            if time.monotonic() > until_s:
                raise Fault(f"{', '.join(stream.servers)} does not answer: {type(error).__name__} {error}",
                            fix="start the broker, or correct stream.servers") from None
            await asyncio.sleep(_RETRY_S)


async def _ignore(_: Exception) -> None:
    """Each attempt says it too."""
