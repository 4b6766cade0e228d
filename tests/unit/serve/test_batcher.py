"""Requests are answered together, each with its own answer; a full queue refuses at once and recovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from limits import HANG_S

from embark.serve.batcher import Batcher, Overloaded


async def running(batcher: Batcher, work):
    """The result of `work` while the batcher runs; bounded, so that nothing hangs."""
    task = asyncio.create_task(batcher.run())
    try:
        async with asyncio.timeout(30):
            return await work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_what_waits_is_answered_in_one_call_and_in_order():
    calls, entered, release = [], threading.Event(), threading.Event()

    def answer(jobs: Sequence[int]) -> list[int]:
        calls.append(list(jobs))
        entered.set()
        assert release.wait(HANG_S)
        return [10 * job for job in jobs]

    batcher = Batcher(answer, 3, 65_536)

    async def work():
        first = asyncio.create_task(batcher.submit(1, 1))
        await asyncio.to_thread(entered.wait, 30)
        others = [asyncio.create_task(batcher.submit(job, 1)) for job in (2, 3, 4, 5)]
        await asyncio.sleep(0)
        assert batcher.num_queued_rows == 5
        release.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(running(batcher, work())) == [10, 20, 30, 40, 50]
    assert calls[0] == [1]
    assert [job for call in calls for job in call] == [1, 2, 3, 4, 5]
    assert batcher.num_queued_rows == 0


def test_without_threads_the_event_loop_answers_what_arrived_together():
    calls, threads = [], set()

    def answer(jobs: Sequence[int]) -> list[int]:
        calls.append(list(jobs))
        threads.add(threading.current_thread())
        if 3 in jobs:
            raise ValueError("three")
        return [10 * job for job in jobs]

    batcher = Batcher(answer, 4_096, 65_536, num_threads=0)

    async def work():
        together = await asyncio.gather(*(batcher.submit(job, 1) for job in (1, 2)))
        with pytest.raises(ValueError, match="three"):
            await batcher.submit(3, 1)
        return [*together, await batcher.submit(4, 1)]

    assert asyncio.run(running(batcher, work())) == [10, 20, 40]
    assert (calls, threads) == ([[1, 2], [3], [4]], {threading.current_thread()})
    assert batcher.num_queued_rows == 0


def test_threads_share_what_waits_and_work_at_the_same_time():
    calls, entered, release = [], threading.Semaphore(0), threading.Event()

    def answer(jobs: Sequence[int]) -> Sequence[int]:
        calls.append(list(jobs))
        entered.release()
        assert release.wait(HANG_S)
        return jobs

    batcher = Batcher(answer, 4_096, 65_536, num_threads=2)

    async def work():
        tasks = []
        for job in (1, 2):
            tasks.append(asyncio.create_task(batcher.submit(job, 1)))
            assert await asyncio.to_thread(entered.acquire, True, 30)  # both at the same time
        tasks += [asyncio.create_task(batcher.submit(job, 1)) for job in (3, 4, 5, 6)]
        await asyncio.sleep(0)
        release.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(running(batcher, work())) == [1, 2, 3, 4, 5, 6]
    assert calls[:2] == [[1], [2]]
    assert calls[2] == [3, 4]  # half of what waits


def test_a_full_queue_refuses_at_once_and_accepts_again_when_it_is_empty():
    entered, release = threading.Event(), threading.Event()

    def answer(jobs: Sequence[str]) -> Sequence[str]:
        entered.set()
        assert release.wait(HANG_S)
        return jobs

    batcher = Batcher(answer, 4_096, 10)

    async def work():
        first = asyncio.create_task(batcher.submit("a", 8))
        await asyncio.to_thread(entered.wait, 30)
        assert batcher.is_full  # for a request as large as the last
        with pytest.raises(Overloaded):
            await batcher.submit("b", 3)
        second = asyncio.create_task(batcher.submit("c", 2))
        await asyncio.sleep(0)
        release.set()
        return [await first, await second, await batcher.submit("d", 10)]

    assert asyncio.run(running(batcher, work())) == ["a", "c", "d"]


def test_a_call_that_fails_fails_its_own_requests_and_no_later_one():
    def answer(jobs: Sequence[int]) -> list[int]:
        if 1 in jobs:
            raise RuntimeError("broken")
        return list(jobs)

    batcher = Batcher(answer, 4_096, 65_536)

    async def work():
        with pytest.raises(RuntimeError, match="broken"):
            await batcher.submit(1, 1)
        return await batcher.submit(2, 1)

    assert asyncio.run(running(batcher, work())) == 2


def test_a_client_that_left_is_not_scored():
    calls, entered, release = [], threading.Event(), threading.Event()

    def answer(jobs: Sequence[str]) -> Sequence[str]:
        calls.extend(jobs)
        entered.set()
        assert release.wait(HANG_S)
        return jobs

    batcher = Batcher(answer, 4_096, 65_536)

    async def work():
        first = asyncio.create_task(batcher.submit("first", 1))
        await asyncio.to_thread(entered.wait, 30)
        left = asyncio.create_task(batcher.submit("left", 1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        release.set()
        return [await first, await batcher.submit("last", 1)]

    assert asyncio.run(running(batcher, work())) == ["first", "last"]
    assert calls == ["first", "last"]
