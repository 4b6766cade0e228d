"""Requests that arrive together are answered by one call; too many are refused at once."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Overloaded(Exception):
    """Raised if more rows are waiting than may."""


class Batcher(Generic[Job, Answer]):
    """Calls `answer` in threads of its own, each with the jobs of one batch. Jobs that arrive while all threads are
    busy are shared among them. Without threads the event loop calls it, for answers that take less time than handing
    them to a thread and back."""

    def __init__(self, answer: Callable[[Sequence[Job]], Sequence[Answer]], max_batch_rows: int, max_queued_rows: int,
                 num_threads: int = 1) -> None:
        """`max_queued_rows` may wait or be in work; further jobs are refused."""
        self._answer, self._num_threads = answer, num_threads
        self._max_batch_rows, self._max_queued_rows = max_batch_rows, max_queued_rows
        self._queue: asyncio.Queue[tuple[Job, int, asyncio.Future[Answer]]] = asyncio.Queue()
        self._num_last_rows = 1
        self._num_waiting_rows = 0  # Queued rows that no thread has taken yet.
        self.num_queued_rows = 0

    @property
    def is_full(self) -> bool:
        """Tell whether a request as large as the last one would be refused."""
        return self.num_queued_rows + self._num_last_rows > self._max_queued_rows

    async def submit(self, job: Job, num_rows: int) -> Answer:
        """Return the job's answer; raise `Overloaded` instead of waiting in too long a queue."""
        if self.num_queued_rows + num_rows > self._max_queued_rows:
            raise Overloaded
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._num_last_rows = num_rows
        self.num_queued_rows += num_rows
        self._num_waiting_rows += num_rows
        try:
            self._queue.put_nowait((job, num_rows, answer))
            return await answer
        finally:
            self.num_queued_rows -= num_rows

    async def run(self) -> None:
        """Answer jobs until cancelled."""
        if not self._num_threads:
            await self._work(None)
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="embark-score") as threads:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._num_threads):
                    group.create_task(self._work(threads))

    async def _work(self, threads: ThreadPoolExecutor | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [one for one in await self._batch() if not one[2].done()]  # a client that left cancelled its own
            try:
                jobs = [job for job, _, _ in batch]
                answers = await loop.run_in_executor(threads, self._answer, jobs) if threads else self._answer(jobs)
            except Exception as error:
                answers = []
                for _, _, waiting in batch:
                    if not waiting.done():
                        waiting.set_exception(error)
            for (_, _, waiting), answer in zip(batch, answers, strict=False):
                if not waiting.done():
                    waiting.set_result(answer)
            if threads is None:
                await asyncio.sleep(0)  # others get their turn

    async def _batch(self) -> list[tuple[Job, int, asyncio.Future[Answer]]]:
        batch = [await self._queue.get()]
        share = min(self._max_batch_rows, -(-self._num_waiting_rows // max(1, self._num_threads)))
        num_rows = batch[0][1]
        while num_rows < share and not self._queue.empty():
            batch.append(self._queue.get_nowait())
            num_rows += batch[-1][1]
        self._num_waiting_rows -= num_rows
        return batch
