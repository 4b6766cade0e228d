"""Requests that wait a moment for each other and are answered by one call; too many are refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Overloaded(Exception):
    """More rows are waiting than may."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How requests are put together."""

    max_batch_rows: int = 4_096
    max_wait_ms: float = 1.0  # How long the first request of a batch waits for others.
    max_queued_rows: int = 65_536  # Rows that may wait or be in work; further requests are refused.


class Batcher(Generic[Job, Answer]):
    """Calls `answer` in a thread of its own, with the jobs of one batch; it must answer each."""

    def __init__(self, answer: Callable[[Sequence[Job]], Sequence[Answer]], limits: BatchLimits) -> None:
        self._answer, self._limits = answer, limits
        self._queue: asyncio.Queue[tuple[Job, int, asyncio.Future[Answer]]] = asyncio.Queue()
        self.num_queued_rows = 0

    async def submit(self, job: Job, num_rows: int) -> Answer:
        """The job's answer; raises `Overloaded` instead of waiting in too long a queue."""
        if self.num_queued_rows + num_rows > self._limits.max_queued_rows:
            raise Overloaded
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.num_queued_rows += num_rows
        try:
            self._queue.put_nowait((job, num_rows, answer))
            return await answer
        finally:
            self.num_queued_rows -= num_rows

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="embark-score") as thread:
            while True:
                batch = [await self._queue.get()]
                num_rows, deadline = batch[0][1], loop.time() + self._limits.max_wait_ms / 1000
                while num_rows < self._limits.max_batch_rows:
                    try:
                        async with asyncio.timeout_at(deadline):
                            batch.append(await self._queue.get())
                    except TimeoutError:
                        break
                    num_rows += batch[-1][1]
                batch = [one for one in batch if not one[2].done()]  # a client that left has cancelled its own
                try:
                    answers = await loop.run_in_executor(thread, self._answer, [job for job, _, _ in batch])
                except Exception as error:
                    answers = []
                    for _, _, waiting in batch:
                        if not waiting.done():
                            waiting.set_exception(error)
                for (_, _, waiting), answer in zip(batch, answers, strict=False):
                    if not waiting.done():
                        waiting.set_result(answer)
