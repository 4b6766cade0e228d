"""Rows for a rehearsed stream: drawn at random, and sent at a steady rate to a real NATS server, or into a folder."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embark.spec import RunSpec
from embark.spec.tasks import label_columns

ROWS_PER_S = 400.0
ROWS_AT_ONCE = 100
_RETRY_S = 0.2


def rows(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Without end. The label goes with the first table's ids, so that there is something to learn."""
    draw, model = random.Random(0), spec.model
    dense = spec.data.dense_columns or tuple(f"dense_{i}" for i in range(model.num_dense))
    labels = label_columns(model.tasks) if model.tasks else (spec.data.label,)
    while True:
        row: dict[str, Any] = {name: draw.gauss(0, 1) for name in dense}
        for table in model.table_list():
            ids = [int(draw.random() ** 3 * table.stored_rows) for _ in range(table.multi_hot)]
            row[table.name] = ids if table.multi_hot > 1 else ids[0]
        first = row[model.table_list()[0].name]
        share = 0.1 + 0.3 * ((first[0] if isinstance(first, list) else first) % 2)
        yield row | {name: int(draw.random() < share) for name in labels}


class StreamSender:
    """A thread that sends rows until it is stopped. While the broker is away it waits, and sends each row once."""

    def __init__(self, spec: RunSpec, servers: tuple[str, ...], folder: Path) -> None:
        self._spec, self._servers, self._folder, self._rows = spec, servers, folder, rows(spec)
        self._is_over, self.num_sent = threading.Event(), 0
        send = self._send_to_nats if spec.stream.source == "nats" else self._write_files
        self._thread = threading.Thread(target=send, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """At the rate."""
        due_s = time.monotonic()
        while not self._is_over.wait(max(0.0, due_s - time.monotonic())):
            yield [next(self._rows) for _ in range(ROWS_AT_ONCE)]
            due_s = max(due_s + ROWS_AT_ONCE / ROWS_PER_S, time.monotonic())

    def _write_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, batch in enumerate(self._batches()):
            hidden = self._folder / "_next"
            hidden.write_text("".join(f"{json.dumps(row)}\n" for row in batch), encoding="utf-8")
            hidden.rename(self._folder / f"{number:09d}.jsonl")
            self.num_sent += len(batch)

    def _send_to_nats(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        import nats

        client, topics = None, self._spec.stream.topics
        for batch in self._batches():
            for row in batch:
                while not self._is_over.is_set():
                    try:
                        if client is None:
                            client = await nats.connect(list(self._servers), max_reconnect_attempts=-1,
                                                        reconnect_time_wait=0.1, connect_timeout=2, error_cb=_ignore)
                        topic = topics[self.num_sent % len(topics)]
                        await client.jetstream(timeout=2).publish(
                            topic, json.dumps(row).encode(), headers={"Nats-Msg-Id": str(self.num_sent)})
                        self.num_sent += 1
                        break
                    except Exception:  # the broker is away, or the trainer has not made the stream yet
                        await asyncio.sleep(_RETRY_S)
        if client is not None:
            await client.close()


async def _ignore(_: Exception) -> None:
    """A row that is not stored is sent again."""
